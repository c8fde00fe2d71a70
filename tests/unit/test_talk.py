"""`python -m orchestrator talk` where it cannot do what it is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.talk import TalkError, talk
from orchestrator.voice.speaking import wav_header

NOWHERE = "http://127.0.0.1:1"  # nobody listens there


@pytest.fixture
def question(tmp_path: Path) -> Path:
    path = tmp_path / "question.wav"
    path.write_bytes(wav_header(16_000) + bytes(32_000))
    return path


def test_an_older_answer_stays_if_there_is_no_new_one(question: Path) -> None:
    answer = question.with_name("answer.wav")
    answer.write_bytes(b"an older answer")
    with pytest.raises(TalkError, match="Connect call failed"):
        talk(NOWHERE, question, answer, "auto")
    assert answer.read_bytes() == b"an older answer"


def test_an_answer_that_cannot_be_written_is_not_asked_for(question: Path) -> None:
    with pytest.raises(FileNotFoundError):
        talk(NOWHERE, question, question.parent / "nowhere" / "answer.wav", "auto")
