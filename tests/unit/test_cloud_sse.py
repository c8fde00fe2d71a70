"""The SSE parser: the WHATWG's rules, and the same events for every cut of the same bytes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cloud.sse import SseError, SseParser

SMALL = 40


def read(pieces: Iterable[bytes], max_event_bytes: int = SMALL) -> tuple[list[str], bool]:
    """The events, and whether the parser then refused to go on."""
    parser = SseParser(max_event_bytes)
    events: list[str] = []
    try:
        for piece in pieces:
            for event in parser.push(piece):
                events.append(event)
    except SseError:
        return events, True
    return events, False


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"", []),
        (b"data: a\n\n", ["a"]),
        (b"data: a\r\n\r\ndata: b\r\rdata: c\n\n", ["a", "b", "c"]),
        (b"data: a\r\n\ndata: b\n\r\n", ["a", "b"]),
        (b"data:a\ndata:  b\ndata\ndata:\n\n", ["a\n b\n\n"]),
        (b"data\n\n", [""]),
        (b": ping\n\n:\n\ndata: a\n: ping\ndata: b\n\n", ["a\nb"]),
        (b"event: x\nid: 1\nretry: 5\n\n", []),
        (b"event: x\ndata: a\nid: 1\n\n", ["a"]),
        (b"Data: a\ndata : b\n data: c\n\n", []),
        (b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n", ["a"]),
        (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\n", []),
        (b"data: a", []),
        (b"data: a\n", []),
        (b"data: a\n\n\n\ndata: b\n\n", ["a", "b"]),
        ("data: 世界 💡\n\n".encode(), ["世界 💡"]),
        (b"data: \xff\n\n", ["\ufffd"]),
        (b"data: a\0b\n\n", ["a\0b"]),
    ],
)
def test_the_rules(stream: bytes, events: list[str]) -> None:
    assert read([stream]) == (events, False)


STREAMS = st.lists(
    st.sampled_from(
        [b"\r", b"\n", b"\r\n", b"data", b":", b" ", b"data: x", b"id: 1", "é💡".encode(), b"\xef\xbb\xbf", b"long" * 6]
    )
).map(b"".join)


@given(STREAMS, st.lists(st.integers(0, 200)))
def test_every_cut_reads_the_same(stream: bytes, cuts: list[int]) -> None:
    """Case S22; the refusal of what is too long comes after the same events, too."""
    whole = read([stream])
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    assert read([stream[start:end] for start, end in pairwise(places)]) == whole
    assert read([bytes([byte]) for byte in stream]) == whole


@given(st.lists(st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=["Cs"]), max_size=20)))
def test_what_is_written_is_read(texts: list[str]) -> None:
    stream = "".join(f"data: {text}\r\n\r\n" for text in texts).encode()
    assert read([stream], 1000) == (texts, False)


@pytest.mark.parametrize(
    "stream",
    [b"x" * (SMALL + 1), b"data: " + b"x" * SMALL + b"\n\n", b"data: 12345\n" * 4, b": " + b"x" * SMALL + b"\n"],
)
def test_what_is_too_long_is_refused(stream: bytes) -> None:
    assert read([b"data: a\n\n" + stream]) == (["a"], True)


def test_the_limit_counts_an_event_not_the_stream() -> None:
    assert read([b"data: 1234567890\n: comment\n\n" * 100]) == (["1234567890"] * 100, False)
