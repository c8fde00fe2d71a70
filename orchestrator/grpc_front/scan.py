"""How many parts a stranger's message has, counted before anything is made of them.

A message of one megabyte can hold half a million empty tensors, each an object that takes a hundred times its bytes and
a step of the checks. Here only tags and lengths are read, and reading ends where there are too many.
"""

from __future__ import annotations

from typing import NamedTuple

from orchestrator.errors import InvalidRequestError

# protobuf's wire types (its encoding guide, "Message structure"); groups, 3 and 4, are in no message of Triton's.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_TAG_BYTES, _MAX_VARINT_BYTES = 5, 10


class _Field(NamedTuple):
    """A field by its name, how often it may come, its wire types, and what is inside, if that is bounded too."""

    name: str
    limit: int = 1
    wire_types: tuple[int, ...] = (_BYTES,)
    inside: dict[int, _Field] | None = None


def _numbers(name: str, wire_type: int) -> _Field:
    """A repeated number: packed into one piece, or each by itself."""
    return _Field(name, _MAX_VALUES, (wire_type, _BYTES))


# No public model takes more than two tensors, or more than 8 values of a tensor outside of `raw_input_contents`.
_MAX_TENSORS = 16
_MAX_PARAMETERS = 32
_MAX_VALUES = 64
# Of Triton's grpc_service.proto, by field number. The last parts are bounded by the message's bytes.
_CONTENTS = {
    1: _numbers("bool_contents", _VARINT),
    2: _numbers("int_contents", _VARINT),
    3: _numbers("int64_contents", _VARINT),
    4: _numbers("uint_contents", _VARINT),
    5: _numbers("uint64_contents", _VARINT),
    6: _numbers("fp32_contents", _FIXED32),
    7: _numbers("fp64_contents", _FIXED64),
    8: _Field("bytes_contents", _MAX_VALUES),
}
_INPUT = {
    1: _Field("name"),
    2: _Field("datatype"),
    3: _numbers("shape", _VARINT),
    4: _Field("parameters", _MAX_PARAMETERS),
    5: _Field("contents", inside=_CONTENTS),
}
_OUTPUT = {1: _Field("name"), 2: _Field("parameters", _MAX_PARAMETERS)}
_INFER_REQUEST = {
    1: _Field("model_name"),
    2: _Field("model_version"),
    3: _Field("id"),
    4: _Field("parameters", _MAX_PARAMETERS),
    5: _Field("inputs", _MAX_TENSORS, inside=_INPUT),
    6: _Field("outputs", _MAX_TENSORS, inside=_OUTPUT),
    7: _Field("raw_input_contents", _MAX_TENSORS),
}


def check_parts(data: bytes) -> None:
    """Raises `InvalidRequestError` for a serialized `ModelInferRequest` with too many parts, or with unknown ones.

    Also for bytes that are no message, but not for all: the lengths of the outermost parts are all that is read.
    """
    _check(data, 0, len(data), _INFER_REQUEST, "")


def _check(data: bytes, offset: int, end: int, fields: dict[int, _Field], path: str) -> None:
    counts: dict[int, int] = {}
    while offset < end:
        tag, offset = _read_varint(data, offset, end, _MAX_TAG_BYTES)
        number, wire_type = tag >> 3, tag & 7
        field = fields.get(number)
        if field is None or wire_type not in field.wire_types:
            where = f"{path or 'the message'}: field {number} of wire type {wire_type}"
            raise _refused(f"{where} is not one of ModelInferRequest")
        count = counts[number] = counts.get(number, 0) + 1
        if count > field.limit:
            raise _refused(f"{path}{'.' if path else ''}{field.name}: at most {field.limit} are allowed")
        if wire_type == _BYTES:
            length, offset = _read_varint(data, offset, end, _MAX_VARINT_BYTES)
            if field.inside is not None and offset + length <= end:
                _check(data, offset, offset + length, field.inside, _path(path, field, count))
            offset += length
        elif wire_type == _VARINT:
            _, offset = _read_varint(data, offset, end, _MAX_VARINT_BYTES)
        else:
            offset += 8 if wire_type == _FIXED64 else 4
    if offset > end:
        raise _refused("the message is no ModelInferRequest: it ends too early")


def _read_varint(data: bytes, offset: int, end: int, max_bytes: int) -> tuple[int, int]:
    """A number of 7 bits a byte, lowest first, and where the next one begins."""
    value = 0
    for index in range(max_bytes):
        if offset == end:
            break
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, offset
    raise _refused("the message is no ModelInferRequest: a number in it does not end")


def _path(path: str, field: _Field, count: int) -> str:
    name = f"{field.name}[{count - 1}]" if field.limit > 1 else field.name
    return f"{path}.{name}" if path else name


def _refused(message: str) -> InvalidRequestError:
    param, colon, _ = message.partition(":")
    return InvalidRequestError(message, param=param if colon and " " not in param else None)
