"""Whole answers as vectors, by an embedder that takes some hundred words."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from orchestrator.quality.clusters import Vector

# As `orchestrator.cache.stage.Embed`: None for a text longer than the window, and when the embedder fails.
Embed = Callable[[str], Coroutine[Any, Any, Vector | None]]

# English of this length mostly fits the window of 256 tokens; half of it takes no caller's embedding long.
PIECE_CHARACTERS = 1000
# Of an answer no more is compared: the two of a pair alike, so its beginning stands for it.
MAX_PIECES = 8
# No token is shorter than a character, so this always fits.
_SURE_CHARACTERS = 250


async def embed_whole(embed: Embed, text: str) -> Vector | None:
    """The direction of the mean of the vectors of the text's pieces, of length 1.

    None for an empty text, and when the embedder fails.
    """
    text = text[: PIECE_CHARACTERS * MAX_PIECES].strip()
    vectors: list[Vector] = []
    rest = [text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS)][::-1]
    while rest:
        piece = rest.pop()
        vector = await embed(piece)
        if vector is not None:
            vectors.append(vector * len(piece))
        elif len(piece) <= _SURE_CHARACTERS:
            return None
        else:
            middle = len(piece) // 2
            rest += [piece[middle:], piece[:middle]]
    length = float(np.linalg.norm(np.sum(vectors, axis=0))) if vectors else 0.0
    if length == 0:
        return None
    mean: Vector = (np.sum(vectors, axis=0) / length).astype(np.float32)
    return mean
