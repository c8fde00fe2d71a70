"""A cloud tier through the pipeline, against an API on loopback: its answers, and every way it can fail."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_cloud import DONE, FakeCloud, Reply, answer, delta, event, fake_cloud, usage
from in_process import RecordingSink
from serving import wait_for

from orchestrator.call import Call
from orchestrator.cloud import create_cloud_client
from orchestrator.cloud.client import HttpCloudClient, read_retry_after
from orchestrator.cloud.events import parse_event
from orchestrator.cloud.generation import estimate_tokens
from orchestrator.config import ConfigError, Tier, Tiers
from orchestrator.errors import (
    ApiError,
    CancelledError,
    CloudError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
)
from orchestrator.pipeline import Pipeline

KEY = "sk-fake-4f1b2c"
PROMPT = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"a": None, "type": "object"}}}]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeCloud]:
    with fake_cloud() as cloud:
        yield cloud


@pytest.fixture
def cloud(server: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCloud:
    """The API, well, and with nothing counted; clients load no authorities, which takes 0.1 s each."""
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    server.reply, server.num_connections, server.num_left = Reply(answer("Hi")), 0, 0
    server.got.clear()
    return server


def make_tier(url: str, generation: dict[str, Any] | None = None, **fields: Any) -> Tier:
    table = {"base_url": url, "model": "vendor/large-1", "key_env": "FAKE_KEY", "connect_timeout_s": 0.5, **fields}
    return Tier.model_validate(
        {
            "name": "cloud",
            "model": "large",
            "context_window": 100_000,
            "input_price_per_million_tokens": 10.0,
            "output_price_per_million_tokens": 100.0,
            "generation": {"max_output_tokens": 40, **(generation or {})},
            "cloud": {"first_token_timeout_s": 1.0, "token_timeout_s": 0.5, **table},
        }
    )


async def serve(tier: Tier, bodies: list[bytes], watch: Callable[[Call, RecordingSink], Any] | None = None) -> Any:
    """One after the other, over one client."""
    client = HttpCloudClient([tier], {"FAKE_KEY": KEY})
    pipeline = Pipeline(Tiers(tier=[tier]), Path("nowhere"), _NoEngines(), client)
    sinks = []
    for body in bodies:
        sinks.append(RecordingSink())
        call = Call(body, {}, sinks[-1])
        running = asyncio.create_task(pipeline.run(call))
        if watch is not None:
            await watch(call, sinks[-1])
        await asyncio.wait_for(running, 10)
        assert sinks[-1].num_ends == 1
    await client.close()
    return sinks


class _NoEngines:
    """An `EngineClient` that must not be asked."""

    stream: Any = None
    stop: Any = None


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": PROMPT, "stream": True, **fields}).encode()


def run(cloud: FakeCloud, tier: Tier | None = None, **fields: Any) -> RecordingSink:
    sink: RecordingSink = asyncio.run(serve(tier or make_tier(cloud.url), [body(**fields)]))[0]
    return sink


def failure(cloud: FakeCloud, **fields: Any) -> tuple[ApiError, RecordingSink]:
    sink = run(cloud, **fields)
    assert sink.error is not None
    assert "tier 'cloud'" in sink.error.message
    assert KEY not in sink.error.message
    assert sink.finish_reasons == []
    return sink.error, sink


# --- answers -------------------------------------------------------------------------------------------------


def test_a_stream(cloud: FakeCloud) -> None:
    cloud.reply = Reply(answer("One", " two", " three."))
    sink = run(cloud)
    assert [choice["delta"].get("content") for each in sink.events for choice in each["choices"]] == [
        "One",
        " two",
        " three.",
        None,
    ]
    assert sink.finish_reasons == ["stop"]
    assert {each["model"] for each in sink.events} == {"large"}
    assert len({each["id"] for each in sink.events}) == 1 and sink.events[0]["id"] != "x"
    rt = sink.events[-1]["rt"]
    assert (rt["tier"], rt["model"], rt["input_tokens"], rt["tokens"]) == ("cloud", "large", 11, 3)
    assert rt["cost_usd"] == pytest.approx((11 * 10 + 3 * 100) / 1e6)
    assert "usage_estimated" not in rt
    assert 0 < rt["ttft_ms"] <= rt["total_ms"]


@pytest.mark.parametrize("stream", [True, False])
def test_usage_is_the_apis(cloud: FakeCloud, stream: bool) -> None:
    cloud.reply = Reply([delta("Hi there", finish="length"), usage(7, 2), DONE])
    options = {"stream_options": {"include_usage": True}} if stream else {}
    sink = run(cloud, stream=stream, **options)
    assert sink.events[-1]["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    assert (sink.text, sink.finish_reasons, cloud.got[0].body["stream"]) == ("Hi there", ["length"], True)


def test_without_usage_it_is_estimated_and_says_so(cloud: FakeCloud) -> None:
    cloud.reply = Reply([delta("a"), delta("b"), delta(finish="stop"), DONE])
    rt = run(cloud).events[-1]["rt"]
    assert (rt["tokens"], rt["usage_estimated"]) == (2, True)
    assert rt["input_tokens"] >= 1


@pytest.mark.parametrize(
    ("num_deltas", "num_bytes", "num_tokens"), [(0, 0, 0), (40, 160, 40), (40, 480, 40), (2, 400, 100), (3, 0, 3)]
)
def test_estimated_tokens(num_deltas: int, num_bytes: int, num_tokens: int) -> None:
    assert estimate_tokens(num_deltas, num_bytes) == num_tokens


def cloud_overruns(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    lines = [json.loads(message) for message in caplog.messages]
    return [line for line in lines if line["event"] == "cloud_overrun"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([delta(f"w{number} ") for number in range(100)], "w0 w1 w2 w3 w4 "),  # a token a delta
        ([delta("word " * 1000)], "word word word word "),  # all at once: by its bytes
        ([delta("a"), delta("é" * 500)], "a" + "é" * 9),
    ],
)
def test_an_answer_that_passes_its_limit_is_cut_and_ended_there(
    cloud: FakeCloud, caplog: pytest.LogCaptureFixture, parts: list[bytes], text: str, stream: bool
) -> None:
    cloud.reply = Reply(parts, end="hang")
    with caplog.at_level(logging.INFO, "orchestrator.requests"):
        sink = run(cloud, max_tokens=5, stream=stream)
    assert (sink.text, sink.finish_reasons) == (text, ["length"])
    rt = sink.events[-1]["rt"]
    assert (rt["tokens"], rt["usage_estimated"]) == (5, True)
    wait_for(lambda: cloud.num_left == 1)
    (line,) = cloud_overruns(caplog)
    assert (line["kind"], line["tier"], line["max_tokens"]) == ("answer", "cloud", 5)


def test_an_answer_that_ends_at_its_limit_is_whole(cloud: FakeCloud, caplog: pytest.LogCaptureFixture) -> None:
    words = [f"w{number}" for number in range(5)]
    cloud.reply = Reply(answer(*words, finish="length"))
    sink = run(cloud, max_tokens=5)
    assert (sink.text, sink.finish_reasons, sink.events[-1]["rt"]["tokens"]) == ("".join(words), ["length"], 5)
    long = " internationalisation and what follows it"  # long tokens, several in a delta
    cloud.reply = Reply([delta(long), delta(finish="length"), usage(11, 1), DONE])
    assert run(cloud, max_tokens=1).text == long and not cloud_overruns(caplog)


def test_of_several_choices_each_has_the_limit(cloud: FakeCloud) -> None:
    parts = [delta("a", 0), delta("x", 1), delta("b", 0), delta("c", 0), delta("d", 0), delta(index=1, finish="stop")]
    cloud.reply = Reply([*parts, *(delta("e", 0) for _ in range(5))], end="hang")
    sink = run(cloud, n=2, max_tokens=2)
    assert (sink.text, sink.finish_reasons) == ("axb", ["length", "stop"])
    wait_for(lambda: cloud.num_left == 1)


def test_an_api_that_goes_on_after_its_end_is_left(cloud: FakeCloud) -> None:
    cloud.reply = Reply([delta("a"), delta(finish="stop"), *(delta("x") for _ in range(5))], end="hang")
    sink = run(cloud)
    assert (sink.text, sink.finish_reasons) == ("a", ["stop"])
    wait_for(lambda: cloud.num_left == 1)


@pytest.mark.parametrize(
    ("parts", "claimed", "counted"),
    [
        ([delta("word " * 20)], (11, 200_000), (11, 40)),  # more than was reserved
        ([delta("Hi")], (11, 30), (11, 3)),  # more than two bytes and an end can be
        ([delta("Hi")], (10**9, 1), (len(body()), 1)),  # the request has so many bytes
        ([delta("", reasoning_content="hm, " * 5), delta("Hi")], (11, 9), (11, 9)),  # thought before it
        ([delta("Hi")], (0, 0), (len(body()) // 4, 1)),  # unknown to the API, estimated
    ],
)
def test_a_usage_is_believed_as_far_as_it_can_be_true(
    cloud: FakeCloud,
    caplog: pytest.LogCaptureFixture,
    parts: list[bytes],
    claimed: tuple[int, int],
    counted: tuple[int, int],
) -> None:
    cloud.reply = Reply([*parts, delta(finish="stop"), usage(*claimed), DONE])
    with caplog.at_level(logging.INFO, "orchestrator.requests"):
        rt = run(cloud).events[-1]["rt"]
    assert (rt["input_tokens"], rt["tokens"]) == counted
    assert rt.get("usage_estimated", False) == (claimed != counted)
    lines = cloud_overruns(caplog)
    assert len(lines) == (max(claimed) > max(counted))
    if lines:
        assert lines[0]["kind"] == "usage" and lines[0]["counted"] == list(counted)


def test_what_an_api_says_of_its_reasoning_counts(cloud: FakeCloud) -> None:
    counts = {"prompt_tokens": 11, "completion_tokens": 30, "completion_tokens_details": {"reasoning_tokens": 29}}
    cloud.reply = Reply([delta("Hi", finish="stop"), event(choices=[], usage=counts), DONE])
    assert run(cloud).events[-1]["rt"]["tokens"] == 30


def test_what_the_api_is_asked(cloud: FakeCloud) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "U"}]}]
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"default": None}}}
    tier = make_tier(f"{cloud.url}/", generation={"temperature": 0.2})
    run(cloud, tier, messages=messages, response_format=schema, seed=7, n=None, user="ann", top_k=0)
    got = cloud.got[0]
    assert got.line == "POST /v1/chat/completions HTTP/1.1"
    assert got.headers["authorization"] == f"Bearer {KEY}"
    assert got.headers["accept-encoding"] == "identity"
    assert got.body == {
        "model": "vendor/large-1",
        "messages": messages,
        "response_format": schema,
        "seed": 7,
        "max_tokens": 40,
        "temperature": 0.2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_what_says_nothing_in_a_message_is_not_passed_on(cloud: FakeCloud) -> None:
    """APIs that are only compatible with OpenAI's do not know it."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    function = {**call["function"], "parsed_arguments": None}  # type: ignore[dict-item]
    back = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "parsed": {}, "audio": None}
    messages = [*PROMPT, {**back, "tool_calls": [{**call, "index": 0, "function": function}]}]
    cloud.reply = Reply(answer("One"))
    run(cloud, messages=messages, store=False, metadata=None)
    assert cloud.got[0].body["messages"][1:] == [{"role": "assistant", "content": "x", "tool_calls": [call]}]
    assert not {"store", "metadata"} & set(cloud.got[0].body)


