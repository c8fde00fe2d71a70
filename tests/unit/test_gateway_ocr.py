"""`/v1/ocr` over a fake Triton: bodies and forms, what is held of them, what a client that leaves leaves behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits_loopback import Beside

from orchestrator.errors import ApiError, InvalidRequestError, ModelNotFoundError
from orchestrator.gateway.ocr import MAX_BODY_BYTES, MAX_IMAGE_BYTES, Ocr, read_image
from orchestrator.gateway.places import Room
from orchestrator.limits.ledger import Amount

BOUNDARY = b"----b"


def part(name: str, data: bytes, file: str | None = None) -> bytes:
    file_name = "" if file is None else f'; filename="{file}"'
    return b"--%b\r\nContent-Disposition: form-data; name=%b\r\n\r\n%b\r\n" % (
        BOUNDARY,
        f'"{name}"{file_name}'.encode(),
        data,
    )


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--%b--\r\n" % BOUNDARY


def read(body: bytes, content_type: bytes = b"multipart/form-data; boundary=" + BOUNDARY) -> bytes:
    return asyncio.run(read_image(body, content_type))


# --- forms -------------------------------------------------------------------------------------------------


@given(st.binary(min_size=1, max_size=2000))
def test_a_form_gives_back_the_file_s_bytes(data: bytes) -> None:
    if b"\r\n--" + BOUNDARY not in b"\r\n" + data:
        assert read(form(part("file", data, "a.png"), part("model", b"ocr"))) == data


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (form(part("model", b"ocr")), "file", "file: required"),
        (form(part("file", b"text")), "file", "file: must come with a file name, as a file"),
        (form(part("file", b"x", "a"), part("language", b"de")), "language", "language: is no field of this form"),
        (form(part("image", b"x", "a")), "image", "image: is a file; the one file is file"),
        (form(part("file", b"x", "a"), part("file", b"x", "a")), None, "the form cannot be read: Too many files"),
        (form(*[part("model", b"ocr")] * 17), None, "the form cannot be read: Too many fields"),
        (form(part("model", b"o" * 2000)), None, "the form cannot be read: Part exceeded maximum size"),
        (b"no form", None, "the form cannot be read: "),
    ],
)
def test_what_is_no_form_of_ours_is_refused(body: bytes, param: str | None, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(body)
    assert caught.value.message.startswith(message) and caught.value.param == param


def test_a_form_without_boundary_or_for_another_model() -> None:
    with pytest.raises(InvalidRequestError, match="Missing boundary"):
        read(form(part("file", b"x", "a")), b"multipart/form-data")
    with pytest.raises(ModelNotFoundError, match="model: 'gpt-4o' reads no images; ocr does"):
        read(form(part("file", b"x", "a"), part("model", b"gpt-4o")))


@given(st.binary(max_size=300), st.integers(0, 300))
def test_a_damaged_form_is_read_or_refused(data: bytes, place: int) -> None:
    whole = form(part("file", b"12345", "a.png"), part("model", b"ocr"))
    try:
        read(whole[:place] + data + whole[place:])
    except ApiError as error:
        assert error.status in (400, 404)


# --- the endpoint ------------------------------------------------------------------------------------------


class FakeTriton:
    def __init__(self, beside: Beside | None = None) -> None:
        self.images: list[bytes] = []
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self._limits = (beside or Beside()).client
        self.check = self._limits.check

    async def serve(self, *request: Any) -> Any:
        *request, work = request
        return await self._limits.serve(*request, lambda: work(self))

    async def read_image(self, image: bytes) -> bytes:
        self.images.append(image)
        self.begun.set()
        await self.may_end.wait()
        return b'{"text": "found"}'


class Client:
    """One request; `leave` ends its connection."""

    def __init__(self, endpoint: Ocr, body: bytes, content_type: bytes = b"image/png", **headers: str) -> None:
        self.sent: list[Any] = []
        self.leave = asyncio.Event()
        self.read_anything = False
        self._came = [{"type": "http.request", "body": body}]
        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "headers": [(b"content-type", content_type), *pairs]}
        self.task = asyncio.create_task(endpoint(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        self.read_anything = True
        if self._came:
            return self._came.pop()
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def answer(self) -> tuple[int, Any, dict[str, str]]:
        await self.task
        headers = {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}
        return self.sent[0]["status"], json.loads(self.sent[1]["body"]), headers


def test_an_image_or_a_form_reaches_the_model() -> None:
    async def scenario() -> None:
        triton = FakeTriton()
        endpoint = Ocr(triton, is_served=True)  # type: ignore[arg-type]
        assert await Client(endpoint, b"bytes").answer() == (
            200,
            {"text": "found"},
            {"content-type": "application/json", "content-length": "17"},
        )
        for content_type in (b"application/octet-stream", b"IMAGE/WEBP; foo=bar"):
            assert (await Client(endpoint, b"bytes", content_type).answer())[0] == 200
        body = form(part("file", b"bytes", "a.png"))
        assert (await Client(endpoint, body, b"multipart/form-data; boundary=" + BOUNDARY).answer())[0] == 200
        assert triton.images == [b"bytes"] * 4
        assert endpoint._room.num_held_bytes == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "content_type", "status", "message"),
    [
        (b"", b"image/png", 400, "file: must not be empty"),
        (b"x" * (MAX_IMAGE_BYTES + 1), b"image/png", 413, "the image has 16777217 bytes; at most 16777216 are allowed"),
        (b"x" * (MAX_BODY_BYTES + 1), b"image/png", 413, "the request has more than 16842752 bytes"),
        (b"{}", b"application/json", 415, "content-type: 'application/json' is not allowed; send the image itself as"),
        (b"x", b"", 415, "content-type: '' is not allowed"),
        (b"x", b"image/gif", 415, "content-type: 'image/gif' is not allowed"),
    ],
)
def test_what_is_refused(body: bytes, content_type: bytes, status: int, message: str) -> None:
    async def scenario() -> None:
        endpoint = Ocr(FakeTriton(), is_served=True)  # type: ignore[arg-type]
        answered, answer, _ = await Client(endpoint, body, content_type).answer()
        assert answered == status and answer["error"]["message"].startswith(message)
        assert endpoint._room.num_held_bytes == 0

    asyncio.run(scenario())


def test_a_compressed_body_and_a_length_too_large_are_refused_unread() -> None:
    async def scenario() -> None:
        endpoint = Ocr(FakeTriton(), is_served=True)  # type: ignore[arg-type]
        for headers, status in (({"content_encoding": "gzip"}, 415), ({"content_length": "99999999"}, 413)):
            client = Client(endpoint, b"x", **headers)
            assert (await client.answer())[0] == status and not client.read_anything

    asyncio.run(scenario())


def test_a_target_without_ocr_says_so() -> None:
    async def scenario() -> None:
        endpoint = Ocr(FakeTriton(), is_served=False)  # type: ignore[arg-type]
        status, answer, _ = await Client(endpoint, b"x").answer()
        assert status == 404 and answer["error"]["message"] == "model: this server has no model 'ocr'; target cpu has"

    asyncio.run(scenario())


def test_the_key_is_asked_for_before_the_body_is_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        beside = Beside(tmp_path, k={"tiers": ["simple"]})
        endpoint = Ocr(FakeTriton(beside), is_served=True)  # type: ignore[arg-type]
        for key, status in (("k", 403), ("nobody", 401)):
            client = Client(endpoint, b"x", authorization=f"Bearer {key}")
            assert (await client.answer())[0] == status and not client.read_anything
        assert beside.asked == ["check"] * 2

    asyncio.run(scenario())


@pytest.mark.parametrize(("body", "status"), [(b"x", 200), (b"", 400)])
def test_an_image_that_is_read_is_a_request_and_its_headers_are_sent(body: bytes, status: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        beside = Beside(tmp_path, k={"requests_per_minute": 5})
        endpoint = Ocr(FakeTriton(beside), is_served=True)  # type: ignore[arg-type]
        answered, _, headers = await Client(endpoint, body, authorization="Bearer k").answer()
        await beside.settled()
        assert answered == status and await beside.used("k") == Amount(int(status == 200))
        assert headers.get("x-ratelimit-remaining-requests") == ("4" if status == 200 else None)

    asyncio.run(scenario())


def test_a_deadline_ends_the_waiting_and_not_the_reading() -> None:
    async def scenario() -> None:
        triton = FakeTriton(beside := Beside())
        triton.may_end.clear()
        endpoint = Ocr(triton, is_served=True)  # type: ignore[arg-type]
        status, answer, _ = await Client(endpoint, b"x", x_deadline_ms="30").answer()
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        assert beside.num_running["ocr"] == 1 and endpoint._room.num_held_bytes > 0
        triton.may_end.set()
        await beside.settled()
        assert endpoint._room.num_held_bytes == 0

    asyncio.run(scenario())


def test_bodies_held_are_bounded_until_triton_is_done_with_them() -> None:
    """Also those of clients that left."""

    async def scenario() -> None:
        triton = FakeTriton()
        triton.may_end.clear()
        endpoint = Ocr(triton, is_served=True)  # type: ignore[arg-type]
        endpoint._room = Room(10, 1)
        first = Client(endpoint, b"123456", content_length="6")
        await triton.begun.wait()
        status, answer, headers = await Client(endpoint, b"123456", content_length="6").answer()
        assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "overloaded", "1")
        first.leave.set()
        await first.task
        assert first.sent == []
        assert (await Client(endpoint, b"123456", content_length="6").answer())[0] == 503
        triton.may_end.set()
        await asyncio.sleep(0.01)
        assert (await Client(endpoint, b"123456", content_length="6").answer())[0] == 200
        assert endpoint._room.num_held_bytes == 0 and len(triton.images) == 2

    asyncio.run(scenario())


def test_a_client_that_leaves_while_sending_leaves_nothing() -> None:
    async def scenario() -> None:
        triton = FakeTriton()
        endpoint = Ocr(triton, is_served=True)  # type: ignore[arg-type]
        client = Client(endpoint, b"x")
        client._came = []
        client.leave.set()
        await client.task
        assert client.sent == [] and triton.images == [] and endpoint._room.num_held_bytes == 0

    asyncio.run(scenario())
