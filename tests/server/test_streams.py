"""Streams out of a real Triton, byte by byte, with an engine that answers as it is told."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from serving import CHAT_PATH, TARGET, Stack, script, wait_for

REPLACEMENT = "\ufffd"
TOOL = {"type": "function", "function": {"name": "get_weather"}}
NUM_TOKENS_OF_PROMPT = 20  # at least: the template's own


# --- the wire ------------------------------------------------------------------------------------------------


def test_the_bytes_of_a_stream(scripted_stack: Stack) -> None:
    body = {"messages": script(token_ids=[[32], [33], [2]], itl_ms=30), "stream": True}
    response = httpx.post(scripted_stack.url + CHAT_PATH, json=body, timeout=30)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["transfer-encoding"] == "chunked"
    assert "content-length" not in response.headers
    *frames, done, nothing = response.content.split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    events = [json.loads(frame.removeprefix(b"data: ")) for frame in frames]
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": "0"},
        {"content": "1"},
        {},
    ]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, "stop"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1


def test_a_token_comes_when_it_is_made(scripted_stack: Stack) -> None:
    """Nothing on the way collects tokens: with a token every 50 ms there is an event every 50 ms."""
    answer = scripted_stack.stream(messages=script(text="a b c d e f", itl_ms=50))
    assert answer.deltas == ["a", " b", " c", " d", " e", " f"]
    gaps_s = [later - earlier for earlier, later in zip(answer.came_s, answer.came_s[1:6])]
    assert sorted(gaps_s)[len(gaps_s) // 2] == pytest.approx(0.050, abs=0.015)
    assert answer.came_s[0] < 0.5


def test_a_whole_answer(scripted_stack: Stack) -> None:
    response = scripted_stack.post(messages=script(text="One two."))
    answer = response.json()
    assert response.headers["content-type"] == "application/json"
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "One two.", "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 3
    assert usage["prompt_tokens"] > NUM_TOKENS_OF_PROMPT
    assert usage["total_tokens"] == usage["prompt_tokens"] + 3
    assert answer["rt"]["tier"] == "simple"


def test_models_health_and_readiness(scripted_stack: Stack) -> None:
    models = scripted_stack.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == [
        "auto",
        "simple",
        "medium",
        "complex",
        "expert",
        "llm_small",
        *(["llm_large"] if TARGET else []),
        "embedding",
        "all-minilm-l6-v2",
        *(["ocr"] if TARGET else []),
    ]
    assert scripted_stack.get("/health").json() == {"status": "alive"}
    assert scripted_stack.get("/ready").json() == {"status": "ready"}


# --- text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["💡", "П", "an idea 💡, П!"])
@pytest.mark.parametrize("per_char", [False, True])
def test_no_broken_characters(scripted_stack: Stack, text: str, per_char: bool) -> None:
    """Case S01."""
    messages = script(text=text, per_char=per_char, itl_ms=10)
    answer = scripted_stack.stream(messages=messages)
    assert answer.text == text
    assert not any(REPLACEMENT in delta for delta in answer.deltas)
    assert scripted_stack.post(messages=messages).json()["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize(
    "text",
    [
        "深度学习 \n\n  两个空格",
        "ما هو التعلّم؟",
        "👩‍👩‍👧‍👦🏳️‍🌈👍🏽",
        'def f():\n\treturn "\\n"  # "quotes"\n',
        "<|im_end|> as text",
    ],
)
def test_streamed_and_whole_are_the_same_text(scripted_stack: Stack, text: str) -> None:
    messages = script(text=text)
    whole = scripted_stack.post(messages=messages).json()["choices"][0]["message"]["content"]
    assert scripted_stack.stream(messages=messages).text == whole


def test_a_stop_string_over_many_tokens(scripted_stack: Stack) -> None:
    """Case S05."""
    messages = script(text="ABCDEFGHIJK", per_char=True, itl_ms=5)
    answer = scripted_stack.stream(messages=messages, stop=["DEFGHIJ"])
    assert (answer.text, answer.finish_reason, answer.is_done) == ("ABC", "stop", True)
    scripted_stack.wait_until_idle()


def test_a_stop_string_delays_no_text_that_cannot_begin_it(scripted_stack: Stack) -> None:
    """Case S07."""
    answer = scripted_stack.stream(messages=script(text="I am fine", itl_ms=300), stop=["\n\nHuman:"])
    assert answer.deltas == ["I", " am", " fine"]
    assert answer.came_s[0] < 0.25


@pytest.mark.parametrize("stop", ["three", ["wo t", " three"], ["never"], ["<im_end>"]])
def test_stops_are_excluded_streamed_or_not(scripted_stack: Stack, stop: Any) -> None:
    """Cases S09 and V07."""
    request = {"messages": script(text="One two three <im_end> four", per_char=True), "stop": stop}
    streamed = scripted_stack.stream(**request)
    whole = scripted_stack.post(**request).json()["choices"][0]
    assert streamed.text == whole["message"]["content"]
    assert streamed.finish_reason == whole["finish_reason"] == "stop"
    for text in [stop] if isinstance(stop, str) else stop:
        assert text not in streamed.text


# --- endings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_max_tokens(scripted_stack: Stack, stream: bool) -> None:
    """Case S10."""
    request = {"messages": script(text="x " * 50), "max_tokens": 16}
    if stream:
        answer = scripted_stack.stream(**request, stream_options={"include_usage": True})
        reason, usage = answer.finish_reason, answer.events[-1]["usage"]
    else:
        body = scripted_stack.post(**request).json()
        reason, usage = body["choices"][0]["finish_reason"], body["usage"]
    assert reason == "length"
    assert usage["completion_tokens"] == 16


def test_a_last_message_without_tokens(scripted_stack: Stack) -> None:
    """Case S11."""
    answer = scripted_stack.stream(messages=script(token_ids=[[32], [33], []]))
    assert (answer.text, answer.finish_reason, answer.is_done) == ("01", "stop", True)


def test_no_usage_chunk_unless_asked_for(scripted_stack: Stack) -> None:
    """Case S13."""
    answer = scripted_stack.stream(messages=script(text="a b"))
    assert all("usage" not in event and len(event["choices"]) == 1 for event in answer.events)


def test_one_usage_chunk_when_asked_for(scripted_stack: Stack) -> None:
    """Case S14."""
    answer = scripted_stack.stream(messages=script(text="a b"), stream_options={"include_usage": True})
    *before, last = answer.events
    assert all(event["usage"] is None and len(event["choices"]) == 1 for event in before)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2
    assert answer.is_done


def test_an_error_after_tokens_is_an_error_event(scripted_stack: Stack) -> None:
    """Case S18: no finish reason, no [DONE], and the log calls it no success."""
    since = scripted_stack.log_length()
    answer = scripted_stack.stream(messages=script(text="a b c d e f g h", fail_after=5))
    assert answer.text == "a b c d e"
    assert answer.error is not None
    assert answer.error["code"] == "engine_error"
    assert answer.error["message"] == "the script says fail"
    assert (answer.finish_reason, answer.is_done) == (None, False)

    def failures() -> list[dict[str, Any]]:
        return [line for line in scripted_stack.logged("request", since) if line["outcome"] == "engine_error"]

    assert wait_for(failures)[0]["tokens"] == 5


@pytest.mark.parametrize("stream", [True, False])
def test_an_error_before_tokens_has_its_status(scripted_stack: Stack, stream: bool) -> None:
    response = scripted_stack.post(messages=script(text="a", fail_after=0), stream=stream)
    assert response.status_code == 502
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {
        "error": {"message": "the script says fail", "type": "server_error", "param": None, "code": "engine_error"}
    }


# --- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": script(text="x"), "prompt": ""}, "prompt"),  # case V04
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content"),
        ({"messages": script(text="x"), "prompt": ["a", "b"]}, "prompt"),
        ({"prompt": ["a", "b"]}, "messages"),
        ({"messages": script(text="x"), "max_tokens": 0}, "max_tokens"),  # case V01
        ({"messages": script(text="x"), "max_tokens": -5}, "max_tokens"),
        ({"messages": script(text="x"), "max_tokens": 9000}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x " * 9000}]}, "messages"),
        ({"model": "simple", "messages": script(text="x"), "tools": [TOOL]}, "tools"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_wrong_request_is_refused_by_field(
    scripted_stack: Stack, fields: dict[str, Any], param: str, stream: bool
) -> None:
    response = scripted_stack.post(**fields, stream=stream)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == param
    assert param in error["message"]
    assert error["type"] == "invalid_request_error"


def test_an_unknown_model(scripted_stack: Stack) -> None:
    response = scripted_stack.post(messages=script(text="x"), model="gpt-4")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_body_that_is_no_request(scripted_stack: Stack, body: bytes) -> None:
    response = httpx.post(
        scripted_stack.url + CHAT_PATH, content=body, headers={"content-type": "application/json"}, timeout=10
    )
    assert response.status_code == 400
    assert "the request" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-6},
        {"temperature": 2},
        {"top_p": 1e-6},
        {"top_k": 2**31 - 1},
        {"seed": 2**63 - 1},
        {"repetition_penalty": 0.01},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"min_tokens": 3, "max_tokens": 3},
        {"user": "someone", "n": 1},
        {"max_completion_tokens": 3},
    ],
)
def test_every_value_that_is_allowed_runs(scripted_stack: Stack, fields: dict[str, Any]) -> None:
    response = scripted_stack.post(messages=script(text="One."), **fields)
    assert response.status_code == 200, response.text


# --- many at once --------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_six_staggered_streams_have_their_first_tokens_alike(scripted_stack: Stack) -> None:
    def start(index: int) -> float:
        time.sleep(0.2 * index)
        # A tier by its name: the classifier takes longer than all the rest, and is another test's matter.
        return scripted_stack.stream(model="simple", messages=script(text="x " * 150, itl_ms=10)).came_s[0]

    with ThreadPoolExecutor(6) as pool:
        first_s = list(pool.map(start, range(6)))
    assert first_s[-1] < max(1.5 * first_s[0], 0.1), first_s


def test_64_streams_at_once_each_with_its_own_text(scripted_stack: Stack) -> None:
    texts = [f"Stream {index}: " + f"{index} " * 20 for index in range(64)]

    def run(text: str) -> tuple[str, str | None, bool]:
        answer = scripted_stack.stream(messages=script(text=text, itl_ms=5))
        return answer.text, answer.finish_reason, answer.is_done

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(run, texts))
    assert answers == [(text, "stop", True) for text in texts]
    scripted_stack.wait_until_idle()


# --- the official client -------------------------------------------------------------------------------------


@pytest.fixture
def client(scripted_stack: Stack) -> openai.OpenAI:
    with openai.OpenAI(
        base_url=f"{scripted_stack.url}/v1", api_key="none", timeout=httpx.Timeout(20.0), max_retries=0
    ) as client:
        yield client


def test_openai_client_streams(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="auto",
            messages=script(text="One two."),
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "One two."
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 3


def test_openai_client_whole(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="simple", messages=script(text="One two."), stop=["two"])
    assert answer.choices[0].message.content == "One "
    assert answer.choices[0].finish_reason == "stop"


def test_openai_client_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens") as got:
        client.chat.completions.create(model="auto", messages=script(text="x"), max_tokens=0)
    assert got.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.chat.completions.create(model="gpt-4", messages=script(text="x"))
    with pytest.raises(openai.APIError, match="the script says fail"):
        list(client.chat.completions.create(model="auto", messages=script(text="a b", fail_after=1), stream=True))


def test_openai_client_lists_models(client: openai.OpenAI) -> None:
    assert "auto" in [model.id for model in client.models.list()]
