"""Bodies of JSON: who may send a large one, what all of them together may hold, and who hears what is wrong in one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orchestrator.errors import ApiError, InvalidRequestError, OverloadedError, UnauthorizedError
from orchestrator.gateway import places
from orchestrator.gateway.places import SMALL_BODY_BYTES, Room, json_body


class Keys:
    """Of a server that has some: one is right."""

    async def check(self, right: str, headers: list[tuple[str, str]]) -> None:
        assert right == "models"
        if dict(headers).get("authorization") != "Bearer right":
            raise UnauthorizedError("the key is missing or wrong")


class Request:
    def __init__(self, body: bytes, *, key: bool = True, says_length: bool = True) -> None:
        headers = [(b"content-type", b"application/json")]
        headers += [(b"authorization", b"Bearer right")] if key else []
        headers += [(b"content-length", str(len(body)).encode())] if says_length else []
        self.scope = {"type": "http", "headers": headers}
        self.is_read = False
        self._body = body

    async def receive(self) -> Any:
        self.is_read = True
        return {"type": "http.request", "body": self._body}

    def open(self) -> Any:
        return json_body(self.scope, self.receive, Keys())  # type: ignore[arg-type]


async def refusal(request: Request, error: ApiError | None = None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        async with request.open() as _:
            if error is not None:
                raise error
    return caught.value


def test_a_large_body_is_not_read_of_who_has_no_key() -> None:
    async def scenario() -> None:
        for request in (
            Request(bytes(SMALL_BODY_BYTES + 1), key=False),
            Request(b"{}", key=False, says_length=False),
            Request(bytes(2 << 20), key=False),
        ):
            assert isinstance(await refusal(request), UnauthorizedError) and not request.is_read
        async with Request(bytes(SMALL_BODY_BYTES), key=False).open() as body:
            assert len(body) == SMALL_BODY_BYTES  # whose key the orchestrator asks for
        async with Request(bytes(SMALL_BODY_BYTES + 1)).open() as body:
            assert len(body) == SMALL_BODY_BYTES + 1

    asyncio.run(scenario())


def test_what_is_wrong_in_a_body_is_for_who_has_a_key() -> None:
    async def scenario() -> None:
        wrong = InvalidRequestError("model: required")
        assert isinstance(await refusal(Request(b"{}", key=False), wrong), UnauthorizedError)
        assert await refusal(Request(b"{}"), wrong) is wrong
        full = OverloadedError("later")
        assert await refusal(Request(b"{}", key=False), full) is full

    asyncio.run(scenario())


def test_large_bodies_are_bounded_together_until_nobody_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(1 << 20, 2)
    monkeypatch.setattr(places, "_json_room", room)

    async def scenario() -> None:
        async with Request(bytes(1 << 20)).open() as _, Request(bytes(1 << 19), says_length=False).open() as _:
            assert room.num_held_bytes == 3 << 19
            refused = Request(bytes((1 << 19) + 1))
            error = await refusal(refused)
            assert (error.status, error.headers["retry-after"], refused.is_read) == (503, "1", False)
            async with Request(bytes(SMALL_BODY_BYTES)).open() as _, Request(bytes(1 << 19)).open() as _:
                pass
        assert room.num_held_bytes == 0

    asyncio.run(scenario())
