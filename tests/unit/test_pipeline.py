"""One call through the pipeline, over the scripted engine in this process: every way it can end, exactly once."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_process import InProcessEngines, RecordingSink
from tokenizers import Tokenizer

from orchestrator.answer import tokens_per_second
from orchestrator.call import Call
from orchestrator.config import Generation, Limits, Tier, Tiers, load_tiers
from orchestrator.engines import EngineRequest
from orchestrator.engines.scripted import ScriptedStepper, Settings
from orchestrator.errors import (
    ApiError,
    CancelledError,
    EngineError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
)
from orchestrator.generation import build_engine_request, template_message
from orchestrator.pipeline import Pipeline
from orchestrator.request import ChatRequest, Message

END_ID = 2
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"$defs": {"City": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "search"}},
]


@pytest.fixture(scope="module")
def settings() -> Settings:
    return Settings(engine="scripted", max_batch_size=8, context_window=8192, vocab_size=49152)


@pytest.fixture(scope="module")
def shared_engines(tokenizer: Tokenizer, settings: Settings) -> InProcessEngines:
    return InProcessEngines(lambda: ScriptedStepper(tokenizer, settings))


@pytest.fixture
def engines(shared_engines: InProcessEngines) -> InProcessEngines:
    shared_engines.requests.clear()
    shared_engines.stopped.clear()
    return shared_engines


@pytest.fixture(scope="module")
def pipeline(artifact: Callable[[str], Path], shared_engines: InProcessEngines) -> Pipeline:
    root = artifact("scripted")
    return Pipeline(load_tiers(root / "tiers.toml"), root, shared_engines)


def body(script: dict[str, Any] | None = None, **fields: Any) -> bytes:
    text = "Hi" if script is None else f"#script {json.dumps(script)}"
    return json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()


def run(pipeline: Pipeline, body: bytes) -> RecordingSink:
    sink = RecordingSink()
    asyncio.run(pipeline.run(Call(body, {}, sink)))
    assert sink.num_ends == 1
    return sink


def failure(pipeline: Pipeline, body: bytes) -> tuple[ApiError, RecordingSink]:
    sink = run(pipeline, body)
    assert sink.error is not None
    return sink.error, sink


# --- answers -------------------------------------------------------------------------------------------------


def test_a_stream_that_the_model_ends(pipeline: Pipeline, engines: InProcessEngines) -> None:
    sink = run(pipeline, body({"text": "One two three."}, stream=True))
    assert sink.text == "One two three."
    assert sink.finish_reasons == ["stop"]
    assert len({event["id"] for event in sink.events}) == 1
    assert sink.events[0]["id"] == f"chatcmpl-{engines.requests[0].request_id}"
    assert {event["model"] for event in sink.events} == {"llm_small"}
    assert ["rt" in event for event in sink.events] == [False] * (len(sink.events) - 1) + [True]


def test_what_rt_says(pipeline: Pipeline) -> None:
    rt = run(pipeline, body({"text": "One two three."}, stream=True)).events[-1]["rt"]
    assert (rt["tier"], rt["model"], rt["cache"]) == ("simple", "llm_small", "bypass")
    assert rt["tokens"] == 4
    assert 0 < rt["ttft_ms"] <= rt["total_ms"]
    assert rt["cost_usd"] == pytest.approx((rt["input_tokens"] * 0.05 + rt["tokens"] * 0.1) / 1e6, abs=1e-9)
    assert rt["tps"] > 0


@pytest.mark.parametrize("stream", [True, False])
def test_max_tokens_end_it(pipeline: Pipeline, stream: bool) -> None:
    """Case S10."""
    options = {"stream_options": {"include_usage": True}} if stream else {}
    request = body({"text": "x " * 100}, max_tokens=16, stream=stream, **options)
    sink = run(pipeline, request)
    assert sink.finish_reasons == ["length"]
    usage = sink.events[-1]["usage"]
    assert usage["completion_tokens"] == 16
    assert usage["total_tokens"] == usage["prompt_tokens"] + 16


def test_an_end_id_at_the_limit_is_a_stop(pipeline: Pipeline) -> None:
    sink = run(pipeline, body({"token_ids": [[32], [33, END_ID]]}, max_tokens=3))
    assert (sink.text, sink.finish_reasons) == ("01", ["stop"])
    assert sink.events[-1]["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_last_message_without_tokens_carries_the_reason(pipeline: Pipeline, stream: bool) -> None:
    """Case S11."""
    sink = run(pipeline, body({"token_ids": [[32], [33], []]}, stream=stream))
    assert (sink.text, sink.finish_reasons) == ("01", ["stop"])


def test_an_answer_without_tokens(pipeline: Pipeline) -> None:
    sink = run(pipeline, body({"token_ids": [[]]}, stream=True))
    assert [event["choices"][0]["delta"] for event in sink.events] == [{"role": "assistant", "content": ""}]
    assert sink.finish_reasons == ["stop"]
    assert sink.events[-1]["rt"]["ttft_ms"] is None


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_answer_and_generation(pipeline: Pipeline, engines: InProcessEngines, stream: bool) -> None:
    """Case S05."""
    script = {"text": "ABCDEFGHIJK" + "x" * 1000, "per_char": True, "itl_ms": 1}
    sink = run(pipeline, body(script, stop=["DEFGHIJ"], stream=stream))
    assert (sink.text, sink.finish_reasons) == ("ABC", ["stop"])
    assert engines.stopped == [engines.requests[0].request_id]
    assert sink.events[-1]["rt"]["tokens"] == 10


def test_text_is_held_only_while_it_could_begin_a_stop(pipeline: Pipeline) -> None:
    """Case S07."""
    sink = run(pipeline, body({"text": "I am fine"}, stop=["\n\nHuman:"], stream=True))
    deltas = [event["choices"][0]["delta"].get("content") for event in sink.events]
    assert deltas == ["I", " am", " fine", None]


def test_what_was_held_comes_when_the_answer_ends(pipeline: Pipeline) -> None:
    sink = run(pipeline, body({"text": "the END", "per_char": True}, stop=["END!"], stream=True))
    assert (sink.text, sink.finish_reasons) == ("the END", ["stop"])


@pytest.mark.parametrize("stop", [None, "three", ["wo t", " three"], ["never"], [".", "!"]])
def test_streamed_and_whole_are_the_same_text(pipeline: Pipeline, stop: Any) -> None:
    """Case S09."""
    script = {"text": "One two three. 深度 👩‍👩‍👧‍👦!", "per_char": True}
    streamed = run(pipeline, body(script, stop=stop, stream=True))
    whole = run(pipeline, body(script, stop=stop, stream=False))
    assert streamed.text == whole.text
    assert streamed.finish_reasons == whole.finish_reasons == ["stop"]
    assert len(whole.events) == 1
    for text in [stop] if isinstance(stop, str) else stop or []:
        assert text not in whole.text


def test_usage_only_when_asked_for(pipeline: Pipeline) -> None:
    """Cases S13 and S14."""
    plain = run(pipeline, body({"text": "a b"}, stream=True))
    assert all("usage" not in event and event["choices"] for event in plain.events)
    asked = run(pipeline, body({"text": "a b"}, stream=True, stream_options={"include_usage": True}))
    assert [event["usage"] is None for event in asked.events] == [True] * (len(asked.events) - 1) + [False]
    assert [len(event["choices"]) for event in asked.events] == [1] * (len(asked.events) - 1) + [0]


# --- several choices, completions, log probabilities ---------------------------------------------------------


def choices_of(sink: RecordingSink) -> dict[int, tuple[str, list[str]]]:
    """Text and finish reasons by index."""
    found: dict[int, tuple[str, list[str]]] = {}
    for event in sink.events:
        for choice in event["choices"]:
            text, reasons = found.get(choice["index"], ("", []))
            part = choice.get("delta") or choice.get("message") or {}
            reasons = reasons + [choice["finish_reason"]] * (choice["finish_reason"] is not None)
            found[choice["index"]] = text + (part.get("content") or ""), reasons
    return found


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("stream", [True, False])
def test_two_choices(pipeline: Pipeline, engines: InProcessEngines, stream: bool, include_usage: bool) -> None:
    """Case S16."""
    options = {"stream_options": {"include_usage": True}} if include_usage and stream else {}
    sink = run(pipeline, body({"text": "One two three."}, n=2, seed=7, stream=stream, **options))
    assert choices_of(sink) == dict.fromkeys((0, 1), ("One two three.", ["stop"]))
    assert [request.seed for request in engines.requests] == [7, 8]
    assert len({request.request_id for request in engines.requests}) == 2
    assert ["rt" in event for event in sink.events] == [False] * (len(sink.events) - 1) + [True]
    assert sink.events[-1]["rt"]["tokens"] == 8
    if include_usage or not stream:
        assert sink.events[-1]["usage"]["completion_tokens"] == 8


def test_one_of_several_choices_that_fails_ends_them_all(pipeline: Pipeline, engines: InProcessEngines) -> None:
    engines.fail_from = 2
    try:
        error, sink = failure(pipeline, body({"text": "x " * 500, "itl_ms": 10}, n=3, stream=True, max_tokens=500))
    finally:
        engines.fail_from = None
    assert isinstance(error, EngineError)
    assert set(engines.stopped) >= {request.request_id for request in engines.requests[:2]}
    assert all(not reasons for _, reasons in choices_of(sink).values())


def test_cancelling_ends_all_choices(pipeline: Pipeline, engines: InProcessEngines) -> None:
    request_body = body({"text": "x " * 500, "itl_ms": 10}, n=3, stream=True, max_tokens=500)
    sink = cancel_when(pipeline, request_body, lambda sink: len(choices_of(sink)) == 3)
    assert isinstance(sink.error, CancelledError)
    assert set(engines.stopped) == {request.request_id for request in engines.requests}


@pytest.mark.parametrize("stream", [True, False])
def test_a_completion(pipeline: Pipeline, engines: InProcessEngines, tokenizer: Tokenizer, stream: bool) -> None:
    prompt = '#script {"text": "One two three."}'
    for asked in (prompt, tokenizer.encode(prompt, add_special_tokens=False).ids):
        sink = run(pipeline, json.dumps({"prompt": asked, "stream": stream, "max_tokens": 2}).encode())
        assert tokenizer.decode(engines.requests[-1].input_ids) == prompt  # no chat template
        assert {event["object"] for event in sink.events} == {"text_completion"}
        assert "".join(choice["text"] for event in sink.events for choice in event["choices"]) == "One two"
        assert sink.finish_reasons == ["length"]


def test_log_probs_follow_their_text(pipeline: Pipeline) -> None:
    script = {"text": "A 💡 is lit.\nEND", "log_probs": [-0.5, -0.25]}
    streamed = run(pipeline, body(script, stop="END", logprobs=True, stream=True))
    whole = run(pipeline, body(script, stop="END", logprobs=True))
    (choice,) = whole.events[0]["choices"]
    entries = choice["logprobs"]["content"]
    deltas = [event["choices"][0]["logprobs"] for event in streamed.events]
    assert [entry for delta in deltas if delta for entry in delta["content"]] == entries
    assert [entry["logprob"] for entry in entries[:2]] == [-0.5, -0.25]
    # What can be told joins to the text; part of a character cannot.
    parts = [entry["token"] for entry in entries if entry["bytes"] is not None]
    assert "".join(parts) == choice["message"]["content"] == "A 💡 is lit.\n"
    assert any(entry["bytes"] is None for entry in entries)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_log_probs_are_json_whatever_the_engine_says(pipeline: Pipeline, kind: str, stream: bool) -> None:
    """Minus infinity, of a token that sampling left out, is what OpenAI and vLLM write for next to impossible."""
    script = '#script {"text": "a b c d e", "log_probs": [-Infinity, NaN, -1e39, Infinity, -0.5]}'
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": script}], "logprobs": True}
    if kind == "completion":
        asked = {"prompt": script, "logprobs": 0}
    sink = run(pipeline, json.dumps({**asked, "stream": stream}).encode())
    assert sink.error is None
    got = [choice["logprobs"] for event in sink.events for choice in event["choices"] if choice["logprobs"]]
    if kind == "chat":
        numbers = [entry["logprob"] for each in got for entry in each["content"]]
    else:
        numbers = [number for each in got for number in each["token_logprobs"]]
    assert numbers == [-9999.0, -9999.0, -9999.0, -9999.0, -0.5]


def test_no_log_probs_unless_asked_for(pipeline: Pipeline, engines: InProcessEngines) -> None:
    sink = run(pipeline, body({"text": "a b"}))
    assert sink.events[0]["choices"][0]["logprobs"] is None
    assert not engines.requests[0].log_probs


# --- guided decoding and tools -------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "guide_type", "guide"),
    [
        ({}, None, None),
        ({"response_format": {"type": "json_object"}}, "json", None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "json_schema",
            json.dumps(SCHEMA),
        ),
        ({"guided_regex": "[0-9]+"}, "regex", "[0-9]+"),
    ],
)
def test_the_engine_hears_what_the_text_must_match(
    pipeline: Pipeline, engines: InProcessEngines, fields: dict[str, Any], guide_type: str | None, guide: str | None
) -> None:
    run(pipeline, body({"text": "5"}, **fields))
    assert (engines.requests[0].guide_type, engines.requests[0].guide) == (guide_type, guide)


def test_a_guide_that_the_engine_has_no_time_for_is_not(pipeline: Pipeline, engines: InProcessEngines) -> None:
    engines.refusal = "guided_decoding_guide: 4 new guides are being tried, which is the limit; try again later"
    try:
        error, _ = failure(pipeline, body({"text": "5"}, guided_regex="a"))
    finally:
        engines.refusal = None
    assert isinstance(error, OverloadedError)


def test_a_token_id_that_the_engine_refuses_is_the_callers_fault(pipeline: Pipeline, engines: InProcessEngines) -> None:
    engines.refusal = "input_ids: ids must be 0 to 9"
    try:
        error, _ = failure(pipeline, json.dumps({"prompt": [10]}).encode())
    finally:
        engines.refusal = None
    assert isinstance(error, InvalidRequestError)
    assert (error.message, error.param) == ("prompt: ids must be 0 to 9", "prompt")


def test_a_guide_that_the_engine_refuses_is_the_callers_fault(pipeline: Pipeline, engines: InProcessEngines) -> None:
    engines.refusal = "guided_decoding_guide: not a schema"
    try:
        error, _ = failure(pipeline, body({"text": "5"}, guided_regex="a"))
    finally:
        engines.refusal = None
    assert isinstance(error, InvalidRequestError)
    assert (error.message, error.param) == ("guided_regex: not a schema", "guided_regex")


HERMES = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
LLAMA = '{"name": "get_weather", "parameters": {"city": "Oslo"}}'


def calls_of(sink: RecordingSink) -> list[tuple[str, str]]:
    calls: list[list[str]] = []
    for event in sink.events:
        for choice in event["choices"]:
            for call in (choice.get("delta") or choice.get("message") or {}).get("tool_calls") or []:
                if "id" in call:
                    calls.append([call["function"]["name"], ""])
                calls[-1][1] += call["function"]["arguments"]
    return [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("model", "text"), [("medium", f"Let me see. {HERMES}"), ("complex", LLAMA)])
def test_tool_calls(pipeline: Pipeline, model: str, text: str, stream: bool) -> None:
    sink = run(pipeline, body({"text": text}, model=model, tools=TOOLS, stream=stream))
    assert calls_of(sink) == [("get_weather", '{"city": "Oslo"}')]
    assert sink.finish_reasons == ["tool_calls"]
    assert sink.text == ("Let me see." if model == "medium" else "")


def test_arguments_stream_as_they_are_written(pipeline: Pipeline) -> None:
    sink = run(pipeline, body({"text": HERMES, "per_char": True}, model="medium", tools=TOOLS, stream=True))
    assert calls_of(sink) == [("get_weather", '{"city": "Oslo"}')]
    assert sum("tool_calls" in event["choices"][0]["delta"] for event in sink.events) > 10


@pytest.mark.parametrize("stream", [True, False])
def test_without_parallel_calls_the_first_one_ends_it(
    pipeline: Pipeline, engines: InProcessEngines, stream: bool
) -> None:
    text = f"{HERMES}{HERMES} and much more" * 20
    fields: dict[str, Any] = {"model": "medium", "tools": TOOLS, "stream": stream}
    assert len(calls_of(run(pipeline, body({"text": text}, **fields)))) > 1
    sink = run(pipeline, body({"text": text}, parallel_tool_calls=False, **fields))
    assert calls_of(sink) == [("get_weather", '{"city": "Oslo"}')]
    assert (sink.finish_reasons, sink.text) == (["tool_calls"], "")
    assert engines.stopped == [engines.requests[-1].request_id]


BROKEN = HERMES.replace('"Oslo"', "NaN")


def test_a_whole_answer_has_no_broken_call(pipeline: Pipeline) -> None:
    sink = run(pipeline, body({"text": BROKEN}, model="medium", tools=TOOLS))
    assert (sink.text, calls_of(sink), sink.finish_reasons) == (BROKEN, [], ["stop"])


@pytest.mark.parametrize("text", [BROKEN, HERMES.partition("Oslo")[0]], ids=["broken", "cut"])
def test_a_call_that_streamed_and_is_broken_is_an_error(pipeline: Pipeline, text: str) -> None:
    error, sink = failure(pipeline, body({"text": text, "per_char": True}, model="medium", tools=TOOLS, stream=True))
    assert isinstance(error, EngineError)
    assert error.message.endswith("; ask again")
    assert sink.finish_reasons == []


def test_a_streamed_call_cut_at_the_limit_is_no_error(pipeline: Pipeline) -> None:
    script = {"text": HERMES, "per_char": True}
    sink = run(pipeline, body(script, model="medium", tools=TOOLS, stream=True, max_tokens=60))
    assert sink.finish_reasons == ["length"]
    assert calls_of(sink)[0][1].startswith('{"ci')


@pytest.mark.parametrize(
    ("stream", "text", "calls"), [(True, "", [("get_weather", '{"city": "')]), (False, HERMES.partition("Oslo")[0], [])]
)
def test_a_stop_string_inside_of_a_call_ends_the_text(
    pipeline: Pipeline, stream: bool, text: str, calls: list[tuple[str, str]]
) -> None:
    script = {"text": HERMES, "per_char": True}
    sink = run(pipeline, body(script, model="medium", tools=TOOLS, stop="Oslo", stream=stream))
    assert (sink.finish_reasons, sink.text, calls_of(sink)) == (["stop"], text, calls)


def test_strict_calls_are_those_that_are_forced(pipeline: Pipeline) -> None:
    tool = {"type": "function", "function": {"name": "search", "strict": True, "parameters": {"type": "object"}}}
    error, _ = failure(pipeline, body({"text": "x"}, model="medium", tools=[TOOLS[1], tool]))
    assert isinstance(error, InvalidRequestError)
    assert error.param == "tools[1].function.strict"
    forced = '{"name": "search", "arguments": {}}'
    sink = run(pipeline, body({"text": forced}, model="medium", tools=[tool], tool_choice="required"))
    assert calls_of(sink) == [("search", "{}")]


def test_a_token_id_outside_of_the_vocabulary(pipeline: Pipeline, engines: InProcessEngines) -> None:
    error, _ = failure(pipeline, json.dumps({"prompt": [5, 49152]}).encode())
    assert isinstance(error, InvalidRequestError)
    assert error.message == "prompt[1]: token ids are integers from 0 to 49151 (got 49152)"
    assert (error.param, engines.requests) == ("prompt[1]", [])


def test_a_name_that_the_template_ignores(pipeline: Pipeline) -> None:
    messages = [{"role": "user", "content": "Hi", "name": "Bob"}]
    error, _ = failure(pipeline, json.dumps({"messages": messages}).encode())
    assert error.param == "messages[0].name"


def test_a_huge_model_name_is_shortened(pipeline: Pipeline) -> None:
    error, _ = failure(pipeline, body(model="m" * 900_000))
    assert len(error.message) < 300


@pytest.mark.parametrize(
    "fields", [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": [TOOLS[1]]}, {"tools": [], "model": "medium"}]
)
def test_without_the_offer_it_is_text(pipeline: Pipeline, fields: dict[str, Any]) -> None:
    sink = run(pipeline, body({"text": HERMES}, **{"model": "medium", **fields}))
    assert (sink.text, sink.finish_reasons) == (HERMES, ["stop"])


def test_a_forced_call_is_guided(pipeline: Pipeline, engines: InProcessEngines) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    text = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
    sink = run(pipeline, body({"text": text}, model="medium", tools=TOOLS, tool_choice=choice))
    assert calls_of(sink) == [("get_weather", '{"city": "Oslo"}')]
    assert json.loads(engines.requests[0].guide or "") == {
        "type": "object",
        "properties": {"name": {"const": "get_weather"}, "arguments": {}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        "$defs": {"City": {"type": "string"}},
    }
    run(pipeline, body({"text": text}, model="complex", tools=TOOLS, tool_choice="required"))
    guide = json.loads(engines.requests[1].guide or "")
    assert [call["properties"]["name"]["const"] for call in guide["anyOf"]] == ["get_weather", "search"]


def test_definitions_of_forced_calls_move_to_the_root(pipeline: Pipeline, engines: InProcessEngines) -> None:
    parameters = {"definitions": {"City": {"type": "string"}}, "properties": {"city": {"$ref": "#/definitions/City"}}}
    older = {"type": "function", "function": {"name": "p", "parameters": parameters}}
    text = '{"name": "p", "arguments": {"city": "Oslo"}}'
    run(pipeline, body({"text": text}, model="medium", tools=[TOOLS[0], older], tool_choice="required"))
    guide = json.loads(engines.requests[0].guide or "")
    assert guide["definitions"] == guide["$defs"] == {"City": {"type": "string"}}
    assert "definitions" not in guide["anyOf"][1]["properties"]["arguments"]


def test_tools_whose_definitions_clash_cannot_be_forced(pipeline: Pipeline) -> None:
    other = {"type": "function", "function": {"name": "o", "parameters": {"$defs": {"City": {"type": "integer"}}}}}
    error, _ = failure(pipeline, body({}, model="medium", tools=[*TOOLS, other], tool_choice="required"))
    assert (error.message, error.param) == ("tools: two of them define $defs 'City' differently", "tools")


CALL = {"id": "c", "type": "function", "function": {"name": "search", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}]}, "messages[0].role"),
    ],
)
def test_a_model_without_a_tool_parser_says_so(
    pipeline: Pipeline, engines: InProcessEngines, fields: dict[str, Any], param: str
) -> None:
    error, _ = failure(pipeline, body(model="simple", **fields))
    assert isinstance(error, InvalidRequestError)
    assert "the model 'llm_small' has no tool parser" in error.message
    assert (error.param, engines.requests) == (param, [])


def test_what_a_template_reads_of_a_message() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "search", "arguments": '{"q": 1}'}}
    rows = [
        ({"role": "developer", "content": "d"}, {"role": "system", "content": "d"}),
        ({"role": "user", "content": "u", "name": "Ann"}, {"role": "user", "content": "u", "name": "Ann"}),
        (
            {"role": "assistant", "tool_calls": [call]},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{**call, "function": {"name": "search", "arguments": {"q": 1}}}],
            },
        ),
        (
            {"role": "tool", "content": "r", "tool_call_id": "c"},
            {"role": "tool", "content": "r", "tool_call_id": "c"},
        ),
    ]
    for given_row, wanted in rows:
        assert template_message(Message.model_validate(given_row)) == wanted


# --- failures ------------------------------------------------------------------------------------------------


def test_an_engine_error_before_tokens(pipeline: Pipeline) -> None:
    error, sink = failure(pipeline, body({"text": "x", "fail_after": 0}, stream=True))
    assert isinstance(error, EngineError)
    assert error.message == "the script says fail"
    assert sink.events == []


def test_every_call_is_counted_by_its_end_and_has_one_line(
    artifact: Callable[[str], Path], shared_engines: InProcessEngines, caplog: pytest.LogCaptureFixture
) -> None:
    root = artifact("scripted")
    pipeline = Pipeline(load_tiers(root / "tiers.toml"), root, shared_engines)
    with caplog.at_level(logging.INFO, "orchestrator.requests"):
        for request_id, request in (
            ("a", body({"text": "x"})),
            ("b", body({"text": "x"}, stream=True)),
            ("c", body({"text": "x", "fail_after": 0})),
            ("d", b"{}"),
        ):
            asyncio.run(pipeline.run(Call(request, {"x-request-id": request_id}, RecordingSink())))
        refused = RecordingSink()
        pipeline.refuse(Call(b"?", {"x-request-id": "e"}, refused), OverloadedError("too many"))
        pipeline.refuse(Call(b"?", {"x-request-id": "not for a log\n"}, RecordingSink()), OverloadedError("too many"))
    assert isinstance(refused.error, OverloadedError)
    lines = [line for line in map(json.loads, caplog.messages) if line["event"] == "request"]
    ends = ["ok", "ok", "engine_error", "invalid_value", "overloaded", "overloaded"]
    assert [line["x_request_id"] for line in lines] == ["a", "b", "c", "d", "e", None]
    assert [line["outcome"] for line in lines] == ends
    assert pipeline.outcomes == Counter(ends)


def test_without_instrumentation_nothing_is_noted(
    artifact: Callable[[str], Path], shared_engines: InProcessEngines, caplog: pytest.LogCaptureFixture
) -> None:
    root, sink = artifact("scripted"), RecordingSink()
    pipeline = Pipeline(load_tiers(root / "tiers.toml"), root, shared_engines, is_instrumented=False)
    with caplog.at_level(logging.INFO, "orchestrator.requests"):
        asyncio.run(pipeline.run(Call(body({"text": "x"}), {}, sink)))
    assert sink.text == "x" and sink.events[-1]["rt"]["tokens"] == 1
    assert (caplog.messages, pipeline.outcomes, pipeline.latencies.total.counts) == ([], Counter(), {})


@pytest.mark.parametrize("how", ["fail_after", "die_after"])
def test_an_engine_error_after_tokens_is_no_clean_end(
    pipeline: Pipeline, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Case S18."""
    with caplog.at_level(logging.INFO, "orchestrator.requests"):
        error, sink = failure(pipeline, body({"text": "a b c d e f g h", how: 5}, stream=True))
    assert isinstance(error, EngineError)
    assert sink.text == "a b c d e"
    assert sink.finish_reasons == []
    assert json.loads(caplog.messages[-1])["outcome"] == "engine_error"
    assert json.loads(caplog.messages[-1])["tokens"] == 5


