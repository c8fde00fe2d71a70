"""Texts as padded word pieces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from orchestrator.embedding.window import check_window, choose_length, pad
from orchestrator.errors import InvalidRequestError

# Texts are counted one after the other, a megabyte in seconds. Beyond this only spaces and words of over 100 letters
# (one unknown word piece each) would have fitted the window.
MAX_TEXT_BYTES = 32 << 10

Ints = npt.NDArray[np.int32]


class Encoded(NamedTuple):
    """`input_ids` and `attention_mask` are [texts, length]; `num_tokens`, without padding, is [texts, 1]."""

    input_ids: Ints
    attention_mask: Ints
    num_tokens: Ints


class WordPieces:
    """The tokenizer of an embedder, `max_input_tokens` being its window."""

    def __init__(self, tokenizer_json: Path, *, max_input_tokens: int, pad_id: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer_json))
        self._max_input_tokens = max_input_tokens
        self._pad_id = pad_id

    def encode(self, texts: Sequence[bytes], field: str) -> Encoded:
        """All texts, padded to the length that the longest needs.

        Raises `InvalidRequestError` naming `field` for a text that is empty, not UTF-8, longer than the window, or
        larger than `MAX_TEXT_BYTES`.
        """
        fields = [field] if len(texts) == 1 else [f"{field}[{index}]" for index in range(len(texts))]
        ids = [self._encode(text, name) for text, name in zip(texts, fields)]
        length = choose_length(max(map(len, ids)), self._max_input_tokens)
        padded = [pad(each, length, self._pad_id) for each in ids]
        return Encoded(
            np.array([each for each, _ in padded], dtype=np.int32),
            np.array([mask for _, mask in padded], dtype=np.int32),
            np.array([[len(each)] for each in ids], dtype=np.int32),
        )

    def _encode(self, text: bytes, field: str) -> list[int]:
        if not text:
            raise InvalidRequestError(f"{field}: must not be empty", param=field)
        if len(text) > MAX_TEXT_BYTES:
            raise InvalidRequestError(
                f"{field}: has {len(text)} bytes; the embedder takes at most {self._max_input_tokens} tokens, "
                f"in at most {MAX_TEXT_BYTES} bytes: shorten it, or split it",
                param=field,
            )
        try:
            ids: list[int] = self._tokenizer.encode(text.decode()).ids
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"{field}: must be UTF-8: {error}", param=field) from error
        check_window(len(ids), self._max_input_tokens, field)
        return ids
