"""As much of Triton's `triton_python_backend_utils` as our modules use, in plain Python."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonError(Exception):
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, CANCELLED = range(6)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        super().__init__(message)
        self._message = message
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name = name
        self._array = array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class InferenceResponse:
    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None) -> None:
        self._tensors = list(output_tensors)
        self._error = error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class ResponseSender:
    """Keeps what was sent, as (response, is final); fails where Triton's would crash."""

    def __init__(self) -> None:
        self.sent: list[tuple[InferenceResponse | None, bool]] = []
        self.cancelled = False

    def _ended(self) -> bool:
        return bool(self.sent) and self.sent[-1][1]

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert not self._ended(), "a response after the final one"
        self.sent.append((response, flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL))

    def is_cancelled(self) -> bool:
        assert not self._ended(), "asked for cancellation after the final response"
        return self.cancelled


class Request:
    """A request as a model receives it."""

    def __init__(
        self, tensors: Sequence[Tensor], request_id: str = "", parameters: dict[str, Any] | None = None
    ) -> None:
        self.sender = ResponseSender()
        self._tensors = list(tensors)
        self._request_id = request_id
        self._parameters = json.dumps(parameters or {})

    def get_response_sender(self) -> ResponseSender:
        return self.sender

    def inputs(self) -> list[Tensor]:
        return self._tensors

    def request_id(self) -> str:
        return self._request_id

    def parameters(self) -> str:
        return self._parameters


def get_input_tensor_by_name(request: Request, name: str) -> Tensor | None:
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


class InferenceRequest:
    """Keeps what a model asks of another one."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields


class MetricFamily:
    GAUGE, COUNTER = range(2)

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        self.metrics: dict[str, Metric] = {}  # by the value of their one label

    def Metric(self, labels: dict[str, str]) -> Metric:
        key = "".join(labels.values())
        assert key not in self.metrics, "Triton has one metric of a name and labels"
        return self.metrics.setdefault(key, Metric(self.fields["kind"]))


class Metric:
    value = 0.0

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def set(self, value: float) -> None:
        self.value = value

    def increment(self, value: float) -> None:
        assert value >= 0 or self.kind == MetricFamily.GAUGE, "a counter never falls"
        self.value += value
