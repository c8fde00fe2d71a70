"""The Triton models `llm_*` on the python backend: an `Engine` behind NVIDIA's tensor contract."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from orchestrator import contracts
from orchestrator.engines import Chunk, Engine, EngineRefusal
from orchestrator.engines.parsing import parse_engine_request
from orchestrator.engines.process import ProcessEngine
from orchestrator.instrumentation import is_instrumented
from orchestrator.local_socket import SOCKETS_VARIABLE, socket_of
from orchestrator.token_lines import Subscriber, Subscribers
from orchestrator.triton.cancellation import CancellationWatcher
from orchestrator.triton.metrics import kv_cache_usage_gauge, live_requests_gauge
from orchestrator.triton.sender import Sender
from orchestrator.triton.tensors import parameters_of

# NVIDIA's parameter of this name and its default: how often a client that called the engine itself is checked.
CANCELLATION_CHECK_PERIOD_S = 0.100


class EngineModel:
    """What an engine's model.py delegates to. Decoupled: `execute` returns at once."""

    def __init__(self, args: dict[str, str], *, has_lines: bool = True) -> None:
        """Without `has_lines` there are Triton's responses alone, also where `serve` has named a place for sockets."""
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        self._exclude_input = parameters.pop("exclude_input_in_output", "false") == "true"
        parameters["max_batch_size"] = str(config["max_batch_size"])
        model_dir = Path(args["model_repository"]) / args["model_version"]
        self._model = args["model_name"]
        sockets = os.environ.get(SOCKETS_VARIABLE) if has_lines else None
        self._subscribers: Subscribers | None = None
        if sockets:
            url = os.environ.get(contracts.GRPC_URL_VARIABLE, contracts.DEFAULT_GRPC_URL)
            self._subscribers = Subscribers(socket_of(sockets, url, self._model, args["model_instance_name"]))
        flush = (lambda: None) if self._subscribers is None else self._subscribers.flush
        self._engine: Engine = ProcessEngine(parameters, model_dir, flush)
        self._live_requests = live_requests_gauge()
        self._kv_cache_usage = None if self._engine.kv_cache_usage() is None else kv_cache_usage_gauge()
        report = self._report if is_instrumented(os.environ) else lambda _: None
        self._watcher = CancellationWatcher(CANCELLATION_CHECK_PERIOD_S, report)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = ChunkSender(Sender(request))
            try:
                self._start(request, sender)
            except EngineRefusal as refusal:
                sender.send(Chunk([], finished=True, error=str(refusal)))

    def finalize(self) -> None:
        self._watcher.close()
        self._engine.close()
        if self._subscribers is not None:
            self._subscribers.close()

    def _report(self, num_live: int) -> None:
        self._live_requests.tell(num_live, model=self._model)
        if self._kv_cache_usage is not None:
            self._kv_cache_usage.tell(self._engine.kv_cache_usage() or 0.0, model=self._model)

    def _start(self, request: Any, sender: ChunkSender) -> None:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        request_id = request.request_id()
        if contracts.STOP.name in tensors and tensors[contracts.STOP.name].any():
            if not request_id:
                raise EngineRefusal("stop: needs the request id of the request to stop")
            self._engine.stop(request_id)
            sender.send(Chunk([], finished=True))
            return
        parsed = parse_engine_request(request_id, tensors, exclude_input=self._exclude_input)
        parameters = parameters_of(request)
        subscriber = self._find_subscriber(parameters.get(contracts.TOKEN_LINES_PARAMETER))

        def leave() -> None:
            with contextlib.suppress(EngineRefusal):  # a failed engine has ended the request already
                self._engine.stop(parsed.request.request_id)

        says_cancels = contracts.SAYS_CANCELS_PARAMETER in parameters
        key = self._watcher.watch(sender.is_cancelled, leave, seldom=says_cancels)
        whole = [] if parsed.exclude_input else list(parsed.request.input_ids)
        log_probs: list[float] = []

        def deliver(chunk: Chunk) -> None:
            if chunk.finished:
                self._watcher.unwatch(key)
            if subscriber is not None:
                subscriber.put(parsed.request.request_id, chunk)
                if chunk.finished:
                    sender.end()
                return
            if not parsed.streaming:
                whole.extend(chunk.token_ids)
                log_probs.extend(chunk.log_probs or [])
                chunk = chunk._replace(token_ids=whole, log_probs=log_probs if parsed.request.log_probs else None)
            if parsed.streaming or chunk.finished:
                sender.send(chunk)

        try:
            self._engine.add(parsed.request, deliver)
        except EngineRefusal:
            self._watcher.unwatch(key)
            raise

    def _find_subscriber(self, subscriber_id: str | None) -> Subscriber | None:
        if subscriber_id is None:
            return None
        found = None if self._subscribers is None else self._subscribers.find(subscriber_id)
        if found is None:
            name = contracts.TOKEN_LINES_PARAMETER
            raise EngineRefusal(f"{name}: nobody is connected as {subscriber_id[:40]!r}; leave it out, or connect")
        return found


class ChunkSender:
    """Sends chunks as the responses of one Triton request.

    With log probabilities, `output_log_probs` is of the response's own generated tokens (none of the prompt) and
    `cum_log_probs` the sum since the first token. NVIDIA's executor repeats the earlier tokens' log probabilities in
    every response of a stream (`LlmRequest::createResult` in TensorRT-LLM's cpp/tensorrt_llm/batch_manager/
    llmRequest.cpp, while `output_ids` are only the new ones): a client that takes the last `sequence_length` of them
    reads both.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._cum_log_prob = 0.0
        self.is_cancelled = sender.is_cancelled

    def log_probs_of(self, chunk: Chunk) -> list[float]:
        """What a response with `chunk` says."""
        return chunk.log_probs or []

    def send(self, chunk: Chunk) -> None:
        response = None
        if chunk.error is not None:
            response = pb_utils.InferenceResponse(error=pb_utils.TritonError(chunk.error))
        elif chunk.token_ids:
            ids = np.array([[chunk.token_ids]], dtype=np.int32)  # [1, beam 1, tokens]
            length = np.array([[len(chunk.token_ids)]], dtype=np.int32)  # [1, beam 1]
            tensors = [
                pb_utils.Tensor(contracts.OUTPUT_IDS.name, ids),
                pb_utils.Tensor(contracts.SEQUENCE_LENGTH.name, length),
            ]
            if chunk.log_probs is not None:
                self._cum_log_prob += sum(chunk.log_probs)
                cumulated = np.array([[self._cum_log_prob]], dtype=np.float32)  # [1, beam 1]
                log_probs = np.array([[self.log_probs_of(chunk)]], dtype=np.float32)  # [1, beam 1, generated tokens]
                tensors += [
                    pb_utils.Tensor(contracts.CUM_LOG_PROBS.name, cumulated),
                    pb_utils.Tensor(contracts.OUTPUT_LOG_PROBS.name, log_probs),
                ]
            response = pb_utils.InferenceResponse(tensors)
        self._sender.send(response, final=chunk.finished)

    def end(self) -> None:
        """An empty final response: the tokens have gone another way."""
        self._sender.send(None, final=True)
