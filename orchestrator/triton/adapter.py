"""The Triton model `orchestrator`: requests in, a thread a call, events out."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from orchestrator import contracts
from orchestrator.config import load_tiers
from orchestrator.errors import ApiError, OverloadedError
from orchestrator.pipeline import Call, Pipeline
from orchestrator.triton.cancellation import CancellationWatcher
from orchestrator.triton.engine_client import GrpcEngineClient
from orchestrator.triton.metrics import live_requests_gauge
from orchestrator.triton.sender import Sender
from orchestrator.triton.tensors import parameters_of, to_triton_error

# How often a live call is asked whether its caller left without a word, as gRPC clients do. The gateway says so.
CANCELLATION_CHECK_PERIOD_S = 0.100


class OrchestratorModel:
    """What the `orchestrator` model.py delegates to. Decoupled: `execute` returns at once."""

    def __init__(self, args: dict[str, str]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        root = Path(args["model_repository"]).parent.parent  # <artifact>/model_repository/orchestrator
        tiers = load_tiers(root / "tiers.toml")
        self._engines = GrpcEngineClient(os.environ.get(contracts.GRPC_URL_VARIABLE, contracts.DEFAULT_GRPC_URL))
        self._pipeline = Pipeline(tiers, root, self._engines)
        self._watcher = CancellationWatcher(
            CANCELLATION_CHECK_PERIOD_S, live_requests_gauge(contracts.ORCHESTRATOR_MODEL)
        )
        self._limits = tiers.limits
        # Reading an engine's stream blocks, so every live call has a thread.
        self._threads = ThreadPoolExecutor(tiers.limits.max_live_requests, thread_name_prefix="call")
        self._in_flight = 0
        self._calls: dict[str, Call] = {}  # by request id, for who sends one
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
        parameters, request_id = parameters_of(request), request.request_id()
        if contracts.CANCEL_PARAMETER in parameters:
            if call := self._calls.get(request_id):
                call.cancel()
            sender.send(None, final=True)
            return
        with self._lock:
            room = self._limits.max_live_requests + self._limits.max_waiting_requests
            accepted = self._in_flight < room
            self._in_flight += accepted
        if not accepted:
            sink.fail(OverloadedError(f"{room} requests are running or waiting, which is the limit; try again later"))
            return
        body = pb_utils.get_input_tensor_by_name(request, contracts.REQUEST.name).as_numpy()
        call = Call(body.reshape(-1)[0], parameters, sink)
        key = self._watcher.watch(sender.is_cancelled, call.cancel)
        if request_id:
            self._calls[request_id] = call
        self._threads.submit(self._serve, call, key, request_id)

    def _serve(self, call: Call, key: int, request_id: str) -> None:
        try:
            self._pipeline.run(call)
        finally:
            self._watcher.unwatch(key)
            self._calls.pop(request_id, None)
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
