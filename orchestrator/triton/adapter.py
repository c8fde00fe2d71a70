"""The Triton model `orchestrator`: requests in, a task a call, events out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
import uvloop

from orchestrator import contracts
from orchestrator.cache.lookup import Lookup
from orchestrator.cache.stage import AnswerCache
from orchestrator.cache.stores import create_store
from orchestrator.call import Call
from orchestrator.cloud import create_cloud_client
from orchestrator.config import Embedder, load_tiers, read_toml
from orchestrator.errors import ApiError, OverloadedError
from orchestrator.instrumentation import is_instrumented
from orchestrator.limits import create_gate
from orchestrator.limits.operations import Operations
from orchestrator.local_socket import SOCKETS_VARIABLE, LocalSink, listen, socket_of
from orchestrator.pipeline import Pipeline
from orchestrator.quality import create_quality
from orchestrator.text_engine import LLMAPI
from orchestrator.token_lines import TokenLines
from orchestrator.tracing import create_traces
from orchestrator.triton.afterwards_metrics import AfterwardsMetrics
from orchestrator.triton.cancellation import CancellationWatcher
from orchestrator.triton.complexity_client import create_classifier
from orchestrator.triton.embedding_client import GrpcEmbedder
from orchestrator.triton.engine_client import GrpcEngineClient
from orchestrator.triton.latency_metrics import LatencyMetrics
from orchestrator.triton.limits_metrics import LimitsMetrics
from orchestrator.triton.metrics import CacheMetrics, OutcomeMetrics, live_requests_gauge
from orchestrator.triton.routing_metrics import RoutingMetrics
from orchestrator.triton.sender import Sender
from orchestrator.triton.tensors import parameters_of, to_triton_error
from orchestrator.triton.text_client import EngineClients, GrpcTextClient
from orchestrator.wire import read_parameters, read_texts

log = logging.getLogger("orchestrator.requests")

# How often a live call is asked whether its caller left without a word, as gRPC clients do. The gateway says so.
CANCELLATION_CHECK_PERIOD_S = 0.100
# How old the cache's metrics may be.
METRICS_PERIOD_S = 0.5


class OrchestratorModel:
    """What the `orchestrator` model.py delegates to. Decoupled: `execute` returns at once.

    All calls live on one event loop in a thread of its own. Triton's thread only takes what it needs from the request,
    the watcher's only asks for cancellation.
    """

    def __init__(self, args: dict[str, str]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        root = Path(args["model_repository"]).parent.parent  # <artifact>/model_repository/orchestrator
        tiers = load_tiers(root / "tiers.toml")
        url = os.environ.get(contracts.GRPC_URL_VARIABLE, contracts.DEFAULT_GRPC_URL)
        sockets = os.environ.get(SOCKETS_VARIABLE)
        lines = TokenLines(socket_of(sockets, url, "{model}")) if sockets else None
        replicated = {tier.model for tier in tiers.tier if tier.num_instances > 1}
        self._engines = EngineClients(
            GrpcEngineClient(url, replicated, root, lines),
            GrpcTextClient(url),
            {tier.model for tier in tiers.tier if tier.runtime == LLMAPI},
        )
        self._cloud = create_cloud_client(tiers.tier, os.environ)
        self._gate = create_gate(os.environ)
        self._embedder = self._metrics = self._store = self._quality = cache = None
        self._store_errors: Counter[str] = Counter()
        if tiers.cache is not None or tiers.quality is not None or any(tier.compression for tier in tiers.tier):
            self._embedder = GrpcEmbedder(root, url)
            self._quality = create_quality(tiers, self._embedder, os.environ, self._gate.may_keep_text)
        if tiers.cache is not None:
            assert self._embedder is not None
            self._metrics = CacheMetrics()
            self._store = create_store(tiers.cache.max_bytes, os.environ, self._store_errors)
            cache = AnswerCache(tiers.cache, Lookup(self._store, self._store.clock), self._embedder, self._metrics)
        self._classifier = create_classifier(root, url)
        self._is_instrumented = is_instrumented(os.environ)
        self._traces = create_traces(os.environ) if self._is_instrumented else None
        self._pipeline = Pipeline(
            tiers,
            root,
            self._engines,
            self._cloud,
            cache=cache,
            gate=self._gate,
            classify=self._classifier,
            embed=self._embedder,
            quality=self._quality,
            traces=self._traces,
            is_instrumented=self._is_instrumented,
        )
        embedder = read_toml(root / "embedder.toml", Embedder)
        self._limits_operations = Operations(
            self._gate, embedder.max_input_tokens, tiers.limits, is_instrumented=self._is_instrumented
        )
        live, limits = live_requests_gauge(), LimitsMetrics(self._gate)
        outcomes = OutcomeMetrics(self._pipeline.outcomes, self._limits_operations.outcomes)
        routing, latencies = RoutingMetrics(), LatencyMetrics(self._pipeline.latencies)
        afterwards = AfterwardsMetrics(self._pipeline.spending, self._pipeline.afterwards)

        def publish(num_watched: int) -> None:  # on the watcher's thread: each number is a round trip to the server
            if not self._is_instrumented:
                return
            live.tell(num_watched + self._num_local, model=contracts.ORCHESTRATOR_MODEL)
            outcomes.publish()
            beside = self._limits_operations.num_waiting()
            waiting = self._pipeline.dispatch.num_waiting()
            limits.publish({name: count + waiting.get(name, 0) for name, count in beside.items()})
            routing.publish(self._pipeline.dispatch)
            afterwards.publish()
            latencies.publish()

        self._num_local = 0  # calls that came by the socket, whose end is told and not watched for
        self._watcher = CancellationWatcher(CANCELLATION_CHECK_PERIOD_S, publish)
        self._max_live_requests = tiers.limits.max_live_requests
        self._num_live = 0
        self._calls: dict[str, Call] = {}  # by request id, for who sends one
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds tasks only weakly
        self._loop = uvloop.new_event_loop()  # 0.25 ms to the first token
        self._thread = threading.Thread(target=self._loop.run_forever, name="calls", daemon=True)
        self._thread.start()
        if self._store is not None:
            asyncio.run_coroutine_threadsafe(self._store.prepare(), self._loop).result()
        self._is_finished = asyncio.Event()
        self._publishing = asyncio.run_coroutine_threadsafe(self._publish_metrics(), self._loop)
        self._watching = asyncio.run_coroutine_threadsafe(self._watch_quality(), self._loop)
        self._listener: asyncio.AbstractServer | None = None
        if sockets:
            path = socket_of(sockets, url, contracts.ORCHESTRATOR_MODEL, args["model_instance_name"])
            listening = asyncio.run_coroutine_threadsafe(listen(path, self._receive_local), self._loop)
            self._listener = listening.result()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._receive(request)

    def finalize(self) -> None:
        """Let live calls finish (Triton unloads a model when its requests are done)."""
        asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result()
        self._watcher.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _receive(self, request: Any) -> None:
        """On Triton's thread."""
        sender = Sender(request)
        parameters, request_id = parameters_of(request), request.request_id()
        if contracts.CANCEL_PARAMETER in parameters:
            self._loop.call_soon_threadsafe(self._cancel, request_id)
            sender.send(None, final=True)
            return
        body = pb_utils.get_input_tensor_by_name(request, contracts.REQUEST.name).as_numpy()
        call = Call(body.reshape(-1)[0], parameters, TritonSink(sender))
        self._loop.call_soon_threadsafe(self._start, call, request_id, sender)

    def _receive_local(self, request: Any, sink: LocalSink) -> Call | None:
        """From who runs beside this server; on the loop."""
        parameters = read_parameters(request)
        if contracts.CANCEL_PARAMETER in parameters:
            self._cancel(request.id)
            sink.send(None, final=True)
            return None
        (body,) = read_texts(request)
        call = Call(body, parameters, sink)
        self._start(call, request.id)
        return call

    def _start(self, call: Call, request_id: str, sender: Sender | None = None) -> None:
        """Without `sender` it is told when the caller leaves."""
        # Of operations on limits each is short, or in a queue that is bounded, or the end of one that is.
        is_counted = contracts.LIMITS_OPERATION_PARAMETER not in call.parameters
        if is_counted and self._num_live >= self._max_live_requests:
            text = f"{self._max_live_requests} requests are running, which is the limit; try again later"
            error = OverloadedError(text, headers={"retry-after": "1"})
            if contracts.CACHE_OPERATION_PARAMETER in call.parameters:
                call.sink.fail(error)
            else:
                self._pipeline.refuse(call, error)
            return
        self._num_live += is_counted
        if request_id:  # now, not when its task first runs: the order to cancel it may be right behind
            self._calls[request_id] = call
        self._spawn(self._serve(call, request_id, sender))

    def _cancel(self, request_id: str) -> None:
        if call := self._calls.get(request_id):
            self._spawn(call.cancel())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, call: Call, request_id: str, sender: Sender | None) -> None:
        def leave() -> None:  # on the watcher's thread
            self._loop.call_soon_threadsafe(lambda: self._spawn(call.cancel()))

        says_cancels = contracts.SAYS_CANCELS_PARAMETER in call.parameters
        watched = None
        if sender is not None:
            watched = self._watcher.watch(sender.is_cancelled, leave, seldom=says_cancels)
        self._num_local += sender is None
        try:
            operation = call.parameters.get(contracts.CACHE_OPERATION_PARAMETER)
            if contracts.LIMITS_OPERATION_PARAMETER in call.parameters:
                await self._limits_operations.run(call)
            elif operation is not None:
                await self._pipeline.operate(call, operation)
            else:
                await self._pipeline.run(call)
        finally:
            self._num_local -= sender is None
            if watched is not None:
                self._watcher.unwatch(watched)
            self._calls.pop(request_id, None)
            self._num_live -= contracts.LIMITS_OPERATION_PARAMETER not in call.parameters

    async def _finish(self) -> None:
        if self._listener is not None:
            self._listener.close()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._pipeline.finish()
        self._is_finished.set()
        await asyncio.wrap_future(self._publishing)
        await asyncio.wrap_future(self._watching)
        if self._embedder is not None:
            await self._embedder.close()
        if self._classifier is not None:
            await self._classifier.close()
        if self._store is not None:
            await self._store.close()
        await self._engines.close()
        await self._gate.close()
        if self._cloud is not None:
            await self._cloud.close()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)

    async def _watch_quality(self) -> None:
        if self._quality is None:
            return
        running = asyncio.ensure_future(self._quality.run())
        running.add_done_callback(_note_end)
        await self._is_finished.wait()
        running.cancel()
        await asyncio.wait({running})

    async def _publish_metrics(self) -> None:
        """In a thread: each number is a round trip to the server's process."""
        if not self._is_instrumented:
            return
        while self._metrics is not None and self._store is not None and not self._is_finished.is_set():
            await asyncio.to_thread(self._metrics.publish, await self._store.size(), self._store_errors)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._is_finished.wait(), METRICS_PERIOD_S)


def _note_end(running: asyncio.Future[None]) -> None:
    if not running.cancelled() and (error := running.exception()) is not None:
        log.error("the quality monitor ended: %s", type(error).__name__)  # its text may be a tenant's


class TritonSink:
    """Sends a call's events as responses of one Triton request."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._headers: dict[str, str] = {}  # for the first event to take along

    def announce(self, headers: Mapping[str, str]) -> None:
        self._headers = dict(headers)

    def send(self, event: str, *, final: bool) -> None:
        tensors = [_string(contracts.EVENT, event)]
        if self._headers:
            tensors.append(_string(contracts.HEADERS, json.dumps(self._headers)))
            self._headers = {}
        self._sender.send(pb_utils.InferenceResponse(tensors), final=final)

    def fail(self, error: ApiError) -> None:
        self._sender.send(pb_utils.InferenceResponse(error=to_triton_error(error)), final=True)


def _string(spec: contracts.TensorSpec, text: str) -> Any:
    return pb_utils.Tensor(spec.name, np.array([text.encode()], dtype=np.object_))
