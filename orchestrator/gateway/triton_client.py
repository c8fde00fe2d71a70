"""The gateway's one shared gRPC channel to Triton."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from grpc import aio
from tritonclient.grpc import service_pb2

from orchestrator import contracts
from orchestrator.channel import Responses, TritonChannel
from orchestrator.errors import from_message
from orchestrator.wire import add_string, find_output, new_request, stop_request

READY_TIMEOUT_S = 2.0


class TritonClient(TritonChannel):
    """What the gateway asks of Triton."""

    def open(self, body: bytes, headers: Iterable[tuple[str, str]]) -> EventStream:
        """Start a chat completion with `body` (OpenAI's JSON); `headers` become request parameters."""
        request = new_request(contracts.ORCHESTRATOR_MODEL, uuid.uuid4().hex)
        add_string(request, contracts.REQUEST, body)
        for name, value in headers:
            request.parameters[name].string_param = value
        return EventStream(self.start(request))

    async def find_not_ready(self, engines: Iterable[str]) -> list[str]:
        """What is not ready: "triton", "orchestrator", or names of `engines`; empty when all is.

        Triton calls a Python model ready whose engine failed or whose process died, so each engine is asked itself.
        """
        not_ready = []
        try:
            server = await self.stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=READY_TIMEOUT_S)
            if not server.ready:
                not_ready.append("triton")
            request = service_pb2.ModelReadyRequest(name=contracts.ORCHESTRATOR_MODEL)
            if not (await self.stub.ModelReady(request, timeout=READY_TIMEOUT_S)).ready:
                not_ready.append(contracts.ORCHESTRATOR_MODEL)
        except aio.AioRpcError:
            return ["triton"]
        return not_ready + [engine for engine in engines if not await self._answers(engine)]

    async def _answers(self, engine: str) -> bool:
        """Whether an engine model answers a stop for a request that does not exist, as the contract says it must."""
        request = stop_request(engine, f"ready-{uuid.uuid4().hex}")
        try:
            responses = self.stub.ModelStreamInfer(iter((request,)), timeout=READY_TIMEOUT_S)
            return not any([response.error_message async for response in responses])
        except aio.AioRpcError:
            return False


class EventStream:
    """The events of one call, in order. `cancel` ends the generation; it may be called at any time."""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses

    def cancel(self) -> None:
        self._responses.cancel()

    async def read(self) -> bytes | None:
        """The next event's JSON, or None after the last.

        Raises the `ApiError` that the orchestrator sent, or `EngineError` when Triton itself failed.
        """
        while (response := await self._responses.read()) is not None:
            if response.error_message:
                raise from_message(response.error_message)
            if raw := find_output(response, contracts.EVENT):
                return raw[4:]  # one STRING element: a length of 4 bytes, then the text
        return None
