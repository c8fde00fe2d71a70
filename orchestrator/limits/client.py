"""The other side of `operations`: how the gateway and the gRPC front ask about a caller's key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from orchestrator.contracts import (
    EVENT,
    HEADERS,
    LIMITS_OPERATION_PARAMETER,
    NUM_TOKENS,
    ORCHESTRATOR_MODEL,
    REQUEST,
)
from orchestrator.errors import ApiError, EngineError, from_message
from orchestrator.infer_streams import InferStreams, Responses
from orchestrator.wire import add_string, find_output, new_request

Headers = Iterable[tuple[str, str]]


class Reservation(NamedTuple):
    """Room for a request that does not pass the orchestrator; `headers` are the answer's."""

    id: str
    headers: Mapping[str, str]


class LimitsClient:
    """All calls raise the `ApiError` that refuses, or `EngineError` when Triton itself failed. For one event loop."""

    def __init__(self, streams: InferStreams) -> None:
        self._streams = streams
        self._settling: set[asyncio.Task[None]] = set()

    async def check(self, right: str, headers: Headers) -> None:
        """Whether the caller of `headers` may see "models" or "metrics"."""
        await self._ask("check", {"right": right}, headers)

    async def reserve(self, model: str, lengths: Sequence[int], headers: Headers) -> Reservation:
        """Room for a request to `model` ("embedding", "ocr", "stt", "tts") with inputs of at most so many tokens."""
        answer, answer_headers = await self._ask("reserve", {"model": model, "lengths": list(lengths)}, headers)
        return Reservation(answer["reservation"], answer_headers)

    def settle(self, reservation: Reservation, num_tokens: int) -> None:
        """Beside the answer, which does not wait for it; one that is lost leaves the reservation as it is."""

        async def settle() -> None:
            with contextlib.suppress(ApiError):
                await self._ask("settle", {"reservation": reservation.id, "tokens": num_tokens}, ())

        task = asyncio.create_task(settle())
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _ask(self, operation: str, body: dict[str, Any], headers: Headers) -> tuple[Any, dict[str, str]]:
        request = new_request(ORCHESTRATOR_MODEL, uuid.uuid4().hex)
        add_string(request, REQUEST, json.dumps(body).encode())
        for name, value in headers:
            request.parameters[name].string_param = value
        request.parameters[LIMITS_OPERATION_PARAMETER].string_param = operation
        answer, answer_headers = None, {}
        async with contextlib.aclosing(Responses(self._streams, request).read()) as reading:
            async for response in reading:
                if response.error_message:
                    raise from_message(response.error_message)
                if raw := find_output(response, EVENT):
                    answer, answer_headers = json.loads(raw[4:]), answer_headers_of(response)
        if answer is None:
            raise EngineError("the orchestrator ended without an answer")
        return answer, answer_headers


class MeteredResponses:
    """The `Responses` of a request to "embedding" or "ocr", begun when the caller's quotas have room for it."""

    def __init__(
        self, limits: LimitsClient, responses: Responses, model: str, lengths: Sequence[int], headers: Headers
    ) -> None:
        """`lengths` are the most tokens that each input may have."""
        self._limits = limits
        self._responses = responses
        self._model = model
        self._lengths = lengths
        self._headers = list(headers)
        self.cancel: Callable[[], Awaitable[None]] = responses.cancel

    async def read(self) -> AsyncGenerator[Any, None]:
        """As `Responses.read`; the quotas' headers are parameters of the first response."""
        reservation = await self._limits.reserve(self._model, self._lengths, self._headers)
        # Who asked for the vectors alone is charged for the most it can be.
        num_tokens: int | None = 0
        headers = dict(reservation.headers)
        try:
            async with contextlib.aclosing(self._responses.read()) as reading:
                async for response in reading:
                    if self._lengths and response.infer_response.outputs:
                        raw = find_output(response, NUM_TOKENS)
                        num_tokens = None if raw is None else sum(memoryview(raw).cast("i"))
                    while headers and not response.error_message:
                        name, value = headers.popitem()
                        response.infer_response.parameters[name].string_param = value
                    yield response
        finally:
            if num_tokens is not None:
                self._limits.settle(reservation, num_tokens)


def answer_headers_of(response: Any) -> dict[str, str]:
    """Those that a `ModelStreamInferResponse` of the orchestrator brings."""
    raw = find_output(response, HEADERS)
    return {} if raw is None else {str(name): str(value) for name, value in json.loads(raw[4:]).items()}
