"""What the routes have in common whose requests do not pass the orchestrator: a place, an answer, room for a file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from starlette.types import Receive, Scope, Send

from orchestrator.errors import ApiError, CancelledError, OverloadedError
from orchestrator.gateway.messages import JSON, ClientLeft, encode_headers, read_body, send_body, send_error
from orchestrator.limits.client import Place


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
    """For bodies that hold files, of one route: each of up to `max_body_bytes`, `num_bodies` of that size in all."""

    def __init__(self, max_body_bytes: int, num_bodies: int) -> None:
        self.num_held_bytes = 0
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = num_bodies * max_body_bytes

    @asynccontextmanager
    async def read(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
        """The body, which counts until the block ends. Raises `OverloadedError` before it is read, and as `read_body`.

        Without a length, or with one that is refused, it counts as the longest.
        """
        length = int(dict(scope["headers"]).get(b"content-length", self._max_body_bytes))
        num_bytes = min(length, self._max_body_bytes)
        if self.num_held_bytes + num_bytes > self._max_held_bytes:
            raise OverloadedError(
                f"files of {self.num_held_bytes} bytes wait or are read here, and {self._max_held_bytes} is the "
                "limit; try again later",
                headers={"retry-after": "1"},
            )
        self.num_held_bytes += num_bytes
        try:
            yield await read_body(scope, receive, self._max_body_bytes)
        finally:
            self.num_held_bytes -= num_bytes
