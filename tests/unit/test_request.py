"""What a caller may send; every refusal names the field, what came and what is allowed."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import ApiError, InvalidRequestError, RequestTooLargeError
from orchestrator.request import (
    MAX_NESTING,
    MAX_REQUEST_BYTES,
    ChatRequest,
    CompletionRequest,
    Guide,
    Kind,
    glance,
    measure_nesting,
    parse_request,
)

USER = {"role": "user", "content": "Hi"}


def parse(**fields: Any) -> ChatRequest:
    request = parse_request(json.dumps({"messages": [USER], **fields}).encode())
    assert isinstance(request, ChatRequest)
    return request


def complete(**fields: Any) -> CompletionRequest:
    request = parse_request(json.dumps({"prompt": "Once", **fields}).encode())
    assert isinstance(request, CompletionRequest)
    return request


def refusal(body: bytes, kind: Kind | None = None) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as got:
        parse_request(body, kind)
    return got.value


def tool(name: str = "get_weather") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def tool_call(arguments: str = "{}") -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


REFUSED: list[tuple[str, Any, str, str]] = [
    # field, value, param of the error, its message
    ("max_tokens", 0, "max_tokens", "max_tokens: Input should be greater than or equal to 1 (got 0)"),  # V01
    ("max_tokens", -5, "max_tokens", "max_tokens: Input should be greater than or equal to 1 (got -5)"),
    ("max_tokens", 1.5, "max_tokens", "max_tokens: Input should be a valid integer (got 1.5)"),
    ("max_tokens", True, "max_tokens", "max_tokens: Input should be a valid integer (got True)"),
    ("max_completion_tokens", 0, "max_completion_tokens", "greater than or equal to 1 (got 0)"),
    ("messages", [], "messages", "messages: List should have at least 1 item after validation, not 0"),  # V04
    ("messages", "Hi", "messages", "messages: Input should be a valid array (got 'Hi')"),
    ("messages", ["Hi"], "messages[0]", "messages[0]: Input should be an object (got 'Hi')"),
    ("messages", [{"role": "user"}], "messages[0].content", "messages[0].content: required"),
    ("messages", [{"content": "Hi"}], "messages[0].role", "messages[0].role: required"),
    (
        "messages",
        [{**USER, "content": None}],
        "messages[0].content",
        "must be a text or a list of text parts (got null)",
    ),
    ("messages", [USER, {**USER, "content": ""}], "messages[1].content", "messages[1].content: must not be empty"),
    ("messages", [{**USER, "content": []}], "messages[0].content", "messages[0].content: must not be empty"),
    ("messages", [{**USER, "content": 5}], "messages[0].content", "messages[0].content: Input should be"),
    ("messages", [{**USER, "role": "bot"}], "messages[0].role", "'assistant' or 'tool' (got 'bot')"),
    ("messages", [{**USER, "content": [{"type": "image_url"}]}], "messages[0].content[0].type", "should be 'text'"),
    ("messages", [{**USER, "role": "tool"}], "messages[0].tool_call_id", "required for the role 'tool'"),
    ("messages", [{**USER, "tool_call_id": "1"}], "messages[0].tool_call_id", "and for no other"),
    ("messages", [{**USER, "tool_calls": []}], "messages[0].tool_calls", "at least 1 item"),
    ("messages", [{**USER, "tool_calls": [tool_call()]}], "messages[0].tool_calls", "only the assistant calls tools"),
    (
        "messages",
        [{"role": "assistant", "tool_calls": [tool_call("{")]}],
        "messages[0].tool_calls[0].function.arguments",
        "must be JSON: ",
    ),
    (
        "messages",
        [{"role": "assistant", "tool_calls": [tool_call("[]")]}],
        "messages[0].tool_calls[0].function.arguments",
        "must be a JSON object (got [])",
    ),
    ("response_format", {"type": "xml"}, "response_format", "'text', 'json_object', 'json_schema'"),
    ("response_format", schema_format(5), "response_format.json_schema.schema", "should be an object (got 5)"),
    ("response_format", schema_format({"a": "x" * 16384}), "response_format.json_schema.schema", "at most 16384 are"),
    ("guided_regex", "", "guided_regex", "at least 1 character"),
    ("guided_regex", "é" * 513, "guided_regex", "1026 bytes; at most 1024 are allowed"),
    ("tools", [{"type": "function"}], "tools[0].function", "tools[0].function: required"),
    ("tools", [tool("a b")], "tools[0].function.name", "should match pattern"),
    ("tools", [tool()] * 129, "tools", "at most 128 items"),
    ("tool_choice", "auto", "tool_choice", "there are no tools to choose from; send tools"),
    ("tool_choice", "maybe", "tool_choice", "'none', 'auto' or 'required' (got 'maybe')"),
    ("top_logprobs", 2, "top_logprobs", "top_logprobs: not supported; remove it (got 2)"),
    ("temperature", -0.1, "temperature", "temperature: Input should be greater than or equal to 0 (got -0.1)"),
    ("temperature", 2.1, "temperature", "temperature: Input should be less than or equal to 2 (got 2.1)"),
    ("temperature", "1", "temperature", "temperature: Input should be a valid number (got '1')"),
    ("temperature", float("nan"), "temperature", "temperature: "),
    ("temperature", float("inf"), "temperature", "temperature: "),
    ("top_p", 0, "top_p", "top_p: Input should be greater than or equal to 0.000001 (got 0)"),
    ("top_p", 1.1, "top_p", "top_p: Input should be less than or equal to 1 (got 1.1)"),
    ("top_k", -1, "top_k", "top_k: Input should be greater than or equal to 0 (got -1)"),
    ("top_k", 2**31, "top_k", "top_k: Input should be less than 2147483648 (got 2147483648)"),
    ("stop", "", "stop", "stop: a stop string must not be empty (got '')"),
    ("stop", ["a", ""], "stop", "stop: a stop string must not be empty (got ['a', ''])"),
    ("stop", ["a"] * 17, "stop", "stop: at most 16 stop strings, not 17 (got ['a', "),
    ("stop", 5, "stop", "stop: Input should be a valid string (got 5)"),
    ("seed", -1, "seed", "seed: Input should be greater than or equal to 0 (got -1)"),
    ("seed", 2**63, "seed", "seed: Input should be less than 9223372036854775808"),
    ("presence_penalty", 2.1, "presence_penalty", "less than or equal to 2 (got 2.1)"),
    ("frequency_penalty", -2.1, "frequency_penalty", "greater than or equal to -2 (got -2.1)"),
    ("repetition_penalty", 0, "repetition_penalty", "greater than or equal to 0.01 (got 0)"),
    ("min_tokens", -1, "min_tokens", "greater than or equal to 0 (got -1)"),
    ("ignore_eos", 1, "ignore_eos", "ignore_eos: Input should be a valid boolean (got 1)"),
    ("stream", "yes", "stream", "stream: Input should be a valid boolean (got 'yes')"),
    ("stream_options", {"x": 1}, "stream_options.x", "stream_options.x: not supported; remove it"),
    ("n", 9, "n", "n: Input should be less than or equal to 8 (got 9)"),
    ("n", 0, "n", "n: Input should be greater than or equal to 1 (got 0)"),
    ("model", 5, "model", "model: Input should be a valid string (got 5)"),
    ("user", 5, "user", "user: Input should be a valid string (got 5)"),
    ("a b", 5, "a b", "a b: not supported; remove it"),
    *(
        (field, value, field, f"{field}: not supported; remove it")
        for field, value in {
            "best_of": 2,
            "functions": [],
            "logit_bias": {"50256": -100},
            "metadata": {"a": "b"},
            "modalities": ["text", "audio"],
            "audio": {"voice": "alloy"},
            "service_tier": "flex",
            "reasoning_effort": "low",
            "prediction": {"type": "content", "content": "x"},
            "store": True,
        }.items()
    ),
    *(
        (
            "messages",
            [USER, {"role": "assistant", "content": "x", field: value}],
            f"messages[1].{field}",
            "not supported",
        )
        for field, value in {
            "refusal": "I cannot",
            "audio": {"id": "a"},
            "function_call": {"name": "f", "arguments": "{}"},
            "annotations": [{"type": "url_citation"}],
        }.items()
    ),
    ("max_tokens", 10**300, "max_tokens", "max_tokens: Input should be less than 2147483648 (got 1000"),
    ("max_completion_tokens", 2**31, "max_completion_tokens", "less than 2147483648 (got 2147483648)"),
]


@pytest.mark.parametrize(("field", "value", "param", "message"), REFUSED)
def test_a_refusal_names_its_field(field: str, value: Any, param: str, message: str) -> None:
    error = refusal(json.dumps({"messages": [USER], field: value}).encode())
    assert message in error.message
    assert error.param == param
    assert error.status == 400


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the request is not JSON: "),
        (b"{", "the request is not JSON: "),
        (b"\xff", "the request is not JSON: "),
        (b"[" * 64, "the request is not JSON: "),
        (b"[" * 65, "the request nests 65 levels deep; at most 64 are allowed"),
        (b"[" * 10_000, "the request nests 10000 levels deep; at most 64 are allowed"),
        (rb'{"messages": [{"role": "user", "content": "\ud800"}]}', "the request is not JSON: "),
        (b"[]", "the request: Input should be an object (got [])"),
        (b"null", "the request: Input should be an object (got null)"),
        (b'{"prompt": ""}', "prompt: must not be empty"),
    ],
)
def test_a_body_that_is_no_request(body: bytes, message: str) -> None:
    assert refusal(body).message.startswith(message)


def test_a_body_that_is_too_large() -> None:
    with pytest.raises(RequestTooLargeError, match="^the request has 1048577 bytes; at most 1048576 are allowed$"):
        parse_request(b" " * (MAX_REQUEST_BYTES + 1))


@pytest.mark.parametrize("depth", [MAX_NESTING, MAX_NESTING + 1])
def test_nesting_inside_a_request(depth: int) -> None:
    """Counted from the outermost brace; a string's brackets are text."""
    deep = "[" * (depth - 1) + "]" * (depth - 1)
    body = json.dumps({"messages": [{**USER, "content": '\\"[{' * 100}], "x": "VALUE"}).replace('"VALUE"', deep)
    expected = "x: not supported" if depth <= MAX_NESTING else "the request nests 65 levels deep"
    assert refusal(body.encode()).message.startswith(expected)


