"""The Triton model `orchestrator`: requests in, a thread a call, events out; engines by BLS."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from orchestrator import contracts
from orchestrator.config import load_tiers
from orchestrator.engines import EngineRequest
from orchestrator.errors import ApiError, EngineError, OverloadedError
from orchestrator.pipeline import Call, Pipeline
from orchestrator.triton.cancellation import CancellationWatcher
from orchestrator.triton.metrics import live_requests_gauge
from orchestrator.triton.sender import Sender
from orchestrator.triton.tensors import parameters_of, to_triton_error

# How often a live call is asked whether its caller left.
CANCELLATION_CHECK_PERIOD_S = 0.010


class OrchestratorModel:
    """What the `orchestrator` model.py delegates to. Decoupled: `execute` returns at once."""

    def __init__(self, args: dict[str, str]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        root = Path(args["model_repository"]).parent.parent  # <artifact>/model_repository/orchestrator
        tiers = load_tiers(root / "tiers.toml")
        self._engines = TritonEngineClient()
        self._pipeline = Pipeline(tiers, root, self._engines)
        self._watcher = CancellationWatcher(
            CANCELLATION_CHECK_PERIOD_S, live_requests_gauge(contracts.ORCHESTRATOR_MODEL)
        )
        self._limits = tiers.limits
        # Triton's response iterators block, so every live call has a thread.
        self._threads = ThreadPoolExecutor(tiers.limits.max_live_requests, thread_name_prefix="call")
        self._in_flight = 0
        self._lock = threading.Lock()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._start(request)

    def finalize(self) -> None:
        """Let live calls finish (Triton unloads a model when its requests are done)."""
        self._threads.shutdown(wait=True)
        self._watcher.close()
        self._engines.close()

    def _start(self, request: Any) -> None:
        sender = Sender(request)
        sink = TritonSink(sender)
        with self._lock:
            room = self._limits.max_live_requests + self._limits.max_waiting_requests
            accepted = self._in_flight < room
            self._in_flight += accepted
        if not accepted:
            sink.fail(OverloadedError(f"{room} requests are running or waiting, which is the limit; try again later"))
            return
        body = pb_utils.get_input_tensor_by_name(request, contracts.REQUEST.name).as_numpy()
        call = Call(body.reshape(-1)[0], parameters_of(request), sink)
        key = self._watcher.watch(sender.is_cancelled, call.cancel)
        self._threads.submit(self._serve, call, key)

    def _serve(self, call: Call, key: int) -> None:
        try:
            self._pipeline.run(call)
        finally:
            self._watcher.unwatch(key)
            with self._lock:
                self._in_flight -= 1


class TritonSink:
    """Sends a call's events as responses of one Triton request."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def send(self, event: str, *, final: bool) -> None:
        tensor = pb_utils.Tensor(contracts.EVENT.name, np.array([event.encode()], dtype=np.object_))
        self._sender.send(pb_utils.InferenceResponse([tensor]), final=final)

    def fail(self, error: ApiError) -> None:
        self._sender.send(pb_utils.InferenceResponse(error=to_triton_error(error)), final=True)


class TritonEngineClient:
    """The engine models of the same server, by BLS, under NVIDIA's tensor contract."""

    def __init__(self) -> None:
        # Stops are requests of their own and must not keep the watcher or a stream waiting.
        self._stops = ThreadPoolExecutor(4, thread_name_prefix="stop")
        self._spent = SpentIterators()

    def close(self) -> None:
        self._stops.shutdown(wait=True)

    def stream(self, model: str, request: EngineRequest) -> Generator[list[int], None, None]:
        responses = self._spent.keep(_infer(model, request.request_id, _engine_inputs(request)))
        try:
            for response in responses:
                if response.has_error():
                    raise EngineError(response.error().message())
                outputs = {tensor.name(): tensor for tensor in response.output_tensors()}
                if contracts.CONTEXT_PHASE_PARAMS.name in outputs:
                    text = outputs[contracts.CONTEXT_PHASE_PARAMS.name].as_numpy()
                    raise EngineError(text.tobytes().decode(errors="replace"))
                if contracts.OUTPUT_IDS.name in outputs:
                    yield outputs[contracts.OUTPUT_IDS.name].as_numpy().reshape(-1).tolist()
        except GeneratorExit:
            self.stop(model, request.request_id)
            raise
        finally:
            for _ in responses:  # drained, or Triton keeps the request
                pass

    def stop(self, model: str, request_id: str) -> None:
        self._stops.submit(self._stop, model, request_id)

    def _stop(self, model: str, request_id: str) -> None:
        inputs = [
            _scalar(contracts.STOP, True, np.bool_),
            # Triton's core insists on the two required tensors, whatever they hold.
            _scalar(contracts.INPUT_LENGTHS, 0, np.int32),
            _scalar(contracts.REQUEST_OUTPUT_LEN, 0, np.int32),
        ]
        for _ in self._spent.keep(_infer(model, request_id, inputs)):
            pass


