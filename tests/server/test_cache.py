"""The cache through public clients: target scripted with a cache, whose questions are embedded by the real embedder."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from serving import CHAT_PATH, Stack, ask, running, script, wait_for
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from build.compiler import build
from build.fetch import cache_folder
from build.rows import load_models, load_target
from orchestrator import contracts
from orchestrator.engines.scripted import DEFAULT_TEXT
from orchestrator.wire import add_string, find_output, new_request
from perf.redis_server import RedisServer

pytestmark = pytest.mark.timeout(180)  # the first one builds

HERE = Path(__file__).parents[2]
POLICY = """
[cache]
ttl_s = 600
max_bytes = 1000000
semantic = true
max_temperature = 0.5
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With `artifact/`: target scripted and a cache."""
    folder = tmp_path_factory.mktemp("cache")
    row = (HERE / "build" / "targets" / "scripted.toml").read_text(encoding="utf-8")
    (folder / "scripted.toml").write_text(row + POLICY, encoding="utf-8")
    target = load_target("scripted", folder)
    build(target, load_models(target), folder / "artifact", cache=cache_folder(), progress=lambda _: nullcontext())
    return folder


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[Stack]:
    with running(folder / "artifact", folder / "run") as stack:
        yield stack


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx.Client]:
    """With an empty cache."""
    with httpx.Client(base_url=stack.url, timeout=30) as client:
        client.post("/v1/rt/cache/invalidate", json={"everything": True, "dry_run": False}).raise_for_status()
        yield client


def chat(client: httpx.Client, messages: Any, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    response = client.post(CHAT_PATH, json={"messages": messages, **fields}, headers=headers)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def kind(client: httpx.Client, messages: Any, headers: dict[str, str] | None = None, **fields: Any) -> str:
    return str(chat(client, messages, headers, **fields)["rt"]["cache"])


def num_generated(stack: Stack) -> int:
    """How many requests the engine has answered."""
    page = httpx.get(stack.facts["triton_metrics_url"], timeout=10).text
    found = re.search(r'^nv_inference_request_success{model="llm_small"[^}]*} (\S+)$', page, re.MULTILINE)
    assert found, page
    return int(float(found[1]))


# --- hits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored_by_stream", [True, False])
def test_a_stream_hits(stack: Stack, http: httpx.Client, stored_by_stream: bool) -> None:
    """Case C19, by OpenAI's package."""
    messages: Any = script(text="A whole answer of more than a few words, and then some more of them.")
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        first = client.chat.completions.create(model="auto", messages=messages, stream=stored_by_stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in first) if stored_by_stream else None
        text = text or first.choices[0].message.content
        before = num_generated(stack)
        chunks = list(
            client.chat.completions.create(
                model="auto", messages=messages, stream=True, stream_options={"include_usage": True}
            )
        )
    deltas = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert len(deltas) > 1 and "".join(deltas) == text
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 5
    rt = (chunks[-1].model_extra or {})["rt"]
    assert (rt["cache"], rt["cache_similarity"], rt["cost_usd"]) == ("exact", 1.0, 0.0)
    assert 0 <= rt["cache_age_s"] < 60
    assert num_generated(stack) == before


def test_a_hit_ends_with_done(stack: Stack, http: httpx.Client) -> None:
    chat(http, ask("Who wrote Hamlet?"))
    body = {"messages": ask("Who wrote Hamlet?"), "stream": True}
    raw = http.post(CHAT_PATH, json=body).text
    assert raw.endswith("data: [DONE]\n\n") and raw.count("data: ") > 3


def test_a_question_in_other_words_hits(http: httpx.Client) -> None:
    chat(http, ask("What is the capital of France?"))
    answer = chat(http, ask("what's the capital of France"))
    assert answer["choices"][0]["message"]["content"] == DEFAULT_TEXT
    assert answer["rt"]["cache"] == "semantic"
    assert 0.8 < answer["rt"]["cache_similarity"] <= 1


def test_the_opposite_does_not(http: httpx.Client) -> None:
    """Case C01."""
    chat(http, ask("How do I turn on dark mode?"))
    assert kind(http, ask("How do I turn off dark mode?")) == "miss"


