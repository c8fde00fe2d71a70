"""What a stranger's request must be before Triton sees it.

Triton's own parsers are not the place to find out what a crafted message does: a request that passes here names a
public model, holds exactly the tensors of its contract with the bytes that their shapes promise, lies in no shared
memory, and has no parameter that we do not know.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from orchestrator.contracts import FORWARDED_HEADERS, FRONT_MODELS, FrontModel, TensorSpec
from orchestrator.errors import InvalidRequestError, ModelNotFoundError
from orchestrator.wire import ASK_FOR_END

_LENGTH_BYTES = 4  # before each element of a BYTES tensor
_ITEM_BYTES = {"BOOL": 1, "INT32": 4, "UINT64": 8, "FP32": 4}
_ALLOWED_PARAMETERS = (ASK_FOR_END, *FORWARDED_HEADERS)
_VERSIONS = ("", "1")  # as `python -m build` lays a repository out
_SHOWN_CHARS = 80  # of what the caller sent: a gRPC status must stay small


def check_model(name: str) -> FrontModel:
    """The tensors of a public model; raises `ModelNotFoundError`, also for models that exist and are not public."""
    if name not in FRONT_MODELS:
        raise ModelNotFoundError(
            f"model_name: {_shown(name)} does not exist here; one of {', '.join(FRONT_MODELS)}", param="model_name"
        )
    return FRONT_MODELS[name]


def check_request(request: Any) -> None:
    """Raises `ModelNotFoundError`, or `InvalidRequestError` naming the field, for a `ModelInferRequest` we refuse."""
    model = check_model(request.model_name)
    specs = {spec.name: spec for spec in model.inputs}
    if request.model_version not in _VERSIONS:
        raise _refused("model_version", f"must be 1, or empty (got {_shown(request.model_version)})")
    for name, value in request.parameters.items():
        if name not in _ALLOWED_PARAMETERS:
            raise _refused(
                f"parameters.{name[:_SHOWN_CHARS]}",
                f"is not allowed here; allowed are {', '.join(_ALLOWED_PARAMETERS)}",
            )
        if name == ASK_FOR_END and value.WhichOneof("parameter_choice") != "bool_param":
            raise _refused(f"parameters.{name}", "must be a bool")
    for part, tensors in (("inputs", request.inputs), ("outputs", request.outputs)):
        for index, tensor in enumerate(tensors):
            for name in tensor.parameters:
                raise _refused(
                    f"{part}[{index}].parameters.{name[:_SHOWN_CHARS]}",
                    "is not allowed here: tensors have no parameters, and shared memory is not served; "
                    "send and receive the bytes themselves",
                )
    outputs = [spec.name for spec in model.outputs]
    for index, output in enumerate(request.outputs):
        if output.name not in outputs:
            raise _refused(f"outputs[{index}].name", f"{_shown(output.name)} is not one of {', '.join(outputs)}")
    if len(request.raw_input_contents) not in (0, len(request.inputs)):
        raise _refused(
            "raw_input_contents", f"has {len(request.raw_input_contents)} parts for {len(request.inputs)} inputs"
        )
    given = [tensor.name for tensor in request.inputs]
    for spec in specs.values():
        if given.count(spec.name) > 1 or (not spec.optional and spec.name not in given):
            raise _refused("inputs", f"must hold {spec.name} once, and holds it {given.count(spec.name)} times")
    for index, tensor in enumerate(request.inputs):
        if tensor.name not in specs:
            raise _refused(f"inputs[{index}].name", f"{_shown(tensor.name)} is not one of {', '.join(specs)}")
        raw = request.raw_input_contents[index] if request.raw_input_contents else None
        _check_tensor(f"inputs[{index}]", tensor, raw, specs[tensor.name])


def most_tokens(request: Any) -> list[int]:
    """The most tokens that each text of a checked request to `embedding` can have: no word piece is below a byte."""
    texts = list(request.inputs[0].contents.bytes_contents)
    if request.raw_input_contents:
        texts = list(_elements(request.raw_input_contents[0]))
    return [len(text) + 2 for text in texts]


def _elements(raw: bytes) -> Iterator[bytes]:
    """Of a serialized BYTES tensor whose lengths add up."""
    offset = 0
    while offset < len(raw):
        begin = offset + _LENGTH_BYTES
        offset = begin + int.from_bytes(raw[offset:begin], "little")
        yield raw[begin:offset]


def _check_tensor(field: str, tensor: Any, raw: bytes | None, spec: TensorSpec) -> None:
    datatype = {"STRING": "BYTES"}.get(kind := spec.dtype.removeprefix("TYPE_"), kind)
    if tensor.datatype != datatype:
        raise _refused(f"{field}.datatype", f"must be {datatype} (got {_shown(tensor.datatype)})")
    fits = len(tensor.shape) == len(spec.dims) and all(
        size == dim or (dim == -1 and size > 0) for size, dim in zip(tensor.shape, spec.dims)
    )
    if not fits:
        raise _refused(f"{field}.shape", f"must be {list(spec.dims)} (got {_shown(list(tensor.shape[:8]))})")
    count = math.prod(tensor.shape)
    if raw is None:
        if datatype != "BYTES":
            raise _refused(f"{field}.contents", f"is for BYTES alone; send {datatype} in raw_input_contents")
        held = sum(len(values) for _, values in tensor.contents.ListFields())
        if held != count or len(tensor.contents.bytes_contents) != count:
            raise _refused(f"{field}.contents", f"must hold {count} of bytes_contents and nothing else")
        return
    if tensor.HasField("contents"):
        raise _refused(f"{field}.contents", "must be empty beside raw_input_contents")
    if datatype == "BYTES":
        if _count_elements(raw) != count:
            raise _refused(f"{field}: raw_input_contents", f"must hold {count} elements, each after its length")
    elif len(raw) != count * _ITEM_BYTES[datatype]:
        raise _refused(
            f"{field}: raw_input_contents", f"must have {count * _ITEM_BYTES[datatype]} bytes (got {len(raw)})"
        )


def _count_elements(raw: bytes) -> int | None:
    """The number of elements of a serialized BYTES tensor; None when their lengths do not add up."""
    count = offset = 0
    while offset < len(raw):
        offset += _LENGTH_BYTES + int.from_bytes(raw[offset : offset + _LENGTH_BYTES], "little")
        count += 1
    return count if offset == len(raw) else None


def _refused(field: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {reason}", param=field)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
