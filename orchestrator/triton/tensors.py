"""Small translations between Triton's Python objects and ours."""

from __future__ import annotations

import json
from typing import Any

import triton_python_backend_utils as pb_utils

from orchestrator.errors import ApiError

# Attributes of pb_utils are looked up when used: the stub adds the compiled ones only after importing the model.
_CODE_NAMES = {
    400: "INVALID_ARG",
    401: "INVALID_ARG",
    403: "INVALID_ARG",
    404: "NOT_FOUND",
    413: "INVALID_ARG",
    429: "UNAVAILABLE",
    499: "CANCELLED",
    503: "UNAVAILABLE",
    504: "UNAVAILABLE",
}


def to_triton_error(error: ApiError) -> Any:
    """Our error as Triton's: the JSON as text, and the nearest of Triton's codes."""
    return pb_utils.TritonError(
        error.to_message(), getattr(pb_utils.TritonError, _CODE_NAMES.get(error.status, "INTERNAL"))
    )


def parameters_of(request: Any) -> dict[str, str]:
    """The request's parameters, forwarded headers among them, as text."""
    return {key: str(value) for key, value in json.loads(request.parameters() or "{}").items()}
