"""The gateway's one shared gRPC channel to Triton."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable
from typing import Any

from grpc import aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from orchestrator import contracts
from orchestrator.errors import EngineError, from_message
from orchestrator.wire import add_string, find_output, is_end, new_request, stop_request

READY_TIMEOUT_S = 2.0


class TritonClient:
    """An async context manager; the channel is made inside the running event loop."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._channel: aio.Channel | None = None
        self._stub: Any = None
        self._cancels: asyncio.Queue[Any] = asyncio.Queue()
        self._idle: list[Any] = []  # open ModelStreamInfer calls that serve nobody

    async def __aenter__(self) -> TritonClient:
        self._channel = aio.insecure_channel(self._url)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._sender = asyncio.create_task(self._send_cancels())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sender.cancel()
        if self._channel is not None:
            await self._channel.close()

    def open(self, body: bytes, headers: Iterable[tuple[str, str]]) -> EventStream:
        """Start a chat completion with `body` (OpenAI's JSON); `headers` become request parameters."""
        request = new_request(contracts.ORCHESTRATOR_MODEL, uuid.uuid4().hex)
        add_string(request, contracts.REQUEST, body)
        for name, value in headers:
            request.parameters[name].string_param = value
        return EventStream(self, self._idle.pop() if self._idle else self._stub.ModelStreamInfer(), request)

    def give_back(self, call: Any) -> None:
        """A gRPC stream whose request ended serves another: opening one costs over a millisecond."""
        self._idle.append(call)

    def say_cancelled(self, request_id: str) -> None:
        """Tell the orchestrator that nobody waits for this request any more.

        Triton would let it find a cancelled stream only by polling. Said on a stream of its own, because the request's
        stream is gone with its reader.
        """
        request = new_request(contracts.ORCHESTRATOR_MODEL, request_id)
        add_string(request, contracts.REQUEST, b"")
        request.parameters[contracts.CANCEL_PARAMETER].bool_param = True
        self._cancels.put_nowait(request)

    async def _send_cancels(self) -> None:
        """One after the other for as long as the client lives; an unreachable Triton has nothing to cancel."""
        call = None
        while True:
            request = await self._cancels.get()
            try:
                call = call or self._stub.ModelStreamInfer()
                await call.write(request)
                while (response := await call.read()) is not aio.EOF and not is_end(response):
                    pass
                call = None if response is aio.EOF else call
            except (aio.AioRpcError, asyncio.InvalidStateError):  # the second: the stream had ended before the write
                call = None

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
        request = stop_request(engine, f"ready-{uuid.uuid4().hex}")
        try:
            responses = self._stub.ModelStreamInfer(iter((request,)), timeout=READY_TIMEOUT_S)
            return not any([response.error_message async for response in responses])
        except aio.AioRpcError:
            return False


class EventStream:
    """The events of one call, in order. `cancel` ends the generation; it may be called at any time."""

    def __init__(self, client: TritonClient, call: Any, request: Any) -> None:
        self._client = client
        self._call = call
        self._request = request
        self._is_started = False
        self._is_ended = False

    def cancel(self) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._client.say_cancelled(self._request.id)
            self._call.cancel()

    async def read(self) -> bytes | None:
        """The next event's JSON, or None after the last.

        Raises the `ApiError` that the orchestrator sent, or `EngineError` when Triton itself failed.
        """
        while not self._is_ended:
            try:
                if not self._is_started:
                    self._is_started = True
                    await self._call.write(self._request)
                response = await self._call.read()
            except aio.AioRpcError as error:
                self._is_ended = True
                raise EngineError(
                    f"Triton cannot be reached or failed: {error.code().name}: {error.details()}"
                ) from error
            if response is aio.EOF:
                self._is_ended = True
                raise EngineError("Triton closed the stream")
            if is_end(response):
                self._is_ended = True
                self._client.give_back(self._call)
            if response.error_message:
                if not self._is_ended:  # Triton itself refused the request, and marks no end
                    self._is_ended = True
                    self._call.cancel()
                raise from_message(response.error_message)
            if raw := find_output(response, contracts.EVENT):
                return raw[4:]  # one STRING element: a length of 4 bytes, then the text
        return None
