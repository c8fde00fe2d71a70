"""Triton's gRPC messages, as every client in this project builds them."""

from __future__ import annotations

import struct
from typing import Any

from tritonclient.grpc import service_pb2

from orchestrator import contracts
from orchestrator.contracts import TensorSpec

# Parameters of Triton's gRPC protocol for decoupled models: ask for the end as a response of its own; read it there.
ASK_FOR_END = "triton_enable_empty_final_response"
_IS_END = "triton_final_response"

_FORMATS = {"TYPE_BOOL": "?", "TYPE_INT32": "i", "TYPE_UINT64": "Q", "TYPE_FP32": "f"}  # of `struct`


def new_request(model: str, request_id: str = "") -> Any:
    """An empty `ModelInferRequest` for a decoupled model."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    ask_for_end(request)
    return request


def ask_for_end(request: Any) -> bool:
    """Have the end sent as a response of its own; returns whether the request asked for that already."""
    asked = bool(request.parameters[ASK_FOR_END].bool_param)
    request.parameters[ASK_FOR_END].bool_param = True
    return asked


def add_row(request: Any, spec: TensorSpec, *values: Any) -> None:
    """Add the tensor `spec` of shape [1, len(values)]."""
    request.inputs.add(name=spec.name, datatype=spec.dtype.removeprefix("TYPE_"), shape=(1, len(values)))
    request.raw_input_contents.append(struct.pack(f"<{len(values)}{_FORMATS[spec.dtype]}", *values))


def add_values(request: Any, spec: TensorSpec, *values: Any) -> None:
    """Add the tensor `spec` of shape [len(values)], for a model that does not batch."""
    add_row(request, spec, *values)
    request.inputs[-1].shape[:] = [len(values)]


def add_floats(request: Any, spec: TensorSpec, values: bytes) -> None:
    """Add the tensor `spec` of one dimension; `values` are little-endian FP32."""
    request.inputs.add(name=spec.name, datatype="FP32", shape=(len(values) // 4,))
    request.raw_input_contents.append(values)


def add_number(request: Any, spec: TensorSpec, value: float) -> None:
    """Add the tensor `spec` of shape [1], for a model that does not batch."""
    add_floats(request, spec, struct.pack("<f", value))


def read_float(raw: bytes) -> float:
    """The first element of an FP32 tensor."""
    (value,) = struct.unpack_from("<f", raw)
    return float(value)


def add_string(request: Any, spec: TensorSpec, value: bytes, shape: tuple[int, ...] = (1,)) -> None:
    """Add the STRING tensor `spec`, one element of `shape`."""
    request.inputs.add(name=spec.name, datatype="BYTES", shape=shape)
    request.raw_input_contents.append(struct.pack("<I", len(value)) + value)


def find_output(response: Any, spec: TensorSpec) -> bytes | None:
    """The raw bytes of an output of a `ModelStreamInferResponse`."""
    return read_outputs(response.infer_response).get(spec.name)


def read_outputs(infer_response: Any) -> dict[str, bytes]:
    """The raw bytes of every output of a `ModelInferResponse`, by name."""
    return {output.name: raw for output, raw in zip(infer_response.outputs, infer_response.raw_output_contents)}


def read_strings(raw: bytes) -> list[bytes]:
    """The elements of a STRING tensor."""
    elements, at = [], 0
    while at < len(raw):
        (size,) = struct.unpack_from("<I", raw, at)
        elements.append(raw[at + 4 : at + 4 + size])
        at += 4 + size
    return elements


def read_texts(request: Any) -> list[bytes]:
    """The elements of a `ModelInferRequest`'s first input, a STRING tensor, in either of the protocol's forms."""
    if request.raw_input_contents:
        return read_strings(request.raw_input_contents[0])
    return list(request.inputs[0].contents.bytes_contents)


def is_end(response: Any) -> bool:
    """Whether this response is the last of its request."""
    parameters = response.infer_response.parameters
    return _IS_END in parameters and bool(parameters[_IS_END].bool_param)  # a look-up alone would add it


def mark_end(response: Any, is_end: bool = True) -> None:
    """As Triton marks whether a `ModelStreamInferResponse` is the last of its request."""
    response.infer_response.parameters[_IS_END].bool_param = is_end


def add_output(infer_response: Any, spec: TensorSpec, value: bytes) -> None:
    """Add the STRING output `spec` of shape [1] to a `ModelInferResponse`."""
    infer_response.outputs.add(name=spec.name, datatype="BYTES", shape=(1,))
    infer_response.raw_output_contents.append(struct.pack("<I", len(value)) + value)


def read_parameters(request: Any) -> dict[str, str]:
    """The parameters of a `ModelInferRequest` as text, as Triton's Python backend gives them."""
    return {
        name: str(getattr(value, value.WhichOneof("parameter_choice") or "string_param"))
        for name, value in request.parameters.items()
    }


def error_response(request_id: str, message: str) -> Any:
    """The last `ModelStreamInferResponse` of a request that failed."""
    response = service_pb2.ModelStreamInferResponse(error_message=message)
    response.infer_response.id = request_id
    mark_end(response)
    return response


def cancel_request(request_id: str, model: str = contracts.ORCHESTRATOR_MODEL) -> Any:
    """The request that ends the running request of the same id, of the orchestrator or of `tts`."""
    request = new_request(model, request_id)
    add_string(request, contracts.TEXT if model == contracts.TTS_MODEL else contracts.REQUEST, b"")
    request.parameters[contracts.CANCEL_PARAMETER].bool_param = True
    return request


def stop_request(model: str, request_id: str) -> Any:
    """The request that ends the running request of the same id, by NVIDIA's contract."""
    request = new_request(model, request_id)
    add_row(request, contracts.STOP, True)
    # Triton's core insists on the two required tensors, whatever they hold.
    add_row(request, contracts.INPUT_LENGTHS, 0)
    add_row(request, contracts.REQUEST_OUTPUT_LEN, 0)
    return request


def stop_text_request(model: str, request_id: str) -> Any:
    """The same for a text engine, by NVIDIA's contract of the LLM-API model."""
    request = new_request(model, request_id)
    add_string(request, contracts.TEXT_INPUT, b"")
    add_values(request, contracts.TEXT_STOP, True)
    return request
