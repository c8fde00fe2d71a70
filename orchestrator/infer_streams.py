"""Open streams to Triton and to its orchestrator, used by one request after another: to open one takes over 1 ms."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from typing import Any

from grpc import aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from orchestrator import contracts
from orchestrator.errors import CancelledError, EngineError
from orchestrator.local_socket import SOCKETS_VARIABLE, LocalCall, socket_of
from orchestrator.wire import cancel_request, error_response, is_end, mark_end

# How long the orchestrator gets to end a request that nobody waits for. It takes one decode step.
CANCEL_TIMEOUT_S = 10.0


class InferStreams:
    """The idle streams to one Triton, on one shared channel. For one event loop, inside which it connects."""

    def __init__(self, url: str) -> None:
        """`url` is host:port of Triton's gRPC service; nothing is sent before the first request.

        Where this process is told of its orchestrator's sockets (`local_socket`), the orchestrator is reached by them.
        """
        self._url = url
        sockets = os.environ.get(SOCKETS_VARIABLE)
        self._sockets = sockets and socket_of(sockets, url)
        self._channel: aio.Channel | None = None
        self._stub: Any = None
        self._idle: dict[bool, list[InferStream]] = {False: [], True: []}  # by `is_local`; the last used last

    @property
    def stub(self) -> Any:
        """All other calls of Triton's service."""
        if self._channel is None:
            self._channel = aio.insecure_channel(self._url)
            self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        return self._stub

    def borrow(self, model: str) -> InferStream:
        """For requests to `model`, which is decoupled."""
        is_local = bool(self._sockets) and model == contracts.ORCHESTRATOR_MODEL
        if idle := self._idle[is_local]:
            return idle.pop()
        if self._sockets and is_local:
            return InferStream(LocalCall(self._sockets), is_local=True)
        return InferStream(self.stub.ModelStreamInfer())

    async def give_back(self, stream: InferStream) -> None:
        """Keep `stream` for the next request if all of this one was heard; else let it end by itself.

        By itself: cancelling a stream at the moment its request ends leaks that request in Triton 2.51.
        """
        if stream.is_idle:
            self._idle[stream.is_local].append(stream)
        else:
            await stream.retire()

    async def close(self) -> None:
        """End every stream."""
        for stream in self._idle[True]:
            stream.give_up()
        if self._channel is not None:
            await self._channel.close()


class InferStream:
    """One open `ModelStreamInfer`, for decoupled models alone: see `ask_once`.

    Triton takes its requests in order, so a stop cannot overtake what it stops.
    """

    def __init__(self, call: Any, *, is_local: bool = False) -> None:
        self.is_local = is_local
        self._call = call
        self._num_open = 0  # requests sent whose end was not received
        self._is_broken = False
        self._writing = asyncio.Lock()  # gRPC allows one write at a time

    @property
    def is_idle(self) -> bool:
        return self._num_open == 0 and not self._is_broken

    async def send(self, request: Any) -> None:
        """Raises `EngineError` when the stream broke."""
        self._num_open += 1
        async with self._writing:
            if self._is_broken:
                raise EngineError("the stream to Triton broke")  # a write would wait forever
            try:
                await self._call.write(request)
            except asyncio.CancelledError:
                self._is_broken = True
                raise
            # The second: it had ended before the write.
            except (aio.AioRpcError, asyncio.InvalidStateError, OSError) as error:
                raise self._broke(error) from error

    async def receive(self) -> Any:
        """The next `ModelStreamInferResponse`; raises `EngineError` when the stream broke."""
        try:
            response = await self._call.read()
        except asyncio.CancelledError:
            if self._is_broken:
                raise EngineError("the stream to Triton was given up") from None
            self._is_broken = True  # gRPC ends a call whose reader is cancelled
            raise
        except aio.AioRpcError as error:
            raise self._broke(error) from error
        if response is aio.EOF:
            raise self._broke("Triton closed it")
        if is_end(response):
            self._num_open -= 1
        elif response.error_message:
            # Triton marks no end when it refuses a request itself (an unknown model, a wrong tensor).
            self._is_broken = True
        return response

    async def drain(self) -> None:
        """Receive until every request has ended, or the stream broke."""
        with contextlib.suppress(EngineError):  # what was asked for has its answer; the stream is not used again
            while self._num_open and not self._is_broken:
                await self.receive()

    async def retire(self) -> None:
        """Send nothing more; Triton ends the stream after its last request."""
        with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):  # it has ended already
            await self._call.done_writing()

    def give_up(self) -> None:
        """End the stream now, whatever runs on it."""
        self._is_broken = True
        self._call.cancel()

    def _broke(self, why: object) -> EngineError:
        self._is_broken = True
        if isinstance(why, aio.AioRpcError):
            why = f"{why.code().name}: {why.details()}"
        return EngineError(f"the stream to Triton broke: {why}")


class Responses:
    """The responses of one request to the orchestrator or to `tts`, for one reader. `cancel` ends it, at any time."""

    def __init__(self, streams: InferStreams, request: Any) -> None:
        """`request` is one of `wire.new_request`, with an id that nobody can guess; `read` sends it."""
        request.parameters[contracts.SAYS_CANCELS_PARAMETER].bool_param = True
        self._streams = streams
        self._request = request
        self._stream: InferStream | None = None
        self._is_cancelled = False
        self._giving_up: asyncio.TimerHandle | None = None

    async def read(self) -> AsyncGenerator[Any, None]:
        """Each `ModelStreamInferResponse`; one with `error_message` is the last.

        Closing it early cancels. Raises `EngineError` when Triton itself failed, `CancelledError` once cancelled.
        """
        self._raise_if_cancelled()
        self._stream = stream = self._streams.borrow(self._request.model_name)
        ended = False
        try:
            await stream.send(self._request)
            while not ended:
                response = await stream.receive()
                self._raise_if_cancelled()
                ended = is_end(response) or bool(response.error_message)
                yield response
        finally:
            if not ended and not self._is_cancelled:
                with contextlib.suppress(EngineError):  # a stream that broke has nothing to cancel
                    await self.cancel()
            await stream.drain()
            await self._streams.give_back(stream)
            self._stream = None
            if self._giving_up is not None:
                self._giving_up.cancel()

    async def cancel(self) -> None:
        """Tell the orchestrator that nobody waits any more. Raises `EngineError` when the stream broke.

        On the stream of the request, which goes on to its end: Triton would let the orchestrator find a cancelled
        stream only by polling, and leaks a request whose stream is cancelled as it ends.
        """
        if self._is_cancelled:
            return
        self._is_cancelled = True
        if self._stream is not None:
            self._giving_up = asyncio.get_running_loop().call_later(CANCEL_TIMEOUT_S, self._stream.give_up)
            await self._stream.send(cancel_request(self._request.id, self._request.model_name))

    def _raise_if_cancelled(self) -> None:
        if self._is_cancelled:
            raise CancelledError("the caller left")


async def ask_once(streams: InferStreams, request: Any) -> Any:
    """The one `ModelStreamInferResponse` of a model that is not decoupled, which cannot be ended once begun.

    With `error_message` when Triton or the model refused. By `ModelInfer`, for on a stream such a request can crash
    Triton 2.51: its end is noted after its memory may serve another request already, whose first response is then
    taken for its last.
    """
    try:
        answer = await streams.stub.ModelInfer(request)
    except aio.AioRpcError as error:
        return error_response(request.id, error.details() or error.code().name)
    response = service_pb2.ModelStreamInferResponse(infer_response=answer)
    mark_end(response)
    return response
