"""The gateway's one shared gRPC channel to Triton."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterable
from typing import Any

from grpc import aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from orchestrator import contracts
from orchestrator.errors import EngineError, from_message

READY_TIMEOUT_S = 2.0


class TritonClient:
    """An async context manager; the channel is made inside the running event loop."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._channel: aio.Channel | None = None
        self._stub: Any = None

    async def __aenter__(self) -> TritonClient:
        self._channel = aio.insecure_channel(self._url)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._channel is not None:
            await self._channel.close()

    def open(self, body: bytes, metadata: Iterable[tuple[str, str]]) -> EventStream:
        """Start a chat completion with `body` (OpenAI's JSON)."""
        request = service_pb2.ModelInferRequest(model_name=contracts.ORCHESTRATOR_MODEL)
        request.inputs.add(name=contracts.REQUEST.name, datatype="BYTES", shape=[1])
        request.raw_input_contents.append(struct.pack("<I", len(body)) + body)
        return EventStream(self._stub.ModelStreamInfer(iter((request,)), metadata=tuple(metadata)))

    async def find_not_ready(self, engines: Iterable[str]) -> list[str]:
        """What is not ready: "triton", "orchestrator", or names of `engines`; empty when all is.

        Triton calls a Python model ready whose engine failed or whose process died, so each engine is asked itself.
        """
        not_ready = []
        try:
            server = await self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=READY_TIMEOUT_S)
            if not server.ready:
                not_ready.append("triton")
            request = service_pb2.ModelReadyRequest(name=contracts.ORCHESTRATOR_MODEL)
            if not (await self._stub.ModelReady(request, timeout=READY_TIMEOUT_S)).ready:
                not_ready.append(contracts.ORCHESTRATOR_MODEL)
        except aio.AioRpcError:
            return ["triton"]
        return not_ready + [engine for engine in engines if not await self._answers(engine)]

    async def _answers(self, engine: str) -> bool:
        """Whether an engine model answers a stop for a request that does not exist, as the contract says it must."""
        request = service_pb2.ModelInferRequest(model_name=engine, id=f"ready-{uuid.uuid4().hex}")
        for spec, datatype, raw in (
            (contracts.STOP, "BOOL", b"\x01"),
            (contracts.INPUT_LENGTHS, "INT32", bytes(4)),
            (contracts.REQUEST_OUTPUT_LEN, "INT32", bytes(4)),
        ):
            request.inputs.add(name=spec.name, datatype=datatype, shape=[1, 1])
            request.raw_input_contents.append(raw)
        try:
            responses = self._stub.ModelStreamInfer(iter((request,)), timeout=READY_TIMEOUT_S)
            return not any([response.error_message async for response in responses])
        except aio.AioRpcError:
            return False


class EventStream:
    """The events of one call, in order. `cancel` ends the generation; it may be called at any time."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def cancel(self) -> None:
        self._call.cancel()

    async def read(self) -> bytes | None:
        """The next event's JSON, or None after the last.

        Raises the `ApiError` that the orchestrator sent, or `EngineError` when Triton itself failed.
        """
        try:
            response = await self._call.read()
        except aio.AioRpcError as error:
            raise EngineError(f"Triton cannot be reached or failed: {error.code().name}: {error.details()}") from error
        if response is aio.EOF:
            return None
        if response.error_message:
            raise from_message(response.error_message)
        raw: bytes = response.infer_response.raw_output_contents[0]
        return raw[4:]  # one STRING element: a length of 4 bytes, then the text
