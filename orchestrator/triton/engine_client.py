"""The way from the orchestrator to the engine models of the same server: gRPC on loopback.

Not BLS, though both models live in one Triton: streaming BLS has three faults in Triton's Python backend, each seen
here on 2.51. An error after the first response arrives without an id, so its caller waits forever. A finished response
iterator is freed by a thread without Python's lock, which corrupts the heap. And a thread that takes a response holds
the iterator's mutex while it waits for Python's lock: with a new call beside it the process deadlocks (200 clients
that connect and leave were enough).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Generator
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2_grpc

from orchestrator import contracts
from orchestrator.engines import EngineRequest
from orchestrator.errors import EngineError
from orchestrator.wire import add_row, find_output, is_end, new_request, stop_request

log = logging.getLogger("orchestrator.engine")

# A stop that was not answered for so long is sent again when somebody asks again.
STOP_TIMEOUT_S = 1.0


class GrpcEngineClient:
    """An `EngineClient`. Streams to Triton are opened once and reused, because opening one costs over a millisecond."""

    def __init__(self, url: str) -> None:
        """`url` is host:port of Triton's gRPC service; nothing is sent before the first request."""
        self._channel = grpc.insecure_channel(url)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._idle: queue.LifoQueue[InferStream] = queue.LifoQueue()  # most recently used first
        self._stops = StopSender(self._stub)

    def stream(self, model: str, request: EngineRequest) -> Generator[list[int], None, None]:
        stream = self._borrow()
        stream.send(build_request(model, request))
        ended = False
        try:
            while not ended:
                response = stream.receive()
                if response.infer_response.id not in ("", request.request_id):
                    continue  # the rest of an earlier request that had failed
                # Triton marks no end when it refuses a request itself (an unknown model, a wrong tensor).
                ended = is_end(response) or bool(response.error_message)
                if response.error_message:
                    raise EngineError(response.error_message)
                if raw := find_output(response, contracts.OUTPUT_IDS):
                    yield np.frombuffer(raw, dtype=np.int32).tolist()
        except GeneratorExit:
            self.stop(model, request.request_id)
            raise
        finally:
            try:
                while not ended:
                    ended = is_end(stream.receive())
                self._idle.put(stream)
            except EngineError as error:
                log.warning("a stream to Triton was given up: %s", error)

    def close(self) -> None:
        """End every stream."""
        self._channel.close()

    def stop(self, model: str, request_id: str) -> None:
        self._stops.send(model, request_id)

    def _borrow(self) -> InferStream:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return InferStream(self._stub)


class InferStream:
    """One open `ModelStreamInfer`, used by one request after another."""

    def __init__(self, stub: Any) -> None:
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._responses = stub.ModelStreamInfer(iter(self._requests.get, None))

    def send(self, request: Any) -> None:
        self._requests.put(request)

    def receive(self) -> Any:
        """The next response; raises `EngineError` when the stream broke."""
        try:
            return next(self._responses)
        except (grpc.RpcError, StopIteration) as error:
            raise EngineError(f"the stream to Triton broke: {error}") from error


class StopSender:
    """Sends stop requests on a stream of their own, one at a time for each request."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._lock = threading.Lock()
        self._asked_s: dict[str, float] = {}  # by request id, until answered
        self._stream: InferStream | None = None

    def send(self, model: str, request_id: str) -> None:
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._asked_s.get(request_id, -STOP_TIMEOUT_S) < STOP_TIMEOUT_S:
                return
            self._asked_s[request_id] = now_s
            if self._stream is None:
                self._stream = InferStream(self._stub)
                threading.Thread(target=self._receive, args=(self._stream,), name="stops", daemon=True).start()
            self._stream.send(stop_request(model, request_id))

    def _receive(self, stream: InferStream) -> None:
        try:
            while True:
                response = stream.receive()
                with self._lock:
                    self._asked_s.pop(response.infer_response.id, None)
        except EngineError:
            with self._lock:
                self._stream = None  # the next stop opens another
                self._asked_s.clear()


def build_request(model: str, request: EngineRequest) -> Any:
    """`request` by NVIDIA's tensor contract, streaming; values that are the engine's defaults are left out."""
    message = new_request(model, request.request_id)
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
    # NVIDIA's backend fails a request that does not ask for these two.
    for output in (contracts.OUTPUT_IDS, contracts.SEQUENCE_LENGTH):
        message.outputs.add(name=output.name)
    return message
