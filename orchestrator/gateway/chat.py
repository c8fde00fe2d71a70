"""`/v1/chat/completions` and `/v1/completions`: relays the orchestrator's events as server-sent events or one JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json

from starlette.types import Receive, Scope, Send

from orchestrator.contracts import FORWARDED_HEADERS
from orchestrator.errors import ApiError, EngineError, InvalidRequestError, ShuttingDownError
from orchestrator.gateway.triton_client import EventStream, TritonClient
from orchestrator.request import MAX_REQUEST_BYTES, Kind, parse_request

_FORWARDED = {name.encode() for name in FORWARDED_HEADERS}
_JSON = [(b"content-type", b"application/json")]
# The last tells nginx and its kin not to buffer.
_SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientLeft(Exception):
    """The HTTP client is gone; nobody reads what we would send."""


class Completions:
    """An ASGI endpoint. A client that leaves ends the generation, streamed or not, before or after the first token."""

    def __init__(self, triton: TritonClient, kind: Kind) -> None:
        self._triton = triton
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await _read_body(receive)
            stream = parse_request(body, self._kind).stream
        except ClientLeft:
            return
        except ApiError as error:
            await _send_json(send, error.status, json.dumps(error.body()).encode())
            return
        headers = [(name.decode(), value.decode("latin-1")) for name, value in scope["headers"] if name in _FORWARDED]
        events = self._triton.open(body, headers)
        leaving = asyncio.create_task(_cancel_when_client_leaves(receive, events))
        try:
            await (_relay_stream if stream else _relay_answer)(events, send)
        finally:
            leaving.cancel()


async def _relay_answer(events: EventStream, send: Send) -> None:
    try:
        answer = None
        async with contextlib.aclosing(events.read()) as reading:
            async for event in reading:
                answer = event
        if answer is None:
            raise EngineError("the orchestrator ended without an answer")
    except ApiError as error:
        await _send_json(send, error.status, json.dumps(error.body()).encode())
    else:
        await _send_json(send, 200, answer)


async def _relay_stream(events: EventStream, send: Send) -> None:
    """Headers wait for the first event, so that an error before it has its own status."""
    started = False
    try:
        async with contextlib.aclosing(events.read()) as reading:
            async for event in reading:
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": _SSE})
                    started = True
                await send({"type": "http.response.body", "body": b"data: " + event + b"\n\n", "more_body": True})
        last = b"data: [DONE]\n\n"
        if not started:
            raise EngineError("the orchestrator ended without an event")
    except ApiError as error:
        last = json.dumps(error.body()).encode()
        if not started:
            await _send_json(send, error.status, last)
            return
        last = b"data: " + last + b"\n\n"
    except asyncio.CancelledError:
        # The server stops and its drain time is over: the stream ends with an error, never as if it were whole.
        if started:
            last = json.dumps(ShuttingDownError("the server is shutting down").body()).encode()
            await send({"type": "http.response.body", "body": b"data: " + last + b"\n\n"})
        raise
    await send({"type": "http.response.body", "body": last})


async def _cancel_when_client_leaves(receive: Receive, events: EventStream) -> None:
    """Ends the generation, whose end then ends the relay."""
    while (await receive())["type"] != "http.disconnect":
        pass
    with contextlib.suppress(ApiError):  # a broken stream ends the relay itself
        await events.cancel()


async def _read_body(receive: Receive) -> bytes:
    """The whole body; raises `ClientLeft`, or `InvalidRequestError` as soon as it is too large."""
    body: bytes = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > MAX_REQUEST_BYTES:
            raise InvalidRequestError(f"the request has more than {MAX_REQUEST_BYTES} bytes, which is the limit")
        if not message.get("more_body", False):
            return body


async def _send_json(send: Send, status: int, body: bytes) -> None:
    headers = [*_JSON, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
