"""Part `text`: SmolLM2 through the whole stack says what AsyncLLM alone says, and ends as it must.

Every check is a line of the result, with what was found; `failed` names those that did not hold.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from perf.errors import PerfError
from perf.gpu.rows import SMOLLM2, make_artifact, make_row
from perf.gpu.sides import bare, sse_load, whole_stack
from perf.gpu.speed import Prompts
from perf.prompts import fresh_question
from perf.report import say
from perf.stack import Stack

NUM_PROMPTS, MAX_TOKENS = 50, 64
NUM_TOGETHER, TOGETHER_TOKENS = 64, 96
NUM_LEAVING = 200
TIMEOUT_S = 60.0


def text(work: Path, cache: Path, out: Path, gateway_workers: int, **changes: Any) -> dict[str, Any]:
    """Raises `PerfError` only when a side does not start or answer."""
    row = make_row("gpu-text", SMOLLM2, precision="bf16", max_seq_len=8192, gpu_memory_share=0.3, **changes)
    artifact = make_artifact(row, work, cache)
    questions = [fresh_question(index, index) for index in range(NUM_PROMPTS)]
    together = {
        "prompts": Prompts(7).take(NUM_TOGETHER, 64),
        "max_tokens": TOGETHER_TOKENS,
        "temperature": 1.0,
        "seeds": list(range(1000, 1000 + NUM_TOGETHER)),
    }
    with whole_stack(artifact, out / "logs" / "text-stack", gateway_workers) as stack:
        tokenizer = stack.load_tokenizer()
        end_id = stack.tier.end_id
        ask = Client(stack.gateway_url).ask
        answers = [ask(chat(each, max_tokens=MAX_TOKENS, temperature=0)) for each in questions]
        checks = {
            "stop_string": check_stop(ask, questions[0], answers[0]["text"]),
            "n": check_n(ask, questions[1]),
            "json_schema": check_schema(ask),
            "seed": check_seed(ask, questions[2]),
            "log_probs": check_log_probs(ask, questions[3]),
            "min_tokens": check_min_tokens(ask, questions[4]),
            "refusal": check_refusal(ask),
            "usage": check_usage(answers, [len(tokenizer.encode_chat([message(each)])) for each in questions]),
            "cancel": check_leaving(stack, questions, 1),
            "leaving": check_leaving(stack, questions, NUM_LEAVING),
        }
        with sse_load(stack.gateway_url, "simple") as load:
            streams = load.ask({**together, "texts": True})
    with bare(artifact) as worker:
        prompts = [tokenizer.encode_chat([message(each)]) for each in questions]
        alone = [worker.ask({"prompts": [each], "max_tokens": MAX_TOKENS, "end_id": end_id}) for each in prompts]
        expected = [decode(tokenizer, each["token_ids"][0], end_id) for each in alone]
        batch = worker.ask(together)
    equal = [answer["text"] == wanted for answer, wanted in zip(answers, expected)]
    checks["greedy"] = {
        "holds": all(equal),
        "equal": sum(equal),
        "of": len(equal),
        "samples": [answer["text"] for answer in answers[:3]],
        "different": [
            {"stack": answer["text"], "bare": wanted}
            for answer, wanted, same in zip(answers, expected, equal)
            if not same
        ][:5],
    }
    checks["together"] = compare_streams(streams, [decode(tokenizer, each, None) for each in batch["token_ids"]])
    failed = [name for name, check in checks.items() if not check["holds"]]
    say(f"  checks that failed: {', '.join(failed) or 'none'}")
    return {"checks": checks, "failed": failed}


def message(question: str) -> dict[str, str]:
    return {"role": "user", "content": question}


def chat(question: str, **fields: Any) -> dict[str, Any]:
    """A request for a chat completion of the cheapest tier, streamed, with usage."""
    common = {"model": "simple", "stream": True, "stream_options": {"include_usage": True}}
    return {**common, "messages": [message(question)], **fields}


def decode(tokenizer: Any, token_ids: list[int], end_id: int | None) -> str:
    """As the stack does it: without the token that ends."""
    if token_ids and token_ids[-1] == end_id:
        token_ids = token_ids[:-1]
    return str(tokenizer.decode_stream().push(token_ids))


class Client:
    """Chat completions by http.client, one at a time a thread; with a `key`, as who has it."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self._address = urlsplit(url).netloc
        self._headers = {
            "Content-Type": "application/json",
            **({} if key is None else {"Authorization": f"Bearer {key}"}),
        }

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """`status`; of a stream `text`, `finish`, `usage`, `log_probs` and `num_events`, else `body`."""
        with self.open(body) as response:
            if response.status != 200 or not body.get("stream"):
                return {"status": response.status, "body": json.loads(response.read())}
            return {"status": 200, **join(events(response))}

    @contextlib.contextmanager
    def open(self, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), self._headers)
            yield connection.getresponse()
        finally:
            connection.close()


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream; raises `PerfError` for one that is an error, or when it ends without its mark."""
    for line in response:
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            return
        if data:
            event = json.loads(data)
            if "error" in event:
                raise PerfError(f"an error inside a stream: {event['error']}")
            yield event
    raise PerfError("a stream ended without [DONE]")


def join(stream: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """A stream of one choice as one answer."""
    texts, log_probs, finish, usage, num_events = [], [], None, None, 0
    for event in stream:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            if piece := choice["delta"].get("content"):
                texts.append(piece)
                num_events += 1
            if choice.get("logprobs"):
                log_probs += choice["logprobs"]["content"]
            finish = choice["finish_reason"] or finish
    return {"text": "".join(texts), "finish": finish, "usage": usage, "log_probs": log_probs, "num_events": num_events}


def check_stop(ask: Any, question: str, whole: str) -> dict[str, Any]:
    """A stop string out of the middle of a greedy answer cuts it just before."""
    words = whole.split()
    stop = f" {words[len(words) // 2]} {words[len(words) // 2 + 1]}"
    answer = ask(chat(question, max_tokens=MAX_TOKENS, temperature=0, stop=[stop]))
    expected = whole.split(stop)[0]
    return {"holds": answer["text"] == expected and answer["finish"] == "stop", "stop": stop, "text": answer["text"]}


def check_n(ask: Any, question: str) -> dict[str, Any]:
    """Three choices, different ones, each with its own finish reason, and the usage of all."""
    answer = ask(
        {**chat(question, max_tokens=24, temperature=1.0, seed=5, n=3), "stream": False, "stream_options": None}
    )
    choices = answer["body"].get("choices", [])
    texts = [each["message"]["content"] for each in choices]
    return {"holds": len(set(texts)) == 3 and all(each["finish_reason"] for each in choices), "texts": texts}


def check_schema(ask: Any) -> dict[str, Any]:
    """Guided decoding gives JSON of the schema."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": schema}}
    answer = ask(chat("Name a large city.", max_tokens=80, temperature=0, response_format=form))
    try:
        found = json.loads(answer.get("text", ""))
        holds = set(found) == {"city", "people"} and isinstance(found["people"], int) and answer["finish"] == "stop"
    except (ValueError, TypeError):
        holds = False
    return {"holds": holds, "answer": answer}


