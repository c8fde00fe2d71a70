"""One call, whoever made it: what came in, where its events go, whether anybody still waits."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from orchestrator.errors import ApiError, CancelledError

log = logging.getLogger("orchestrator.requests")


class Sink(Protocol):
    """Where the events of one call go."""

    def send(self, event: str, *, final: bool) -> None:
        """Send one event; the final one ends the call."""

    def fail(self, error: ApiError) -> None:
        """End the call with `error`."""


class Waited:
    """Something that somebody waits for, until he leaves. For one event loop."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._stop: Callable[[], Awaitable[None]] | None = None

    async def cancel(self) -> None:
        """Nobody waits any more: end it, wherever it is. Safe to repeat."""
        if self.is_cancelled:
            return
        self.is_cancelled = True
        if self._stop is not None:
            await self._stop()

    def on_cancel(self, stop: Callable[[], Awaitable[None]] | None) -> None:
        """From now on `cancel` calls `stop`; raises `CancelledError` when it was cancelled already."""
        self._stop = stop
        self.raise_if_cancelled()

    def raise_if_cancelled(self) -> None:
        if self.is_cancelled:
            raise CancelledError("the caller left")


class Call(Waited):
    """One call from its arrival to its only end. For one event loop.

    `body` is the request as it came, `parameters` are the request parameters (forwarded headers among them). `id` is
    known once its answer begins.
    """

    def __init__(self, body: bytes, parameters: Mapping[str, str], sink: Sink) -> None:
        super().__init__()
        self.body = body
        self.parameters = parameters
        self.sink = sink
        self.received_s = time.monotonic()
        self.request_id = parameters.get("x-request-id")  # the caller's name for it, in our log too
        self.id: str | None = None

    async def cancel(self) -> None:
        """The caller left."""
        if not self.is_cancelled:
            log.info(json.dumps({"event": "caller_left", "request_id": self.id, "monotonic_s": time.monotonic()}))
        await super().cancel()
