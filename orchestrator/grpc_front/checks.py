"""What a stranger's request must be before Triton sees it.

Triton's own parsers are not the place to find out what a crafted message does: a request that passes here names a
public model, holds exactly the tensors of its contract with the bytes that their shapes promise, lies in no shared
memory, and has no parameter that we do not know.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Any

from orchestrator.contracts import FORWARDED_HEADERS, FRONT_MODELS, FrontModel, TensorSpec
from orchestrator.errors import InvalidRequestError, ModelNotFoundError, shorten
from orchestrator.request import REQUEST_ID_RULE, is_request_id
from orchestrator.wire import ASK_FOR_END, read_texts

_LENGTH_BYTES = 4  # before each element of a BYTES tensor
_ITEM_BYTES = {"BOOL": 1, "INT32": 4, "UINT64": 8, "FP32": 4}
_ALLOWED_PARAMETERS = (ASK_FOR_END, *FORWARDED_HEADERS)
_VERSIONS = ("", "1")  # as `python -m build` lays a repository out
_SHOWN_CHARS = 80  # of a name that the caller chose: a gRPC status must stay small
_POSITIVE_INTEGER = re.compile(r"0*[1-9][0-9]{0,17}")


def check_model(name: str, models: Collection[str] = FRONT_MODELS) -> FrontModel:
    """The tensors of a public model, of which the target has `models`.

    Raises `ModelNotFoundError`, also for models that exist and are not public.
    """
    if name not in models:
        raise ModelNotFoundError(
            f"model_name: {shorten(name)} does not exist here; one of {', '.join(models)}", param="model_name"
        )
    return FRONT_MODELS[name]


def check_version(version: str) -> None:
    """Raises `ModelNotFoundError` for another than the one that each model has."""
    if version not in _VERSIONS:
        raise ModelNotFoundError(f"model_version: must be 1, or empty (got {shorten(version)})", param="model_version")


def check_request(request: Any, max_batch: int, models: Collection[str] = FRONT_MODELS) -> None:
    """Raises `ModelNotFoundError`, or `InvalidRequestError` naming the field, for a `ModelInferRequest` we refuse.

    `max_batch` is the most that a dimension of any size may be: of public models, the embedder's batch. `models` are
    those of `FRONT_MODELS` that the target has.
    """
    model = check_model(request.model_name, models)
    specs = {spec.name: spec for spec in model.inputs}
    check_version(request.model_version)
    for name, value in request.parameters.items():
        if name not in _ALLOWED_PARAMETERS:
            raise _refused(
                f"parameters.{name[:_SHOWN_CHARS]}",
                f"is not allowed here; allowed are {', '.join(_ALLOWED_PARAMETERS)}",
            )
        _check_parameter(name, value)
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
            raise _refused(f"outputs[{index}].name", f"{shorten(output.name)} is not one of {', '.join(outputs)}")
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
            raise _refused(f"inputs[{index}].name", f"{shorten(tensor.name)} is not one of {', '.join(specs)}")
        raw = request.raw_input_contents[index] if request.raw_input_contents else None
        _check_tensor(f"inputs[{index}]", tensor, raw, specs[tensor.name], max_batch)


def most_tokens(request: Any) -> list[int]:
    """The most tokens that each text of a checked request to `embedding` can have: no word piece is below a byte."""
    return [len(text) + 2 for text in read_texts(request)]


def _check_parameter(name: str, value: Any) -> None:
    """What the orchestrator reads itself (`cache-control`, the traces' context) it checks itself."""
    kind = value.WhichOneof("parameter_choice")
    if name == ASK_FOR_END:
        if kind != "bool_param":
            raise _refused(f"parameters.{name}", "must be a bool")
        return
    text = value.string_param
    if kind != "string_param":
        raise _refused(f"parameters.{name}", "must be a string, as the header of this name")
    if name == "x-request-id" and not is_request_id(text):
        raise _refused(f"parameters.{name}", f"must be {REQUEST_ID_RULE} (got {shorten(text)})")
    if name == "x-deadline-ms" and not _POSITIVE_INTEGER.fullmatch(text):
        raise _refused(f"parameters.{name}", f"must be a positive integer, as text (got {shorten(text)})")


def _check_tensor(field: str, tensor: Any, raw: bytes | None, spec: TensorSpec, max_batch: int) -> None:
    datatype = {"STRING": "BYTES"}.get(kind := spec.dtype.removeprefix("TYPE_"), kind)
    if tensor.datatype != datatype:
        raise _refused(f"{field}.datatype", f"must be {datatype} (got {shorten(tensor.datatype)})")
    fits = len(tensor.shape) == len(spec.dims) and all(
        size == dim or (dim == -1 and 0 < size <= max_batch) for size, dim in zip(tensor.shape, spec.dims)
    )
    if not fits:
        any_size = f", -1 being 1 to {max_batch}" if -1 in spec.dims else ""
        raise _refused(f"{field}.shape", f"must be {list(spec.dims)}{any_size} (got {shorten(list(tensor.shape[:8]))})")
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
