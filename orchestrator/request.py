"""The request a caller sends: OpenAI's chat completion or completion, plus the extras that load tools send.

Whatever is not a field here is refused with its name, never ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import pydantic_core
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)

from orchestrator.errors import InvalidRequestError, RequestTooLargeError, shorten
from orchestrator.regexes import check_regex
from orchestrator.schemas import check_schema

# One request's JSON on every way in. Checked before parsing.
MAX_REQUEST_BYTES = 1 << 20
MAX_NESTING = 64
# Values and keys of all objects and arrays together; more than a context window of token ids.
MAX_VALUES = 1 << 14
MAX_STOPS = 16
MAX_CHOICES = 8
MAX_TOOLS = 128  # OpenAI's limit
# Grammars cost time and memory to compile, out of proportion to their length.
MAX_SCHEMA_BYTES = 16 << 10
MAX_REGEX_BYTES = 1 << 10
# Of each text in `prefix_key`. Two conversations that differ later only share a replica.
_KEY_CHARS = 1024


# What a caller may call a request in `x-request-id`: it goes into logs and headers.
REQUEST_ID_RULE = "1 to 128 letters, digits, '.', '_' or '-'"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def is_request_id(text: str) -> bool:
    return _REQUEST_ID.fullmatch(text) is not None


_SCHEMA = "response_format.json_schema.schema"


class Guide(NamedTuple):
    """What the answer's text must match: NVIDIA's guide type and guide, and the field that asked for it."""

    type: Literal["json", "json_schema", "regex"]
    text: str | None
    param: str


StrictT = TypeVar("StrictT", bound="Strict")


class Strict(BaseModel):
    """Base of what callers send: nothing converted, nothing ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


def _support(value: Any, allowed: ValidatorFunctionWrapHandler) -> Any:
    try:
        return allowed(value)
    except ValidationError as error:
        raise ValueError("not supported; remove it") from error


def _ask_nothing(value: Any, allowed: ValidatorFunctionWrapHandler) -> None:
    _support(value, allowed)


# OpenAI's fields that we do not have. Its clients send them with values that ask for nothing, and send back what
# answers carry: such values are as if left out, and all others are refused.
_SUPPORTED = WrapValidator(_support)
_NOTHING = WrapValidator(_ask_nothing)
_Null: TypeAlias = Annotated[None, _NOTHING]
_Empty: TypeAlias = Annotated[Annotated[dict[str, Any], Field(max_length=0)] | None, _NOTHING]
# What the openai package, or its user, read out of an answer's other fields, which say it all.
_Derived: TypeAlias = Annotated[Any, BeforeValidator(lambda value: None)]
# How often `validate` looks for nulls to leave out; each list that holds some takes one more.
_MAX_NULL_ROUNDS = 8
# Null is OpenAI's default, and ours.
_Flag: TypeAlias = Annotated[bool, BeforeValidator(lambda value: False if value is None else value)]


# --- messages and tools --------------------------------------------------------------------------------------


class TextPart(Strict):
    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    """`arguments` is a JSON object as text, as the model wrote it."""

    name: str
    arguments: str
    parsed_arguments: _Derived = None


class ToolCall(Strict):
    id: str
    type: Literal["function"]
    function: FunctionCall
    index: _Derived = None


class Message(Strict):
    """`content` may be null only beside `tool_calls`; `tool_call_id` belongs to the role "tool".

    The last fields are in OpenAI's answers, and come back with them.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    refusal: _Null = None
    audio: _Null = None
    function_call: _Null = None
    annotations: Annotated[Annotated[list[Any], Field(max_length=0)] | None, _NOTHING] = None
    parsed: _Derived = None

    def text(self) -> str:
        """The content as one string; parts are joined as they are."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