def test_a_wrong_script_is_the_engines_refusal(pipeline: Pipeline) -> None:
    error, _ = failure(pipeline, body({"txt": "x"}))
    assert "the prompt's script is wrong" in error.message


@pytest.mark.parametrize("request_body", [b"", b"{}", body(max_tokens=0), body(model="simple", tools=TOOLS)])
def test_a_refused_request(pipeline: Pipeline, engines: InProcessEngines, request_body: bytes) -> None:
    error, sink = failure(pipeline, request_body)
    assert isinstance(error, InvalidRequestError)
    assert (sink.events, engines.requests) == ([], [])


def test_a_fault_of_ours_says_little_and_stops_the_engine(
    pipeline: Pipeline, engines: InProcessEngines, caplog: pytest.LogCaptureFixture
) -> None:
    class BrokenSink(RecordingSink):
        def send(self, event: str, *, final: bool) -> None:
            raise RuntimeError("a secret")

    sink = BrokenSink()
    started_s = time.monotonic()
    asyncio.run(pipeline.run(Call(body({"text": "x " * 500, "itl_ms": 20}, stream=True), {}, sink)))
    assert sink.num_ends == 1
    assert isinstance(sink.error, InternalError)
    assert sink.error.message == "the orchestrator failed: RuntimeError"
    assert "a secret" in caplog.text  # the log has it
    assert engines.stopped == [engines.requests[0].request_id]
    assert time.monotonic() - started_s < 5


