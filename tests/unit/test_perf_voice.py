"""The sounds and sums of `perf voice`; no server runs here."""

from __future__ import annotations

import numpy as np
import pytest

from perf.voice import describe, word_errors
from perf.voice_sounds import gaps_of, in_a_room, speech_bounds, with_equal_gaps, with_pauses

RATE = 16_000


def speech(*parts_s: float) -> np.ndarray:
    """Tone, silence, tone, ... of so many seconds, in a room."""
    parts = [
        (0.0 if number % 2 else 0.3) * np.sin(np.arange(int(seconds * RATE)) / 8)
        for number, seconds in enumerate(parts_s)
    ]
    return in_a_room(np.concatenate(parts).astype(np.float32))


def test_speech_begins_and_ends_where_it_is_heard() -> None:
    samples = speech(0, 0.5, 1.0, 0.3, 0.5, 0.7)
    begin, end = speech_bounds(samples)
    assert begin == pytest.approx(0.5 * RATE, abs=320) and end == pytest.approx(2.3 * RATE, abs=320)


def test_pauses_are_put_between_words() -> None:
    words = [(0.0, 0.4), (0.5, 0.9), (1.0, 1.4), (1.5, 1.9), (2.0, 2.4)]
    samples = speech(0.4, 0.1, 0.4, 0.1, 0.4, 0.1, 0.4, 0.1, 0.4)
    paused, pauses = with_pauses(samples, words, 2, 0.7)
    assert len(pauses) == 2 and len(paused) == len(samples) + 2 * int(0.7 * RATE)
    long_gaps = [(begin, end) for begin, end in gaps_of(paused, 0.6)]
    for (begin, end), (gap_begin, gap_end) in zip(pauses, long_gaps, strict=True):
        assert gap_begin - 320 <= begin < end <= gap_end + 320
    assert with_pauses(samples, words[:2], 2, 0.7).pauses == []


def test_a_readers_pauses_are_made_equal() -> None:
    samples = speech(1.0, 0.3, 1.0, 0.02, 1.0, 0.9, 1.0)
    equal, pauses = with_equal_gaps(samples, 0.7)
    for found, said in zip(gaps_of(equal), pauses, strict=True):
        assert found == pytest.approx(said, abs=400)
        assert found[1] - found[0] == pytest.approx(0.7 * RATE, abs=400)


def test_word_errors() -> None:
    assert word_errors("What is the capital of France?", "What is the capital of France?") == 0
    assert word_errors("What is capital", "What is the capital") == 0.25
    assert word_errors("", "Yes.") == 1


def test_the_table_has_every_bar() -> None:
    points = {"p50": 1.0, "p95": 2.0}
    times = ("speech_end_to_audio_ms", "barge_in_ms", "barge_in_cancelled_ms")
    parallel = {"sessions": 10, "speech_end_to_audio_ms": points, "longest_gap_ms": 3.0}
    result = dict.fromkeys(times, points) | {"stages_ms": {"asked_ms": points}, "parallel": parallel}
    table = describe(result | {"pauses": 40, "false_cutoffs": 0.0, "word_errors": 0.1})
    assert "900 / 1500" in table and "200" in table and "0.05" in table
