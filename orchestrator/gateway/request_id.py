"""`x-request-id`: one name for a request in the caller's log, in ours and on the answer."""

from __future__ import annotations

import random
from collections.abc import Mapping

from orchestrator.request import is_request_id

REQUEST_ID_HEADER = b"x-request-id"


def new_request_id() -> bytes:
    """Unique, no secret: it names, and opens nothing."""
    return b"%032x" % random.getrandbits(128)


def choose_request_id(headers: Mapping[bytes, bytes]) -> bytes:
    """The caller's, or a new one where there is none that could go into a log."""
    given = headers.get(REQUEST_ID_HEADER)
    return given if given is not None and is_request_id(given.decode("latin-1")) else new_request_id()