def test_the_log_has_the_callers_name_for_a_request(pipeline: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "orchestrator.requests"):
        asyncio.run(pipeline.run(Call(body({"text": "x"}), {"x-request-id": "abc-1"}, RecordingSink())))
    assert json.loads(caplog.messages[-1])["x_request_id"] == "abc-1"


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "line\nbreak"])
def test_a_name_that_could_not_go_into_a_log_is_refused(
    pipeline: Pipeline, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    sink = RecordingSink()
    with caplog.at_level(logging.INFO, "orchestrator.requests"):
        asyncio.run(pipeline.run(Call(body({"text": "x"}), {"x-request-id": name}, sink)))
    assert sink.error is not None
    assert sink.error.param == "x-request-id"
    assert json.loads(caplog.messages[-1])["x_request_id"] is None


# --- cancelling ----------------------------------------------------------------------------------------------


def cancel_when(pipeline: Pipeline, request_body: bytes, ready: Callable[[RecordingSink], object]) -> RecordingSink:
    """Start a call, cancel it when `ready` says so, and wait for its end."""
    sink = RecordingSink()
    call = Call(request_body, {}, sink)

    async def cancel() -> None:
        running = asyncio.create_task(pipeline.run(call))
        while not ready(sink):
            await asyncio.sleep(0.001)
        for _ in range(3):  # repeated, as the watcher does
            await call.cancel()
        await asyncio.wait_for(running, 5)

    asyncio.run(cancel())
    assert sink.num_ends == 1
    return sink


def test_cancelled_before_it_began(pipeline: Pipeline, engines: InProcessEngines) -> None:
    sink = RecordingSink()
    call = Call(body({"text": "x"}), {}, sink)
    asyncio.run(call.cancel())
    asyncio.run(pipeline.run(call))
    assert isinstance(sink.error, CancelledError)
    assert (sink.events, engines.requests) == ([], [])


@pytest.mark.parametrize("stream", [True, False])
def test_cancelled_in_prefill(pipeline: Pipeline, engines: InProcessEngines, stream: bool) -> None:
    started_s = time.monotonic()
    sink = cancel_when(pipeline, body({"text": "x", "first_token_ms": 5000}, stream=stream), lambda _: engines.requests)
    assert time.monotonic() - started_s < 2
    assert isinstance(sink.error, CancelledError)
    assert set(engines.stopped) == {engines.requests[0].request_id}


def test_cancelled_while_it_streams(
    pipeline: Pipeline, engines: InProcessEngines, caplog: pytest.LogCaptureFixture
) -> None:
    request_body = body({"text": "x " * 1000, "itl_ms": 5}, stream=True, max_tokens=1000)
    with caplog.at_level(logging.INFO, "orchestrator.requests"):
        sink = cancel_when(pipeline, request_body, lambda sink: sink.events)
    assert isinstance(sink.error, CancelledError)
    assert sink.finish_reasons == []
    settled = json.loads(caplog.messages[-1])
    assert settled["outcome"] == "cancelled"
    assert 1 <= settled["tokens"] < 100


def test_cancelled_after_its_end_is_nothing(pipeline: Pipeline, engines: InProcessEngines) -> None:
    sink = RecordingSink()
    call = Call(body({"text": "x"}), {}, sink)
    asyncio.run(pipeline.run(call))
    asyncio.run(call.cancel())
    assert sink.num_ends == 1
    assert sink.error is None
    assert engines.stopped == []


# --- tiers and the engine's share of a request ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "tier"), [("auto", "simple"), ("medium", "medium"), ("expert", "expert"), ("llm_small", "simple")]
)
def test_the_model_names_the_tier(pipeline: Pipeline, model: str, tier: str) -> None:
    assert run(pipeline, body(model=model)).events[-1]["rt"]["tier"] == tier