def test_what_goes_before_counts(http: httpx.Client) -> None:
    """Cases C10 and C11."""
    for one, other in (("OpenAI", "Apple"),):
        last = {"role": "user", "content": "How old is he?"}
        before = [{"role": "user", "content": f"Who runs {one}?"}, {"role": "assistant", "content": "Somebody."}]
        assert kind(http, [*before, last]) == "miss"
        assert kind(http, [*before, last]) == "exact"
        before[0]["content"] = f"Who runs {other}?"
        assert kind(http, [*before, last]) == "miss"


def test_a_long_question_is_not_matched_by_its_beginning(http: httpx.Client) -> None:
    """Case C21."""
    text = "The sea was calm that day and the gulls were flying. " * 60
    chat(http, ask(f"{text} Who was there?"))
    assert kind(http, ask(f"{text} What was eaten?")) == "miss"
    assert kind(http, ask(f"{text} Who was there?")) == "exact"


def test_nothing_that_a_caller_sends_names_his_tenant(http: httpx.Client) -> None:
    """Case C13: it could only be made up, so it neither opens nor closes anything."""
    question = ask("What is my account balance?")
    assert kind(http, question) == "miss"
    for name in ("x-tenant", "x-tenant-id", "tenant", "authorization", "x-user"):
        assert kind(http, question, {name: "another"}) == "exact", name
    assert kind(http, question, user="another") == "exact"
    refused = http.post(CHAT_PATH, json={"messages": question, "tenant": "another"})
    assert refused.status_code == 400 and "tenant: not supported" in refused.text


# --- what is not kept ----------------------------------------------------------------------------------------


def test_what_was_cut_or_left_is_not_kept(stack: Stack, http: httpx.Client) -> None:
    """Case C22."""
    counting = script(text="one two three four five six seven eight", itl_ms=20)
    assert kind(http, counting, max_tokens=2) == "miss"
    assert kind(http, counting, max_tokens=2) == "miss"
    with stack.send(messages=counting, stream=True) as connection:
        assert connection.recv(4096)
    stack.wait_until_idle()
    assert kind(http, counting) == "miss"
    assert kind(http, counting) == "exact"


def test_what_failed_is_not_kept(http: httpx.Client) -> None:
    """Case S18."""
    failing = script(text="a b c d e f", fail_after=5)
    for _ in range(2):
        assert http.post(CHAT_PATH, json={"messages": failing}).status_code == 502


# --- Cache-Control -------------------------------------------------------------------------------------------


def test_cache_control(http: httpx.Client) -> None:
    question = ask("How tall is the Eiffel Tower?")
    refused = http.post(CHAT_PATH, json={"messages": question}, headers={"cache-control": "only-if-cached"})
    assert refused.status_code == 504
    assert refused.json()["error"]["code"] == "not_cached"
    assert kind(http, question, {"cache-control": "no-store"}) == "bypass"
    assert kind(http, question, {"Cache-Control": "max-age=60, unheard-of"}) == "miss"
    assert kind(http, question, {"cache-control": "only-if-cached"}) == "exact"
    assert kind(http, question, {"cache-control": "max-age=0"}) == "miss"
    assert kind(http, question, {"cache-control": "no-cache"}) == "miss"
    malformed = http.post(CHAT_PATH, json={"messages": question}, headers={"cache-control": "max-age=1m"})
    assert malformed.status_code == 400
    assert malformed.json()["error"]["param"] == "cache-control"


def test_a_header_that_comes_twice_is_one_list(http: httpx.Client) -> None:
    body = json.dumps({"messages": ask("How deep is the sea?")})
    headers = [("cache-control", "no-store"), ("cache-control", "max-age=5"), ("content-type", "application/json")]
    response = http.post(CHAT_PATH, content=body, headers=headers)
    assert response.json()["rt"]["cache"] == "bypass"


