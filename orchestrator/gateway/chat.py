"""`/v1/chat/completions` and `/v1/completions`: relays the orchestrator's events as server-sent events or one JSON."""

from __future__ import annotations

import asyncio
import contextlib
import time

from starlette.types import Receive, Scope, Send

from orchestrator.errors import ApiError, EngineError, InvalidRequestError, ShuttingDownError
from orchestrator.gateway.messages import (
    ClientLeft,
    attended,
    encode_error,
    encode_headers,
    forwarded_headers,
    send_error,
    send_json,
)
from orchestrator.gateway.metrics import count_stream_begun, count_stream_ended
from orchestrator.gateway.places import json_body
from orchestrator.gateway.triton_client import EventStream, TritonClient
from orchestrator.request import Kind, glance

# The last tells nginx and its kin not to buffer.
_SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Completions:
    """An ASGI endpoint. A client that leaves ends the generation, streamed or not, before or after the first token."""

    def __init__(self, triton: TritonClient, kind: Kind) -> None:
        self._triton = triton
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_s = time.monotonic()
        try:
            async with json_body(scope, receive, self._triton) as body:
                stream, fields = glance(body, self._kind)
                if stream and scope["http_version"] == "1.0":
                    raise InvalidRequestError(
                        "stream: needs HTTP/1.1, which can say where a stream ends", param="stream"
                    )
                events = self._triton.open(body, forwarded_headers(scope), fields)
                async with attended(receive, events.cancel):  # whose end then ends the relay
                    await (_relay_stream(events, send, started_s) if stream else _relay_answer(events, send))
        except ClientLeft:
            return
        except ApiError as error:
            await send_error(send, error)


async def _relay_answer(events: EventStream, send: Send) -> None:
    try:
        answer = None
        async with contextlib.aclosing(events.read()) as reading:
            async for event in reading:
                answer = event
        if answer is None:
            raise EngineError("the orchestrator ended without an answer")
    except ApiError as error:
        await send_error(send, error)
    else:
        await send_json(send, 200, answer, encode_headers(events.headers))


async def _relay_stream(events: EventStream, send: Send, started_s: float) -> None:
    """Headers wait for the first event, so that an error before it has its own status."""
    num_events, ttft_s = 0, 0.0
    try:
        async with contextlib.aclosing(events.read()) as reading:
            async for event in reading:
                if not num_events:
                    headers = [*_SSE, *encode_headers(events.headers)]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": b"data: " + event + b"\n\n", "more_body": True})
                num_events += 1
                if num_events == 1:
                    ttft_s = time.monotonic() - started_s
                    count_stream_begun()
        last = b"[DONE]"
        if not num_events:
            raise EngineError("the orchestrator ended without an event")
    except ApiError as error:
        if not num_events:
            await send_error(send, error)
            return
        last = encode_error(error)
    except asyncio.CancelledError:
        # The server stops and its drain time is over: the stream ends with an error, never as if it were whole.
        if num_events:
            last = encode_error(ShuttingDownError("the server is shutting down"))
            await send({"type": "http.response.body", "body": b"data: " + last + b"\n\n"})
        raise
    finally:
        if num_events:
            count_stream_ended(ttft_s, num_events)
    await send({"type": "http.response.body", "body": b"data: " + last + b"\n\n"})
