"""OpenAI's objects, letter by letter."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.streaming.chunks import ChunkWriter, Usage

HEAD = '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m"'


def writer(*, include_usage: bool = False) -> ChunkWriter:
    return ChunkWriter("chatcmpl-1", 1700000000, "m", include_usage=include_usage)


def test_a_stream_without_usage() -> None:
    """Case S13: no usage chunk and no empty choices."""
    chunks = writer()
    assert [chunks.delta("Hi"), chunks.delta(' "x"\n')] == [
        HEAD + ',"choices":[{"index":0,"delta":{"role":"assistant","content":"Hi"},'
        '"logprobs":null,"finish_reason":null}]}',
        HEAD + r',"choices":[{"index":0,"delta":{"content":" \"x\"\n"},'
        '"logprobs":null,"finish_reason":null}]}',
    ]
    assert chunks.ending("stop", Usage(3, 2), {"tier": "simple"}) == [
        HEAD + ',"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}],"rt":{"tier":"simple"}}'
    ]


def test_a_stream_with_usage() -> None:
    """Case S14: usage is null in every chunk but the last, which has no choices."""
    chunks = writer(include_usage=True)
    assert chunks.delta("Hi").endswith('"finish_reason":null}],"usage":null}')
    assert chunks.ending("length", Usage(3, 2), {"tier": "simple"}) == [
        HEAD + ',"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}],"usage":null}',
        HEAD + ',"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5},'
        '"rt":{"tier":"simple"}}',
    ]


def test_an_empty_answer_still_has_its_role() -> None:
    (last,) = writer().ending("stop", Usage(3, 0), {})
    assert json.loads(last)["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_a_whole_answer() -> None:
    assert writer().completion("Hé", "stop", Usage(3, 2), {"tier": "simple"}) == (
        '{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"m",'
        '"choices":[{"index":0,"message":{"role":"assistant","content":"Hé","refusal":null},'
        '"logprobs":null,"finish_reason":"stop"}],'
        '"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5},"rt":{"tier":"simple"}}'
    )


@given(texts=st.lists(st.text(), min_size=1), include_usage=st.booleans())
def test_every_text_survives_and_the_role_comes_once(texts: list[str], include_usage: bool) -> None:
    chunks = writer(include_usage=include_usage)
    deltas = [json.loads(chunks.delta(text))["choices"][0]["delta"] for text in texts]
    assert [delta["content"] for delta in deltas] == texts
    assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(texts) - 1)]


@given(text=st.text())
def test_an_event_is_one_line(text: str) -> None:
    """A line break inside an event would cut its SSE frame."""
    event = writer().delta(text)
    assert not {"\n", "\r"} & set(event)
