"""The Triton models `llm_*` on the python backend: an `Engine` behind NVIDIA's tensor contract."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from orchestrator import contracts
from orchestrator.engines import Chunk, Engine, EngineRefusal
from orchestrator.engines.parsing import parse_engine_request
from orchestrator.engines.process import ProcessEngine
from orchestrator.triton.cancellation import CancellationWatcher
from orchestrator.triton.metrics import live_requests_gauge
from orchestrator.triton.sender import Sender
from orchestrator.triton.tensors import parameters_of

log = logging.getLogger("orchestrator.engine")

# NVIDIA's parameter of this name and its default: how often a client that called the engine itself is checked.
CANCELLATION_CHECK_PERIOD_S = 0.100


class EngineModel:
    """What an engine's model.py delegates to. Decoupled: `execute` returns at once."""

    def __init__(self, args: dict[str, str]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        self._exclude_input = parameters.pop("exclude_input_in_output", "false") == "true"
        parameters["max_batch_size"] = str(config["max_batch_size"])
        model_dir = Path(args["model_repository"]) / args["model_version"]
        self._outbox = Outbox()
        self._engine: Engine = ProcessEngine(parameters, model_dir)
        self._watcher = CancellationWatcher(CANCELLATION_CHECK_PERIOD_S, live_requests_gauge(args["model_name"]))

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = ChunkSender(Sender(request), parameters_of(request).get(contracts.ERROR_OUTPUT))
            try:
                self._start(request, sender)
            except EngineRefusal as refusal:
                sender.send(Chunk([], finished=True, error=str(refusal)))

    def finalize(self) -> None:
        self._watcher.close()
        self._engine.close()
        self._outbox.close()

    def _start(self, request: Any, sender: ChunkSender) -> None:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        request_id = request.request_id()
        if contracts.STOP.name in tensors and tensors[contracts.STOP.name].all():
            if not request_id:
                raise EngineRefusal("stop: needs the request id of the request to stop")
            self._engine.stop(request_id)
            sender.send(Chunk([], finished=True))
            return
        parsed = parse_engine_request(request_id, tensors, exclude_input=self._exclude_input)
        prefix = [] if parsed.streaming or parsed.exclude_input else parsed.request.input_ids
        parcel = Parcel(sender, whole=not parsed.streaming, token_ids=prefix)
        key = self._watcher.watch(sender.is_cancelled, lambda: self._engine.stop(parsed.request.request_id))

        def deliver(chunk: Chunk) -> None:
            if chunk.finished:
                self._watcher.unwatch(key)
            self._outbox.put(parcel, chunk)

        try:
            self._engine.add(parsed.request, deliver)
        except EngineRefusal:
            self._watcher.unwatch(key)
            raise


class ChunkSender:
    """Sends chunks as the responses of one Triton request.

    A caller that sets the parameter `ERROR_OUTPUT` gets an error as bytes of text in the output of that name, any
    other caller as a Triton error: see `contracts.ERROR_OUTPUT`.
    """

    def __init__(self, sender: Sender, error_output: str | None) -> None:
        self._sender = sender
        self._error_output = error_output
        self.is_cancelled = sender.is_cancelled

    def send(self, chunk: Chunk) -> None:
        response = None
        if chunk.error is not None and self._error_output is None:
            response = pb_utils.InferenceResponse(error=pb_utils.TritonError(chunk.error))
        elif chunk.error is not None:
            text = np.frombuffer(chunk.error.encode(), dtype=np.uint8)[None]  # [1, bytes]
            response = pb_utils.InferenceResponse([pb_utils.Tensor(self._error_output, text)])
        elif chunk.token_ids:
            ids = np.array([[chunk.token_ids]], dtype=np.int32)  # [1, beam 1, tokens]
            length = np.array([[len(chunk.token_ids)]], dtype=np.int32)  # [1, beam 1]
            response = pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor(contracts.OUTPUT_IDS.name, ids),
                    pb_utils.Tensor(contracts.SEQUENCE_LENGTH.name, length),
                ]
            )
        self._sender.send(response, final=chunk.finished)


class Parcel:
    """What waits to be sent for one request; with `whole` it waits for the last chunk."""

    __slots__ = ("sender", "whole", "chunk")

    def __init__(self, sender: ChunkSender, *, whole: bool, token_ids: list[int]) -> None:
        self.sender = sender
        self.whole = whole
        self.chunk = Chunk(list(token_ids))


class Outbox:
    """Sends chunks from a thread of its own, so that the next step runs meanwhile.

    Chunks of one request that wait for the thread are joined into one response.
    """

    def __init__(self) -> None:
        self._ready = threading.Condition()
        self._waiting: dict[int, Parcel] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, parcel: Parcel, chunk: Chunk) -> None:
        with self._ready:
            parcel.chunk = chunk._replace(token_ids=parcel.chunk.token_ids + chunk.token_ids)
            if chunk.finished or not parcel.whole:
                self._waiting[id(parcel)] = parcel
                self._ready.notify()

    def close(self) -> None:
        """Send what waits, then end."""
        with self._ready:
            self._closed = True
            self._ready.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                parcel = self._waiting.pop(next(iter(self._waiting)))
                chunk, parcel.chunk = parcel.chunk, Chunk([])
            if chunk.error is not None and chunk.token_ids:
                parcel.sender.send(Chunk(chunk.token_ids))
            parcel.sender.send(chunk)
