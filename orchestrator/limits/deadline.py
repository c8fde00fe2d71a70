"""How long a caller will wait: `x-deadline-ms`, or what his key says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from orchestrator.call import Call, Waited
from orchestrator.errors import DeadlineError, InvalidRequestError
from orchestrator.limits.keys import MAX_DEADLINE_MS, Key

HEADER = "x-deadline-ms"


class Deadline(NamedTuple):
    """How long was allowed, and when that is over (`time.monotonic`)."""

    ms: int
    ends_at_s: float


_ending: set[asyncio.Task[None]] = set()  # the loop itself keeps no reference


def parse_deadline(text: str) -> int:
    """Milliseconds; raises `InvalidRequestError`."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and 0 < int(text) <= MAX_DEADLINE_MS):
        raise InvalidRequestError(
            f"{HEADER}: must be whole milliseconds from 1 to {MAX_DEADLINE_MS} (got {text[:40]!r})", param=HEADER
        )
    return int(text)


def find_deadline(call: Call, key: Key) -> Deadline | None:
    """When the answer must be whole, counted from `call.received_s`; None: whenever."""
    text = call.parameters.get(HEADER)
    deadline_ms = key.deadline_ms if text is None else parse_deadline(text)
    return None if deadline_ms is None else Deadline(deadline_ms, call.received_s + deadline_ms / 1000)


@contextmanager
def ending(waited: Waited, deadline: Deadline | None) -> Iterator[None]:
    """While the block runs, end what is `waited` for by a `DeadlineError` once the deadline has come."""
    if deadline is None:
        yield
        return
    loop = asyncio.get_running_loop()

    def end() -> None:
        reason = DeadlineError(f"the deadline of {deadline.ms} ms has passed; allow more time, or ask for less")
        task = loop.create_task(waited.cancel(reason))
        _ending.add(task)
        task.add_done_callback(_ending.discard)

    timer = loop.call_at(loop.time() + deadline.ends_at_s - time.monotonic(), end)
    try:
        yield
    finally:
        timer.cancel()
