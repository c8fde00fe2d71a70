"""The pipeline's two neighbours without Triton: engines in this process, and a sink that keeps everything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from orchestrator.engines import Chunk, EngineRequest, Stepper
from orchestrator.errors import ApiError, EngineError


class InProcessEngines:
    """An `EngineClient` that steps a stepper of its own for every request; remembers requests and stops."""

    def __init__(self, make_stepper: Callable[[], Stepper]) -> None:
        self._make_stepper = make_stepper
        self.requests: list[EngineRequest] = []
        self.stopped: list[str] = []
        self.refusal: str | None = None  # of every request
        self.fail_from: int | None = None  # the requests that fail, counted from 0

    async def stream(self, model: str, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        self.requests.append(request)
        if self.refusal is not None:
            raise EngineError(self.refusal)
        if self.fail_from is not None and len(self.requests) > self.fail_from:
            await asyncio.sleep(0.05)
            raise EngineError("this one fails")
        chunks = self._run(request)
        try:
            async for chunk in chunks:
                if chunk.token_ids:
                    yield chunk
                if chunk.error is not None:
                    raise EngineError(chunk.error)
        except GeneratorExit:
            await self.stop(model, request.request_id)
            raise
        finally:
            async for _ in chunks:  # until the engine let go
                pass

    async def stop(self, model: str, request_id: str) -> None:
        self.stopped.append(request_id)

    async def _run(self, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        stepper = self._make_stepper()
        try:
            stepper.add(request)
            while stepper.has_requests():
                if request.request_id in self.stopped:
                    stepper.stop(request.request_id)
                    return
                for chunk in (await asyncio.to_thread(stepper.step)).values():
                    yield chunk
        except Exception as error:
            yield Chunk([], finished=True, error=str(error))


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


class RecordingSink:
    """Keeps events and the error; fails the test when a call ends twice, or goes on after its end, or sends no JSON."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.error: ApiError | None = None
        self.headers: dict[str, str] = {}
        self.num_ends = 0

    def send(self, event: str, *, final: bool) -> None:
        assert self.num_ends == 0, "an event after the end"
        self.events.append(json.loads(event, parse_constant=_refuse))
        self.num_ends += final

    def announce(self, headers: Mapping[str, str]) -> None:
        assert not self.events, "headers after an event"
        self.headers = dict(headers)

    def fail(self, error: ApiError) -> None:
        assert self.num_ends == 0, "an error after the end"
        self.error = error
        self.num_ends += 1

    @property
    def text(self) -> str:
        """The content of all deltas, or of the whole answer."""
        parts = []
        for event in self.events:
            for choice in event["choices"]:
                parts.append((choice.get("delta") or choice.get("message") or {}).get("content") or "")
        return "".join(parts)

    @property
    def finish_reasons(self) -> list[str]:
        reasons = [choice["finish_reason"] for event in self.events for choice in event["choices"]]
        return [reason for reason in reasons if reason is not None]