def nesting_step_by_step(body: bytes) -> int:
    depth = deepest = 0
    in_string = escaped = False
    for char in body.decode("latin-1"):
        if in_string:
            in_string = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            in_string = True
        elif char in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "}]":
            depth -= 1
    return deepest


JSON = st.recursive(
    st.none() | st.text('"\\[]{}a'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('"\\[{a'), inner),
    max_leaves=300,
)


@given(JSON)
def test_nesting_is_that_of_a_scan(value: Any) -> None:
    """With more brackets in front than are counted one by one."""
    body = b"[]" * (MAX_NESTING + 1) + json.dumps(value).encode()
    assert measure_nesting(body) == max(1, nesting_step_by_step(json.dumps(value).encode()))


@given(st.binary() | st.text('{}[]",:\\ 1e').map(str.encode))
def test_any_bytes_are_refused_or_read(body: bytes) -> None:
    try:
        parse_request(body)
    except ApiError as error:
        assert (error.status, bool(error.message)) == (400, True)


def test_a_long_value_is_shortened() -> None:
    message = refusal(json.dumps({"messages": [USER], "max_tokens": "9" * 1000}).encode()).message
    assert message.endswith("9...)")
    assert len(message) < 200


@pytest.mark.parametrize(
    ("stop", "stops"),
    [
        (None, []),
        ("<im_end>", ["<im_end>"]),
        (["<im_end>"], ["<im_end>"]),  # case V07: text that looks like a special token is a text like any other
        (["a", "b"], ["a", "b"]),
        (["a"] * 16, ["a"] * 16),
    ],
)
def test_stops(stop: Any, stops: list[str]) -> None:
    assert parse(stop=stop).stops == stops


