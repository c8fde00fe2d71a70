"""Keys, quotas and deadlines by both public ways in, and two orchestrators on one Redis."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc as triton
from serving import CHAT_PATH, Stack, Start, script, wait_for
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from orchestrator import contracts
from orchestrator.__main__ import main
from orchestrator.wire import add_string, find_output, new_request
from perf.redis_server import RedisServer

WRONG = "rt-this-key-is-nobodys-0123456789abcdefghijklm"
LONG: dict[str, Any] = {"messages": script(text="x " * 2000, itl_ms=20), "max_tokens": 2000}


class Keys:
    """A file of keys, changed as an operator changes it. Remembers every key that it made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.secrets: list[str] = []

    def add(self, tenant: str, *rights: str) -> str:
        self.secrets.append(self._run("add", "--tenant", tenant, *rights).strip())
        return self.secrets[-1]

    def revoke(self, key_id: str) -> None:
        self._run("revoke", key_id)

    def _run(self, action: str, *arguments: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            assert main(["keys", action, f"--keys={self.path}", *arguments]) == 0
        return output.getvalue()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    keys = Keys(tmp_path_factory.mktemp("keys") / "keys.json")
    keys.add("operator", "--metrics")
    return keys


@pytest.fixture(scope="module")
def stack(start: Start, keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with start("scripted", tmp_path_factory.mktemp("limits"), f"--keys={keys.path}") as stack:
        yield stack


def client(stack: Stack, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0)


def post(stack: Stack, key: str | None, path: str = CHAT_PATH, headers: Any = None, **fields: Any) -> httpx.Response:
    authorization = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.post(f"{stack.url}{path}", json=fields, headers={**authorization, **(headers or {})}, timeout=30)


def embed(stack: Stack, key: str | None, given: Any) -> httpx.Response:
    return post(stack, key, "/v1/embeddings", model="embedding", input=given)


# --- who may call --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, WRONG])
def test_without_a_valid_key(stack: Stack, key: str | None) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    answers = [
        post(stack, key, messages=script(text="Hi")),
        post(stack, key, messages=script(text="Hi"), stream=True),
        post(stack, key, "/v1/completions", prompt="Hi"),
        embed(stack, key, "Hi"),
        post(stack, key),
        post(stack, key, "/v1/completions"),
        post(stack, key, "/v1/embeddings"),
        post(stack, key, "/v1/audio/speech"),
        post(stack, key, messages=script(text="Hi"), user="x" * 100_000),
        post(stack, key, "/v1/rt/cache/invalidate", everything=True),
        *(httpx.get(f"{stack.url}{path}", headers=headers) for path in ("/v1/models", "/v1/models/auto", "/metrics")),
    ]
    for answer in answers:
        assert answer.status_code == 401, answer.request.url
        assert answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    for path in ("/health", "/ready", "/openapi.json"):
        assert httpx.get(f"{stack.url}{path}").status_code == 200


def test_orders_to_the_cache_need_a_key_that_may(stack: Stack, keys: Keys) -> None:
    order = {"everything": True}
    refused = post(stack, keys.add("no-orders"), "/v1/rt/cache/invalidate", **order)
    assert (refused.status_code, "keys add --cache" in refused.json()["error"]["message"]) == (403, True)
    heard = post(stack, keys.add("orders", "--cache"), "/v1/rt/cache/invalidate", **order)
    assert "the cache is off here" in heard.json()["error"]["message"]


def test_the_official_client_knows_what_it_is_told(stack: Stack, keys: Keys) -> None:
    with client(stack, WRONG) as wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    question: Any = script(text="Hi")
    with client(stack, keys.add("narrow", "--tier", "simple")) as narrow:
        assert "auto" in [model.id for model in narrow.models.list()]
        with pytest.raises(openai.PermissionDeniedError, match="may not use 'expert'; it may use simple"):
            narrow.chat.completions.create(model="expert", messages=question)
        with pytest.raises(openai.PermissionDeniedError, match="may not use 'embedding'"):
            narrow.embeddings.create(model="embedding", input="Hi")
        assert narrow.chat.completions.create(model="auto", messages=question).choices[0].message.content == "Hi"
        headers = {"authorization": f"Bearer {narrow.api_key}"}
    assert httpx.get(f"{stack.url}/metrics", headers=headers).status_code == 403


def test_a_revoked_key_is_none_at_once(stack: Stack, keys: Keys) -> None:
    key = keys.add("leaving")
    assert post(stack, key, messages=script(text="Hi")).status_code == 200
    keys.revoke("leaving-1")
    assert post(stack, key, messages=script(text="Hi")).status_code == 401
    assert embed(stack, key, "Hi").status_code == 401


def test_nothing_but_the_key_says_whose_call_it_is(stack: Stack, keys: Keys) -> None:
    key, since = keys.add("honest"), stack.log_length()
    headers = {"x-tenant": "other", "x-priority": "batch", "limits_operation": "reserve", "tenant": "other"}
    assert post(stack, key, headers=headers, messages=script(text="Hi"), user="other").status_code == 200
    line = stack.wait_for_log("request", since)
    assert (line["tenant"], line["key"]) == ("honest", "honest-1")


# --- how much ------------------------------------------------------------------------------------------------


def test_a_minutes_requests(stack: Stack, keys: Keys) -> None:
    """Case R08."""
    key = keys.add("few", "--requests-per-minute", "3")
    for left, stream in ((2, False), (1, True)):
        answer = post(stack, key, messages=script(text="Hi"), stream=stream)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
        assert answer.headers["x-ratelimit-reset-requests"] in ("60s", "61s")
    assert embed(stack, key, "Hi").headers["x-ratelimit-remaining-requests"] == "0"
    question: Any = script(text="Hi")
    with (
        client(stack, key) as few,
        pytest.raises(openai.RateLimitError, match="this key has 3 requests in 60 s") as caught,
    ):
        few.chat.completions.create(model="auto", messages=question, stream=True)
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 61
    assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    assert caught.value.code == "rate_limit_exceeded"
    assert embed(stack, key, "Hi").status_code == 429


def test_five_at_once_of_a_hundred_tokens_a_minute(stack: Stack, keys: Keys) -> None:
    """What is refused was not begun, and what was granted never sums up to more."""
    key, asked = keys.add("hundred", "--tokens-per-minute", "100"), [58, 81, 40, 175, 60]
    prompt_tokens = post(stack, keys.secrets[0], messages=script(text="a b")).json()["usage"]["prompt_tokens"]

    async def ask_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=stack.url, timeout=30) as http:
            body = {"messages": script(text="a b"), "n": 1}
            headers = {"authorization": f"Bearer {key}"}
            return await asyncio.gather(
                *(
                    http.post(CHAT_PATH, headers=headers, json={**body, "max_tokens": max(1, size - prompt_tokens)})
                    for size in asked
                )
            )

    answers = asyncio.run(ask_all())
    assert sorted({answer.status_code for answer in answers}) == [200, 429]
    spent = sum(answer.json()["usage"]["total_tokens"] for answer in answers if answer.status_code == 200)
    assert spent <= 100
    never = answers[asked.index(175)]
    assert (never.status_code, never.headers["x-should-retry"]) == (429, "false")
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status_code == 429)
    assert "shorten the prompt or lower max_tokens" in never.json()["error"]["message"]


