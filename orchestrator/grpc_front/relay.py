"""One caller's inference: his requests to Triton under ids of ours, the responses back under his."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio
from tritonclient.grpc import service_pb2

from orchestrator.channel import Responses, TritonChannel
from orchestrator.contracts import FORWARDED_HEADERS
from orchestrator.errors import ApiError, InvalidRequestError, OverloadedError, from_message
from orchestrator.grpc_front.checks import check_request
from orchestrator.wire import ask_for_end, error_response, is_end

log = logging.getLogger("orchestrator.grpc_front")

# Requests that one stream may have running. A caller with more opens more streams.
MAX_LIVE_PER_STREAM = 64

Metadata = Iterable[tuple[str, Any]]


def parse(kind: type[Message], data: bytes) -> Any:
    """Raises `InvalidRequestError` when `data` is no message of this kind."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequestError(f"the message is no {kind.DESCRIPTOR.name}") from error


def start(channel: TritonChannel, request: Any, metadata: Metadata) -> tuple[Responses, bool]:
    """Check a caller's request and send it as ours; returns the responses, and whether he asked for an empty last one.

    Raises the `ApiError` that refuses it.

    The orchestrator ends a request for whoever knows its id, so no id that a caller has chosen may reach it. Headers
    become parameters as Triton makes them of metadata: a header wins over a parameter that the caller set.
    """
    check_request(request)
    request.id = uuid.uuid4().hex
    for name, value in metadata:
        if name in FORWARDED_HEADERS:
            request.parameters[name].string_param = value
    wants_end = ask_for_end(request)
    return channel.start(request), wants_end


async def infer(channel: TritonChannel, data: bytes, metadata: Metadata) -> Any:
    """`ModelInfer`: the one response. Triton refuses this call for decoupled models; a whole answer fits it.

    Raises the `ApiError` that the request was refused or answered with.
    """
    request = parse(service_pb2.ModelInferRequest, data)
    request_id = request.id
    responses, _ = start(channel, request, metadata)
    answer = None
    try:
        while (response := await responses.read()) is not None:
            if response.error_message:
                raise from_message(response.error_message)
            if not _is_empty(response):
                if answer is not None:
                    raise InvalidRequestError(
                        "ModelInfer has one response, and this request is answered by several: "
                        "call ModelStreamInfer, or ask for a whole answer (stream: false)"
                    )
                answer = response.infer_response
    finally:
        responses.cancel()
    if answer is None:
        raise from_message("the model ended without an answer")
    answer.id = request_id
    return answer


class StreamRelay:
    """One `ModelStreamInfer` of a caller: any number of requests, answered side by side.

    Each has a stream of its own to Triton, so each can be ended alone. A response is read from Triton when the one
    before it was taken by the caller's connection: a caller that does not read holds one response here.
    """

    def __init__(self, channel: TritonChannel, context: aio.ServicerContext) -> None:
        self._channel = channel
        self._context = context
        self._metadata = context.invocation_metadata() or ()
        self._live: set[asyncio.Task[None]] = set()
        self._writing = asyncio.Lock()
        self._reader = asyncio.create_task(self._read_requests())
        self._is_draining = False

    async def run(self) -> None:
        """Until the caller has said all and has heard all, or until `drain`; cancelled when he leaves."""
        try:
            await asyncio.wait((self._reader,))
            while self._live:
                await asyncio.wait(self._live)
            if self._is_draining:
                await self._context.abort(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
            if self._reader.cancelled():
                await self._context.abort(grpc.StatusCode.INTERNAL, "the gRPC front failed")
            self._reader.result()
        finally:
            self._reader.cancel()
            for task in self._live:
                task.cancel()

    def drain(self) -> None:
        """Take no more requests, and end with the last of those that run."""
        self._is_draining = True
        self._reader.cancel()

    async def _read_requests(self) -> None:
        while (data := await self._context.read()) is not aio.EOF:
            request_id = ""
            try:
                request = parse(service_pb2.ModelInferRequest, data)
                request_id = request.id
                if len(self._live) >= MAX_LIVE_PER_STREAM:
                    raise OverloadedError(
                        f"{MAX_LIVE_PER_STREAM} requests run on this stream, which is the limit; open another one"
                    )
                responses, wants_end = start(self._channel, request, self._metadata)
            except ApiError as error:
                await self._write(error_response(request_id, error.to_message()))
                continue
            task = asyncio.create_task(self._relay(responses, request_id, wants_end))
            self._live.add(task)
            task.add_done_callback(self._ended(responses))

    async def _relay(self, responses: Responses, request_id: str, wants_end: bool) -> None:
        try:
            while (response := await responses.read()) is not None:
                if wants_end or not (is_end(response) and _is_empty(response)):
                    response.infer_response.id = request_id
                    await self._write(response)
        except ApiError as error:
            await self._write(error_response(request_id, error.to_message()))

    def _ended(self, responses: Responses) -> Callable[[asyncio.Task[None]], None]:
        def note(task: asyncio.Task[None]) -> None:
            self._live.discard(task)
            responses.cancel()
            if not task.cancelled() and task.exception() is not None:
                log.error("a response could not be relayed", exc_info=task.exception())
                self._reader.cancel()

        return note

    async def _write(self, response: Any) -> None:
        async with self._writing:  # gRPC takes one message at a time
            try:
                await self._context.write(response.SerializeToString())
            except aio.InternalError:
                pass  # the caller has just left, and gRPC is about to cancel `run`


def _is_empty(response: Any) -> bool:
    return not response.error_message and not response.infer_response.outputs
