"""A long recording as chunks that overlap, of which each is one window of Whisper's (30 s)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orchestrator.contracts import SAMPLE_RATE_HZ

CHUNK_S = 29
OVERLAP_S = 5  # some dozen words: both hear a few of them whole
_CHUNK = CHUNK_S * SAMPLE_RATE_HZ
_HOP = (CHUNK_S - OVERLAP_S) * SAMPLE_RATE_HZ

Floats = npt.NDArray[np.float32]


class Chunk(NamedTuple):
    """`audio` is FP32 [samples] at 16 kHz, from `start_s` of the recording on."""

    start_s: float
    audio: Floats


def cut_chunks(blocks: Iterable[Floats]) -> Iterator[Chunk]:
    """The chunks of a recording that comes in `blocks`; each but the first begins with the end of the one before."""
    held = np.empty(0, np.float32)
    num_before = 0
    for block in blocks:
        held = np.concatenate([held, block])
        while len(held) > _CHUNK:  # so that the last chunk has more than what overlaps
            yield Chunk(num_before / SAMPLE_RATE_HZ, held[:_CHUNK])
            held = held[_HOP:]
            num_before += _HOP
    if len(held):
        yield Chunk(num_before / SAMPLE_RATE_HZ, held)
