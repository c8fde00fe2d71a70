"""One call, whoever made it: what came in, where its events go, whether anybody still waits."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from orchestrator.errors import ApiError, CancelledError
from orchestrator.stages import Stages

log = logging.getLogger("orchestrator.requests")


class Sink(Protocol):
    """Where the events of one call go."""

    def send(self, event: str, *, final: bool) -> None:
        """Send one event; the final one ends the call."""

    def announce(self, headers: Mapping[str, str]) -> None:
        """Headers of the answer, before its first event; an error brings its own."""

    def fail(self, error: ApiError) -> None:
        """End the call with `error`."""


class Waited:
    """Something that somebody waits for, until he leaves. For one event loop."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._reason: ApiError = CancelledError("the caller left")
        self._stop: Callable[[], Awaitable[None]] | None = None

    async def cancel(self, reason: ApiError | None = None) -> None:
        """End it, wherever it is: for `reason` or, without one, because nobody waits any more.

        Safe to repeat; the first reason stands.
        """
        if self.is_cancelled:
            return
        self.is_cancelled = True
        self._reason = reason or self._reason
        if self._stop is not None:
            await self._stop()

    def on_cancel(self, stop: Callable[[], Awaitable[None]] | None) -> None:
        """From now on `cancel` calls `stop`; raises as `raise_if_cancelled` does."""
        self._stop = stop
        self.raise_if_cancelled()

    @property
    def reason(self) -> ApiError | None:
        """What it was cancelled for; None while it is not."""
        return self._reason if self.is_cancelled else None

    def raise_if_cancelled(self) -> None:
        """Raises what the call was cancelled for: `CancelledError` when the caller left."""
        if self.is_cancelled:
            raise self._reason


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
        self.stages = Stages(self.received_s)
        self.request_id = parameters.get("x-request-id")  # the caller's name for it, in our log too
        self.id: str | None = None

    async def cancel(self, reason: ApiError | None = None) -> None:
        """For `reason` or, without one, because the caller left."""
        if not self.is_cancelled and reason is None:
            log.info(json.dumps({"event": "caller_left", "request_id": self.id, "monotonic_s": time.monotonic()}))
        await super().cancel(reason)
