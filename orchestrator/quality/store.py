"""Where the monitor's samples and state go: a file of this server's own, or Redis, shared with others.

The state is what the samples made of it in their order. So servers that share do not merge states: each takes in all
samples, its own too, in the order in which the store has them.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from orchestrator.files import write_whole
from orchestrator.quality.monitor import Sample, State

log = logging.getLogger("orchestrator.quality")

STATE_FILE = "quality.json"
# Ten times what a full state takes.
MAX_STATE_BYTES = 16 << 20


class Store(Protocol):
    """For one event loop; all may raise what a disk or a client raises."""

    async def load(self) -> State | None:
        """What was saved last; None if nothing was that can be read. `receive` goes on from there."""

    async def share(self, sample: Sample) -> None:
        """Hand in a sample."""

    async def receive(self) -> list[Sample]:
        """Samples that were handed in since, by whomever, in order."""

    async def save(self, state: State) -> None:
        """The state after what was received."""

    async def close(self) -> None: ...


class FileStore:
    """Samples go from hand to hand; the state is a file. Without a path it is not kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._samples: list[Sample] = []

    async def load(self) -> State | None:
        return None if self._path is None else await asyncio.to_thread(read_state, self._path)

    async def share(self, sample: Sample) -> None:
        self._samples.append(sample)

    async def receive(self) -> list[Sample]:
        samples, self._samples = self._samples, []
        return samples

    async def save(self, state: State) -> None:
        if self._path is not None:
            await asyncio.to_thread(write_whole, self._path, state.model_dump_json())

    async def close(self) -> None:
        pass


def read_state(path: Path) -> State | None:
    """None where there is none, and, with a warning, for one that cannot be read: all begins anew."""
    try:
        if path.stat().st_size > MAX_STATE_BYTES:
            raise ValueError(f"more than {MAX_STATE_BYTES} bytes")
        return parse_state(path.read_bytes(), str(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s: cannot be read (%s); quality is learnt anew", path, error)
        return None


def parse_state(text: bytes, where: str) -> State | None:
    """None, with a warning, for what is no state of this version."""
    try:
        return State.model_validate_json(text)
    except ValidationError as error:
        log.warning("%s: not a state of this version (%d faults); quality is learnt anew", where, error.error_count())
        return None