def test_what_a_request_sets_is_passed_on(cloud: FakeCloud) -> None:
    tier = make_tier(cloud.url, limit_field="max_completion_tokens", key_env=None)
    stops = ["1", "2", "3", "4", "5"]
    fields = {"presence_penalty": 0.5, "tools": TOOLS, "tool_choice": "auto", "top_p": 0.5, "temperature": 1.0}
    run(cloud, tier, max_tokens=5, stop=stops, **fields)
    assert cloud.got[0].body | fields == cloud.got[0].body
    assert (cloud.got[0].body["max_completion_tokens"], cloud.got[0].body["stop"]) == (5, stops[:4])
    assert "max_tokens" not in cloud.got[0].body
    assert "authorization" not in cloud.got[0].headers


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_k": 5}, "top_k"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_what_an_api_does_not_have_is_refused(cloud: FakeCloud, fields: dict[str, Any], param: str) -> None:
    error, _ = failure(cloud, **fields)
    assert isinstance(error, InvalidRequestError)
    assert (error.param, cloud.got) == (param, [])


def test_a_completion_is_refused(cloud: FakeCloud) -> None:
    (sink,) = asyncio.run(serve(make_tier(cloud.url), [b'{"prompt": "x"}']))
    assert (sink.error.param, cloud.got) == ("prompt", [])