class Function(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class ToolChoice(Strict):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


# --- what the answer must look like --------------------------------------------------------------------------


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    """OpenAI's `schema` field; `strict` is accepted because guided decoding is always strict."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


# --- requests ------------------------------------------------------------------------------------------------


class StreamOptions(Strict):
    include_usage: _Flag = False
    include_obfuscation: Annotated[Literal[False] | None, _NOTHING] = None


class GenerationRequest(Strict):
    """What both kinds of request share. Ranges are OpenAI's; `top_k` of 0 means all tokens."""

    model: Annotated[str, BeforeValidator(lambda value: "auto" if value is None else value)] = "auto"
    stream: _Flag = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=1e-6, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: _Flag = False
    guided_regex: Annotated[str, Field(min_length=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    user: str | None = None
    logit_bias: _Empty = None

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings, not {len(stops)}")
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        return stop

    @field_validator("guided_regex")
    @classmethod
    def _check_regex(cls, regex: str | None) -> str | None:
        if regex is not None and len(regex.encode()) > MAX_REGEX_BYTES:
            raise ValueError(f"{len(regex.encode())} bytes; at most {MAX_REGEX_BYTES} are allowed")
        return regex

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def output_limit(self) -> int | None:
        """The caller's limit in tokens."""
        return self.max_tokens

    @property
    def output_limit_field(self) -> str:
        """Where the caller set it, or could have."""
        return "max_tokens"

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_log_probs(self) -> bool:
        """Whether the answer carries the log probability of each of its tokens."""
        return False

    @property
    def guide(self) -> Guide | None:
        """What the text must match."""
        return None if self.guided_regex is None else Guide("regex", self.guided_regex, "guided_regex")


class ChatRequest(GenerationRequest):
    """One `/v1/chat/completions` body."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    # The engines' contract carries the log probability of the chosen token alone.
    top_logprobs: Annotated[Literal[0] | None, _NOTHING] = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    store: Annotated[Literal[False] | None, _NOTHING] = None
    metadata: _Empty = None
    service_tier: Annotated[Literal["auto", "default"] | None, _NOTHING] = None
    modalities: Annotated[Annotated[list[Literal["text"]], Field(max_length=1)] | None, _NOTHING] = None
    audio: _Null = None
    prediction: _Null = None
    reasoning_effort: _Null = None
    verbosity: _Null = None
    web_search_options: _Null = None
    prompt_cache_key: _Null = None
    prompt_cache_retention: _Null = None
    safety_identifier: _Null = None
    functions: _Null = None
    function_call: _Null = None

    @property
    def output_limit(self) -> int | None:
        """The caller's limit in tokens, by whichever of its names."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def output_limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def wants_log_probs(self) -> bool:
        return bool(self.logprobs)

    @property
    def guide(self) -> Guide | None:
        """`response_format`'s or `guided_regex`; a forced tool call's is the tool parser's matter."""
        if isinstance(self.response_format, JsonObjectFormat):
            return Guide("json", None, "response_format")
        if isinstance(self.response_format, JsonSchemaFormat):
            schema = self.response_format.json_schema.schema_
            return Guide("json_schema", json.dumps(schema, ensure_ascii=False), _SCHEMA)
        return super().guide

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a tool call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, ToolChoice)

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []


_TokenIds = Annotated[list[Annotated[int, Field(strict=True, ge=0, lt=2**31)]], Field(fail_fast=True)]


class CompletionRequest(GenerationRequest):
    """One `/v1/completions` body. `prompt` is text or token ids; it reaches the model without a chat template.

    Text of a control token (``<|im_end|>``) is that token here, as other servers of open models have it: whoever writes
    a raw prompt writes the template's part too.
    """

    # No validator in Python: one costs as much a token as all the rest.
    prompt: Annotated[_TokenIds | str, Field(union_mode="left_to_right")]
    logprobs: Annotated[Literal[0] | None, _SUPPORTED] = None
    echo: Annotated[Literal[False] | None, _NOTHING] = None
    best_of: Annotated[Literal[1] | None, _NOTHING] = None
    suffix: _Null = None

    @property
    def wants_log_probs(self) -> bool:
        return self.logprobs is not None


Request: TypeAlias = ChatRequest | CompletionRequest
Kind = Literal["chat", "completion"]


def parse_request(body: bytes, kind: Kind | None = None) -> Request:
    """The request in `body`, of the `kind` that its endpoint takes; without one, what has a `prompt` is a completion.

    Raises `InvalidRequestError` naming the field, what is allowed and what came, or `RequestTooLargeError`.
    """
    check_size(body)
    if (kind or _guess_kind(body)) == "completion":
        return _checked_completion(validate(CompletionRequest, body))
    return _checked_chat(validate(ChatRequest, body))


def validate(model: type[StrictT], body: bytes) -> StrictT:
    """`body`, whose size was checked, as a `model`; raises `InvalidRequestError`.

    A null is as if left out, also of a field that we do not have: clients with types of their own send all they know.
    Validation stops at the first bad element of a list, so what is unknown may take some rounds to be seen.
    """
    for num_rounds in itertools.count(1):
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            nulls: dict[tuple[str | None, ...], set[str]] = {}
            for fault in error.errors(include_url=False, include_context=False):
                if fault["type"] == "extra_forbidden" and fault["input"] is None:
                    *parents, name = fault["loc"]
                    path = tuple(None if isinstance(part, int) else part for part in parents)
                    nulls.setdefault(path, set()).add(str(name))
            if not nulls or num_rounds > _MAX_NULL_ROUNDS:
                raise explain(error) from error
        fields = pydantic_core.from_json(body)
        for path, names in nulls.items():
            _drop_nulls(fields, path, names)
        body = pydantic_core.to_json(fields)
    raise AssertionError("counting does not end")


def _drop_nulls(value: Any, path: tuple[str | None, ...], names: set[str]) -> None:
    """Remove the nulls of `names` from the objects at `path`, in which None stands for each element of a list.

    Pydantic has names of its own in a path, those of a union's members, which may also be fields': both ways are gone.
    """
    if isinstance(value, list):
        for each in value:
            _drop_nulls(each, path[1:], names)
    elif isinstance(value, dict) and path:
        _drop_nulls(value.get(path[0]), path[1:], names)
        if path[0] is not None:
            _drop_nulls(value, path[1:], names)
    elif isinstance(value, dict):
        for name in names & value.keys():
            if value[name] is None:
                del value[name]


def check_size(body: bytes) -> None:
    """Raise `RequestTooLargeError`, or `InvalidRequestError` for JSON that would be slow to parse, or to explain."""
    if len(body) > MAX_REQUEST_BYTES:
        raise RequestTooLargeError(f"the request has {len(body)} bytes; at most {MAX_REQUEST_BYTES} are allowed")
    if (depth := measure_nesting(body)) > MAX_NESTING:
        raise InvalidRequestError(f"the request nests {depth} levels deep; at most {MAX_NESTING} are allowed")
    if (num_values := count_values(body)) > MAX_VALUES:
        raise InvalidRequestError(f"the request has about {num_values} values; at most {MAX_VALUES} are allowed")


class Glance(NamedTuple):
    """What is seen of a body at once. `fields` are its JSON, unchecked."""

    stream: bool
    fields: Mapping[str, Any]


def glance(body: bytes, kind: Kind) -> Glance:
    """Whether `body` asks for a stream, found out quickly: for who passes it on to be checked.

    Raises as `parse_request` does, but not for every fault.
    """
    check_size(body)
    fields: Any = None
    with contextlib.suppress(ValueError):
        fields = pydantic_core.from_json(body)
        if isinstance(fields, dict) and ("prompt" in fields) == (kind == "completion"):
            stream = fields.get("stream")
            if stream is None or isinstance(stream, bool):
                return Glance(bool(stream), fields)
    return Glance(parse_request(body, kind).stream, fields if isinstance(fields, dict) else {})


def read_fields(body: bytes) -> Mapping[str, Any]:
    """The JSON of a body that nobody has checked; empty for what is none."""
    with contextlib.suppress(ValueError, InvalidRequestError, RequestTooLargeError):
        check_size(body)
        fields = pydantic_core.from_json(body)
        if isinstance(fields, dict):
            return fields
    return {}


def prefix_key(fields: Mapping[str, Any], caller: str) -> bytes:
    """16 bytes for what stays the same from turn to turn of a conversation, and an engine's prefix cache may hold.

    That is all up to the first thing a user says, or how a prompt begins; and of whom, for callers share nothing.
    """
    messages = fields.get("messages")
    head: list[Any] = [caller]
    if isinstance(messages, list):
        for message in messages:
            if isinstance(message, dict):
                head.append(_begin(message.get("content")))
                if message.get("role") == "user":
                    break
    else:
        head.append(_begin(fields.get("prompt")))
    return hashlib.blake2b("\0".join(head).encode(errors="replace"), digest_size=16).digest()


def _begin(content: Any) -> str:
    if isinstance(content, list):
        content = repr(content[:_KEY_CHARS])
    return str(content)[:_KEY_CHARS]


def _guess_kind(body: bytes) -> Kind:
    if b'"prompt"' in body:  # else it need not be parsed twice
        if b'"messages"' not in body and rb"\u" not in body:
            return "completion"
        with contextlib.suppress(ValueError):
            fields = pydantic_core.from_json(body)
            if isinstance(fields, dict) and "prompt" in fields:
                return "chat" if fields["prompt"] is None and "messages" in fields else "completion"
    return "chat"


def _checked_completion(request: CompletionRequest) -> CompletionRequest:
    if not request.prompt:
        raise InvalidRequestError("prompt: must not be empty", param="prompt")
    _check_options(request)
    _check_guided(request, is_guided=request.guide is not None)
    return request


def _check_options(request: GenerationRequest) -> None:
    if request.guided_regex is not None:
        check_regex(request.guided_regex, "guided_regex")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options: only with stream: true", param="stream_options")


def _check_guided(request: GenerationRequest, *, is_guided: bool) -> None:
    """A text that must match something ends where it matches, so nothing may keep it from ending."""
    for param, is_set in (("ignore_eos", request.ignore_eos), ("min_tokens", bool(request.min_tokens))):
        if is_guided and is_set:
            raise InvalidRequestError(
                f"{param}: cannot be combined with response_format, guided_regex or a forced tool call", param=param
            )


def _checked_chat(request: ChatRequest) -> ChatRequest:
    """What no single field can tell."""
    _check_options(request)
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise InvalidRequestError(
            f"max_tokens: {request.max_tokens} beside max_completion_tokens, which is {request.max_completion_tokens}; "
            "they are two names of one limit, so send one",
            param="max_tokens",
        )
    for index, message in enumerate(request.messages):
        _check_message(f"messages[{index}]", message)
    guide = request.guide
    if isinstance(request.response_format, JsonSchemaFormat):
        schema = request.response_format.json_schema.schema_
        num_bytes = len(json.dumps(schema, ensure_ascii=False).encode(errors="surrogatepass"))
        if num_bytes > MAX_SCHEMA_BYTES:
            raise InvalidRequestError(
                f"{_SCHEMA}: {num_bytes} bytes; at most {MAX_SCHEMA_BYTES} are allowed", param=_SCHEMA
            )
        check_schema(schema, _SCHEMA)
    if guide is not None and guide.type != "regex" and request.guided_regex is not None:
        raise InvalidRequestError("guided_regex: cannot be combined with response_format", param="guided_regex")
    if request.tool_choice not in (None, "none") and not request.tools:
        raise InvalidRequestError("tool_choice: there are no tools to choose from; send tools", param="tool_choice")
    if isinstance(request.tool_choice, ToolChoice):
        name, names = request.tool_choice.function.name, [tool.function.name for tool in request.tools or []]
        if name not in names:
            raise InvalidRequestError(
                f"tool_choice.function.name: {shorten(name)} is not among tools; one of {', '.join(names[:16])}",
                param="tool_choice.function.name",
            )
    if request.parallel_tool_calls is not None and not request.tools:
        raise InvalidRequestError("parallel_tool_calls: only with tools", param="parallel_tool_calls")
    _check_guided(request, is_guided=guide is not None or request.must_call)
    if request.offered_tools and request.logprobs:
        raise InvalidRequestError("logprobs: cannot be combined with tools", param="logprobs")
    if request.offered_tools and guide is not None:
        param = "guided_regex" if guide.type == "regex" else "response_format"
        raise InvalidRequestError(f"{param}: cannot be combined with tools", param=param)
    return request


def _check_message(path: str, message: Message) -> None:
    def refuse(field: str, text: str) -> InvalidRequestError:
        return InvalidRequestError(f"{path}.{field}: {text}", param=f"{path}.{field}")

    if message.tool_calls is not None and message.role != "assistant":
        raise refuse("tool_calls", f"only the assistant calls tools, not the role {message.role!r}")
    if (message.tool_call_id is not None) != (message.role == "tool"):
        raise refuse("tool_call_id", "required for the role 'tool', and for no other")
    if message.content is None and message.tool_calls is None:
        if "content" in message.model_fields_set:
            raise refuse("content", "must be a text or a list of text parts (got null)")
        raise refuse("content", "required")
    if message.role == "user" and not message.text():
        raise refuse("content", "must not be empty")
    for number, call in enumerate(message.tool_calls or []):
        field = f"tool_calls[{number}].function.arguments"
        try:
            arguments = json.loads(call.function.arguments)
        except (ValueError, RecursionError) as error:
            raise refuse(field, f"must be JSON: {error}") from error
        if not isinstance(arguments, dict):
            raise refuse(field, f"must be a JSON object (got {shorten(arguments)})")


# To bytes that read as int8 are the steps up and down; all others are left out.
_STEPS = bytes.maketrans(b"{[}]", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"{[}]"))


def count_values(body: bytes) -> int:
    """About how many values `body` has, as if it were JSON; an upper bound when it has few commas."""
    num_commas = body.count(b",")
    if num_commas > MAX_VALUES:
        num_commas = sum(part.count(b",") for part in _outside_strings(body))
    return num_commas + 1


def _outside_strings(body: bytes) -> list[bytes]:
    return body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2]