def test_a_model_that_does_not_exist(pipeline: Pipeline) -> None:
    error, _ = failure(pipeline, body(model="gpt-4"))
    assert isinstance(error, ModelNotFoundError)
    assert error.message == ("model: 'gpt-4' does not exist; one of auto, simple, llm_small, medium, complex, expert")
    assert error.param == "model"


TIER = Tier(
    name="simple",
    model="llm_small",
    tokenizer="t",
    context_window=100,
    end_id=END_ID,
    pad_id=2,
    input_price_per_million_tokens=0.0,
    output_price_per_million_tokens=0.0,
    generation=Generation(max_output_tokens=40, temperature=0.2, top_p=0.9),
)


def engine_request(num_input_ids: int = 10, **fields: Any) -> EngineRequest:
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}], **fields})
    return build_engine_request(request, TIER, [5] * num_input_ids, None)


@pytest.mark.parametrize(
    ("num_input_ids", "fields", "expected"),
    [
        (10, {}, {"max_new_tokens": 40, "temperature": 0.2, "top_p": 0.9, "sample": True, "end_id": END_ID}),
        (80, {}, {"max_new_tokens": 20}),  # what the window has left
        (99, {}, {"max_new_tokens": 1}),
        (10, {"max_tokens": 90}, {"max_new_tokens": 90}),
        (10, {"max_completion_tokens": 6}, {"max_new_tokens": 6}),
        (10, {"temperature": 0.0}, {"sample": False}),
        (10, {"temperature": 1e-5}, {"sample": False}),
        (10, {"temperature": 1.5, "top_p": 0.5, "top_k": 7}, {"temperature": 1.5, "top_p": 0.5, "top_k": 7}),
        (10, {"ignore_eos": True, "min_tokens": 3, "seed": 9}, {"end_id": None, "min_tokens": 3, "seed": 9}),
        (10, {"presence_penalty": 1.0}, {"presence_penalty": 1.0, "frequency_penalty": 0.0}),
    ],
)
def test_the_engines_share(num_input_ids: int, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    request = engine_request(num_input_ids, **fields)
    assert {name: getattr(request, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("num_input_ids", "fields", "param", "message"),
    [
        (
            100,
            {},
            "messages",
            "the prompt's 100 tokens and an answer of up to 1 are more than the context window of 100",
        ),
        (10, {"max_tokens": 91}, "max_tokens", "the prompt's 10 tokens and an answer of up to 91 are more than"),
        (
            10,
            {"max_completion_tokens": 2**31 - 1},
            "max_completion_tokens",
            "max_completion_tokens: the prompt's 10 tokens and an answer of up to 2147483647 are more than",
        ),
        (150, {"max_tokens": 5}, "messages", "shorten the messages or lower max_tokens"),
        (10, {"min_tokens": 41}, "min_tokens", "min_tokens: 41 is more than the answer's limit of 40 tokens"),
    ],
)
def test_what_does_not_fit_is_refused_with_counts(
    num_input_ids: int, fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError) as got:
        engine_request(num_input_ids, **fields)
    assert message in got.value.message
    assert got.value.param == param


def test_every_request_has_an_id_of_its_own() -> None:
    assert len({engine_request().request_id for _ in range(100)}) == 100


def test_tiers_of_one_tokenizer_load_it_once(
    tmp_path: Path, engines: InProcessEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, text in (("t", "a"), ("t2", "a"), ("t3", "b")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokenizer.json").write_text(text)
    loaded: list[Path] = []
    monkeypatch.setattr("orchestrator.dispatch.ChatTokenizer.load", loaded.append)
    other = TIER.model_copy(update={"name": "other"})
    third = TIER.model_copy(update={"name": "third", "tokenizer": "t3"})
    same = TIER.model_copy(update={"name": "same", "tokenizer": "t2"})
    Pipeline(Tiers(tier=[TIER, other, third, same], limits=Limits()), tmp_path, engines)
    assert len(loaded) == 2 and tmp_path / "t3" in loaded


@pytest.mark.parametrize(
    ("num_tokens", "ttft_s", "total_s", "tps"),
    [(0, None, 1.0, None), (1, 0.5, 1.0, None), (11, 0.5, 1.5, 10.0), (2, 1.0, 1.0, None)],
)
def test_tokens_per_second(num_tokens: int, ttft_s: float | None, total_s: float, tps: float | None) -> None:
    assert tokens_per_second(num_tokens, ttft_s, total_s) == tps
