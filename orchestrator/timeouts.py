"""Engines that are silent for too long: their request ends here, whatever becomes of it there."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing

from orchestrator.config import FIRST_TOKEN_TIMEOUT_S, TOKEN_TIMEOUT_S, Tier
from orchestrator.engines import Chunk, EngineRequest
from orchestrator.errors import EngineStopError, EngineTimeoutError
from orchestrator.generation import EngineClient
from orchestrator.routing.breaker import Passage

# An engine that is told to stop needs a step for it: no longer than that does a caller wait who has left already.
STOP_TIMEOUT_S = 2.0
# The first token of a probe: whoever asked for it could have had another tier.
PROBE_TIMEOUT_S = 5.0


class TimedEngines:
    """An `EngineClient` for one attempt on a tier; its silence raises `EngineTimeoutError`, or `EngineStopError`.

    There is one timer a stream, moved when it fires and not at each token.
    """

    def __init__(self, engines: EngineClient, tier: Tier, passage: Passage) -> None:
        self._engines = engines
        self._tier = tier
        self._passage = passage
        self._first_token_s = tier.first_token_timeout_s or FIRST_TOKEN_TIMEOUT_S
        if passage.is_probe:
            self._first_token_s = min(self._first_token_s, PROBE_TIMEOUT_S)
        self._watches: dict[str, _Watch] = {}

    async def stream(self, model: str, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        token_s, passage = self._tier.token_timeout_s or TOKEN_TIMEOUT_S, self._passage
        watch = _Watch(self._first_token_s, f"no first token within {self._first_token_s:g} s")
        self._watches[request.request_id] = watch
        is_left = False
        try:
            async with aclosing(self._engines.stream(model, request)) as chunks:
                async for chunk in chunks:
                    passage.hear()
                    watch.allow(token_s, f"no further token within {token_s:g} s")
                    try:
                        yield chunk
                    except GeneratorExit:
                        is_left = True
                        watch.allow_to_stop()
                        raise
            passage.show_life()
        except asyncio.CancelledError:
            if not watch.has_fired:
                raise
            watch.undo()
            if not is_left:  # else its reader has what it wanted
                error = EngineStopError if watch.is_stopping else EngineTimeoutError
                raise error(f"tier {self._tier.name!r}: {watch.text}") from None
        finally:
            watch.close()
            del self._watches[request.request_id]

    async def stop(self, model: str, request_id: str) -> None:
        if watch := self._watches.get(request_id):
            watch.allow_to_stop()
        await self._engines.stop(model, request_id)


class _Watch:
    """Cancels the task that made it once its time is over. That task waits for nothing but the engine meanwhile."""

    def __init__(self, seconds: float, text: str) -> None:
        self.text = text  # what happened if it fires
        self.has_fired = False
        self.is_stopping = False
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._end_s = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._end_s, self._check)

    def allow(self, seconds: float, text: str) -> None:
        """So much time from now. The timer finds out by itself, which costs nothing at each token."""
        if not self.is_stopping:
            self._end_s, self.text = self._loop.time() + seconds, text

    def allow_to_stop(self) -> None:
        """Only that much more, whatever comes."""
        if not self.is_stopping:
            self.is_stopping, self.text = True, f"did not stop within {STOP_TIMEOUT_S:g} s"
            self._timer.cancel()
            self._end_s = self._loop.time() + STOP_TIMEOUT_S
            self._timer = self._loop.call_at(self._end_s, self._check)

    def close(self) -> None:
        self._timer.cancel()

    def undo(self) -> None:
        """The cancellation was caught: it was none of the task itself."""
        if sys.version_info >= (3, 11) and self._task is not None:
            self._task.uncancel()

    def _check(self) -> None:
        if self._loop.time() < self._end_s:
            self._timer = self._loop.call_at(self._end_s, self._check)
        elif self._task is not None:
            self.has_fired = True
            self._task.cancel()
