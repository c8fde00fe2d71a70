"""One caller's inference: his requests to Triton under ids of ours, the responses back under his."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio
from tritonclient.grpc import service_pb2

from orchestrator.contracts import (
    EMBEDDING_MODEL,
    FORWARDED_HEADERS,
    LIST_HEADERS,
    ORCHESTRATOR_MODEL,
    SINGLE_HEADERS,
)
from orchestrator.errors import ApiError, InvalidRequestError, OverloadedError, from_message, strip_prefixes
from orchestrator.grpc_front.calls import IDLE_TIMEOUT_S, STATUS_TIMEOUT_S, Call
from orchestrator.grpc_front.checks import check_request, most_tokens
from orchestrator.grpc_front.scan import check_parts
from orchestrator.infer_streams import InferStreams, Responses, ask_once
from orchestrator.limits.client import MeteredResponses, Place
from orchestrator.replicas import Replica, Replicas
from orchestrator.request import prefix_key, read_fields
from orchestrator.wire import ask_for_end, error_response, is_end, read_texts

log = logging.getLogger("orchestrator.grpc_front")

# Requests that one stream may have running. A caller with more opens more streams.
MAX_LIVE_PER_STREAM = 64
# Of responses that wait on a stream until the one before them is taken; with more it takes no further request.
MAX_WAITING_BYTES = 1 << 20
# How long a caller may leave a response unread, as over HTTP (`gateway.protocol`). Until then one waits here, and in
# the orchestrator what it keeps for a slow reader.
WRITE_TIMEOUT_S = 30.0
# From then on a response counts as unread.
_SLOW_S = 1.0

Metadata = Iterable[tuple[str, Any]]
T = TypeVar("T")
AnyResponses = Responses | MeteredResponses


@dataclass
class Upstream:
    """The way to Triton.

    `max_batch` is the most texts that a request to the embedder may hold, `models` are the public ones that there are.
    Both change with the artifact.
    """

    replicas: Replicas
    max_batch: int
    models: tuple[str, ...]


def parse(kind: type[Message], data: bytes) -> Any:
    """Raises `InvalidRequestError` when `data` is no message of this kind."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequestError(f"the message is no {kind.DESCRIPTOR.name}") from error


def parse_infer_request(data: bytes) -> Any:
    """Raises `InvalidRequestError` when `data` is no `ModelInferRequest`, or one of too many parts."""
    check_parts(data)
    return parse(service_pb2.ModelInferRequest, data)


def prepare(upstream: Upstream, request: Any, metadata: Metadata) -> tuple[AnyResponses, bool]:
    """Check a caller's request and make it ours; returns its responses, and whether he asked for an empty last one.

    Raises the `ApiError` that refuses it.

    The orchestrator ends a request for whoever knows its id, so no id that a caller has chosen may reach it. Headers
    become parameters as Triton makes them of metadata: a header wins over a parameter that the caller set.
    """
    check_request(request, upstream.max_batch, upstream.models)
    request.id = uuid.uuid4().hex
    for name, value in _read_headers(metadata).items():
        request.parameters[name].string_param = value
    wants_end = ask_for_end(request)
    replicas = upstream.replicas
    if request.model_name == ORCHESTRATOR_MODEL:
        key = _prefix_key(request) if len(replicas.serving) > 1 else None
        replica = replicas.choose(key)

        def instead() -> InferStreams | None:
            other = replicas.another(replica, key)
            return None if other is None else other.streams

        return Responses(replica.streams, request, instead), wants_end
    headers = [
        (name, request.parameters[name].string_param) for name in FORWARDED_HEADERS if name in request.parameters
    ]
    lengths = most_tokens(request) if request.model_name == EMBEDDING_MODEL else []
    beside = _Beside(replicas, request)
    return MeteredResponses(beside.serve, beside.ask, request.model_name, lengths, headers), wants_end


