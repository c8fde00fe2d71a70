"""Transcripts: what two ears heard made one, what is certain while somebody speaks, subtitles."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.contracts import SAMPLE_RATE_HZ
from orchestrator.voice.chunks import CHUNK_S, OVERLAP_S, cut_chunks
from orchestrator.voice.partial import PartialTranscript
from orchestrator.voice.subtitles import to_srt, to_vtt
from orchestrator.voice.transcript import Segment, Word, decode_segments, encode_segments, join, said_once, text_of


def segment(words: Sequence[Word]) -> Segment:
    return Segment(tuple(words), -0.2, 1.1, 0.01, 0.0)


def said(text: str, start_s: float = 0.0, word_s: float = 0.4) -> list[Word]:
    """The words of `text`, one after the other."""
    return [
        Word(f" {word}", start_s + index * word_s, start_s + (index + 1) * word_s, 0.9)
        for index, word in enumerate(text.split())
    ]


# --- chunks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.5, CHUNK_S, CHUNK_S + 0.5, CHUNK_S + 20, 3 * CHUNK_S, 100])
@pytest.mark.parametrize("block_s", [5, 1000])
def test_chunks_overlap_and_leave_nothing_out(seconds: float, block_s: int) -> None:
    sound = np.arange(int(seconds * SAMPLE_RATE_HZ), dtype=np.float32)
    size = block_s * SAMPLE_RATE_HZ
    chunks = list(cut_chunks(sound[begin : begin + size] for begin in range(0, len(sound), size)))
    rejoined = chunks[0].audio
    for before, chunk in itertools.pairwise(chunks):
        assert chunk.start_s == before.start_s + CHUNK_S - OVERLAP_S
        assert len(chunk.audio) > OVERLAP_S * SAMPLE_RATE_HZ
        rejoined = np.concatenate([rejoined, chunk.audio[OVERLAP_S * SAMPLE_RATE_HZ :]])
    np.testing.assert_array_equal(rejoined, sound)
    assert max(len(chunk.audio) for chunk in chunks) <= CHUNK_S * SAMPLE_RATE_HZ


def test_no_sound_has_no_chunk() -> None:
    assert list(cut_chunks([])) == []


# --- joining -----------------------------------------------------------------------------------------------


def test_the_ears_change_inside_a_run_that_both_heard() -> None:
    before = [segment(said("it was the best of times it was the wor"))]  # the last one is cut
    after = [segment(said("mes it was the worst of times", start_s=5 * 0.4))]  # so is the first one
    assert text_of(join(before, after, 5 * 0.4, 10 * 0.4)) == "it was the best of times it was the worst of times"


def test_words_that_differ_are_joined_by_the_clock() -> None:
    before = [segment(said("one two three four five"))]
    after = [segment(said("drei vier fünf sechs", start_s=0.8))]
    assert text_of(join(before, after, 0.8, 2.0)) == "one two three vier fünf sechs"


def test_a_phrase_that_comes_again_later_is_not_taken_for_the_same() -> None:
    before = [segment(said("it was the best of times it was the worst"))]
    after = [segment(said("of times it was the worst of times it was the age", start_s=4 * 0.4))]
    joined = text_of(join(before, after, 4 * 0.4, 10 * 0.4))
    assert joined == "it was the best of times it was the worst of times it was the age"


def test_one_ear_that_heard_nothing() -> None:
    words = [segment(said("hello there"))]
    assert join([], words, 0.0, 0.0) == words
    assert join(words, [], 0.0, 5.0)[0].words == words[0].words


VOCABULARY = ["it", "was", "the", "best", "of", "times", "worst", "age", "we", "had", "nothing", "before", "us"]
WORDS = st.lists(st.sampled_from(VOCABULARY), min_size=21, max_size=60)


@given(WORDS, st.integers(8, 12), st.data())
def test_joined_chunks_are_what_was_said(words: list[str], overlap: int, data: st.DataObject) -> None:
    """Whatever both misheard of the words that the border cuts."""
    spoken = said(" ".join(words))
    begin = data.draw(st.integers(1, len(spoken) - overlap - 1))
    end = begin + overlap
    cut = Word(" mumble", spoken[end - 1].start_s, spoken[end - 1].end_s, 0.1)
    before = [segment([*spoken[: end - 1], cut])]
    after = [segment([Word(" mutter", *_times(spoken[begin]), 0.1), *spoken[begin + 1 :]])]
    joined = join(before, after, spoken[begin].start_s, spoken[end - 1].end_s)
    assert text_of(joined) == " ".join(words)


def _times(word: Word) -> tuple[float, float]:
    return word.start_s, word.end_s


def test_segments_travel_as_json() -> None:
    segments = [segment(said("a b")), segment(said("c", start_s=2))]
    assert decode_segments(encode_segments(segments)) == segments
    later = decode_segments(encode_segments(segments), offset_s=24)
    assert (later[1].start_s, later[1].end_s) == (26, 26.4)


# --- while somebody speaks ---------------------------------------------------------------------------------


def test_a_word_is_certain_when_it_was_heard_twice() -> None:
    transcript = PartialTranscript()
    assert transcript.update([segment(said("I want two"))]).new == ()
    partial = transcript.update([segment(said("I want to go"))])
    assert [word.key for word in partial.new] == ["i", "want"]
    assert [word.key for word in partial.tentative] == ["to", "go"]
    assert transcript.certain_until_s == pytest.approx(0.8)
    # Only what is behind the certain words was heard again.
    partial = transcript.update([segment(said("to go home", start_s=0.8))])
    assert [word.key for word in transcript.certain] == ["i", "want", "to", "go"]
    assert [word.key for word in partial.tentative] == ["home"]


def test_what_is_certain_stays() -> None:
    transcript = PartialTranscript()
    for text in ("hello", "hello", "yellow submarine", "yellow submarine"):
        transcript.update([segment(said(text))])
    assert [word.key for word in transcript.certain] == ["hello", "submarine"]


# --- subtitles ---------------------------------------------------------------------------------------------


def test_subtitles() -> None:
    segments = [segment(said("Hello there.")), segment(said("One --> two", start_s=3723.5, word_s=0.5))]
    assert to_srt(segments) == (
        "1\n00:00:00,000 --> 00:00:00,800\nHello there.\n\n2\n01:02:03,500 --> 01:02:05,000\nOne -> two\n\n"
    )
    assert to_vtt(segments) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:00.800\nHello there.\n\n01:02:03.500 --> 01:02:05.000\nOne -> two\n\n"
    )
    assert to_vtt([]) == "WEBVTT\n\n"


@pytest.mark.parametrize(
    ("text", "once"),
    [
        ("What is the capital of France? What is the capital of France? What is", "What is the capital of France?"),
        ("Row, row, row your boat. Row, row, row your boat.", "Row, row, row your boat."),
        ("No, no, no, no.", "No, no, no, no."),
        (
            "It was the best of times, it was the worst of times.",
            "It was the best of times, it was the worst of times.",
        ),
        ("", ""),
    ],
)
def test_what_is_repeated_is_said_once(text: str, once: str) -> None:
    assert said_once(text) == once
