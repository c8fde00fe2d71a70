"""Stop words and bad words: sequences of token ids, as TensorRT-LLM's Triton backend takes them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy.typing as npt

from orchestrator.engines import EngineRefusal

# In a word list's row of ends: no more words.
PADDING = -1


def parse_words(name: str, tensor: npt.NDArray[Any]) -> list[list[int]]:
    """The words of tensor `name`, INT32 [1, 2, n].

    Row 0 holds the token ids of all words one after the other, row 1 where each word ends (exclusive, ascending),
    padded with -1; ids behind the last end are padding (`convertWordList` in TensorRT-LLM's
    triton_backend/inflight_batcher_llm/src/utils.cc). Raises `EngineRefusal` naming the tensor.
    """
    if tensor.ndim != 3 or tensor.shape[:2] != (1, 2):
        raise EngineRefusal(f"{name}: shape {list(tensor.shape)}; must be [1, 2, n]")
    ids, ends = tensor[0].tolist()
    num_words = ends.index(PADDING) if PADDING in ends else len(ends)
    if any(end != PADDING for end in ends[num_words:]):
        raise EngineRefusal(f"{name}: ends {ends}; after the first -1 only -1 is allowed")
    words = []
    for begin, end in itertools.pairwise([0, *ends[:num_words]]):
        if not begin < end <= len(ids):
            raise EngineRefusal(f"{name}: ends {ends}; must ascend from at least 1 to at most {len(ids)}")
        words.append(ids[begin:end])
    return words


def check_ids(name: str, ids: list[int], vocab_size: int) -> None:
    """Raises `EngineRefusal` naming tensor `name` when one of `ids` is no token of the model."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise EngineRefusal(f"{name}: ids must be 0 to {vocab_size - 1}")


class StopWords:
    """Watches the output of one request for its stop words; the prompt does not count."""

    def __init__(self, words: list[list[int]]) -> None:
        self._words = words
        self._num_kept = max(map(len, words), default=1) - 1
        self._tail: list[int] = []  # the last tokens seen, as many as may begin a word

    def cut(self, token_ids: list[int]) -> int | None:
        """How many of the new `token_ids` there are up to the end of the first stop word; None when none ends here."""
        if not self._words:
            return None
        seen = self._tail + token_ids
        for end in range(len(self._tail) + 1, len(seen) + 1):
            if any(len(word) <= end and seen[end - len(word) : end] == word for word in self._words):
                return end - len(self._tail)
        self._tail = seen[max(len(seen) - self._num_kept, 0) :]
        return None