def test_text_parts_are_joined_as_they_are() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert parse(messages=[{"role": "user", "content": parts}]).messages[0].text() == "a b"


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 6, "max_completion_tokens": 6}, 6),
        ({"max_tokens": None, "max_completion_tokens": 6}, 6),
    ],
)
def test_output_limit(fields: dict[str, int], limit: int | None) -> None:
    assert parse(**fields).output_limit == limit


def test_two_limits_that_differ_are_refused() -> None:
    """As by OpenAI, which refuses both together; clients that send both mean one."""
    error = refusal(json.dumps({"messages": [USER], "max_tokens": 5, "max_completion_tokens": 6}).encode())
    assert error.message.startswith("max_tokens: 5 beside max_completion_tokens, which is 6; ")
    assert error.param == "max_tokens"


NULLS = (
    "nobody_knows",
    "thinking",
    "top_logprobs",
    "stream",
    "stream_options",
    "ignore_eos",
    "stop",
    "logit_bias",
    "n",
)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_null_is_as_if_left_out(kind: Kind) -> None:
    """Also of what we do not have: some clients send every field that they know."""
    asked: dict[str, Any] = {"messages": [USER], "temperature": 0.5} if kind == "chat" else {"prompt": "ß"}
    nulls = dict.fromkeys([*NULLS, "prompt" if kind == "chat" else "messages"])
    body = json.dumps({**asked, **nulls}).encode()
    plain = json.dumps(asked).encode()
    for told in (kind, None):  # the orchestrator guesses
        got, wanted = parse_request(body, told), parse_request(plain, told)
        assert type(got) is type(wanted) and got.model_dump() == wanted.model_dump()
    assert glance(body, kind).stream is False
    assert parse_request(json.dumps({**asked, "stream": True, "stream_options": {"include_usage": None}}).encode())
    error = refusal(json.dumps({**asked, **nulls, "other": 0, "top_k": -1}).encode(), kind)
    assert error.param in ("other", "top_k")


