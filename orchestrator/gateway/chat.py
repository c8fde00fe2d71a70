"""`/v1/chat/completions` and `/v1/completions`: relays the orchestrator's events as server-sent events or one JSON."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable

from starlette.types import Receive, Scope, Send

from orchestrator.contracts import FORWARDED_HEADERS
from orchestrator.errors import ApiError, EngineError, InvalidRequestError, ShuttingDownError
from orchestrator.gateway.messages import (
    ClientLeft,
    encode_error,
    read_json_body,
    send_error,
    send_json,
    wait_until_client_leaves,
)
from orchestrator.gateway.metrics import EVENTS, LIVE_STREAMS, TTFT_S
from orchestrator.gateway.triton_client import EventStream, TritonClient
from orchestrator.request import Kind, wants_stream

_FORWARDED = {name.encode() for name in FORWARDED_HEADERS}
_LISTS = (b"cache-control", b"tracestate")
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
            body = await read_json_body(scope, receive)
            stream = wants_stream(body, self._kind)
            if stream and scope["http_version"] == "1.0":
                raise InvalidRequestError("stream: needs HTTP/1.1, which can say where a stream ends", param="stream")
        except ClientLeft:
            return
        except ApiError as error:
            await send_error(send, error)
            return
        events = self._triton.open(body, _forwarded(scope["headers"]))
        leaving = asyncio.create_task(_cancel_when_client_leaves(receive, events))
        try:
            await (_relay_stream(events, send, started_s) if stream else _relay_answer(events, send))
        finally:
            leaving.cancel()


def _forwarded(headers: Iterable[tuple[bytes, bytes]]) -> Iterable[tuple[str, str]]:
    """Those that go on. Of one that came twice the values are joined where it is a list (RFC 9110, section 5.3)."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _FORWARDED:
            found[name] = found[name] + b", " + value if name in _LISTS and name in found else value
    return [(name.decode(), value.decode("latin-1")) for name, value in found.items()]


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
        await send_json(send, 200, answer)


async def _relay_stream(events: EventStream, send: Send, started_s: float) -> None:
    """Headers wait for the first event, so that an error before it has its own status."""
    num_events, ttft_s = 0, 0.0
    try:
        async with contextlib.aclosing(events.read()) as reading:
            async for event in reading:
                if not num_events:
                    await send({"type": "http.response.start", "status": 200, "headers": _SSE})
                await send({"type": "http.response.body", "body": b"data: " + event + b"\n\n", "more_body": True})
                num_events += 1
                if num_events == 1:
                    ttft_s = time.monotonic() - started_s
                    LIVE_STREAMS.inc()
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
            TTFT_S.observe(ttft_s)
            EVENTS.inc(num_events)
            LIVE_STREAMS.dec()
    await send({"type": "http.response.body", "body": b"data: " + last + b"\n\n"})


async def _cancel_when_client_leaves(receive: Receive, events: EventStream) -> None:
    """Ends the generation, whose end then ends the relay."""
    await wait_until_client_leaves(receive)
    with contextlib.suppress(ApiError):  # a broken stream ends the relay itself
        await events.cancel()