def test_embeddings_pay_their_tokens(stack: Stack, keys: Keys) -> None:
    key = keys.add("embeds", "--tokens-per-minute", "300")
    ids, text = embed(stack, key, [101, 2735, 102]), "Turn on dark mode."
    assert ids.headers["x-ratelimit-remaining-tokens"] == "297"
    first = embed(stack, key, text)
    spent = ids.json()["usage"]["total_tokens"] + first.json()["usage"]["total_tokens"]
    assert int(first.headers["x-ratelimit-remaining-tokens"]) == 297 - len(text) - 2

    def left() -> int:
        return int(post(stack, key, messages=script(text="a"), max_tokens=1).headers["x-ratelimit-remaining-tokens"])

    num_prompt = post(stack, keys.secrets[0], messages=script(text="a"), max_tokens=1).json()["usage"]["prompt_tokens"]
    assert left() == 300 - spent - num_prompt - 1
    assert embed(stack, key, "word " * 100).status_code == 429
    assert embed(stack, key, "").status_code == 400


def test_a_days_money(stack: Stack, keys: Keys) -> None:
    key = keys.add("poor", "--usd-per-day", "0.00001")
    answer = post(stack, key, messages=script(text="a b"), max_tokens=500)
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "insufficient_quota"
    assert int(answer.headers["retry-after"]) <= 86400
    assert answer.headers["x-should-retry"] == "false"


