"""Open gRPC streams to Triton, used by one request after another: opening one costs over a millisecond."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from grpc import aio
from tritonclient.grpc import service_pb2_grpc

from orchestrator.errors import EngineError
from orchestrator.wire import is_end


class InferStreams:
    """The idle streams to one Triton, on one shared channel. For one event loop, inside which it connects."""

    def __init__(self, url: str) -> None:
        """`url` is host:port of Triton's gRPC service; nothing is sent before the first request."""
        self._url = url
        self._channel: aio.Channel | None = None
        self._stub: Any = None
        self._idle: list[InferStream] = []  # the most recently used last

    @property
    def stub(self) -> Any:
        """All other calls of Triton's service."""
        if self._channel is None:
            self._channel = aio.insecure_channel(self._url)
            self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        return self._stub

    def borrow(self) -> InferStream:
        return self._idle.pop() if self._idle else InferStream(self.stub.ModelStreamInfer())

    async def give_back(self, stream: InferStream) -> None:
        """Keep `stream` for the next request if all of this one was heard; else let it end by itself.

        By itself: cancelling a stream at the moment its request ends leaks that request in Triton 2.51.
        """
        if stream.is_idle:
            self._idle.append(stream)
        else:
            await stream.retire()

    async def close(self) -> None:
        """End every stream."""
        if self._channel is not None:
            await self._channel.close()


class InferStream:
    """One open `ModelStreamInfer`. Triton takes its requests in order, so a stop cannot overtake what it stops."""

    def __init__(self, call: Any) -> None:
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
            except (aio.AioRpcError, asyncio.InvalidStateError) as error:  # the second: it had ended before the write
                raise self._broke(error) from error

    async def receive(self) -> Any:
        """The next `ModelStreamInferResponse`; raises `EngineError` when the stream broke."""
        try:
            response = await self._call.read()
        except asyncio.CancelledError:
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

    def _broke(self, why: object) -> EngineError:
        self._is_broken = True
        if isinstance(why, aio.AioRpcError):
            why = f"{why.code().name}: {why.details()}"
        return EngineError(f"the stream to Triton broke: {why}")