def check_seed(ask: Any, question: str) -> dict[str, Any]:
    """A seed repeats an answer; another one does not."""
    one, same, other = (ask(chat(question, max_tokens=32, temperature=1.0, seed=each))["text"] for each in (1, 1, 2))
    return {"holds": one == same != other, "texts": [one, same, other]}


def check_log_probs(ask: Any, question: str) -> dict[str, Any]:
    """One log probability a token, none above 0, and of a greedy answer most are likely."""
    answer = ask(chat(question, max_tokens=16, temperature=0, logprobs=True))
    values = [each["logprob"] for each in answer["log_probs"]]
    holds = len(values) == answer["usage"]["completion_tokens"] and all(-30 < each <= 0 for each in values)
    return {"holds": holds, "values": values}


def check_min_tokens(ask: Any, question: str) -> dict[str, Any]:
    """An answer that would end sooner goes on."""
    answer = ask(chat(question, max_tokens=200, min_tokens=200, temperature=0))
    return {"holds": answer["usage"]["completion_tokens"] == 200, "usage": answer["usage"]}


def check_refusal(ask: Any) -> dict[str, Any]:
    """What does not fit is refused with its name, and nothing is sent to the engine."""
    answer = ask(chat("Hi", max_tokens=9000))
    return {"holds": answer["status"] == 400 and "context window" in str(answer["body"]), "answer": answer}


def check_usage(answers: list[dict[str, Any]], num_prompt_tokens: list[int]) -> dict[str, Any]:
    """Prompt tokens are those of the template; an answer that was cut has exactly as many as allowed."""
    wrong = [
        {"usage": answer["usage"], "prompt": num, "finish": answer["finish"]}
        for answer, num in zip(answers, num_prompt_tokens)
        if answer["usage"]["prompt_tokens"] != num
        or (answer["finish"] == "length") != (answer["usage"]["completion_tokens"] == MAX_TOKENS)
    ]
    return {"holds": not wrong, "wrong": wrong[:5]}


def check_leaving(stack: Stack, questions: list[str], num: int) -> dict[str, Any]:
    """Clients that go after the first text leave no request, and no KV block behind.

    The KV cache's use is that of a step, so one short request asks for a last one.
    """
    client = Client(stack.gateway_url)
    for number in range(num):
        with client.open(chat(questions[number % len(questions)], max_tokens=2000, ignore_eos=True)) as response:
            for event in events(response):
                if any(choice["delta"].get("content") for choice in event["choices"]):
                    break
    left_s = time.monotonic()
    while (live := read_gauge(stack, "rt_live_requests")) > 0 and time.monotonic() - left_s < 10:
        time.sleep(0.02)
    gone_s = time.monotonic() - left_s
    client.ask(chat(questions[0], max_tokens=2))
    time.sleep(0.3)  # the gauge is told every 100 ms
    usage = read_gauge(stack, "rt_kv_cache_usage_ratio")
    return {"holds": live == 0 and usage == 0, "live": live, "kv_cache_usage": usage, "gone_after_s": round(gone_s, 3)}


def read_gauge(stack: Stack, name: str) -> float:
    """The sum over the models, of Triton's metrics."""
    with urllib.request.urlopen(stack.triton_metrics_url, timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def compare_streams(streams: dict[str, Any], expected: list[str]) -> dict[str, Any]:
    """Streams that ran together, each with its own seed, against the same together in AsyncLLM alone.

    Sampling by a seed is repeatable only as far as the batch is: a batch of another shape rounds otherwise. What must
    hold for each is its number of tokens (the load refuses others) and that it is like its own, and nobody else's.
    """
    texts = streams["texts"]
    same = sum(text == wanted for text, wanted in zip(texts, expected))
    mixed = [
        index
        for index, text in enumerate(texts)
        if max(range(len(expected)), key=lambda other: common_prefix(text, expected[other])) != index
    ]
    return {
        "holds": not mixed,
        "equal": same,
        "of": len(texts),
        "mixed": mixed,
        "tokens_per_s": streams["tokens_per_s"],
    }


def common_prefix(one: str, other: str) -> int:
    """Characters."""
    return next((index for index, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