class SpentIterators:
    """Keeps every response iterator a while beyond its end.

    When an iterator ends, a thread of Triton's stub forgets it. If that reference is the last one, the thread frees
    Python objects without holding Python's lock, which corrupts the heap (Triton 2.51; at 1,000 events a second the
    process died within a minute). So ours must be the last one.
    """

    KEEP_S = 1.0  # the stub's thread needs microseconds

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: collections.deque[tuple[float, Any]] = collections.deque()

    def keep(self, iterator: Any) -> Iterator[Any]:
        """Iterate; afterwards the iterator stays alive for `KEEP_S`, at least until the next one has ended."""
        try:
            yield from iterator
        finally:
            now_s = time.monotonic()
            with self._lock:
                self._kept.append((now_s, iterator))
                while self._kept[0][0] < now_s - self.KEEP_S:
                    self._kept.popleft()


def _infer(model: str, request_id: str, inputs: list[Any]) -> Any:
    """Start a decoupled BLS request; returns its response iterator."""
    outputs = (contracts.OUTPUT_IDS, contracts.SEQUENCE_LENGTH, contracts.CONTEXT_PHASE_PARAMS)
    request = pb_utils.InferenceRequest(
        model_name=model,
        request_id=request_id,
        inputs=inputs,
        requested_output_names=[output.name for output in outputs],
        parameters={contracts.ERROR_OUTPUT: contracts.CONTEXT_PHASE_PARAMS.name},
    )
    return request.exec(decoupled=True)


def _engine_inputs(request: EngineRequest) -> list[Any]:
    """`request` as tensors of the contract; values that are the engine's defaults are left out."""
    ids = np.array([request.input_ids], dtype=np.int32)  # [1, tokens]
    inputs = [
        pb_utils.Tensor(contracts.INPUT_IDS.name, ids),
        _scalar(contracts.INPUT_LENGTHS, ids.shape[1], np.int32),
        _scalar(contracts.REQUEST_OUTPUT_LEN, request.max_new_tokens, np.int32),
        _scalar(contracts.STREAMING, True, np.bool_),
    ]
    if request.end_id is not None:
        inputs.append(_scalar(contracts.END_ID, request.end_id, np.int32))
    if request.sample:
        inputs.append(_scalar(contracts.TEMPERATURE, request.temperature, np.float32))
        inputs.append(_scalar(contracts.RUNTIME_TOP_K, request.top_k, np.int32))
        inputs.append(_scalar(contracts.RUNTIME_TOP_P, request.top_p, np.float32))
    else:
        inputs.append(_scalar(contracts.RUNTIME_TOP_K, 1, np.int32))
    if request.seed is not None:
        inputs.append(_scalar(contracts.SEED, request.seed, np.uint64))
    if request.min_tokens:
        inputs.append(_scalar(contracts.MIN_TOKENS, request.min_tokens, np.int32))
    for spec, value, default in (
        (contracts.REPETITION_PENALTY, request.repetition_penalty, 1.0),
        (contracts.PRESENCE_PENALTY, request.presence_penalty, 0.0),
        (contracts.FREQUENCY_PENALTY, request.frequency_penalty, 0.0),
    ):
        if value != default:
            inputs.append(_scalar(spec, value, np.float32))
    return inputs


def _scalar(spec: contracts.TensorSpec, value: Any, dtype: Any) -> Any:
    return pb_utils.Tensor(spec.name, np.array([[value]], dtype=dtype))  # [1, 1]
