"""What the routes have in common: room for bodies, and for requests that do not pass the orchestrator a place."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from starlette.types import Receive, Scope, Send

from orchestrator.errors import ApiError, CancelledError, InvalidRequestError, OverloadedError
from orchestrator.gateway.messages import (
    JSON,
    ClientLeft,
    check_json,
    encode_headers,
    forwarded_headers,
    read_body,
    send_body,
    send_error,
)
from orchestrator.gateway.triton_client import TritonClient
from orchestrator.limits.client import Place
from orchestrator.request import MAX_REQUEST_BYTES

# Bodies of JSON up to here are read at once, which costs a connection hardly more than its head. Larger ones need room,
# of which all together have this, and a key where there are keys.
SMALL_BODY_BYTES = 16 << 10
NUM_JSON_BODIES = 256  # of the largest size
_ANY_RIGHT = "models"  # which every key has


class Answer(NamedTuple):
    body: bytes
    media_type: bytes = JSON


async def send_answer(send: Send, place: Place, work: Coroutine[Any, Any, Answer]) -> None:
    """Send what `work` returns, or what it fails with, or that the deadline has passed.

    If that comes first, or the client leaves, what `work` has begun ends by itself.
    """
    try:
        answer = await place.watch(work)
    except (ClientLeft, CancelledError):
        return
    except ApiError as error:
        await send_error(send, error)
        return
    await send_body(send, 200, answer.body, answer.media_type, encode_headers(place.headers))


class Room:
    """For bodies, each of up to `max_body_bytes`, `num_bodies` of that size in all."""

    def __init__(self, max_body_bytes: int, num_bodies: int) -> None:
        self.num_held_bytes = 0
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = num_bodies * max_body_bytes

    @asynccontextmanager
    async def read(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
        """The body, which counts until the block ends. Raises `OverloadedError` before it is read, and as `read_body`.

        Without a length, or with one that is refused, it counts as the longest until it is there.
        """
        length = int(dict(scope["headers"]).get(b"content-length", self._max_body_bytes))
        num_bytes = min(length, self._max_body_bytes)
        if self.num_held_bytes + num_bytes > self._max_held_bytes:
            raise OverloadedError(
                f"bodies of {self.num_held_bytes} bytes are held here, and {self._max_held_bytes} is the limit; "
                "try again later",
                headers={"retry-after": "1"},
            )
        self.num_held_bytes += num_bytes
        try:
            body = await read_body(scope, receive, self._max_body_bytes)
            self.num_held_bytes += len(body) - num_bytes
            num_bytes = len(body)
            yield body
        finally:
            self.num_held_bytes -= num_bytes


_json_room = Room(MAX_REQUEST_BYTES, NUM_JSON_BODIES)


@asynccontextmanager
async def json_body(scope: Scope, receive: Receive, triton: TritonClient) -> AsyncIterator[bytes]:
    """The body of a request, unparsed; what is wrong with it the block raises.

    Raises `UnsupportedMediaTypeError` when it is not declared as JSON; where there are keys, what refuses a caller
    without one, before a large body is read and in the place of what the block raises of a small one; and as
    `Room.read`.
    """
    check_json(scope)
    length = int(dict(scope["headers"]).get(b"content-length", MAX_REQUEST_BYTES))
    if length > SMALL_BODY_BYTES:
        await triton.check(_ANY_RIGHT, forwarded_headers(scope))
        async with _json_room.read(scope, receive) as body:
            yield body
        return
    try:
        yield await read_body(scope, receive, MAX_REQUEST_BYTES)
    except InvalidRequestError:
        await triton.check(_ANY_RIGHT, forwarded_headers(scope))
        raise