def test_stop_strings_are_applied_here_too(cloud: FakeCloud) -> None:
    cloud.reply = Reply([delta("on"), delta("e EN"), delta("D two")], end="hang")
    sink = run(cloud, stop="END")
    assert (sink.text, sink.finish_reasons) == ("one ", ["stop"])
    wait_for(lambda: cloud.num_left == 1)
    assert sink.events[-1]["rt"]["usage_estimated"]
    cloud.reply = Reply(answer("the EN"))
    assert run(cloud, stop="END").text == "the EN"


@pytest.mark.parametrize("stream", [True, False])
def test_several_choices(cloud: FakeCloud, stream: bool) -> None:
    parts = [delta("a", 0), delta("x", 1), delta("b", 0, finish="stop"), delta("y", 1, finish="length")]
    cloud.reply = Reply([*parts, usage(3, 4), DONE])
    sink = run(cloud, n=2, stream=stream)
    texts = {0: "", 1: ""}
    for choice in (choice for each in sink.events for choice in each["choices"]):
        texts[choice["index"]] += (choice.get("delta") or choice.get("message") or {}).get("content") or ""
    assert (texts, sink.finish_reasons, cloud.got[0].body["n"]) == ({0: "ab", 1: "xy"}, ["stop", "length"], 2)


def call(index: int | None, id: str | None, name: str | None, arguments: str | None) -> dict[str, Any]:
    return {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "deltas",
    [
        [call(0, "c1", "search", ""), call(0, None, None, '{"q"'), call(0, "", None, ":1}"), call(1, "c2", "go", "{}")],
        [call(None, "c1", "search", '{"q":1}'), call(None, "c2", "go", "{}")],  # an API that does not count
        [call(0, "c1", "search", '{"q":1}'), call(0, "c2", "go", "{}")],
        [call(3, "c1", "search", '{"q":1}'), call(7, "c2", "go", None), call(7, "c2", "go", "{}")],
    ],
)
def test_tool_calls(cloud: FakeCloud, deltas: list[dict[str, Any]], stream: bool) -> None:
    parts = [delta(tool_calls=[each]) for each in deltas]
    cloud.reply = Reply([*parts, delta(finish="tool_calls"), usage(1, 9), DONE])
    sink = run(cloud, tools=TOOLS, stream=stream)
    calls: dict[int, list[str]] = {}
    for choice in (choice for each in sink.events for choice in each["choices"]):
        for number, each in enumerate((choice.get("delta") or choice.get("message") or {}).get("tool_calls") or []):
            row = calls.setdefault(each.get("index", number), ["", "", ""])
            row[0] += each.get("id") or ""
            row[1] += each["function"].get("name") or ""
            row[2] += each["function"]["arguments"]
    assert calls == {0: ["c1", "search", '{"q":1}'], 1: ["c2", "go", "{}"]}
    assert sink.finish_reasons == ["tool_calls"]


