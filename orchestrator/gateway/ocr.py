"""`/v1/ocr`: an image, as it is or in a form, to the Triton model `ocr`; its text as JSON."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from orchestrator.contracts import OCR_MODEL
from orchestrator.errors import ModelNotFoundError, RequestTooLargeError, shorten
from orchestrator.gateway.errors import UnsupportedMediaTypeError
from orchestrator.gateway.forms import read_form, refuse_field
from orchestrator.gateway.messages import attended, forwarded_headers, quote
from orchestrator.gateway.places import Answer, Room, send_answer
from orchestrator.gateway.triton_client import TritonClient
from orchestrator.limits.client import Place

OCR_PATH = "/v1/ocr"
FILE_FIELD = "file"
MODEL_FIELD = "model"
# A page at 300 dots an inch in colours is some 15 MB as PNG.
MAX_IMAGE_BYTES = 16 << 20
MAX_BODY_BYTES = MAX_IMAGE_BYTES + (64 << 10)  # with what a form puts around it
NUM_BODIES = 16  # of this size that are held at a time, all requests together

FORM = "multipart/form-data"
RAW = ("image/png", "image/jpeg", "image/webp", "application/octet-stream")


class Ocr:
    """An ASGI endpoint. What Triton has begun for a client that then leaves, it finishes."""

    def __init__(self, triton: TritonClient, *, is_served: bool) -> None:
        """`is_served` says that the artifact has the model; without it every request is refused."""
        self._triton = triton
        self._is_served = is_served
        self._room = Room(MAX_BODY_BYTES, NUM_BODIES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        place = Place()
        await send_answer(send, place, self._answer(scope, receive, place))

    async def _answer(self, scope: Scope, receive: Receive, place: Place) -> Answer:
        content_type = dict(scope["headers"]).get(b"content-type", b"")
        media_type = check_media_type(content_type)
        if not self._is_served:
            raise ModelNotFoundError(f"model: this server has no model {OCR_MODEL!r}; target cpu has", param="model")
        headers = forwarded_headers(scope)
        await self._triton.check(OCR_MODEL, headers)  # nobody without a key makes us hold a body
        async with self._room.read(scope, receive) as body:
            image = await read_image(body, content_type) if media_type == FORM else body
            check_image(image)
            async with attended(receive, place.cancel):
                return Answer(
                    await self._triton.serve(place, OCR_MODEL, (), headers, lambda triton: triton.read_image(image))
                )


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