def test_unknown_nulls_at_any_depth_are_as_if_left_out() -> None:
    call: dict[str, Any] = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    form: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"default": None}}}
    answer: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": "x"}
    asked: dict[str, Any] = {"messages": [USER, answer, result], "response_format": form}
    call_of_more = {**call, "custom": None, "function": {**call["function"], "x": None}}
    answer_of_more = {**answer, "reasoning_content": None, "tool_calls": [call_of_more, call_of_more]}
    more = {
        "messages": [USER, answer_of_more, {**result, "b": None}],
        "response_format": {**form, "c": None, "json_schema": {**form["json_schema"], "d": None}},
        "e": None,
    }
    answer["tool_calls"] = [call, call]
    assert parse(**more) == parse(**asked)
    error = refusal(json.dumps({"messages": [{**USER, "a": None}, {**USER, "a": 1}]}).encode(), "chat")
    assert error.param == "messages[1].a"


def test_many_nulls_in_many_messages_are_dropped_quickly() -> None:
    started_s = time.process_time()
    many = [{**USER, **{f"k{number}": None for number in range(8000)}}, *[USER] * 1500]
    assert parse(messages=many) == parse(messages=[USER] * 1501)
    with pytest.raises(InvalidRequestError, match="not supported"):
        parse(messages=[{**USER, f"k{number}": None} for number in range(2000)])
    assert time.process_time() - started_s < 1.0


def test_many_nulls_are_dropped_quickly() -> None:
    started_s = time.process_time()
    assert parse(**{f"k{number}": None for number in range(16_000)}).messages == parse().messages
    assert time.process_time() - started_s < 0.5


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"prompt": ""}, "prompt: must not be empty", "prompt"),  # case V04
        ({"prompt": []}, "prompt: must not be empty", "prompt"),
        ({"prompt": None}, "must be one text or one list of token ids", "prompt"),
        ({"prompt": ["a", "b"]}, "must be one text or one list of token ids; send each of several", "prompt"),
        ({"prompt": [1, True]}, "must be one text or one list of token ids", "prompt"),
        ({"prompt": [-1]}, "prompt[0]: Input should be greater than or equal to 0 (got -1)", "prompt[0]"),
        ({"prompt": "x", "messages": [USER]}, "messages: not supported; remove it", "messages"),
        ({"prompt": "x", "echo": True}, "echo: not supported; remove it (got True)", "echo"),
        ({"prompt": "x", "best_of": 2}, "best_of: not supported; remove it (got 2)", "best_of"),
        ({"prompt": "x", "logprobs": 1}, "logprobs: not supported; remove it (got 1)", "logprobs"),
        ({"prompt": "x", "suffix": "y"}, "suffix: not supported; remove it", "suffix"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1", "max_tokens"),
    ],
)
def test_a_refused_completion(fields: dict[str, Any], message: str, param: str) -> None:
    error = refusal(json.dumps(fields).encode())
    assert message in error.message
    assert error.param == param


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [' + b"{}," * 250_000 + b"{}]}",
        b'{"messages": [' + b"0," * 500_000 + b"0]}",
        b'{"prompt": [' + b"1," * 500_000 + b"1]}",
        b"{" + b",".join(b'"k%d": 1' % number for number in range(60_000)) + b"}",
    ],
)
def test_many_values_are_refused_quickly(body: bytes) -> None:
    for ask in (parse_request, lambda body: glance(body, "chat")):
        started_s = time.process_time()
        with pytest.raises(InvalidRequestError, match="values; at most 16384 are allowed"):
            ask(body)
        assert time.process_time() - started_s < 0.5  # it was 5 s


def test_a_text_full_of_commas_has_few_values() -> None:
    assert parse(messages=[{"role": "user", "content": ", " * 100_000}]).messages


def test_only_the_first_of_many_faults_is_explained() -> None:
    assert refusal(b'{"messages": [' + b"0," * 5000 + b"0]}").param == "messages[0]"


def test_a_stream_is_seen_without_parsing_all() -> None:
    assert glance(json.dumps({"messages": [USER], "stream": True}).encode(), "chat").stream
    assert not glance(b'{"messages": 5}', "chat").stream  # the orchestrator will say what is wrong
    for body in (b"5", b'{"stream": 1, "messages": 5}', b'{"prompt": "x"}', b"{"):
        with pytest.raises(InvalidRequestError):
            glance(body, "chat")


