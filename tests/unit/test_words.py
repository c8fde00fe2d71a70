"""Word lists as TensorRT-LLM's Triton backend takes them, and where an output ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.engines import EngineRefusal
from orchestrator.engines.words import StopWords, check_ids, parse_words

WORD = st.lists(st.integers(0, 3), min_size=1, max_size=4)


def words_tensor(words: list[list[int]], padding: int = 0) -> np.ndarray:
    """[1, 2, n], as NVIDIA's preprocessing model makes it."""
    ids = [token_id for word in words for token_id in word]
    ends = np.cumsum([len(word) for word in words], dtype=np.int32).tolist()
    size = max(len(ids), len(ends), 1) + padding
    return np.array([[ids + [0] * (size - len(ids)), ends + [-1] * (size - len(ends))]], np.int32)


@given(words=st.lists(WORD, max_size=5), padding=st.integers(0, 3))
def test_what_is_written_is_read(words: list[list[int]], padding: int) -> None:
    assert parse_words("stop_words_list", words_tensor(words, padding)) == words


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[[5], [1]]], [[5]]),
        ([[[5, 6, 7], [1, 3, -1]]], [[5], [6, 7]]),
        ([[[5, 6, 7], [2, -1, -1]]], [[5, 6]]),
        ([[[0], [-1]]], []),
        (np.zeros([1, 2, 0]), []),
    ],
)
def test_words(rows: Any, words: list[list[int]]) -> None:
    assert parse_words("stop_words_list", np.array(rows, np.int32)) == words


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[5], [1]], "stop_words_list: shape [2, 1]; must be [1, 2, n]"),
        ([[[5], [1], [1]]], "stop_words_list: shape [1, 3, 1]; must be [1, 2, n]"),
        ([[[5], [1]], [[5], [1]]], "stop_words_list: shape [2, 2, 1]; must be [1, 2, n]"),
        ([[[5, 6], [3, -1]]], "stop_words_list: ends [3, -1]; must ascend from at least 1 to at most 2"),
        ([[[5, 6], [0, 1]]], "stop_words_list: ends [0, 1]; must ascend"),
        ([[[5, 6], [2, 1]]], "stop_words_list: ends [2, 1]; must ascend"),
        ([[[5, 6], [1, 1]]], "stop_words_list: ends [1, 1]; must ascend"),
        ([[[5, 6], [1, -2]]], "stop_words_list: ends [1, -2]; must ascend"),
        ([[[5, 6], [-1, 1]]], "stop_words_list: ends [-1, 1]; after the first -1 only -1 is allowed"),
    ],
)
def test_a_malformed_list_is_refused(rows: Any, message: str) -> None:
    with pytest.raises(EngineRefusal) as got:
        parse_words("stop_words_list", np.array(rows, np.int32))
    assert message in str(got.value)


@pytest.mark.parametrize("token_id", [-1, 100])
def test_an_id_that_is_no_token(token_id: int) -> None:
    check_ids("stop_words_list", [0, 99], 100)
    with pytest.raises(EngineRefusal, match="^stop_words_list: ids must be 0 to 99$"):
        check_ids("stop_words_list", [5, token_id], 100)


@given(words=st.lists(WORD, max_size=3), steps=st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=12))
def test_the_output_ends_with_the_first_stop_word(words: list[list[int]], steps: list[list[int]]) -> None:
    """However the tokens come in pieces, as if one looked at the whole output."""
    whole = [token_id for step in steps for token_id in step]
    ends = [end for end in range(1, len(whole) + 1) if any(whole[:end][-len(word) :] == word for word in words)]
    stop_words, output = StopWords(words), []
    for step in steps:
        cut = stop_words.cut(step)
        output += step[:cut]
        if cut is not None:
            break
    assert output == (whole[: ends[0]] if ends else whole)
