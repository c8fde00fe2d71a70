"""How long a caller will wait: `x-deadline-ms`, or what his key says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.call import Call
from orchestrator.errors import DeadlineError, InvalidRequestError
from orchestrator.limits.keys import MAX_DEADLINE_MS, Key

HEADER = "x-deadline-ms"

_ending: set[asyncio.Task[None]] = set()  # the loop itself keeps no reference


def parse_deadline(text: str) -> int:
    """Milliseconds; raises `InvalidRequestError`."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and 0 < int(text) <= MAX_DEADLINE_MS):
        raise InvalidRequestError(
            f"{HEADER}: must be whole milliseconds from 1 to {MAX_DEADLINE_MS} (got {text[:40]!r})", param=HEADER
        )
    return int(text)


def find_end_s(call: Call, key: Key) -> float | None:
    """When the answer must be whole, on the clock of `call.received_s`; None: whenever."""
    text = call.parameters.get(HEADER)
    deadline_ms = key.deadline_ms if text is None else parse_deadline(text)
    return None if deadline_ms is None else call.received_s + deadline_ms / 1000


@contextmanager
def ending(call: Call, ends_at_s: float | None) -> Iterator[None]:
    """While the block runs, end `call` by a `DeadlineError` once `ends_at_s` has come."""
    if ends_at_s is None:
        yield
        return
    loop = asyncio.get_running_loop()
    limit_ms = round((ends_at_s - call.received_s) * 1000)

    def end() -> None:
        reason = DeadlineError(f"the deadline of {limit_ms} ms has passed; allow more time, or ask for less")
        task = loop.create_task(call.cancel(reason))
        _ending.add(task)
        task.add_done_callback(_ending.discard)

    timer = loop.call_at(loop.time() + ends_at_s - time.monotonic(), end)
    try:
        yield
    finally:
        timer.cancel()
