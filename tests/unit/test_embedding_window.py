"""Lengths: refused beyond the window, padded within it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.embedding.window import BUCKETS, check_window, choose_length, pad
from orchestrator.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("num_tokens", "window", "length"),
    [
        (1, 256, 16),
        (16, 256, 16),
        (17, 256, 32),
        (129, 256, 256),
        (256, 256, 256),
        (40, 50, 50),
        (3, 8, 8),
        (300, 512, 512),
    ],
)
def test_the_length_to_pad_to(num_tokens: int, window: int, length: int) -> None:
    assert choose_length(num_tokens, window) == length


@given(st.data(), st.integers(3, 600))
def test_a_length_fits_what_it_is_for(data: st.DataObject, window: int) -> None:
    ids = data.draw(st.lists(st.integers(0, 30521), min_size=1, max_size=window))
    length = choose_length(len(ids), window)
    assert len(ids) <= length <= window and length in (*BUCKETS, window)
    padded, mask = pad(ids, length, 7)
    assert len(padded) == len(mask) == length
    assert padded[: len(ids)] == ids and set(padded[len(ids) :]) <= {7}
    assert mask == sorted(mask, reverse=True) and sum(mask) == len(ids)


def test_too_long_is_told_with_both_lengths() -> None:
    check_window(256, 256, "text")
    with pytest.raises(InvalidRequestError, match=r"text: has 257 tokens; the embedder takes at most 256") as caught:
        check_window(257, 256, "text")
    assert caught.value.param == "text"
