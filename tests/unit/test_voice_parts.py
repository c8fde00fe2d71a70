"""The parts of a realtime session that know no time but what they are told: playback, pieces, sound."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import InvalidRequestError
from orchestrator.voice.pcm import Inlet, Resampler, cut_silence, decode_pcm, encode_pcm
from orchestrator.voice.pieces import SpokenPieces
from orchestrator.voice.playback import LEAD_S, Mark, Playback, text_until

# --- playback ----------------------------------------------------------------------------------------------


def test_what_is_sent_is_heard_in_real_time() -> None:
    playback = Playback(1000)
    playback.send(500, 10.0)
    assert playback.num_heard(10.0) == 0
    assert playback.num_heard(10.2) == 200
    assert playback.num_heard(11.0) == 500
    playback.send(100, 12.0)  # after a gap
    assert playback.num_heard(12.05) == 550


def test_little_is_sent_ahead() -> None:
    playback = Playback(1000)
    assert playback.wait_s(80, 10.0) == 0
    playback.send(160, 10.0)
    assert playback.wait_s(80, 10.0) == pytest.approx(0.24 - LEAD_S)
    assert playback.wait_s(80, 10.04) == pytest.approx(0)


def test_what_was_not_heard_is_sent_again() -> None:
    playback = Playback(1000)
    playback.send(200, 10.0)
    assert playback.rewind(10.05) == 150
    assert playback.num_sent == playback.num_heard(10.05) == playback.num_heard(20.0) == 50
    assert playback.rewind(20.0) == 0


@given(st.lists(st.tuples(st.integers(0, 500), st.floats(0, 1), st.booleans())))
def test_nobody_hears_more_than_was_sent(steps: list[tuple[int, float, bool]]) -> None:
    playback, now_s, before = Playback(1000), 100.0, 0
    for num_samples, passed_s, rewinds in steps:
        now_s += passed_s
        assert before <= playback.num_heard(now_s) <= playback.num_sent
        if rewinds:
            playback.rewind(now_s)
        playback.send(num_samples, now_s)
        before = playback.num_heard(now_s)


MARKS = [Mark("It is Paris. ", 1000), Mark("It lies on the Seine.", 3000)]


@pytest.mark.parametrize(
    ("num_samples", "text"),
    [
        (0, ""),
        (500, "It is"),
        (1000, "It is Paris."),
        (2000, "It is Paris. It lies on"),
        (3000, "It is Paris. It lies on the Seine."),
        (9000, "It is Paris. It lies on the Seine."),
    ],
)
def test_text_that_was_heard(num_samples: int, text: str) -> None:
    assert text_until(MARKS, num_samples) == text


@given(st.lists(st.tuples(st.text(), st.integers(0, 100))), st.integers(0, 2000))
def test_what_was_heard_is_a_beginning(pieces: list[tuple[str, int]], num_samples: int) -> None:
    end, marks = 0, []
    for text, length in pieces:
        end += length
        marks.append(Mark(text, end))
    assert "".join(text for text, _ in pieces).startswith(text_until(marks, num_samples))


# --- pieces ------------------------------------------------------------------------------------------------


def cut(text: str, size: int = 3) -> list[str]:
    pieces = SpokenPieces()
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    return [piece for part in parts for piece in pieces.push(part)] + pieces.flush()


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("It is Paris. It lies on the Seine.", ["It is Paris. ", "It lies on the Seine."]),
        # Clauses, if they are long enough, at the beginning.
        (
            "The capital of France is Paris, which lies on the Seine, a river. It is old.",
            ["The capital of France ", "is Paris, which lies on the Seine, ", "a river. ", "It is old."],
        ),
        (
            "Bread is made from flour and water. " * 3 + "It is a very old food, which people eat.",
            [
                "Bread is made ",
                "from flour and water. ",
                *["Bread is made from flour and water. "] * 2,
                "It is a very old food, which people eat.",
            ],
        ),
        (
            "A computer is a machine that works with numbers and does what a program tells it to do.",
            [
                "A computer is a machine ",
                "that works with numbers and does what a program tells it to do.",
            ],
        ),
        ("Well, it is Paris, I think.", ["Well, it is Paris, ", "I think."]),
        # Not inside of numbers and times.
        ("There are about 1,000,000 people in it.", ["There are about 1,000,000 people ", "in it."]),
        ("The next train leaves at 12:30 or so.", ["The next train leaves ", "at 12:30 or so."]),
        # What cannot be said goes with the next, or at the end with nothing.
        ("... Yes. It is 98.6°F.", ["... Yes. ", "It is 98.6°F."]),
        ("It costs $3.14. 🙂", ["It costs $3.14. ", "🙂"]),
        ("", []),
    ],
)
def test_pieces(text: str, pieces: list[str]) -> None:
    assert cut(text) == pieces


@given(st.text(alphabet="ab. ,!?\n1:é🙂", max_size=200), st.integers(1, 9))
def test_joined_they_are_the_text(text: str, size: int) -> None:
    assert "".join(cut(text, size)) == text


# --- sound -------------------------------------------------------------------------------------------------


def test_frames_whatever_the_pieces() -> None:
    tone = (8000 * np.sin(np.arange(48_000) * 2 * np.pi * 440 / 24_000)).astype(np.int16)
    whole = np.concatenate(Inlet(24_000).push(tone))
    inlet = Inlet(24_000)
    frames = [frame for at in range(0, len(tone), 777) for frame in inlet.push(tone[at : at + 777])]
    assert all(frame.shape == (512,) and frame.dtype == np.float32 for frame in frames)
    parts = np.concatenate(frames)
    np.testing.assert_allclose(parts, whole[: len(parts)], atol=1e-6)
    assert abs(len(parts) - 32_000) < 1200
    crossings = np.count_nonzero(np.diff(np.sign(parts[2000:30_000])))
    assert crossings == pytest.approx(2 * 440 * 28_000 / 16_000, abs=8)


def test_16_khz_is_taken_as_it_is() -> None:
    sound = np.arange(-600, 600, dtype=np.int16)
    (first, second) = Inlet(16_000).push(sound)
    np.testing.assert_array_equal(np.concatenate([first, second]) * 32768, sound[:1024])


def test_pcm_there_and_back() -> None:
    sound = np.array([0, 1, -1, 32767, -32768], np.int16)
    np.testing.assert_array_equal(decode_pcm(encode_pcm(sound), "audio"), sound)
    resampler = Resampler(16_000, 16_000, "int16")
    np.testing.assert_array_equal(resampler.push(sound, last=True), sound)


@given(st.binary(max_size=100))
def test_bytes_are_whole_samples_or_refused(raw: bytes) -> None:
    text = base64.b64encode(raw).decode()
    if len(raw) % 2:
        with pytest.raises(InvalidRequestError, match="no whole samples"):
            decode_pcm(text, "audio")
    else:
        assert len(decode_pcm(text, "audio")) == len(raw) // 2


@given(st.text(max_size=30))
def test_any_text_is_sound_or_refused(text: str) -> None:
    try:
        decode_pcm(text, "audio")
    except InvalidRequestError as error:
        assert error.param == "audio"


def test_silence_at_the_end_is_cut() -> None:
    sound = np.concatenate([np.full(1000, 9000), np.full(5000, 20)]).astype(np.int16)
    assert len(cut_silence(sound, 10_000)) == pytest.approx(1300, abs=2)
    assert len(cut_silence(sound[:1000], 10_000)) == 1000
    assert len(cut_silence(sound[:0], 10_000)) == 0
