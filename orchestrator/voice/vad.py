"""Silero VAD: how probably somebody speaks, frame by frame, for many people at a time.

The network remembers: each answer depends on the frames before it. What it remembers of a person is kept here between
his frames, by his sequence's id.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from orchestrator.contracts import FRAME, FRAME_SAMPLES, SAMPLE_RATE_HZ, SEQUENCE_ID
from orchestrator.errors import InvalidRequestError
from orchestrator.onnx_session import open_session

Floats = npt.NDArray[np.float32]

# The network sees the end of the frame before as well: 4 ms at 16 kHz (silero_vad/utils_vad.py, `context_size`).
CONTEXT_SAMPLES = 64
_STATE_SHAPE = (2, 128)


class Frame(NamedTuple):
    """32 ms of a sequence: FP32 [512]."""

    sequence_id: int
    samples: Floats
    starts: bool = False
    ends: bool = False


@dataclass
class _Memory:
    """Of one sequence: the network's state, the last samples, and when they came."""

    state: Floats  # [2, 128]
    context: Floats  # [64]
    used_s: float


class VoiceActivity:
    """For one thread. A sequence is forgotten at its end, and when it was idle for `max_idle_s`."""

    def __init__(
        self, model: Path, *, num_threads: int, max_idle_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._session: Any = open_session(model, num_threads=num_threads)
        self._max_idle_s = max_idle_s
        self._clock = clock
        self._memories: dict[int, _Memory] = {}  # the longest idle first

    @property
    def num_sequences(self) -> int:
        """Those that are remembered."""
        return len(self._memories)

    def hear(self, frames: Sequence[Frame]) -> list[float | InvalidRequestError]:
        """How probably somebody speaks in each of `frames`, which are of different sequences: one batch.

        In the place of a frame that is refused stands why; the others are heard.
        """
        self._forget_idle()
        answers: list[float | InvalidRequestError] = [self._find_fault(frame) or 0.0 for frame in frames]
        heard = [index for index, answer in enumerate(answers) if isinstance(answer, float)]
        if not heard:
            return answers
        memories = [self._recall(frames[index]) for index in heard]
        sounds = [
            np.concatenate([memory.context, frames[index].samples]) for index, memory in zip(heard, memories)
        ]  # each [576]
        feeds = {
            "input": np.stack(sounds).astype(np.float32, copy=False),
            "state": np.stack([memory.state for memory in memories], axis=1),  # [2, batch, 128]
            "sr": np.array(SAMPLE_RATE_HZ, np.int64),
        }
        probabilities, states = self._session.run(None, feeds)
        for row, (index, memory) in enumerate(zip(heard, memories)):
            frame = frames[index]
            memory.state, memory.context = states[:, row], frame.samples[-CONTEXT_SAMPLES:].copy()
            if not frame.ends:
                self._memories[frame.sequence_id] = memory
            answers[index] = float(probabilities[row, 0])
        return answers

    def _find_fault(self, frame: Frame) -> InvalidRequestError | None:
        if frame.samples.shape != (FRAME_SAMPLES,):
            reason = f"must be [1, {FRAME_SAMPLES}], one frame of one sequence (got {list(frame.samples.shape)})"
            return InvalidRequestError(f"{FRAME.name}: {reason}", param=FRAME.name)
        if not np.isfinite(frame.samples).all():
            return InvalidRequestError(f"{FRAME.name}: must be finite numbers", param=FRAME.name)
        if not frame.starts and frame.sequence_id not in self._memories:
            reason = f"{frame.sequence_id} has not begun, or was idle for {self._max_idle_s:g} s; begin it again"
            return InvalidRequestError(f"{SEQUENCE_ID.name}: {reason}", param=SEQUENCE_ID.name)
        return None

    def _recall(self, frame: Frame) -> _Memory:
        """What is remembered of a sequence, taken out: it goes back behind all others."""
        memory = self._memories.pop(frame.sequence_id, None)
        if memory is None or frame.starts:
            memory = _Memory(np.zeros(_STATE_SHAPE, np.float32), np.zeros(CONTEXT_SAMPLES, np.float32), 0.0)
        memory.used_s = self._clock()
        return memory

    def _forget_idle(self) -> None:
        oldest_s = self._clock() - self._max_idle_s
        while self._memories and next(iter(self._memories.values())).used_s < oldest_s:
            del self._memories[next(iter(self._memories))]