def test_over_grpc_too(stack: Stack, http: httpx.Client) -> None:
    def infer(**metadata: str) -> dict[str, Any]:
        message = new_request(contracts.ORCHESTRATOR_MODEL)
        add_string(message, contracts.REQUEST, json.dumps({"messages": ask("How far is the moon?")}).encode())
        sent = [(name.replace("_", "-"), value) for name, value in metadata.items()]
        with grpc.insecure_channel(stack.front_url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            response = stub.ModelInfer(message, metadata=sent, timeout=20)
        raw = find_output(pb.ModelStreamInferResponse(infer_response=response), contracts.EVENT)
        assert raw is not None
        answer: dict[str, Any] = json.loads(raw[4:])["rt"]
        return answer

    assert infer()["cache"] == "miss"
    assert infer()["cache"] == "exact"
    assert infer(cache_control="no-store")["cache"] == "bypass"
    assert kind(http, ask("How far is the moon?")) == "exact"


# --- single flight -------------------------------------------------------------------------------------------


def test_twenty_identical_streams_generate_once(stack: Stack, http: httpx.Client) -> None:
    before = num_generated(stack)
    messages = script(text="one two three four five six seven eight nine ten", first_token_ms=500, itl_ms=10)
    together = threading.Barrier(20)

    def run(number: int) -> dict[str, Any]:
        body = {"messages": messages, "stream": number % 2 == 0}
        together.wait()
        response = httpx.post(stack.url + CHAT_PATH, json=body, timeout=30)
        assert response.status_code == 200
        if not body["stream"]:
            answer = response.json()
            return {"id": answer["id"], "text": answer["choices"][0]["message"]["content"], **answer["rt"]}
        *events, done, _ = response.text.split("\n\n")
        assert done == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        return {"id": chunks[0]["id"], "text": text, **chunks[-1]["rt"]}

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(run, range(20)))
    assert {answer["text"] for answer in answers} == {"one two three four five six seven eight nine ten"}
    assert len({answer["id"] for answer in answers}) == 20
    assert sorted(answer["cache"] for answer in answers) == ["exact"] * 19 + ["miss"]
    assert num_generated(stack) == before + 1


def test_if_the_first_leaves_the_others_go_on_and_the_last_ends_it(stack: Stack, http: httpx.Client) -> None:
    endless = script(text="x " * 3000, itl_ms=10)
    body = {"messages": endless, "stream": True, "max_tokens": 3000}

    def wait_for_events(connection: Any) -> None:
        received = b""
        while received.count(b"data: ") < 3:
            received += connection.recv(4096)

    since = stack.log_length()
    first, second = stack.send(**body), stack.send(**body)
    wait_for_events(first), wait_for_events(second)
    wait_for(lambda: (stack.num_live("orchestrator"), stack.num_live("llm_small")) == (2, 1))  # each told by itself
    first.close()
    wait_for(lambda: len(stack.logged("caller_left", since)) == 1)
    wait_for_events(second)
    assert stack.num_live("llm_small") == 1
    second.close()
    stack.wait_until_idle()
    assert len(stack.logged("caller_left", since)) == 2


# --- the operator --------------------------------------------------------------------------------------------


def test_a_wrong_hit_is_blocked(http: httpx.Client) -> None:
    """Case C23."""
    chat(http, ask("What is the capital of Spain?"))
    hit = chat(http, ask("what's the capital of Spain"))
    assert hit["rt"]["cache"] == "semantic"
    assert http.post("/v1/rt/cache/wrong", json={"id": hit["id"]}).json() == {"id": hit["id"], "evicted": True}
    assert kind(http, ask("What is the capital of Spain?")) == "miss"
    assert kind(http, ask("what's the capital of Spain")) == "miss"
    again = http.post("/v1/rt/cache/wrong", json={"id": hit["id"]})
    assert again.status_code == 400 and again.json()["error"]["param"] == "id"


def test_invalidation(http: httpx.Client) -> None:
    chat(http, ask("What is the capital of Italy?"))
    chosen = http.post("/v1/rt/cache/invalidate", json={"text": "italy"}).json()
    assert (chosen["num_entries"], chosen["dry_run"]) == (1, True)
    assert kind(http, ask("What is the capital of Italy?")) == "exact"
    removed = http.post("/v1/rt/cache/invalidate", json={"text": "italy", "dry_run": False}).json()
    assert removed == {**chosen, "dry_run": False}
    assert kind(http, ask("What is the capital of Italy?")) == "miss"