def test_odd_chunks_do_no_harm(cloud: FakeCloud) -> None:
    """Case S15."""
    odd = [
        event(id="x", object="chat.completion.chunk"),
        event(choices=[]),
        event(choices=None, usage=None, error=None),
        event(choices=[{"index": 0, "delta": None}]),
        event(choices=[{"delta": {"content": None, "reasoning_content": "hm", "tool_calls": None}, "x": [1]}]),
        event(choices=[{"index": 0, "delta": {}, "finish_reason": ""}]),
        b": OPENROUTER PROCESSING\n\n",
        b"data:\n\n",
        b"event: ping\r\nid: 5\r\n\r\n",
    ]
    cloud.reply = Reply([part for each in answer("a", "b") for part in [*odd, each]])
    sink = run(cloud)
    assert (sink.text, sink.finish_reasons, sink.events[-1]["rt"]["tokens"]) == ("ab", ["stop"], 2)


def test_a_refusal_is_text(cloud: FakeCloud) -> None:
    cloud.reply = Reply([delta(refusal="I cannot."), delta(finish="content_filter"), DONE])
    sink = run(cloud)
    assert (sink.text, sink.finish_reasons) == ("I cannot.", ["content_filter"])


@pytest.mark.parametrize("size", [1, 2, 7])
def test_frames_cut_anywhere(cloud: FakeCloud, size: int) -> None:
    whole = b"".join(answer("Grüße ", "💡")).replace(b"\n", b"\r\n")
    cloud.reply = Reply([whole[start : start + size] for start in range(0, len(whole), size)])
    assert run(cloud).text == "Grüße 💡"


