"""OpenAI's objects, letter by letter."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.streaming.chunks import ChatWriter, Choice, CompletionWriter, Usage
from orchestrator.streaming.log_probs import TokenLogProb
from orchestrator.streaming.tool_calls import ToolCallDelta

HEAD = '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m"'


def writer(*, include_usage: bool = False) -> ChatWriter:
    return ChatWriter("1", 1700000000, "m", include_usage=include_usage)


def done(reason: str = "stop", **fields: Any) -> Choice:
    return Choice(0, finish_reason=reason, **fields)


LOG_PROBS = [TokenLogProb("Hé", -0.5), TokenLogProb("\ufffd", -1.0)]
CALLS = [
    ToolCallDelta(0, "call_1", "search", ""),
    ToolCallDelta(0, None, None, '{"q":'),
    ToolCallDelta(0, None, None, "1}"),
    ToolCallDelta(1, "call_2", "stop", "{}"),
]


def test_a_stream_without_usage() -> None:
    """Case S13: no usage chunk and no empty choices."""
    chunks = writer()
    assert [chunks.delta(0, "Hi", None), chunks.delta(0, ' "x"\n', None)] == [
        HEAD + ',"choices":[{"index":0,"delta":{"role":"assistant","content":"Hi"},'
        '"logprobs":null,"finish_reason":null}]}',
        HEAD + r',"choices":[{"index":0,"delta":{"content":" \"x\"\n"},'
        '"logprobs":null,"finish_reason":null}]}',
    ]
    assert chunks.finish(done(), {"tier": "simple"}) == (
        HEAD + ',"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}],"rt":{"tier":"simple"}}'
    )


def test_a_stream_with_usage() -> None:
    """Case S14: usage is null in every chunk but the last, which has no choices."""
    chunks = writer(include_usage=True)
    assert chunks.delta(0, "Hi", None).endswith('"finish_reason":null}],"usage":null}')
    assert chunks.finish(done("length"), None) == (
        HEAD + ',"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}],"usage":null}'
    )
    assert chunks.usage(Usage(3, 2), {"tier": "simple"}) == (
        HEAD + ',"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5},'
        '"rt":{"tier":"simple"}}'
    )


def test_an_empty_answer_still_has_its_role() -> None:
    last = writer().finish(done(), {})
    assert json.loads(last)["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_every_choice_has_its_role_once() -> None:
    chunks = writer()
    deltas = [json.loads(chunks.delta(index, "x", None))["choices"][0] for index in (1, 0, 1)]
    assert [(delta["index"], "role" in delta["delta"]) for delta in deltas] == [(1, True), (0, True), (1, False)]


def test_log_probs_ride_with_their_text() -> None:
    (choice,) = json.loads(writer().delta(0, "Hé", LOG_PROBS))["choices"]
    assert choice["logprobs"] == {
        "content": [
            {"token": "Hé", "logprob": -0.5, "bytes": [72, 195, 169], "top_logprobs": []},
            {"token": "\ufffd", "logprob": -1.0, "bytes": None, "top_logprobs": []},
        ],
        "refusal": None,
    }


def test_tool_calls_as_they_come_and_whole() -> None:
    chunks = writer()
    deltas = [json.loads(chunks.calls(0, [call]))["choices"][0]["delta"] for call in CALLS]
    assert deltas == [
        {
            "role": "assistant",
            "tool_calls": [
                {"index": 0, "id": "call_1", "type": "function", "function": {"name": "search", "arguments": ""}}
            ],
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"q":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {
            "tool_calls": [
                {"index": 1, "id": "call_2", "type": "function", "function": {"name": "stop", "arguments": "{}"}}
            ]
        },
    ]
    whole = json.loads(chunks.whole([done("tool_calls", calls=CALLS)], Usage(1, 1), {}))
    assert whole["choices"][0]["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": '{"q":1}'}},
            {"id": "call_2", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
        ],
    }


def test_a_whole_answer() -> None:
    assert writer().whole([done(pieces=["H", "é"])], Usage(3, 2), {"tier": "simple"}) == (
        '{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"m",'
        '"choices":[{"index":0,"message":{"role":"assistant","content":"Hé","refusal":null},'
        '"logprobs":null,"finish_reason":"stop"}],'
        '"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5},"rt":{"tier":"simple"}}'
    )


def test_a_completion_streamed_and_whole() -> None:
    chunks = CompletionWriter("1", 1700000000, "m", include_usage=True)
    head = '{"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"m"'
    assert chunks.delta(0, "Hé", None) == (
        head + ',"choices":[{"index":0,"text":"Hé","logprobs":null,"finish_reason":null}],"usage":null}'
    )
    (choice,) = json.loads(chunks.delta(0, "llo", [TokenLogProb("l", -0.5), TokenLogProb("lo", -1.0)]))["choices"]
    assert choice["logprobs"] == {
        "tokens": ["l", "lo"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": None,
        "text_offset": [2, 3],
    }
    assert chunks.finish(done("length"), None) == (
        head + ',"choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"length"}],"usage":null}'
    )
    assert chunks.usage(Usage(3, 2), {}) == (
        head + ',"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5},"rt":{}}'
    )
    whole = json.loads(chunks.whole([done(pieces=["H", "é"]), Choice(1, ["x"], finish_reason="stop")], Usage(3, 2), {}))
    assert [choice["text"] for choice in whole["choices"]] == ["Hé", "x"]
    assert whole["usage"]["total_tokens"] == 5


@given(texts=st.lists(st.text(), min_size=1), include_usage=st.booleans())
def test_every_text_survives_and_the_role_comes_once(texts: list[str], include_usage: bool) -> None:
    chunks = writer(include_usage=include_usage)
    deltas = [json.loads(chunks.delta(0, text, None))["choices"][0]["delta"] for text in texts]
    assert [delta["content"] for delta in deltas] == texts
    assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(texts) - 1)]


@given(text=st.text())
def test_an_event_is_one_line(text: str) -> None:
    """A line break inside an event would cut its SSE frame."""
    for make in (ChatWriter, CompletionWriter):
        event = make("1", 1700000000, "m", include_usage=False).delta(0, text, None)
        assert not {"\n", "\r"} & set(event)
