"""Forms with a file (multipart/form-data), held in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import NamedTuple

from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from orchestrator.errors import InvalidRequestError, shorten

_MAX_FIELDS = 16
_MAX_FIELD_BYTES = 1024
_CHUNK_BYTES = 256 << 10


class Form(NamedTuple):
    """`file` is the content of the one file, `fields` are the values of each field, in order."""

    file: bytes
    fields: dict[str, list[str]]


async def read_form(body: bytes, content_type: bytes, file_field: str) -> Form:
    """The form in `body`, whose file is in `file_field`. Raises `InvalidRequestError`."""

    async def chunks() -> AsyncGenerator[bytes, None]:
        for begin in range(0, len(body), _CHUNK_BYTES):
            yield body[begin : begin + _CHUNK_BYTES]
            await asyncio.sleep(0)  # other requests are served meanwhile

    headers = Headers(raw=[(b"content-type", content_type)])
    parser = _InMemory(headers, chunks(), max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise InvalidRequestError(f"the form cannot be read: {error.message}") from error
    except (KeyError, UnicodeDecodeError, LookupError) as error:  # no boundary, or an unknown character set
        raise InvalidRequestError("the form cannot be read: its content-type is damaged") from error
    try:
        return await _parts_of(form, file_field)
    finally:
        await form.close()


async def _parts_of(form: FormData, file_field: str) -> Form:
    fields: dict[str, list[str]] = {}
    files = []
    for name, value in form.multi_items():
        if isinstance(value, UploadFile) and name == file_field:
            files.append(value)
        elif isinstance(value, UploadFile):
            raise refuse_field(name, f"is a file; the one file is {file_field}")
        elif name == file_field:
            raise refuse_field(name, "must come with a file name, as a file")
        else:
            fields.setdefault(name, []).append(value)
    if not files:
        raise refuse_field(file_field, "required")
    return Form(await files[0].read(), fields)


class _InMemory(MultiPartParser):
    """Starlette's, which would write a file to disk: the body is held in memory, and bounded, already."""

    spool_max_size = 1 << 30


def refuse_field(field: str, reason: str) -> InvalidRequestError:
    """The error of a field that is wrong for `reason`."""
    return InvalidRequestError(f"{shorten(field)[1:-1]}: {reason}", param=field[:80])