def test_one_connection_serves_one_after_another(cloud: FakeCloud) -> None:
    sinks = asyncio.run(serve(make_tier(cloud.url), [body(), body(), body()]))
    assert [sink.text for sink in sinks] == ["Hi"] * 3
    assert cloud.num_connections == 1


@pytest.mark.parametrize("end", ["cut", "hang"])
def test_an_answer_that_is_whole_needs_no_proper_end(cloud: FakeCloud, end: Any) -> None:
    cloud.reply = Reply([delta("Hi"), delta(finish="stop")], end=end)
    sink = run(cloud)
    assert (sink.text, sink.finish_reasons, sink.error) == ("Hi", ["stop"], None)
    assert sink.events[-1]["rt"]["usage_estimated"]


# --- faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "error_type", "message"),
    [
        ("429 Too Many Requests", OverloadedError, "takes no more requests now (429)"),
        ("500 Oops", CloudError, "the API answered 500"),
        ("503 Oops", CloudError, "the API answered 503"),
        ("401 Who", CloudError, "answered 401; check the key in the variable that cloud.key_env names"),
        ("404 Where", CloudError, "answered 404; check cloud.base_url and cloud.model"),
        ("204 Nothing", CloudError, "the API answered 204"),
    ],
)
def test_a_status(cloud: FakeCloud, status: str, error_type: type[ApiError], message: str) -> None:
    cloud.reply = Reply([f'{{"error": {{"message": "secret of {KEY}"}}}}'.encode()], status, "application/json")
    if status.startswith("204"):
        cloud.reply.parts = []
    error, sink = failure(cloud)
    assert isinstance(error, error_type)
    assert message in error.message
    assert "secret" not in error.message
    assert sink.events == []
    # What may pass is tried once more.
    assert len(cloud.got) == 1 + (status[0] == "5")


def test_when_to_come_again_is_the_apis_to_say(cloud: FakeCloud) -> None:
    for headers, after in ((["retry-after: 7"], "7"), (["retry-after: 86400"], "3600"), ([], "1")):
        cloud.reply = Reply([b"{}"], "429 Slow", "application/json", headers)
        error, _ = failure(cloud)
        assert (error.status, error.headers) == (503, {"retry-after": after})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("0", 1), ("7", 7), ("0.4", 1), ("2.5", 3), ("-5", 1), ("999999999999", 3600), ("inf", 3600), ("nan", 1)),
        *(("", 1), ("soon", 1), ("1" * 500, 3600), ("٣", 3), ("Thu, 01 Jan 1970 00:01:30 GMT", 30)),
        *(("Thu, 01 Jan 1970 00:00:30 GMT", 1), ("Fri, 31 Dec 9999 23:59:59 GMT", 3600), ("Mon, 99 Foo 0000", 1)),
    ],
)
def test_a_retry_after_of_any_kind(text: str, seconds: int) -> None:
    assert read_retry_after(text, now_s=60.0) == seconds


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (f'{{"error": {{"message": "no {KEY}\\n here"}}}}', "refused the request with 400: no [key] here"),
        ("<html>" + "x" * 100_000, "400: <html>xxx"),
        ('{"error": "text"}', '400: {"error": "text"}'),
        ("", "400: "),
    ],
)
def test_a_refusal_says_what_the_api_said_cut_short(cloud: FakeCloud, said: str, message: str) -> None:
    cloud.reply = Reply([said.encode()] * bool(said), "400 Bad", "application/json")
    error, _ = failure(cloud)
    assert isinstance(error, InvalidRequestError)
    assert message in error.message
    assert len(error.message) < 400


