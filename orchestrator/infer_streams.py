"""Open streams to Triton and to its orchestrator, used by one request after another: to open one takes over 1 ms."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
from grpc import aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from orchestrator import contracts
from orchestrator.errors import CancelledError, ConnectionLostError, EngineError, OverloadedError
from orchestrator.inference_key import LOCKED_OUT, REFUSAL, find_inference_key, unlock
from orchestrator.local_socket import SOCKETS_VARIABLE, LocalCall, socket_of
from orchestrator.wire import cancel_request, error_response, is_end, mark_end

# How long the orchestrator gets to end a request that nobody waits for. It takes one decode step.
CANCEL_TIMEOUT_S = 10.0
_CHECK_TIMEOUT_S = 2.0
# Sockets that are kept for the next requests; a new one costs 0.2 ms, and each is an open file on both sides.
MAX_IDLE_SOCKETS = 16
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # a whole answer is one message; how long it may be is decided there
    # A Triton that was started again is found within a second; gRPC's own pauses grow up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class InferStreams:
    """The idle streams to one Triton, on one shared channel. For one event loop, inside which it connects.

    `num_live` is how many requests run there now, as far as this process asked for them.
    """

    def __init__(self, url: str, on_lost: Callable[[], None] = lambda: None) -> None:
        """`url` is host:port of Triton's gRPC service; nothing is sent before the first request.

        `on_lost` is called for each request that ends because Triton is gone, or cannot be reached. Where this process
        is told of its orchestrator's sockets (`local_socket`), the orchestrator is reached by them; Triton itself with
        the inference key, if there is one. Raises `ConfigError` when that cannot be one.
        """
        self.num_live = 0
        self.on_lost = on_lost
        self._url = url
        self._key = find_inference_key(os.environ)
        sockets = os.environ.get(SOCKETS_VARIABLE)
        self._sockets = sockets and socket_of(sockets, url, contracts.ORCHESTRATOR_MODEL)
        self._channel: aio.Channel | None = None
        self._stub: Any = None
        self._idle: dict[bool, list[InferStream]] = {False: [], True: []}  # by `is_local`; the last used last
        self._is_ending = False

    @property
    def stub(self) -> Any:
        """All other calls of Triton's service."""
        if self._channel is None:
            self._channel = aio.insecure_channel(self._url, _OPTIONS)
            self._stub = unlock(service_pb2_grpc.GRPCInferenceServiceStub(self._channel), self._key)
        return self._stub

    def borrow(self, model: str) -> InferStream:
        """For requests to `model`, which is decoupled."""
        self.num_live += 1
        is_local = bool(self._sockets) and model == contracts.ORCHESTRATOR_MODEL
        idle = self._idle[is_local]
        while idle:
            stream = idle.pop()
            if not stream.has_ended:  # with the Triton that it led to
                return stream
        if self._sockets and is_local:
            return InferStream(LocalCall(self._sockets), is_local=True)
        return InferStream(self.stub.ModelStreamInfer())

    async def give_back(self, stream: InferStream) -> None:
        """Keep `stream` for the next request if all of this one was heard; else let it end by itself.

        By itself: cancelling a stream at the moment its request ends leaks that request in Triton 2.51.
        """
        self.num_live -= 1
        idle = self._idle[stream.is_local]
        has_room = not stream.is_local or len(idle) < MAX_IDLE_SOCKETS
        if stream.is_idle and has_room and not self._is_ending:
            idle.append(stream)
        else:
            await stream.retire()

    async def end_idle(self) -> None:
        """From now on no stream is kept: Triton, which is about to end, would wait for them."""
        self._is_ending = True
        for idle in self._idle.values():
            while idle:
                await idle.pop().retire()

    async def infer(self, request: Any) -> Any:
        """The `ModelInferResponse` of a model that is not decoupled; see `ask_once`.

        Raises `aio.AioRpcError` when Triton refuses it, `ConnectionLostError` when it is gone, `EngineError` when its
        key is another one.
        """
        self.num_live += 1
        try:
            return await self.stub.ModelInfer(request)
        except aio.AioRpcError as error:
            assert self._channel is not None
            if _is_locked_out(error):
                raise EngineError(LOCKED_OUT) from error
            # Triton itself answers UNAVAILABLE too, of a model whose queue is full.
            is_lost = error.code() is grpc.StatusCode.UNAVAILABLE
            if is_lost and self._channel.get_state() is not grpc.ChannelConnectivity.READY:
                self.on_lost()
                raise ConnectionLostError(f"the connection to Triton broke: {error.details()}") from error
            raise
        finally:
            self.num_live -= 1

    async def check_key(self) -> None:
        """Raises `EngineError` when Triton does not take the key of this process.

        Of a stream that it refuses gRPC may say no more than that it broke: when a write meets the end.
        """
        try:
            await self.stub.ModelInfer(service_pb2.ModelInferRequest(), timeout=_CHECK_TIMEOUT_S)
        except aio.AioRpcError as error:
            if _is_locked_out(error):
                raise EngineError(LOCKED_OUT) from error

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

    @property
    def has_ended(self) -> bool:
        return bool(self._call.done())

    async def send(self, request: Any) -> None:
        """Raises `EngineError` when the stream broke, `ConnectionLostError` if that is because Triton is gone,
        `OverloadedError` when the orchestrator does not come to take it."""
        self._num_open += 1
        async with self._writing:
            if self._is_broken:
                raise EngineError("the stream to Triton broke")  # a write would wait forever
            try:
                await self._call.write(request)
            except asyncio.CancelledError:
                self._is_broken = True
                raise
            except BlockingIOError as error:
                self._is_broken = True
                raise OverloadedError(
                    "the orchestrator has as many requests waiting as it takes; try again later",
                    headers={"retry-after": "1"},
                ) from error
            # The second: it had ended before the write.
            except (aio.AioRpcError, asyncio.InvalidStateError, OSError) as error:
                raise self._broke(error, is_lost=True) from error

    async def receive(self) -> Any:
        """The next `ModelStreamInferResponse`; raises as `send`."""
        try:
            response = await self._call.read()
        except asyncio.CancelledError:
            if self._is_broken:
                raise EngineError("the stream to Triton was given up") from None
            self._is_broken = True  # gRPC ends a call whose reader is cancelled
            raise
        except aio.AioRpcError as error:
            raise self._broke(error, is_lost=error.code() is grpc.StatusCode.UNAVAILABLE) from error
        if response is aio.EOF:
            # As either does when it ends.
            raise self._broke(f"{'the orchestrator' if self.is_local else 'Triton'} closed it", is_lost=True)
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

    def _broke(self, why: object, *, is_lost: bool) -> EngineError:
        self._is_broken = True
        if isinstance(why, aio.AioRpcError):
            if _is_locked_out(why):
                return EngineError(LOCKED_OUT)
            why = f"{why.code().name}: {why.details()}"
        return (ConnectionLostError if is_lost else EngineError)(f"the stream to Triton broke: {why}")


