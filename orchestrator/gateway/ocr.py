"""`/v1/ocr`: an image, as it is or in a form, to the Triton model `ocr`; its text as JSON."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope, Send

from orchestrator.contracts import OCR_MODEL
from orchestrator.errors import (
    ApiError,
    ModelNotFoundError,
    OverloadedError,
    RequestTooLargeError,
    shorten,
)
from orchestrator.gateway.errors import UnsupportedMediaTypeError
from orchestrator.gateway.forms import read_form, refuse_field
from orchestrator.gateway.messages import (
    ClientLeft,
    encode_headers,
    forwarded_headers,
    look_at,
    quote,
    read_body,
    send_error,
    send_json,
    wait_until_client_leaves,
)
from orchestrator.gateway.triton_client import TritonClient

OCR_PATH = "/v1/ocr"
FILE_FIELD = "file"
MODEL_FIELD = "model"
# A page at 300 dots an inch in colours is some 15 MB as PNG.
MAX_IMAGE_BYTES = 16 << 20
MAX_BODY_BYTES = MAX_IMAGE_BYTES + (64 << 10)  # with what a form puts around it
# Bodies that are held at a time, all requests together.
MAX_HELD_BYTES = 16 * MAX_BODY_BYTES

FORM = "multipart/form-data"
RAW = ("image/png", "image/jpeg", "image/webp", "application/octet-stream")


class Ocr:
    """An ASGI endpoint. What Triton has begun for a client that then leaves, it finishes."""

    def __init__(self, triton: TritonClient, *, is_served: bool, with_keys: bool) -> None:
        """`is_served` says that the artifact has the model; without it every request is refused."""
        self._triton = triton
        self._is_served = is_served
        self._with_keys = with_keys
        self._num_held_bytes = 0
        self._asked: set[asyncio.Task[bytes]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reservation = None
        try:
            media_type = check_media_type(dict(scope["headers"]).get(b"content-type", b""))
            if not self._is_served:
                raise ModelNotFoundError(
                    f"model: this server has no model {OCR_MODEL!r}; target cpu has", param="model"
                )
            if self._with_keys:  # before the body: nobody without a key makes us hold one
                reservation = await self._triton.limits.reserve(OCR_MODEL, (), forwarded_headers(scope))
            answer = await self._read(scope, receive, media_type)
        except ClientLeft:
            return
        except ApiError as error:
            await send_error(send, error)
            return
        finally:
            if reservation is not None:
                self._triton.limits.settle(reservation, 0)
        await send_json(send, 200, answer, encode_headers({} if reservation is None else reservation.headers))

    async def _read(self, scope: Scope, receive: Receive, media_type: str) -> bytes:
        headers = dict(scope["headers"])
        # Without a length, or with a length that is refused, it is at most this.
        num_bytes = min(int(headers.get(b"content-length", MAX_BODY_BYTES)), MAX_BODY_BYTES)
        if self._num_held_bytes + num_bytes > MAX_HELD_BYTES:
            raise OverloadedError("many images are being read; try again later", headers={"retry-after": "1"})
        self._num_held_bytes += num_bytes
        asked = None
        try:
            body = await read_body(scope, receive, MAX_BODY_BYTES)
            image = await read_image(body, headers[b"content-type"]) if media_type == FORM else body
            check_image(image)
            asked = asyncio.create_task(self._triton.read_image(image))
        finally:
            if asked is None:
                self._num_held_bytes -= num_bytes

        def ended(task: asyncio.Task[bytes]) -> None:
            self._num_held_bytes -= num_bytes
            self._asked.discard(task)
            look_at(task)

        self._asked.add(asked)
        asked.add_done_callback(ended)
        leaving = asyncio.create_task(wait_until_client_leaves(receive))
        try:
            await asyncio.wait((asked, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise ClientLeft
            return await asked
        finally:
            leaving.cancel()


def check_media_type(content_type: bytes) -> str:
    """One of `RAW`, or `FORM`; raises `UnsupportedMediaTypeError` for another."""
    media_type = content_type.partition(b";")[0].strip().lower().decode("latin-1")
    if media_type not in (*RAW, FORM):
        raise UnsupportedMediaTypeError(
            f"content-type: {quote(content_type)} is not allowed; send the image itself as {', '.join(RAW)}, "
            f"or in the field {FILE_FIELD!r} of a form as {FORM}"
        )
    return media_type


def check_image(image: bytes) -> None:
    """Raise `InvalidRequestError` or `RequestTooLargeError` by the number of bytes; the rest is the model's matter."""
    if not image:
        raise refuse_field(FILE_FIELD, "must not be empty")
    if len(image) > MAX_IMAGE_BYTES:
        raise RequestTooLargeError(
            f"the image has {len(image)} bytes; at most {MAX_IMAGE_BYTES} are allowed", param=FILE_FIELD
        )


async def read_image(body: bytes, content_type: bytes) -> bytes:
    """The image in a form. Raises `InvalidRequestError` naming the field, or `ModelNotFoundError`."""
    form = await read_form(body, content_type, FILE_FIELD)
    for name in form.fields:
        if name != MODEL_FIELD:
            raise refuse_field(name, f"is no field of this form; there are {FILE_FIELD}, {MODEL_FIELD}")
    for model in form.fields.get(MODEL_FIELD, ()):
        if model != OCR_MODEL:
            raise ModelNotFoundError(f"model: {shorten(model)} reads no images; {OCR_MODEL} does", param=MODEL_FIELD)
    return form.file
