"""The way from the orchestrator to the engine models of the same server: gRPC on loopback.

Not BLS, though both models live in one Triton: streaming BLS has three faults in Triton's Python backend, each seen
here on 2.51. An error after the first response arrives without an id, so its caller waits forever. A finished response
iterator is freed by a thread without Python's lock, which corrupts the heap. And a thread that takes a response holds
the iterator's mutex while it waits for Python's lock: with a new call beside it the process deadlocks (200 clients
that connect and leave were enough).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator import contracts
from orchestrator.engines import Chunk, EngineRequest, Lora
from orchestrator.errors import EngineError
from orchestrator.infer_streams import InferStream, InferStreams
from orchestrator.token_lines import Received, TokenLines
from orchestrator.triton.lora import NOT_CACHED, LoraTensors, add_lora, read_lora
from orchestrator.wire import add_row, add_string, find_output, is_end, new_request, stop_request

# Triton hands a stop to any of a model's instances, and only one of them knows the request. When its stream has not
# ended after this long, it is cancelled, which every backend sees; a stop that arrives takes a step.
REPLICA_STOP_TIMEOUT_S = 0.050


class GrpcEngineClient:
    """An `EngineClient` for one event loop."""

    def __init__(
        self, url: str, replicated: Collection[str] = (), root: Path = Path(), lines: TokenLines | None = None
    ) -> None:
        """`url` is host:port of Triton's gRPC service; nothing is sent before the first request.

        `replicated` are the models that have several instances; folders of adapters are relative to `root`. Tokens come
        by `lines` from models that have them.
        """
        self._root = root
        self._lines = lines
        self._taught: set[tuple[str, int]] = set()  # models, and adapters that they were sent
        self._streams = InferStreams(url)
        self._replicated = frozenset(replicated)
        self._live: dict[str, InferStream] = {}
        self._stopping: dict[str, asyncio.TimerHandle] = {}

    async def stream(self, model: str, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        if request.lora is None:
            async with aclosing(self._stream(model, request, None)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        known = (model, request.lora.task_id)
        tensors = None if known in self._taught else await self._read_lora(request.lora)
        self._taught.add(known)
        while True:
            has_begun = False
            try:
                async with aclosing(self._stream(model, request, tensors)) as chunks:
                    async for chunk in chunks:
                        has_begun = True
                        yield chunk
                return
            except EngineError as error:
                # It had to make room for others, or another instance has it.
                if has_begun or tensors is not None or NOT_CACHED not in error.message:
                    raise
                tensors = await self._read_lora(request.lora)

    async def _read_lora(self, lora: Lora) -> LoraTensors:
        try:
            return await asyncio.to_thread(read_lora, self._root / lora.folder)
        except (OSError, ValueError) as error:
            raise EngineError(f"the adapter cannot be read: {error}") from error

    async def _stream(
        self, model: str, request: EngineRequest, tensors: LoraTensors | None
    ) -> AsyncGenerator[Chunk, None]:
        message = build_request(model, request, tensors)
        subscriber_id = None if self._lines is None else await self._lines.join(model)
        with contextlib.ExitStack() as open_lines:
            lines: Received | None = None
            if self._lines is not None and subscriber_id is not None:
                message.parameters[contracts.TOKEN_LINES_PARAMETER].string_param = subscriber_id
                lines = open_lines.enter_context(self._lines.receive(model, request.request_id))
            stream = self._streams.borrow(model)
            self._live[request.request_id] = stream
            watching: asyncio.Task[None] | None = None
            ended = False
            try:
                await stream.send(message)
                if lines is not None:
                    watching = asyncio.create_task(self._watch(stream, request.request_id, lines))
                while not ended:
                    chunk = await (self._receive(stream, request) if lines is None else self._take(lines, stream))
                    ended = chunk.finished
                    if chunk.error is not None:
                        raise EngineError(chunk.error)
                    if chunk.token_ids:
                        yield chunk
            finally:
                if not ended:
                    with contextlib.suppress(EngineError):  # a stream that broke has nothing to stop
                        await self.stop(model, request.request_id)
                del self._live[request.request_id]
                if watching is not None:
                    await watching
                await stream.drain()
                if timer := self._stopping.pop(request.request_id, None):
                    timer.cancel()
                await self._streams.give_back(stream)

    async def _receive(self, stream: InferStream, request: EngineRequest) -> Chunk:
        """The next chunk, by Triton. Raises `EngineError` when the stream broke."""
        try:
            response = await stream.receive()
        except EngineError:
            if request.request_id in self._stopping:
                return Chunk([], finished=True)  # given up, as a stopped engine ends
            raise
        if response.error_message:
            return Chunk([], finished=True, error=response.error_message)
        token_ids: list[int] = []
        log_probs = None
        if raw := find_output(response, contracts.OUTPUT_IDS):
            token_ids = np.frombuffer(raw, dtype=np.int32).tolist()
            if request.log_probs and (raw := find_output(response, contracts.OUTPUT_LOG_PROBS)):
                # NVIDIA's backend repeats those of earlier tokens.
                log_probs = np.frombuffer(raw, dtype=np.float32)[-len(token_ids) :].tolist()
        return Chunk(token_ids, is_end(response), log_probs=log_probs)

    async def _take(self, lines: Received, stream: InferStream) -> Chunk:
        """The next chunk, by lines. Who gives up waiting does not wait for the engine either: it may hang.

        Raises `EngineError` when lines were lost.
        """
        try:
            received = await lines.get()
        except asyncio.CancelledError:
            stream.give_up()
            raise
        if isinstance(received, EngineError):
            raise received
        return received

    async def _watch(self, stream: InferStream, request_id: str, lines: Received) -> None:
        """What Triton has to say of a request whose tokens come by lines: that it is refused, or lost."""
        try:
            response = await stream.receive()
            if response.error_message:
                lines.put_nowait(Chunk([], finished=True, error=response.error_message))
        except EngineError as error:
            is_given_up = request_id in self._stopping
            lines.put_nowait(Chunk([], finished=True, error=None if is_given_up else error.message))

    async def stop(self, model: str, request_id: str) -> None:
        # On the stream of the request itself: on another one it could come first, and stop nothing.
        if stream := self._live.get(request_id):
            await stream.send(stop_request(model, request_id))
            if model in self._replicated and request_id not in self._stopping:
                later = asyncio.get_running_loop().call_later
                self._stopping[request_id] = later(REPLICA_STOP_TIMEOUT_S, stream.give_up)

    async def close(self) -> None:
        """End every stream."""
        if self._lines is not None:
            await self._lines.close()
        await self._streams.close()


def build_request(model: str, request: EngineRequest, tensors: LoraTensors | None = None) -> Any:
    """`request` by NVIDIA's tensor contract, streaming; values that are the engine's defaults are left out.

    `tensors` are those of the request's adapter, for an engine that may not have them.
    """
    message = new_request(model, request.request_id)
    message.parameters[contracts.SAYS_CANCELS_PARAMETER].bool_param = True
    add_row(message, contracts.INPUT_IDS, *request.input_ids)
    add_row(message, contracts.INPUT_LENGTHS, len(request.input_ids))
    add_row(message, contracts.REQUEST_OUTPUT_LEN, request.max_new_tokens)
    add_row(message, contracts.STREAMING, True)
    if request.end_id is not None:
        add_row(message, contracts.END_ID, request.end_id)
    if request.sample:
        add_row(message, contracts.TEMPERATURE, request.temperature)
        add_row(message, contracts.RUNTIME_TOP_K, request.top_k)
        add_row(message, contracts.RUNTIME_TOP_P, request.top_p)
    else:
        add_row(message, contracts.RUNTIME_TOP_K, 1)
    if request.seed is not None:
        add_row(message, contracts.SEED, request.seed)
    if request.min_tokens:
        add_row(message, contracts.MIN_TOKENS, request.min_tokens)
    for spec, value, default in (
        (contracts.REPETITION_PENALTY, request.repetition_penalty, 1.0),
        (contracts.PRESENCE_PENALTY, request.presence_penalty, 0.0),
        (contracts.FREQUENCY_PENALTY, request.frequency_penalty, 0.0),
    ):
        if value != default:
            add_row(message, spec, value)
    if request.guide_type is not None:
        add_string(message, contracts.GUIDED_DECODING_GUIDE_TYPE, request.guide_type.encode(), shape=(1, 1))
    if request.guide is not None:
        add_string(message, contracts.GUIDED_DECODING_GUIDE, request.guide.encode(), shape=(1, 1))
    if request.lora is not None:
        add_lora(message, request.lora.task_id, tensors)
    # NVIDIA's backend fails a request that does not ask for the first two.
    outputs = [contracts.OUTPUT_IDS, contracts.SEQUENCE_LENGTH]
    if request.log_probs:
        add_row(message, contracts.RETURN_LOG_PROBS, True)
        outputs.append(contracts.OUTPUT_LOG_PROBS)
    for output in outputs:
        message.outputs.add(name=output.name)
    return message
