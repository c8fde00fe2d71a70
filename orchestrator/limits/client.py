"""The other side of `operations`: how the gateway and the gRPC front ask about a caller's key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from orchestrator.call import Waited
from orchestrator.contracts import (
    EVENT,
    HEADERS,
    LIMITS_OPERATION_PARAMETER,
    NUM_TOKENS,
    ORCHESTRATOR_MODEL,
    REQUEST,
)
from orchestrator.errors import ApiError, EngineError, InternalError, from_message
from orchestrator.infer_streams import InferStreams, Responses
from orchestrator.limits.deadline import Deadline, ending
from orchestrator.wire import add_string, find_output, new_request

T = TypeVar("T")
Headers = Iterable[tuple[str, str]]


_working: set[asyncio.Task[Any]] = set()  # the loop itself keeps no reference


class Place(Waited):
    """One request to a model beside the orchestrator, from before its turn until what was begun for it has ended.

    `headers` are the answer's, known when its turn has come. Who serves it counts its `num_tokens` (None: they are not
    known) and, where it fails without an exception, says so in `outcome`. For one event loop.
    """

    def __init__(self) -> None:
        super().__init__()
        self.headers: Mapping[str, str] = {}
        self.num_tokens: int | None = 0
        self.outcome = "ok"
        self._over = asyncio.get_running_loop().create_future()

    async def cancel(self, reason: ApiError | None = None) -> None:
        if not self._over.done():
            self._over.set_result(None)
        await super().cancel(reason)

    async def watch(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns; raises what the place was cancelled for as soon as it is.

        `work` is never cancelled, for Triton leaks a request that is cancelled as it ends: it shall begin nothing more
        once the place is, and ends by itself.
        """
        task = _start(work)
        try:
            await asyncio.wait((task, self._over), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.cancel()
            raise
        if not task.done():
            self.raise_if_cancelled()
        return await task


def _start(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    task = asyncio.create_task(work)
    _working.add(task)
    task.add_done_callback(_let_go)
    return task


def _let_go(task: asyncio.Task[Any]) -> None:
    _working.discard(task)
    look_at(task)


def look_at(done: asyncio.Future[Any]) -> None:
    """For what nobody may wait for any more: else asyncio logs its failure."""
    if not done.cancelled():
        done.exception()


class LimitsClient:
    """All calls raise the `ApiError` that refuses, or `EngineError` when Triton itself failed. For one event loop."""

    def __init__(self, streams: InferStreams, *, with_keys: bool = True) -> None:
        """Without keys everybody may do everything, and `check` need not ask."""
        self._streams = streams
        self.with_keys = with_keys

    async def check(self, right: str, headers: Headers) -> None:
        """Whether the caller of `headers` may see "models" or "metrics", order the "cache", or use a model."""
        if self.with_keys:
            await self._ask("check", {"right": right}, headers)

    async def serve(
        self,
        place: Place,
        model: str,
        lengths: Sequence[int],
        headers: Headers,
        work: Callable[[], Coroutine[Any, Any, T]],
    ) -> T:
        """What `work` returns, when it is the turn of a request to `model` ("embedding", "ocr", "stt", "tts").

        `lengths` are the most tokens of each input. Raises what refuses the request or what `work` raises; once the
        place is cancelled, and its deadline cancels it too, what that was for. The place is kept until `work` has
        ended, which the answer does not wait to be told of.
        """
        responses = self._operate("admit", {"model": model, "lengths": list(lengths)}, headers)
        reading, reservation = responses.read(), None
        try:
            place.on_cancel(responses.cancel)
            grant, place.headers = await _read_event(reading)
            reservation = grant["reservation"]
            place.on_cancel(None)
            deadline = grant["deadline"]
            with ending(place, deadline and Deadline(deadline[0], time.monotonic() + deadline[1])):
                result = await work()
            place.raise_if_cancelled()
            return result
        except ApiError as error:  # of a work that was cancelled, mostly that it was
            ended_by = place.reason or error
            place.outcome = ended_by.code
            raise ended_by from error.__cause__
        except BaseException:
            place.outcome = InternalError.code
            raise
        finally:
            _start(self._end(reading, reservation, place))

    async def _end(self, reading: AsyncGenerator[Any, None], reservation: str | None, place: Place) -> None:
        """Settle; where that fails the place is given up, and what was reserved stays as it is."""
        async with contextlib.aclosing(reading):
            if reservation is not None:
                await self._ask(
                    "settle", {"reservation": reservation, "tokens": place.num_tokens, "outcome": place.outcome}, ()
                )
                async for _ in reading:
                    pass

    async def _ask(self, operation: str, body: dict[str, Any], headers: Headers) -> None:
        async with contextlib.aclosing(self._operate(operation, body, headers).read()) as reading:
            await _read_event(reading)
            async for _ in reading:
                pass

    def _operate(self, operation: str, body: dict[str, Any], headers: Headers) -> Responses:
        request = new_request(ORCHESTRATOR_MODEL, uuid.uuid4().hex)
        add_string(request, REQUEST, json.dumps(body).encode())
        for name, value in headers:
            request.parameters[name].string_param = value
        request.parameters[LIMITS_OPERATION_PARAMETER].string_param = operation
        return Responses(self._streams, request)


async def _read_event(reading: AsyncGenerator[Any, None]) -> tuple[Any, dict[str, str]]:
    """The first event, and the headers that it brings."""
    async for response in reading:
        if response.error_message:
            raise from_message(response.error_message)
        if raw := find_output(response, EVENT):
            return json.loads(raw[4:]), answer_headers_of(response)
    raise EngineError("the orchestrator ended without an answer")


class MeteredResponses:
    """The response of a request to "embedding" or "ocr", in its turn; `cancel` as of `Responses`."""

    def __init__(
        self,
        serve: Callable[..., Coroutine[Any, Any, Any]],
        ask: Callable[[], Awaitable[Any]],
        model: str,
        lengths: Sequence[int],
        headers: Headers,
    ) -> None:
        """`serve` is that of a `LimitsClient`; `lengths` are the most tokens that each input may have."""
        self._place = Place()
        self.cancel: Callable[[], Awaitable[None]] = self._place.cancel
        self._ask = ask
        self._has_tokens = bool(lengths)
        self._serving = partial(serve, self._place, model, lengths, list(headers), self._serve)

    async def read(self) -> AsyncGenerator[Any, None]:
        """What `ask` returns, a `ModelStreamInferResponse`; the quotas' headers are parameters of it."""
        yield await self._place.watch(self._serving())

    async def _serve(self) -> Any:
        response = await self._ask()
        if response.error_message:
            self._place.outcome = from_message(response.error_message).code
            return response
        if self._has_tokens:
            # Who asked for the vectors alone is charged for the most it can be.
            raw = find_output(response, NUM_TOKENS)
            self._place.num_tokens = None if raw is None else sum(memoryview(raw).cast("i"))
        for name, value in self._place.headers.items():
            response.infer_response.parameters[name].string_param = value
        return response


def answer_headers_of(response: Any) -> dict[str, str]:
    """Those that a `ModelStreamInferResponse` of the orchestrator brings."""
    raw = find_output(response, HEADERS)
    return {} if raw is None else {str(name): str(value) for name, value in json.loads(raw[4:]).items()}
