"""Small translations between Triton's Python objects and ours."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from orchestrator.contracts import TensorSpec
from orchestrator.errors import ApiError, InternalError
from orchestrator.triton.sender import Sender

log = logging.getLogger("orchestrator.models")

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


def read_arguments(args: dict[str, str]) -> tuple[dict[str, str], Path]:
    """The model's parameters and its version folder, from what Triton gives `initialize`; also sets up the log."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parameters = json.loads(args["model_config"])["parameters"]
    folder = Path(args["model_repository"]) / args["model_version"]
    return {key: value["string_value"] for key, value in parameters.items()}, folder


def input_of(request: Any, spec: TensorSpec) -> Any:
    """An input of a request, as numpy's array."""
    return pb_utils.get_input_tensor_by_name(request, spec.name).as_numpy()


def not_computed(name: str) -> ApiError:
    """For the caller of a graph that failed just now, of the input `name`; the log gets the graph's own words."""
    log.exception("%s could not be computed", name)
    return InternalError(f"{name}: could not be computed; the server's log says why")


def fail(sender: Sender, error: ApiError) -> None:
    """End a request with `error`."""
    sender.send(pb_utils.InferenceResponse(error=to_triton_error(error)), final=True)