def _is_locked_out(error: aio.AioRpcError) -> bool:
    return (error.details() or "").startswith(REFUSAL)


class Responses:
    """The responses of one request to the orchestrator or to `tts`, for one reader. `cancel` ends it, at any time."""

    def __init__(
        self, streams: InferStreams, request: Any, instead: Callable[[], InferStreams | None] = lambda: None
    ) -> None:
        """`request` is one of `wire.new_request`, with an id that nobody can guess; `read` sends it.

        If Triton is lost before it has answered anything, the request is sent once more, to what `instead` returns.
        """
        request.parameters[contracts.SAYS_CANCELS_PARAMETER].bool_param = True
        self._streams = streams
        self._instead = instead
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
            try:
                await stream.send(self._request)
                response = await stream.receive()
            except ConnectionLostError as error:
                stream = await self._move(stream, error)
                await stream.send(self._request)
                response = await stream.receive()
            while True:
                self._raise_if_cancelled()
                ended = is_end(response) or bool(response.error_message)
                yield response
                if ended:
                    break
                response = await stream.receive()
        except ConnectionLostError:
            self._streams.on_lost()
            raise
        finally:
            if not ended and not self._is_cancelled:
                with contextlib.suppress(EngineError):  # a stream that broke has nothing to cancel
                    await self.cancel()
            await stream.drain()
            await self._streams.give_back(stream)
            self._stream = None
            if self._giving_up is not None:
                self._giving_up.cancel()

    async def _move(self, broken: InferStream, error: ConnectionLostError) -> InferStream:
        """A stream to another Triton; raises `error` where there is none, or nobody waits, or what `check_key` does."""
        if not broken.is_local:
            await self._streams.check_key()
        other = None if self._is_cancelled else self._instead()
        if other is None:
            raise error
        self._streams.on_lost()
        await self._streams.give_back(broken)
        self._streams = other
        self._stream = other.borrow(self._request.model_name)
        return self._stream

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
        answer = await streams.infer(request)
    except aio.AioRpcError as error:
        return error_response(request.id, error.details() or error.code().name)
    response = service_pb2.ModelStreamInferResponse(infer_response=answer)
    mark_end(response)
    return response
