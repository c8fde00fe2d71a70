"""The one gRPC channel to Triton that a process in front of it shares between its requests."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc import aio
from tritonclient.grpc import service_pb2_grpc

from orchestrator import contracts
from orchestrator.errors import EngineError
from orchestrator.wire import add_string, is_end, new_request


class TritonChannel:
    """An async context manager; the channel is made inside the running event loop."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._channel: aio.Channel | None = None
        self.stub: Any = None
        self._cancels: asyncio.Queue[Any] = asyncio.Queue()
        self._idle: list[Any] = []  # open ModelStreamInfer calls that serve nobody

    async def __aenter__(self) -> TritonChannel:
        self._channel = aio.insecure_channel(self._url)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._sender = asyncio.create_task(self._send_cancels())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sender.cancel()
        if self._channel is not None:
            await self._channel.close()

    def start(self, request: Any) -> Responses:
        """Send a `ModelInferRequest` that asks for its end (`wire.new_request`), with an id that nobody can guess."""
        return Responses(self, self._idle.pop() if self._idle else self.stub.ModelStreamInfer(), request)

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
        """As long as the channel lives; an unreachable Triton has nothing to cancel.

        All that wait are sent before the first answer is read: one dead client may have left many.
        """
        call = None
        while True:
            requests = [await self._cancels.get()]
            while not self._cancels.empty():
                requests.append(self._cancels.get_nowait())
            try:
                call = call or self.stub.ModelStreamInfer()
                for request in requests:
                    await call.write(request)
                unanswered = len(requests)
                while unanswered and (response := await call.read()) is not aio.EOF:
                    unanswered -= is_end(response) or bool(response.error_message)
                call = None if unanswered else call
            except (aio.AioRpcError, asyncio.InvalidStateError):  # the second: the stream had ended before the write
                call = None


class Responses:
    """The responses of one request, in order. `cancel` ends the generation; it may be called at any time."""

    def __init__(self, channel: TritonChannel, call: Any, request: Any) -> None:
        self._channel = channel
        self._call = call
        self._request_id = request.id
        self._unsent: Any = request
        self._is_ended = False

    def cancel(self) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._channel.say_cancelled(self._request_id)
            self._call.cancel()

    async def read(self) -> Any | None:
        """The next `ModelStreamInferResponse`, or None after the last. One with `error_message` is the last.

        Raises `EngineError` when Triton itself failed.
        """
        if self._is_ended:
            return None
        try:
            if self._unsent is not None:
                request, self._unsent = self._unsent, None
                await self._call.write(request)
            response = await self._call.read()
        except aio.AioRpcError as error:
            self._is_ended = True
            raise EngineError(f"Triton cannot be reached or failed: {error.code().name}: {error.details()}") from error
        if response is aio.EOF:
            self._is_ended = True
            raise EngineError("Triton closed the stream")
        if is_end(response):
            self._is_ended = True
            self._channel.give_back(self._call)
        elif response.error_message:  # Triton itself refused the request, and marks no end
            self._is_ended = True
            self._call.cancel()
        return response