def test_an_endpoint_takes_its_own_kind() -> None:
    assert refusal(json.dumps({"prompt": "x"}).encode(), "chat").message == "messages: required"
    assert refusal(json.dumps({"messages": [USER]}).encode(), "completion").message == "prompt: required"
    assert complete(prompt=[5, 6]).prompt == [5, 6]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "guide"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Guide("json", None, "response_format")),
        (
            {"response_format": schema_format(SCHEMA)},
            Guide("json_schema", json.dumps(SCHEMA), "response_format.json_schema.schema"),
        ),
        ({"guided_regex": "[0-9]+"}, Guide("regex", "[0-9]+", "guided_regex")),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, Guide("regex", "a", "guided_regex")),
    ],
)
def test_what_the_text_must_match(fields: dict[str, Any], guide: Guide | None) -> None:
    assert parse(**fields).guide == guide


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"tools": [tool()], "guided_regex": "a"}, "guided_regex"),
        ({"tools": [tool()], "logprobs": True}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"response_format": schema_format({"not": {}})}, "response_format.json_schema.schema"),
        ({"guided_regex": "a^b"}, "guided_regex"),
        ({"tools": [tool()], "response_format": schema_format({})}, "response_format"),
        ({"ignore_eos": True, "guided_regex": "a"}, "ignore_eos"),
        ({"min_tokens": 2, "response_format": {"type": "json_object"}}, "min_tokens"),
        ({"min_tokens": 2, "tools": [tool()], "tool_choice": "required"}, "min_tokens"),
        ({"tools": [tool()], "response_format": {"type": "json_object"}}, "response_format"),
        (
            {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
    ],
)
def test_what_does_not_go_together(fields: dict[str, Any], param: str) -> None:
    assert refusal(json.dumps({"messages": [USER], **fields}).encode()).param == param


def test_tools_that_the_model_may_call() -> None:
    assert [each.function.name for each in parse(tools=[tool()]).offered_tools] == ["get_weather"]
    assert parse(tools=[tool()], tool_choice="none").offered_tools == []
    assert parse(tools=[]).offered_tools == []


def test_a_conversation_with_a_tool() -> None:
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [tool_call('{"city": "Oslo"}')]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    assert parse(messages=messages, tools=[tool()]).messages[2].text() == "rain"


def test_null_is_as_if_left_out() -> None:
    """All but the few that OpenAI does not let be null either."""
    nulls = dict.fromkeys(set(ChatRequest.model_fields) - {"messages", "ignore_eos"})
    assert parse(**nulls) == parse()
    nulls = dict.fromkeys(set(CompletionRequest.model_fields) - {"prompt", "ignore_eos"})
    assert complete(**nulls) == complete()
    assert not glance(json.dumps({"messages": [USER], "stream": None}).encode(), "chat").stream


def test_what_asks_for_nothing_is_as_if_left_out() -> None:
    fields: dict[str, Any] = {
        "store": False,
        "metadata": {},
        "logit_bias": {},
        "service_tier": "auto",
        "modalities": ["text"],
        "top_logprobs": 0,
    }
    assert parse(**fields) == parse()
    assert parse(service_tier="default") == parse()
    assert complete(echo=False, best_of=1, suffix=None) == complete()
    options = {"include_usage": True, "include_obfuscation": False}
    assert parse(stream=True, stream_options=options).include_usage


def test_an_answers_message_comes_back() -> None:
    nulls = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls", "name", "tool_call_id"))
    back = {"role": "assistant", "content": "x", "annotations": [], "parsed": {"a": 1}, **nulls}
    call = tool_call()
    read = {**call, "index": 0, "function": {**call["function"], "parsed_arguments": {}}}
    assert parse(messages=[USER, {**back, "tool_calls": [read]}]) == parse(
        messages=[USER, {"role": "assistant", "content": "x", "tool_calls": [call]}]
    )
    assert parse(messages=[USER, back, USER]) == parse(messages=[USER, {"role": "assistant", "content": "x"}, USER])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.dictionaries(st.sampled_from(sorted(ChatRequest.model_fields)) | st.text(max_size=8), JSON, max_size=5)


@given(fields=FIELDS)
def test_any_json_is_a_request_or_refused(fields: dict[str, Any]) -> None:
    for body in (fields, {"messages": [USER], **fields}, {"messages": [fields]}):
        try:
            parse_request(json.dumps(body).encode())
        except InvalidRequestError as error:
            assert error.message


@given(body=st.binary(max_size=64))
def test_any_bytes_are_a_request_or_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse_request(body)