def test_a_redirect_is_not_followed(cloud: FakeCloud) -> None:
    cloud.reply = Reply([], "307 Elsewhere", headers=[f"location: {cloud.url}/elsewhere"])
    error, _ = failure(cloud)
    assert "answered 307; redirects are not followed" in error.message
    assert len(cloud.got) == 1


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply([b"{}"], content_type="application/json"), "text/event-stream (got 'application/json')"),
        (Reply([b"<html>"], content_type="text/html\t" + "x" * 500), "(got 'text/html xxx"),
        (Reply([b"data: {nonsense\n\n"]), "no chat completion chunk"),
        (Reply([b"data: 5\n\n"]), "no chat completion chunk"),
        (Reply([event(choices="x")]), "no chat completion chunk: choices"),
        (Reply([event(choices=[{"delta": {"content": 5}}])]), "choices.0.delta.content"),
        (Reply([b'data: {"choices": [{"delta": {"content": "\\ud800"}}]}\n\n']), "no chat completion chunk"),
        (Reply([delta("x", index=1)]), "sent a choice 1, but 1 were asked for"),
        (Reply([delta(tool_calls=[call(0, "c", None, "{}")])]), "a tool call without a name"),
        (Reply([event(error={"message": f"secret {KEY}", "code": 500})]), "reported an error in its stream"),
        (Reply([b"data: " + b"x" * (2 << 20)]), "an event has more than 1048576 bytes"),
        (Reply([], end="cut"), "the connection failed (RemoteProtocolError)"),
        (Reply([], end="hang"), "no first token within 1 s"),
        (Reply([]), "the API's stream ended before its answer"),
        (Reply([DONE]), "the API's stream ended before its answer"),
        (Reply([b": ping\n\n", 0.2] * 20), "no first token within 1 s"),
        (Reply([delta("", role="assistant"), 0.2] * 20), "no first token within 1 s"),
    ],
)
def test_garbage_before_a_token(cloud: FakeCloud, reply: Reply, message: str) -> None:
    cloud.reply = reply
    started_s = time.monotonic()
    error, sink = failure(cloud)
    assert isinstance(error, CloudError)
    assert message in error.message
    assert len(error.message) < 300 and "secret" not in error.message
    assert sink.events == []
    assert time.monotonic() - started_s < 2.5


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("parts", "end", "message"),
    [
        ([], "cut", "the connection failed (RemoteProtocolError)"),
        ([delta("never")[:20]], "cut", "the connection failed (RemoteProtocolError)"),
        ([delta("never")[:20]], "whole", "the API's stream ended before its answer"),
        ([DONE], "whole", "the API's stream ended before its answer"),
        ([], "hang", "no further token within 0.5 s"),
        ([b": ping\n\n", 0.1] * 20, "hang", "no further token within 0.5 s"),
        ([b"data: {\n\n"], "whole", "no chat completion chunk"),
        ([event(error={"message": "x"})], "whole", "reported an error in its stream"),
    ],
)
def test_death_after_three_tokens(
    cloud: FakeCloud, caplog: pytest.LogCaptureFixture, parts: list[Any], end: Any, message: str, stream: bool
) -> None:
    """Case S20."""
    cloud.reply = Reply([delta("a"), delta("b"), delta("c"), *parts], end=end)
    with caplog.at_level(logging.INFO, "orchestrator.requests"):
        error, sink = failure(cloud, stream=stream)
    assert isinstance(error, CloudError) and len(cloud.got) == 1
    assert message in error.message
    assert sink.text == ("abc" if stream else "")
    assert len(cloud.got) == 1
    settled = json.loads(caplog.messages[-1])
    assert (settled["outcome"], settled["tokens"]) == ("cloud_error", 3)


def test_a_slow_first_token_may_take_longer_than_the_next(cloud: FakeCloud) -> None:
    cloud.reply = Reply([0.7, *answer("a", "b")])
    assert run(cloud).text == "ab"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_are_progress(cloud: FakeCloud, name: str) -> None:
    """Case P01: the first token of any channel, and the next."""
    thinking = [0.2, delta(**{name: "hm"})] * 8  # longer than a first token may take, and than any other
    cloud.reply = Reply([*thinking, delta("a"), *thinking, *answer("b")])
    assert run(cloud).text == "ab"


def test_an_api_that_thinks_without_end_is_left(cloud: FakeCloud) -> None:
    tier = make_tier(cloud.url).model_copy(update={"context_window": 50})
    cloud.reply = Reply([delta(reasoning="hm")] * 60, end="hang")
    sink = run(cloud, tier, max_tokens=5)
    assert (sink.text, sink.finish_reasons) == ("", ["length"])
    wait_for(lambda: cloud.num_left == 1)


def test_no_connection() -> None:
    with socket.socket() as nobody:  # bound, but not listening
        nobody.bind(("127.0.0.1", 0))
        dead = FakeCloud(url=f"http://127.0.0.1:{nobody.getsockname()[1]}")
        error, _ = failure(dead)
    assert error.message == "tier 'cloud': the API cannot be reached"


