"""ASGI messages: a request's JSON in, an answer or an error as JSON out."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping

from starlette.types import Receive, Scope, Send

from orchestrator.contracts import FORWARDED_HEADERS, LIST_HEADERS
from orchestrator.errors import ApiError, RequestTooLargeError, UnauthorizedError, shorten
from orchestrator.gateway.errors import UnsupportedMediaTypeError

Headers = Iterable[tuple[bytes, bytes]]

JSON = b"application/json"


_FORWARDED = {name.encode() for name in FORWARDED_HEADERS}
_LISTS = {name.encode() for name in LIST_HEADERS}


def forwarded_headers(scope: Scope) -> list[tuple[str, str]]:
    """The request's headers that the orchestrator reads.

    Of one that came twice the values are joined where it is a list (RFC 9110, section 5.3).
    """
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in _FORWARDED:
            found[name] = found[name] + b", " + value if name in _LISTS and name in found else value
    return [(name.decode(), value.decode("latin-1")) for name, value in found.items()]


class ClientLeft(Exception):
    """The HTTP client is gone; nobody reads what we would send."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole body, of at most `max_bytes`.

    Raises `UnsupportedMediaTypeError` when it is compressed, `RequestTooLargeError` as soon as its length or what came
    of it says so, `ClientLeft`. How long it may take is the connection's matter.
    """
    headers = dict(scope["headers"])
    if (encoding := headers.get(b"content-encoding", b"identity")) != b"identity":
        raise UnsupportedMediaTypeError(f"content-encoding: {quote(encoding)} is not supported; send the body as it is")
    if int(headers.get(b"content-length", 0)) > max_bytes:  # the HTTP parser lets nothing but digits through
        raise RequestTooLargeError(
            f"the request has {headers[b'content-length'].decode()} bytes; at most {max_bytes} are allowed"
        )
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > max_bytes:
            raise RequestTooLargeError(f"the request has more than {max_bytes} bytes, which is the limit")
        if not message.get("more_body", False):
            return b"".join(parts)


@contextlib.asynccontextmanager
async def attended(receive: Receive, cancel: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """While the block runs, `cancel` is called if the client leaves. For when the body was read: no more is to come."""

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        with contextlib.suppress(ApiError):  # a broken stream ends the answer itself
            await cancel()

    waiting = asyncio.create_task(wait())
    try:
        yield
    finally:
        waiting.cancel()


def check_json(scope: Scope) -> None:
    """Raises `UnsupportedMediaTypeError` for a body that is not declared as JSON.

    JSON is UTF-8 (RFC 8259, section 8.1). A web page cannot send this type across origins without asking first.
    """
    if (content_type := dict(scope["headers"]).get(b"content-type", b"")) == JSON:
        return
    media_type, *parameters = (part.strip().lower() for part in content_type.split(b";"))
    charsets = [
        value.strip(b'"') for name, _, value in (part.partition(b"=") for part in parameters) if name == b"charset"
    ]
    if media_type != JSON or charsets not in ([], [b"utf-8"]):
        raise UnsupportedMediaTypeError(
            f"content-type: {quote(content_type)} is not allowed; the body must be JSON and say so: application/json"
        )


def quote(value: bytes) -> str:
    """A header's value for an error message."""
    return shorten(value.decode("latin-1"))


async def send_json(send: Send, status: int, body: bytes, headers: Headers = ()) -> None:
    await send_body(send, status, body, JSON, headers)


async def send_body(send: Send, status: int, body: bytes, media_type: bytes, headers: Headers = ()) -> None:
    head = [(b"content-type", media_type), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError, headers: Headers = ()) -> None:
    await send_json(send, error.status, encode_error(error), [*encode_headers(error_headers(error)), *headers])


async def refuse(send: Send, error: ApiError) -> None:
    """An HTTP answer to a WebSocket's handshake."""
    body = encode_error(error)
    fields = [(b"content-type", b"application/json"), *encode_headers(error_headers(error))]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": fields})
    await send({"type": "websocket.http.response.body", "body": body})


def error_headers(error: ApiError) -> dict[str, str]:
    """The error's own, and what its status asks for (RFC 9110, section 11.6.1)."""
    challenge = {"www-authenticate": "Bearer"} if error.status == UnauthorizedError.status else {}
    return {**challenge, **error.headers}


def encode_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]


def encode_error(error: ApiError) -> bytes:
    return json.dumps(error.body()).encode()