def _read_headers(metadata: Metadata) -> dict[str, str]:
    """Those that the orchestrator reads, as over HTTP: of a list that came twice the values are joined.

    Raises `InvalidRequestError` for one that may come only once.
    """
    found: dict[str, str] = {}
    for name, value in metadata:
        if name in FORWARDED_HEADERS:
            if name in SINGLE_HEADERS and name in found:
                raise InvalidRequestError(f"{name}: sent twice in the metadata; once is allowed", param=name)
            found[name] = f"{found[name]}, {value}" if name in LIST_HEADERS and name in found else value
    return found


def _prefix_key(request: Any) -> bytes:
    """Of a checked request to the orchestrator."""
    caller = request.parameters["authorization"].string_param if "authorization" in request.parameters else ""
    return prefix_key(read_fields(read_texts(request)[0]), caller)


class _Beside:
    """A request to a model beside the orchestrator, asked where its place is."""

    def __init__(self, replicas: Replicas, request: Any) -> None:
        self._replicas = replicas
        self._request = request
        self._replica: Replica | None = None

    async def serve(self, place: Place, model: str, lengths: Any, headers: Any, work: Callable[[], Any]) -> Any:
        def begin(replica: Replica) -> Any:
            self._replica = replica
            return work()

        return await self._replicas.serve(place, model, lengths, headers, begin)

    async def ask(self) -> Any:
        assert self._replica is not None
        return await ask_once(self._replica.streams, self._request)


async def infer(upstream: Upstream, data: bytes, metadata: Metadata) -> Any:
    """`ModelInfer`: the one response. Triton refuses this call for decoupled models; a whole answer fits it.

    Raises the `ApiError` that the request was refused or answered with.
    """
    request = parse_infer_request(data)
    request_id = request.id
    responses, _ = prepare(upstream, request, metadata)
    reading = _keep(asyncio.create_task(_read_one(responses)))
    try:
        answer = await asyncio.shield(reading)
    except asyncio.CancelledError:
        await _cancel(responses)
        raise
    answer.id = request_id
    return answer


async def _read_one(responses: AnyResponses) -> Any:
    answer = None
    async with aclosing(responses.read()) as reading:
        async for response in reading:
            if response.error_message:
                raise from_message(response.error_message)
            if not _is_empty(response):
                if answer is not None:
                    raise InvalidRequestError(
                        "stream: ModelInfer has one response, and this request is answered by several: "
                        "call ModelStreamInfer, or ask for a whole answer (stream: false)",
                        param="stream",
                    )
                answer = response.infer_response
    if answer is None:
        raise from_message("the model ended without an answer")
    return answer


