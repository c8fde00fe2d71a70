"""The request a caller sends: OpenAI's chat completion, plus the sampling extras that load tools send.

Whatever is not a field here is refused with its name, never ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from orchestrator.errors import InvalidRequestError, RequestTooLargeError

# One request's JSON on every way in. Checked before parsing.
MAX_REQUEST_BYTES = 1 << 20
MAX_NESTING = 64
MAX_STOPS = 16


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def text(self) -> str:
        """The content as one string; parts are joined as they are."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(_Strict):
    include_usage: bool = False


class ChatRequest(_Strict):
    """One `/v1/chat/completions` body. Ranges are OpenAI's; `top_k` of 0 means all tokens."""

    model: str = "auto"
    messages: Annotated[list[Message], Field(min_length=1)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=1e-6, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1, le=1)] | None = None
    user: str | None = None

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings, not {len(stops)}")
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        return stop

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def output_limit(self) -> int | None:
        """The caller's limit in tokens; the newer name wins when both are given."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def parse_request(body: bytes) -> ChatRequest:
    """The request in `body`.

    Raises `InvalidRequestError` naming the field, what is allowed and what came, or `RequestTooLargeError`.
    """
    if len(body) > MAX_REQUEST_BYTES:
        raise RequestTooLargeError(f"the request has {len(body)} bytes; at most {MAX_REQUEST_BYTES} are allowed")
    if (depth := measure_nesting(body)) > MAX_NESTING:
        raise InvalidRequestError(f"the request nests {depth} levels deep; at most {MAX_NESTING} are allowed")
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from error
    for index, message in enumerate(request.messages):
        if message.role == "user" and not message.text():
            param = f"messages[{index}].content"
            raise InvalidRequestError(f"{param}: must not be empty", param=param)
    return request


# To bytes that read as int8 are the steps up and down; all others are left out.
_STEPS = bytes.maketrans(b"{[}]", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"{[}]"))


def measure_nesting(body: bytes) -> int:
    """How many objects and arrays deep `body` goes, as if it were JSON; an upper bound when it has few brackets.

    Linear, and without a Python step per byte: a million brackets take milliseconds.
    """
    num_opening = body.count(b"{") + body.count(b"[")
    if num_opening <= MAX_NESTING:
        return num_opening
    outside_strings = b"".join(body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])
    steps = np.frombuffer(outside_strings.translate(_STEPS, _NO_BRACKETS), np.int8)
    return int(steps.cumsum(dtype=np.int32).max(initial=0))


def _explain(error: ValidationError) -> InvalidRequestError:
    """The first fault in a caller's words."""
    fault = error.errors(include_url=False, include_context=False)[0]
    param = _path(fault["loc"])
    if fault["type"] == "json_invalid":
        return InvalidRequestError(f"the request is not JSON: {fault['msg']}")
    if fault["type"] == "extra_forbidden":
        return InvalidRequestError(f"{param}: not supported; remove it", param=param)
    if fault["type"] == "missing":
        return InvalidRequestError(f"{param}: required", param=param)
    where = param or "the request"
    return InvalidRequestError(f"{where}: {fault['msg']} (got {_shorten(fault['input'])})", param=param or None)


# What pydantic puts into a place for the branch of a union it tried.
_UNION_TAGS = {"str", "list[str]", "list[TextPart]"}


def _path(loc: tuple[int | str, ...]) -> str:
    """OpenAI's way to write a place: ``messages[0].content``; pydantic's union tags are left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _UNION_TAGS:
            path += f".{part}" if path else part
    return path


def _shorten(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
