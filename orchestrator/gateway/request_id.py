"""`x-request-id`: one name for a request in the caller's log, in ours and on the answer."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

REQUEST_ID_HEADER = b"x-request-id"
ALLOWED = "1 to 128 letters, digits, '.', '_' or '-'"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


def is_request_id(value: bytes) -> bool:
    return _REQUEST_ID.fullmatch(value) is not None


def new_request_id() -> bytes:
    """Unique, no secret: it names, and opens nothing."""
    return b"%032x" % random.getrandbits(128)


def choose_request_id(headers: Mapping[bytes, bytes]) -> bytes:
    """The caller's, or a new one where there is none that could go into a log."""
    given = headers.get(REQUEST_ID_HEADER)
    return given if given is not None and is_request_id(given) else new_request_id()