def test_one_that_leaves_gets_back_what_it_did_not_use(stack: Stack, keys: Keys) -> None:
    key, since = keys.add("leaves", "--tokens-per-minute", "9000"), stack.log_length()
    headers = {"authorization": f"Bearer {key}"}
    body = {**LONG, "max_tokens": 900, "stream": True}
    with httpx.stream("POST", f"{stack.url}{CHAT_PATH}", headers=headers, json=body, timeout=30) as response:
        reserved = 9000 - int(response.headers["x-ratelimit-remaining-tokens"])
        for _ in zip(range(20), response.iter_lines()):
            pass
    line = stack.wait_for_log("request", since)
    assert line["outcome"] == "cancelled" and line["tokens"] < 60
    answer = post(stack, key, messages=script(text="a"), max_tokens=1)
    used = 9000 - int(answer.headers["x-ratelimit-remaining-tokens"]) - answer.json()["usage"]["total_tokens"]
    assert used == line["input_tokens"] + line["tokens"] < reserved


# --- when ----------------------------------------------------------------------------------------------------


def test_a_deadline(stack: Stack, keys: Keys) -> None:
    key, deadline = keys.add("hurried"), {"x-deadline-ms": "400"}
    whole = post(stack, key, headers=deadline, **LONG)
    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert whole.elapsed.total_seconds() < 1.5
    streamed = post(stack, key, headers=deadline, stream=True, **LONG)
    assert streamed.status_code == 200
    last = streamed.text.strip().splitlines()[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    stack.wait_until_idle()
    wrong = post(stack, key, headers={"x-deadline-ms": "soon"}, messages=script(text="Hi"))
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "x-deadline-ms"


@pytest.mark.alone
def test_a_deadline_that_cannot_be_met(stack: Stack, keys: Keys) -> None:
    key = keys.add("planner", "--deadline-ms", "30000")
    asked = {"model": "simple", "max_tokens": 60}  # by name: another engine, of which nothing is known, may be in time
    for _ in range(3):
        assert post(stack, key, messages=script(text="x " * 60, itl_ms=15), **asked).status_code == 200
    num_started = len(stack.logged("request"))
    refused = post(stack, key, headers={"x-deadline-ms": "60"}, messages=script(text="x " * 60), **asked)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.elapsed.total_seconds() < 0.3
    assert len(stack.logged("request")) >= num_started


LATE = {(503, "overloaded"), (504, "deadline_exceeded")}  # not expected to be in time, or not in time


def test_embeddings_have_a_deadline_too(stack: Stack, keys: Keys) -> None:
    key = keys.add("embeds-hurried", "--tokens-per-minute", "100000")
    answer = post(stack, key, "/v1/embeddings", {"x-deadline-ms": "3"}, model="embedding", input=["word " * 200] * 100)
    assert (answer.status_code, answer.json()["error"]["code"]) in LATE
    wrong = post(stack, key, "/v1/embeddings", {"x-deadline-ms": "0"}, model="embedding", input="Hi")
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "x-deadline-ms"
    assert embed(stack, key, "Hi").status_code == 200
    stack.wait_until_idle()


# --- gRPC ----------------------------------------------------------------------------------------------------


@pytest.fixture
def stub(stack: Stack) -> Iterator[Any]:
    with grpc.insecure_channel(stack.front_url) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def chat_request(**fields: Any) -> Any:
    message = new_request(contracts.ORCHESTRATOR_MODEL)
    add_string(message, contracts.REQUEST, json.dumps(fields).encode())
    return message


def embedding_request(*texts: str) -> Any:
    message = pb.ModelInferRequest(model_name=contracts.EMBEDDING_MODEL)
    message.inputs.add(name="text", datatype="BYTES", shape=(len(texts), 1))
    message.inputs[0].contents.bytes_contents.extend(text.encode() for text in texts)
    return message


def refusal(call: Callable[[], Any]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


def test_the_front_knows_the_same_keys(stub: Any, keys: Keys) -> None:
    question = chat_request(messages=script(text="Hi"))
    wrong = (("authorization", f"Bearer {WRONG}"),)
    for message in (question, embedding_request("Hi")):
        for metadata in ((), wrong):
            error = refusal(lambda: stub.ModelInfer(message, metadata=metadata))  # noqa: B023 (it runs at once)
            assert error.code() == grpc.StatusCode.UNAUTHENTICATED
            assert json.loads(error.details())["error"]["code"] == "invalid_api_key"
    (response,) = stub.ModelStreamInfer(iter((question,)))
    assert json.loads(response.error_message)["error"]["code"] == "invalid_api_key"
    metadata = (("authorization", f"Bearer {keys.add('rpc')}"),)
    assert b'"Hi"' in find_output_of(stub.ModelInfer(question, metadata=metadata), "event")
    assert len(find_output_of(stub.ModelInfer(embedding_request("Hi", "Ho"), metadata=metadata), "embedding")) == 3072


def find_output_of(response: Any, name: str) -> bytes:
    names = [output.name for output in response.outputs]
    return bytes(response.raw_output_contents[names.index(name)])


def test_the_front_knows_the_same_quotas(stack: Stack, stub: Any, keys: Keys) -> None:
    metadata = (("authorization", f"Bearer {keys.add('few-rpc', '--requests-per-minute', '2')}"),)
    question = chat_request(messages=script(text="Hi"))
    first, *_ = stub.ModelStreamInfer(iter((question,)), metadata=metadata)
    raw = find_output(first, contracts.HEADERS)
    assert raw is not None and json.loads(raw[4:])["x-ratelimit-remaining-requests"] == "1"
    embedded = stub.ModelInfer(embedding_request("Hi"), metadata=metadata)
    assert embedded.parameters["x-ratelimit-remaining-requests"].string_param == "0"
    for message in (question, embedding_request("Hi")):
        error = refusal(lambda: stub.ModelInfer(message, metadata=metadata))  # noqa: B023
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 1 <= int(dict(error.trailing_metadata())["retry-after"]) <= 61
        assert 1 <= int(json.loads(error.details())["headers"]["retry-after"]) <= 61


def test_embeddings_by_the_front_pay_their_tokens(stub: Any, keys: Keys) -> None:
    metadata = (("authorization", f"Bearer {keys.add('embeds-rpc', '--tokens-per-minute', '300')}"),)
    text = "Turn on dark mode."

    def left() -> int:
        embedded = stub.ModelInfer(embedding_request(text, text), metadata=metadata)
        return int(embedded.parameters["x-ratelimit-remaining-tokens"].string_param)

    most = 2 * (len(text) + 2)
    assert left() == 300 - most
    assert wait_for(lambda: left() > 300 - 2 * most, 0.1)  # settled: 7 tokens a text, not 20
    only_vectors = embedding_request(text)
    only_vectors.outputs.add(name="embedding")
    assert len(stub.ModelInfer(only_vectors, metadata=metadata).outputs) == 1


def test_operations_are_not_for_strangers(stub: Any, keys: Keys) -> None:
    message = chat_request(lengths=[1])
    message.parameters[contracts.LIMITS_OPERATION_PARAMETER].string_param = "admit"
    error = refusal(lambda: stub.ModelInfer(message, metadata=(("authorization", f"Bearer {keys.secrets[0]}"),)))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "parameters.limits_operation: is not allowed here" in error.details()


def test_embeddings_by_the_front_have_a_deadline_too(stub: Any, keys: Keys) -> None:
    metadata = (("authorization", f"Bearer {keys.add('hurried-rpc')}"), ("x-deadline-ms", "3"))
    error = refusal(lambda: stub.ModelInfer(embedding_request(*["word " * 200] * 8), metadata=metadata))
    assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert json.loads(error.details())["error"]["code"] in {code for _, code in LATE}


def test_both_outputs_may_be_asked_for_by_name(stack: Stack, keys: Keys) -> None:
    """As load tools do; there are no headers where there are no limits."""
    body = triton.InferInput("request", [1], "BYTES")
    body.set_data_from_numpy(np.array([json.dumps({"messages": script(text="Hi")})], dtype=np.object_))
    outputs = [triton.InferRequestedOutput(name) for name in ("event", "headers")]
    for key in (keys.secrets[0], keys.add("counted", "--requests-per-minute", "9")):
        with triton.InferenceServerClient(stack.front_url) as front:
            result = front.infer("orchestrator", [body], outputs=outputs, headers={"authorization": f"Bearer {key}"})
        assert json.loads(result.as_numpy("event")[0])["choices"][0]["message"]["content"] == "Hi"


def has_store_errors(stack: Stack) -> bool:
    page = httpx.get(stack.facts["triton_metrics_url"], timeout=10).text
    return re.search(r"^rt_limits_store_errors_total [1-9]", page, re.MULTILINE) is not None


# --- two orchestrators, one Redis ----------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_two_orchestrators_share_their_quotas(start: Start, tmp_path: Path) -> None:
    """A hundred at once, exactly as many as fit; then Redis dies: money is refused, and the rest goes on."""
    keys, redis = Keys(tmp_path / "keys.json"), RedisServer()
    redis.start()
    rates = keys.add("rates", "--requests-per-minute", "30")
    tokens = keys.add("tokens", "--tokens-per-minute", "3000")
    money = keys.add("money", "--usd-per-day", "1")
    spare = keys.add("spare", "--requests-per-minute", "30")

    async def ask_all(stacks: list[Stack], key: str, **fields: Any) -> list[httpx.Response]:
        async with contextlib.AsyncExitStack() as stack:
            limits = httpx.Limits(max_connections=60)
            clients = [
                await stack.enter_async_context(httpx.AsyncClient(base_url=each.url, timeout=60, limits=limits))
                for each in stacks
            ]
            body = {"messages": script(text="a b", itl_ms=20), **fields}
            headers = {"authorization": f"Bearer {key}"}
            return await asyncio.gather(
                *(clients[index % 2].post(CHAT_PATH, json=body, headers=headers) for index in range(100))
            )

    try:
        with contextlib.ExitStack() as stack:
            stacks = [
                stack.enter_context(start("scripted", tmp_path / name, f"--keys={keys.path}", REDIS_URL=redis.url))
                for name in ("one", "two")
            ]
            codes = [answer.status_code for answer in asyncio.run(ask_all(stacks, rates))]
            assert (codes.count(200), codes.count(429)) == (30, 70)
            answers = asyncio.run(ask_all(stacks, tokens, max_tokens=300))
            good = [answer for answer in answers if answer.status_code == 200]
            most = max(300 + answer.json()["usage"]["prompt_tokens"] for answer in good)
            # As many as fit at once; those that ended made room for others, for what they had not used.
            assert 3000 // most <= len(good) < 100
            assert sum(answer.json()["usage"]["total_tokens"] for answer in good) <= 3000
            assert {answer.status_code for answer in answers} == {200, 429}
            assert post(stacks[0], money, messages=script(text="a")).status_code == 200
            redis.kill()
            assert post(stacks[0], spare, messages=script(text="a")).status_code == 200
            assert (
                post(stacks[0], rates, messages=script(text="a")).status_code == 429
            )  # what was used is not forgotten
            refused = post(stacks[1], money, messages=script(text="a"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "limits_unavailable")
            assert refused.headers["retry-after"] == "1"
            wait_for(lambda: has_store_errors(stacks[1]))
            redis.start()
            wait_for(lambda: post(stacks[1], money, messages=script(text="a")).status_code == 200)
            assert redis.url not in stacks[0].log() + stacks[1].log()
    finally:
        redis.stop()


# --- secrets -------------------------------------------------------------------------------------------------


def test_no_key_is_written_anywhere(stack: Stack, keys: Keys) -> None:
    """After all that was done above; and it would be found."""
    refused = post(stack, WRONG, messages=script(text="Hi"))
    time.sleep(0.3)  # metrics are told every 0.1 s
    page = httpx.get(f"{stack.url}/metrics", headers={"authorization": f"Bearer {keys.secrets[0]}"})
    assert 'rt_limits_refusals_total{code="invalid_api_key"}' in page.text
    logs = {name: stack.log(name) for name in stack.facts["logs"]}
    assert all(logs.values())
    texts = [page.text, keys.path.read_text(), refused.text, *logs.values()]
    for secret in (*keys.secrets, WRONG):
        for part in (secret, secret.removeprefix("rt-")[:20]):
            assert not any(part in text for text in texts)