def measure_nesting(body: bytes) -> int:
    """How many objects and arrays deep `body` goes, as if it were JSON; an upper bound when it has few brackets.

    Linear, and without a Python step per byte: a million brackets take milliseconds.
    """
    num_opening = body.count(b"{") + body.count(b"[")
    if num_opening <= MAX_NESTING:
        return num_opening
    outside_strings = b"".join(_outside_strings(body))
    steps = np.frombuffer(outside_strings.translate(_STEPS, _NO_BRACKETS), np.int8)
    return int(steps.cumsum(dtype=np.int32).max(initial=0))


def explain(error: ValidationError) -> InvalidRequestError:
    """The first fault in a caller's words."""
    faults = error.errors(include_url=False, include_context=False)
    # Of the branches of a union, the one that got furthest is what the caller meant.
    fault = max((each for each in faults if each["loc"][:1] == faults[0]["loc"][:1]), key=lambda each: len(each["loc"]))
    if fault["loc"][:1] == ("prompt",) and fault["type"] in ("list_type", "string_type", "int_type"):
        fault = {**fault, "loc": ("prompt",), "msg": _ONE_PROMPT, "input": faults[-1]["input"]}  # text was tried last
    param = _path(fault["loc"])
    if fault["type"] == "json_invalid":
        return InvalidRequestError(f"the request is not JSON: {fault['msg']}")
    if fault["type"] == "extra_forbidden":
        return InvalidRequestError(f"{param}: not supported; remove it", param=param)
    if fault["type"] == "missing":
        return InvalidRequestError(f"{param}: required", param=param)
    where = param or "the request"
    reason = fault["msg"].removeprefix("Value error, ")  # pydantic's
    return InvalidRequestError(f"{where}: {reason} (got {shorten(fault['input'])})", param=param or None)


_ONE_PROMPT = "must be one text or one list of token ids; send each of several prompts by itself"
# Fields that may be of several types: pydantic puts the name of the one it tried behind them.
_UNIONS = {"content", "prompt", "response_format", "stop", "tool_choice"}


def _path(loc: tuple[int | str, ...]) -> str:
    """OpenAI's way to write a place: ``messages[0].content``; the names of union branches are left out."""
    path = ""
    before: int | str | None = None
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif before not in _UNIONS:
            path += f".{part}" if path else part
        # A branch may be called like a union itself.
        before = part if before not in _UNIONS else None
    return path if len(path) <= 200 else path[:197] + "..."