class StreamRelay:
    """One `ModelStreamInfer` of a caller: any number of requests, answered side by side.

    Each has a stream of its own to Triton, so each can be ended alone. A response is read from Triton when the one
    before it was taken by the caller's connection: of each request that runs, a caller that does not read holds one
    response here, which counts as unread.
    """

    def __init__(self, upstream: Upstream, call: Call) -> None:
        self._upstream = upstream
        self._call = call
        self._metadata = call.metadata
        self._live: dict[asyncio.Task[None], AnyResponses] = {}
        self._writing = asyncio.Lock()  # gRPC takes one message at a time
        self._num_waiting_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._reader = _keep(asyncio.create_task(self._read_requests()))
        self._is_draining = False
        self._is_slow = False
        self._is_over = False

    async def run(self) -> None:
        """Until the caller has said all and heard all, or until `drain`; cancelled when he leaves or does not read."""
        try:
            await asyncio.wait((self._reader,))
            while self._live:
                await asyncio.wait(self._live)
            if self._is_draining:
                await self._call.abort(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
            if self._reader.cancelled():
                await self._call.abort(grpc.StatusCode.INTERNAL, "the gRPC front failed")
            self._reader.result()
        finally:
            self._is_over = True
            self._reader.cancel()
            for task, responses in self._live.items():
                _keep(asyncio.create_task(_cancel(responses)))
                if self._call.is_ended:
                    task.cancel()  # it may be in the midst of a write, which keeps gRPC from ending the call

    def drain(self) -> None:
        """Take no more requests, and end with the last of those that run."""
        self._is_draining = True
        self._reader.cancel()

    async def _read_requests(self) -> None:
        while await self._has_room.wait() and (data := await self._call.read()) is not aio.EOF:
            self._note_state()
            request_id = ""
            try:
                request = parse_infer_request(data)
                request_id = request.id
                if len(self._live) >= MAX_LIVE_PER_STREAM:
                    raise OverloadedError(
                        f"{MAX_LIVE_PER_STREAM} requests run on this stream, which is the limit; open another one"
                    )
                responses, wants_end = prepare(self._upstream, request, self._metadata)
            except ApiError as error:
                await self._write(error_response(request_id, error.to_message()))
                continue
            # Not cancelled when the caller leaves: it reads the end of what is then cancelled.
            task = _keep(asyncio.create_task(self._relay(responses, request_id, wants_end)))
            self._live[task] = responses
            self._note_state()
            task.add_done_callback(self._ended)

    async def _relay(self, responses: AnyResponses, request_id: str, wants_end: bool) -> None:
        try:
            async with aclosing(responses.read()) as reading:
                async for response in reading:
                    if wants_end or not (is_end(response) and _is_empty(response)):
                        response.infer_response.id = request_id
                        response.error_message = strip_prefixes(response.error_message)
                        await self._write(response)
        except ApiError as error:
            await self._write(error_response(request_id, error.to_message()))

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._live[task]
        self._note_state()
        if not task.cancelled() and task.exception() is not None:
            log.error("a response could not be relayed", exc_info=task.exception())
            self._reader.cancel()

    async def _write(self, response: Any) -> None:
        await self._take_turn(response)
        try:
            if self._is_over:
                return
            slowness = asyncio.get_running_loop().call_later(_SLOW_S, self._note_slowness)
            try:
                await self._call.write(response.SerializeToString())
            except aio.InternalError:
                pass  # the caller has just left, and gRPC is about to cancel `run`
            finally:
                slowness.cancel()
            if self._is_slow:
                self._is_slow = False
                self._note_state()
        finally:
            self._writing.release()

    async def _take_turn(self, response: Any) -> None:
        if not self._writing.locked():
            await self._writing.acquire()
            return
        num_bytes = response.ByteSize()
        self._wait(num_bytes)
        self._call.keep(num_bytes)
        try:
            await self._writing.acquire()
        finally:
            self._call.let_go(num_bytes)
            self._wait(-num_bytes)

    def _wait(self, num_bytes: int) -> None:
        self._num_waiting_bytes += num_bytes
        if self._num_waiting_bytes > MAX_WAITING_BYTES:
            self._has_room.clear()
        else:
            self._has_room.set()

    def _note_slowness(self) -> None:
        """The caller does not read: whatever runs for him, his place is the next to be had."""
        self._is_slow = True
        text = f"no response was read for {WRITE_TIMEOUT_S:g} s"
        self._call.be_idle(WRITE_TIMEOUT_S, text, STATUS_TIMEOUT_S)

    def _note_state(self) -> None:
        if self._is_slow:
            return
        if self._live:
            self._call.be_busy()
        else:
            self._call.be_idle(IDLE_TIMEOUT_S, f"nothing ran on the stream for {IDLE_TIMEOUT_S:g} s")


# The loop itself keeps no reference to a task that outlives its caller.
_kept: set[asyncio.Task[Any]] = set()


def _keep(task: asyncio.Task[T]) -> asyncio.Task[T]:
    _kept.add(task)
    task.add_done_callback(_let_go)
    return task


def _let_go(task: asyncio.Task[Any]) -> None:
    _kept.discard(task)
    # Seen: whoever waited for it got it, and nobody else wants it. Of a task that was cancelled that drops the
    # traceback, whose frames would keep the RPC, and what waits for its caller, until the next garbage collection.
    with suppress(asyncio.CancelledError):
        task.exception()


async def _cancel(responses: AnyResponses) -> None:
    with suppress(ApiError):  # a stream that broke has nothing to cancel
        await responses.cancel()


def _is_empty(response: Any) -> bool:
    return not response.error_message and not response.infer_response.outputs
