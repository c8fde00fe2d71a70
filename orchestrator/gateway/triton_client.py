"""The gateway's way to Triton: one shared gRPC channel, a stream a call."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, Iterable

from grpc import aio
from tritonclient.grpc import service_pb2

from orchestrator import contracts
from orchestrator.errors import from_message
from orchestrator.infer_streams import InferStreams, Responses
from orchestrator.wire import add_string, find_output, new_request, stop_request

READY_TIMEOUT_S = 2.0


class TritonClient:
    """For one event loop; `close` it there."""

    def __init__(self, url: str) -> None:
        """`url` is host:port of Triton's gRPC service; nothing is sent before the first request."""
        self._streams = InferStreams(url)

    async def close(self) -> None:
        await self._streams.close()

    def open(self, body: bytes, headers: Iterable[tuple[str, str]]) -> EventStream:
        """A chat completion of `body` (OpenAI's JSON), to be read; `headers` become request parameters."""
        request = new_request(contracts.ORCHESTRATOR_MODEL, uuid.uuid4().hex)
        add_string(request, contracts.REQUEST, body)
        for name, value in headers:
            request.parameters[name].string_param = value
        return EventStream(Responses(self._streams, request))

    async def find_not_ready(self, engines: Iterable[str]) -> list[str]:
        """What is not ready: "triton", "orchestrator", or names of `engines`; empty when all is.

        Triton calls a Python model ready whose engine failed or whose process died, so each engine is asked itself.
        """
        not_ready = []
        stub = self._streams.stub
        try:
            server = await stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=READY_TIMEOUT_S)
            if not server.ready:
                not_ready.append("triton")
            request = service_pb2.ModelReadyRequest(name=contracts.ORCHESTRATOR_MODEL)
            if not (await stub.ModelReady(request, timeout=READY_TIMEOUT_S)).ready:
                not_ready.append(contracts.ORCHESTRATOR_MODEL)
        except aio.AioRpcError:
            return ["triton"]
        return not_ready + [engine for engine in engines if not await self._answers(engine)]

    async def _answers(self, engine: str) -> bool:
        """Whether an engine model answers a stop for a request that does not exist, as the contract says it must."""
        request = stop_request(engine, f"ready-{uuid.uuid4().hex}")
        try:
            responses = self._streams.stub.ModelStreamInfer(iter((request,)), timeout=READY_TIMEOUT_S)
            return not any([response.error_message async for response in responses])
        except aio.AioRpcError:
            return False


class EventStream:
    """The events of one call, for one reader. `cancel` ends the generation; it may be called at any time."""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses
        self.cancel = responses.cancel

    async def read(self) -> AsyncGenerator[bytes, None]:
        """Each event's JSON.

        Raises the `ApiError` that the orchestrator sent, or `EngineError` when Triton itself failed.
        """
        async with contextlib.aclosing(self._responses.read()) as reading:
            async for response in reading:
                if response.error_message:
                    raise from_message(response.error_message)
                if raw := find_output(response, contracts.EVENT):
                    yield raw[4:]  # one STRING element: a length of 4 bytes, then the text