def test_a_connection_that_takes_too_long() -> None:
    with socket.socket() as busy, socket.socket() as first, socket.socket() as second:
        busy.bind(("127.0.0.1", 0))
        busy.listen(0)
        for waiting in (first, second):  # the queue is full; the kernel lets further ones wait
            waiting.setblocking(False)
            waiting.connect_ex(busy.getsockname())
        error, _ = failure(FakeCloud(url=f"http://127.0.0.1:{busy.getsockname()[1]}"))
    assert error.message == "tier 'cloud': no connection within 0.5 s"


# --- cancelling ----------------------------------------------------------------------------------------------


async def wait_until(ready: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 5
    while not ready():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("stream", [True, False])
def test_a_caller_who_leaves_after_40_tokens_pays_for_40(
    cloud: FakeCloud, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """Case K06."""
    cloud.reply = Reply([delta(f"word{number} ") for number in range(40)], end="hang")

    async def leave(call: Call, sink: RecordingSink) -> None:
        await wait_until(lambda: len(sink.events) == 40 if stream else cloud.got)
        await asyncio.sleep(0 if stream else 0.2)
        for _ in range(3):
            await call.cancel()
        await wait_until(lambda: cloud.num_left)  # the API heard of it

    with caplog.at_level(logging.INFO, "orchestrator.requests"):
        (sink,) = asyncio.run(serve(make_tier(cloud.url), [body(stream=stream)], leave))
    assert isinstance(sink.error, CancelledError)
    settled = json.loads(caplog.messages[-1])
    assert (settled["outcome"], settled["tokens"], settled["usage_estimated"]) == ("cancelled", 40, True)
    assert settled["cost_usd"] == pytest.approx((settled["input_tokens"] * 10 + 40 * 100) / 1e6)


def test_a_caller_who_leaves_before_the_first_token(cloud: FakeCloud) -> None:
    cloud.reply = Reply([], end="hang")

    async def leave(call: Call, sink: RecordingSink) -> None:
        await wait_until(lambda: cloud.got)
        await call.cancel()
        await wait_until(lambda: cloud.num_left)

    (sink,) = asyncio.run(serve(make_tier(cloud.url), [body()], leave))
    assert isinstance(sink.error, CancelledError)


def test_a_caller_who_left_before_it_began(cloud: FakeCloud) -> None:
    async def leave(call: Call, sink: RecordingSink) -> None:
        await call.cancel()

    (sink,) = asyncio.run(serve(make_tier(cloud.url), [body()], leave))
    assert isinstance(sink.error, CancelledError)
    assert cloud.got == []


# --- keys and configuration ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "FAKE_KEY is not set"),
        ({"FAKE_KEY": " \n"}, "FAKE_KEY is not set"),
        ({"FAKE_KEY": "secret\r\nx: y"}, "FAKE_KEY must be printable ASCII"),
        ({"FAKE_KEY": "secret é"}, "FAKE_KEY must be printable ASCII"),
    ],
)
def test_a_key_that_cannot_be_used(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as got:
        create_cloud_client([make_tier("https://x")], environ)
    assert "tier 'cloud'" in str(got.value) and "secret" not in str(got.value)


def test_without_a_cloud_tier_there_is_no_client() -> None:
    assert create_cloud_client([], {}) is None


def test_a_pipeline_without_a_client_says_so(cloud: FakeCloud) -> None:
    sink = RecordingSink()
    pipeline = Pipeline(Tiers(tier=[make_tier(cloud.url)]), Path("nowhere"), _NoEngines())
    asyncio.run(pipeline.run(Call(body(), {}, sink)))
    assert isinstance(sink.error, InternalError)


def test_no_log_line_holds_the_key(cloud: FakeCloud, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        run(cloud)
        cloud.reply = Reply([f"data: {KEY}\n\n".encode()])
        run(cloud)
    assert caplog.messages
    assert KEY not in caplog.text and "Authorization" not in caplog.text


@pytest.mark.parametrize("data", ["", "null", "[]", '"x"', "{", '{"choices": [5]}', '{"usage": {"prompt_tokens": -1}}'])
def test_no_event(data: str) -> None:
    with pytest.raises(CloudError, match="tier 'cloud': the API sent what is no chat completion chunk: "):
        parse_event(data, "cloud")
