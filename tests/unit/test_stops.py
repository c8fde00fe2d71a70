"""Stop strings, whatever the borders of the pieces that a stream comes in."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.streaming.stops import StopStrings

# Two letters make overlaps and near misses frequent.
SHORT = st.text("ab", min_size=1, max_size=4)


def feed(stops: Sequence[str], pieces: Sequence[str]) -> tuple[list[str], str | None]:
    """What comes out for each piece (and for the flush, if no stop was found), and the stop."""
    found = StopStrings(stops)
    out = []
    for piece in pieces:
        out.append(found.push(piece))
        if found.matched is not None:
            return out, found.matched
    return [*out, found.flush()], None


def cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The definition: the stop that is complete first; of two complete at one character, the longer."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    ("stops", "pieces", "out", "matched"),
    [
        (["DEFGHIJ"], "ABCDEFGHIJK", ["A", "B", "C", "", "", "", "", "", "", ""], "DEFGHIJ"),  # case S05
        (["\n\nHuman:"], ["I", " am", " fine"], ["I", " am", " fine", ""], None),  # case S07
        (["\n\nHuman:"], ["Hi.\n", "\n", "Bye"], ["Hi.", "", "\n\nBye", ""], None),
        (["\n\nHuman:"], ["Hi.\n\nHu", "man: x"], ["Hi.", ""], "\n\nHuman:"),
        (["<im_end>"], ["a <im_", "end> b"], ["a ", ""], "<im_end>"),  # case V07
        (["END"], ["the EN"], ["the ", "EN"], None),
        (["b", "ab"], ["a", "b"], ["", ""], "ab"),
        (["abcd", "bc"], ["ab", "cd"], ["", "a"], "bc"),
        (["aab"], ["aaa", "b"], ["a", ""], "aab"),
        (["💡"], ["an idea ", "💡!"], ["an idea ", ""], "💡"),
        (["x"], ["x"], [""], "x"),
        ([], ["a", ""], ["a", "", ""], None),
    ],
)
def test_table(stops: list[str], pieces: Sequence[str], out: list[str], matched: str | None) -> None:
    assert feed(stops, pieces) == (out, matched)


@given(pieces=st.lists(st.text("ab", max_size=6), max_size=8), stops=st.lists(SHORT, max_size=3))
def test_pieces_make_no_difference(pieces: list[str], stops: list[str]) -> None:
    out, matched = feed(stops, pieces)
    assert ("".join(out), matched) == cut("".join(pieces), stops)


@given(pieces=st.lists(st.text("ab", min_size=1, max_size=6), max_size=8), stops=st.lists(SHORT, max_size=3))
def test_nothing_is_held_that_could_not_begin_a_stop(pieces: list[str], stops: list[str]) -> None:
    found, given_so_far, out = StopStrings(stops), "", ""
    for piece in pieces:
        given_so_far += piece
        out += found.push(piece)
        if found.matched is not None:
            return
        held = given_so_far[len(out) :]
        assert given_so_far == out + held
        assert held == "" or any(stop.startswith(held) for stop in stops)