def test_only_who_is_here_gives_orders(stack: Stack, http: httpx.Client) -> None:
    for header in ("x-forwarded-for", "forwarded"):
        refused = http.post("/v1/rt/cache/invalidate", json={"everything": True}, headers={header: "for=10.0.0.1"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_local")
    message = new_request(contracts.ORCHESTRATOR_MODEL)
    add_string(message, contracts.REQUEST, b'{"everything": true}')
    message.parameters[contracts.CACHE_OPERATION_PARAMETER].string_param = "invalidate"
    with grpc.insecure_channel(stack.front_url) as channel, pytest.raises(grpc.RpcError) as caught:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message, timeout=10)
    assert "parameters.cache_operation: is not allowed here" in str(caught.value)


def test_metrics(stack: Stack, http: httpx.Client) -> None:
    def read(name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", stack.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    names = {each: f'rt_cache_answers_total{{cache="{each}"}}' for each in ("exact", "semantic", "miss", "bypass")}
    # Sizes are told after counts: once these entries are on the page, so is every answer before them.
    wait_for(lambda: read("rt_cache_stored_entries") == 0)
    for country in ("Peru", "Chile", "Ghana"):
        chat(http, ask(f"What is the capital of {country}?"))
    wait_for(lambda: read("rt_cache_stored_entries") == 3)
    before = {each: read(name) for each, name in names.items()}
    rejected = sum_of(stack, "rt_cache_guard_rejections_total")
    for text in ("How do I turn on the radio?", "How do I turn on the radio?", "how do i turn on the radio"):
        chat(http, ask(text))
    chat(http, ask("How do I turn off the radio?"))
    chat(http, ask("How do I turn on the radio?"), temperature=1)
    wait_for(lambda: read(names["bypass"]) == before["bypass"] + 1)
    after = {each: read(name) - before[each] for each, name in names.items()}
    assert after == {"exact": 1, "semantic": 1, "miss": 2, "bypass": 1}
    assert sum_of(stack, "rt_cache_guard_rejections_total") == rejected + 1
    wait_for(lambda: read("rt_cache_stored_entries") == 5)
    assert read("rt_cache_stored_bytes") > 5000
    assert 'rt_cache_store_errors_total{kind="failed"} 0' in stack.get("/metrics").text


def sum_of(stack: Stack, name: str) -> float:
    return sum(map(float, re.findall(rf"^{name}\S* (\S+)$", stack.get("/metrics").text, re.MULTILINE)))


# --- two orchestrators, one Redis ----------------------------------------------------------------------------


def test_redis_is_shared_and_dies_under_load_without_a_failed_request(folder: Path) -> None:
    """Every answer carries its question's number, so that one that belongs to another question is seen."""
    redis, stop = RedisServer(), threading.Event()
    redis.start()
    seen: Counter[str] = Counter()  # what `rt.cache` said, over both

    def load(url: str, first: int) -> None:
        with httpx.Client(base_url=url, timeout=30) as client:
            for number in itertools.count(first):
                if stop.is_set():
                    return
                answer = chat(client, script(text=f"number {number % 12}"))
                assert answer["choices"][0]["message"]["content"] == f"number {number % 12}"
                seen[answer["rt"]["cache"]] += 1

    def wait_for_more(kind: str) -> None:
        """Forty more requests of `kind`: those that were on their way before are among the first of them."""
        enough = seen[kind] + 40
        wait_for(lambda: seen[kind] >= enough or any(each.done() for each in loads))
        for each in loads:
            if each.done():
                each.result()  # raises what ended it

    try:
        with ExitStack() as exits:
            urls = [
                exits.enter_context(running(folder / "artifact", folder / name, REDIS_URL=redis.url)).url
                for name in ("one", "two")
            ]
            with httpx.Client(base_url=urls[0], timeout=30) as one, httpx.Client(base_url=urls[1], timeout=30) as two:
                assert kind(one, ask("How high is the moon?")) == "miss"
                wait_for(lambda: kind(two, ask("How high is the moon?")) == "exact")
                assert kind(two, ask("how high is the moon")) == "semantic"
            pool = exits.enter_context(ThreadPoolExecutor(4))
            exits.callback(stop.set)
            loads = [pool.submit(load, urls[index % 2], 3 * index) for index in range(4)]
            wait_for_more("exact")
            redis.kill()
            wait_for_more("miss")
            redis.start()
            wait_for_more("exact")
            stop.set()
            for each in loads:
                each.result()
    finally:
        redis.stop()
