"""Techniques around the engine, measured through the gateway of a served target."""

from __future__ import annotations

import http.client
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from build.router_data import read_labelled
from perf.errors import PerfError
from perf.prompts import PARAPHRASES, script
from perf.report import say
from perf.sse import SseConnection, chat_body
from perf.stack import Stack
from perf.stats import percentile
from perf.techniques.comparison import Comparison, alternate
from perf.techniques.engine import first_token_ms
from perf.techniques.ground import COMPRESSED_TIER, WHOLE_TIER, Ground

HELD_OUT = Path("tests/data/router_unseen.jsonl")
NUM_ROUTED = 24
NUM_TALKS = 3
NUM_TURNS = 9
NUM_TEXTS = 64
NUM_CONNECTIONS = 30


class Client:
    """One keep-alive connection, whole answers. A context manager."""

    def __init__(self, stack: Stack) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(stack.gateway_url).netloc, timeout=120)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def post(self, path: str, body: dict[str, Any], **headers: str) -> tuple[float, dict[str, Any]]:
        """Milliseconds until the whole answer was read, and the answer. Raises `PerfError` for a refusal."""
        names = {"content-type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
        started_s = time.perf_counter()
        self._connection.request("POST", path, json.dumps(body), names)
        response = self._connection.getresponse()
        raw = response.read()
        took_ms = (time.perf_counter() - started_s) * 1000
        if response.status != HTTPStatus.OK:
            raise PerfError(f"{path}: {response.status} {raw.decode(errors='replace')[:300]}")
        return took_ms, json.loads(raw)

    def chat(self, model: str, messages: list[dict[str, str]], **fields: Any) -> tuple[float, dict[str, Any]]:
        """As `post`, past the cache unless `stored`."""
        headers = {} if fields.pop("stored", False) else {"cache_control": "no-store"}
        body = {"model": model, "messages": messages, "temperature": 0, **fields}
        return self.post("/v1/chat/completions", body, **headers)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def warm_up(ground: Ground) -> Comparison:
    """The first request of an engine that has warmed up, against one that has not; beside it, a server's."""

    def first_ms(**changes: Any) -> float:
        with ground.engine(**changes) as engine:
            return first_token_ms(engine, ground.prompt(ground.question()))

    rounds = alternate(ground.num_rounds, first_ms, lambda: first_ms(warm_up=False))
    _ = ground.stack
    first, *_, tenth = ground.first_ttft_ms
    served = {"first_ms": round(first, 1), "tenth_ms": round(tenth, 1), "first_by_tenth": round(first / tenth, 3)}
    return Comparison("ms to first token", "lower", rounds, {"served": served})


def streaming(ground: Ground) -> Comparison:
    """When the first text of an answer of 64 tokens is there: streamed, or with all of it."""
    with SseConnection(ground.stack.gateway_url) as connection, Client(ground.stack) as client:
        rounds = alternate(
            ground.num_rounds,
            lambda: connection.ask(chat_body(ground.question(), 64)).ttft_ms,
            lambda: client.chat("simple", user(ground.question()), max_tokens=64, ignore_eos=True)[0],
        )
    return Comparison("ms to first text", "lower", rounds, {"tokens": 64})


def semantic_cache(ground: Ground) -> Comparison:
    """A whole answer to a question that is stored in other words, against the one to those when they were new."""
    rounds, num_served = [], 0
    with Client(ground.stack) as client:
        for stored, asked in PARAPHRASES:
            miss_ms, first = client.chat("simple", user(stored), stored=True)
            if first["choices"][0]["finish_reason"] != "stop":
                continue  # an answer that was cut is not kept
            time.sleep(0.5)  # it is stored after it was sent
            hit_ms, second = client.chat("simple", user(asked), stored=True)
            if first["rt"]["cache"] == "miss" and second["rt"]["cache"] == "semantic":
                num_served += 1
                rounds.append((hit_ms, miss_ms))
    if not rounds:
        raise PerfError("semantic-cache: none of the questions was served from the cache in other words")
    return Comparison("ms to whole answer", "lower", rounds, {"questions": len(PARAPHRASES), "served": num_served})


def routing(ground: Ground) -> Comparison:
    """What conversations cost that are sent to "auto", against the dearest tier: the classifier's held-out ones."""
    rows = random.Random(0).sample(read_labelled(HELD_OUT), NUM_ROUTED)
    costs: dict[str, float] = {"auto": 0.0, "expert": 0.0}
    times_ms: dict[str, list[float]] = {"auto": [], "expert": []}
    tiers: Counter[str] = Counter()
    num_right = 0
    with Client(ground.stack) as client:
        for number, row in enumerate(rows):
            messages = [{"role": said.role, "content": said.content} for said in row.messages]
            for model in ("auto", "expert") if number % 2 else ("expert", "auto"):
                took_ms, answer = client.chat(model, messages, max_tokens=32, ignore_eos=True)
                costs[model] += answer["rt"]["cost_usd"]
                times_ms[model].append(took_ms)
                if model == "auto":
                    tiers[answer["rt"]["tier"]] += 1
                    num_right += answer["rt"]["tier"] == row.tier
    facts = {
        "conversations": len(rows),
        "tiers": dict(tiers),
        "as_labelled": round(num_right / len(rows), 4),
        "whole_answer_ms_p50": {
            "on": round(percentile(times_ms["auto"], 50), 1),
            "off": round(percentile(times_ms["expert"], 50), 1),
        },
    }
    per_thousand = 1000 / len(rows)
    rounds = [(costs["auto"] * per_thousand, costs["expert"] * per_thousand)]
    return Comparison("USD per 1,000 requests", "lower", rounds, facts)


def compression(ground: Ground) -> Comparison:
    """First token of the last question of long conversations with the model, with old turns compressed and whole.

    Asked as a server gets them that has not seen the conversation, and then once more, each with its prefix cached.
    """
    cold: list[tuple[float, float]] = []
    warm: list[tuple[float, float]] = []
    num_saved: list[int] = []
    num_whole: list[int] = []
    with Client(ground.stack) as client, SseConnection(ground.stack.gateway_url) as connection:
        questions = [random.Random(talk).sample(ground.questions, NUM_TURNS) for talk in range(NUM_TALKS)]
        say(f"  the model holds {NUM_TALKS} conversations")
        with ThreadPoolExecutor(NUM_TALKS) as pool:
            talks = list(pool.map(partial(hold_talk, ground.stack), questions))
        for talk, messages in enumerate(talks):

            def fresh(messages: list[dict[str, str]] = messages) -> list[dict[str, str]]:
                return [{"role": "user", "content": f"{ground.number():06d}. {messages[0]['content']}"}, *messages[1:]]

            def first_ms(tier: str, asked: list[dict[str, str]]) -> float:
                return connection.ask(_streamed(tier, asked)).ttft_ms

            asked = {tier: fresh() for tier in (COMPRESSED_TIER, WHOLE_TIER)}
            order = list(asked) if talk % 2 == 0 else list(asked)[::-1]
            for rounds in (cold, warm):
                times = {tier: first_ms(tier, asked[tier]) for tier in order}
                rounds.append((times[COMPRESSED_TIER], times[WHOLE_TIER]))
            facts = {tier: client.chat(tier, asked[tier], max_tokens=2)[1] for tier in asked}
            num_saved.append(facts[COMPRESSED_TIER]["rt"].get("prompt_tokens_saved", 0))
            num_whole.append(facts[WHOLE_TIER]["rt"]["input_tokens"])
    if not sum(num_saved):
        raise PerfError(f"compression: nothing was left out of prompts of {num_whole} tokens")
    cached = Comparison("", "lower", warm).describe()
    return Comparison(
        "ms to first token",
        "lower",
        cold,
        {
            "conversations": NUM_TALKS,
            "prompt_tokens": round(statistics.mean(num_whole), 1),
            "tokens_saved": round(statistics.mean(num_saved), 1),
            "share_saved": round(sum(num_saved) / sum(num_whole), 4),
            "with_cached_prefix": {name: cached[name] for name in ("on", "off", "ratio")},
        },
    )


def hold_talk(stack: Stack, questions: Sequence[str]) -> list[dict[str, str]]:
    """A conversation of people's questions and the model's own answers, up to the last question."""
    messages = user(questions[0])
    with Client(stack) as client:
        for question in questions[1:]:
            _, answer = client.chat(WHOLE_TIER, messages, max_tokens=120)
            said = answer["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, *user(question)]
    return messages


def _streamed(model: str, messages: list[dict[str, str]]) -> bytes:
    options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "max_tokens": 2}
    return json.dumps({"model": model, "messages": messages, "ignore_eos": True, **options}).encode()


def dynamic_batching(ground: Ground) -> Comparison:
    """Short texts that are embedded at once: Triton's batches against each text alone."""
    with Client(ground.scripted) as batched, Client(ground.unbatched) as alone:

        def rate(client: Client) -> float:
            texts = [ground.question() for _ in range(NUM_TEXTS)]
            took_ms, _ = client.post("/v1/embeddings", {"model": "embedding", "input": texts})
            return NUM_TEXTS / took_ms * 1000

        for client in (batched, alone):
            rate(client)  # warms up
        rounds = alternate(ground.num_rounds, lambda: rate(batched), lambda: rate(alone))
    return Comparison("texts/s", "higher", rounds, {"texts": NUM_TEXTS})


def connection_reuse(ground: Ground) -> Comparison:
    """First token over a connection that is open, against one that is opened for it. On loopback: without a way."""
    url = ground.scripted.gateway_url

    def first_ms(connection: SseConnection, since_s: float) -> float:
        body = chat_body(script("one two", 0, 0, ground.number()), 2)
        return (connection.ask(body).first_token_s - since_s) * 1000

    def new() -> float:
        started_s = time.monotonic()
        with SseConnection(url) as connection:
            return first_ms(connection, started_s)

    with SseConnection(url) as open_connection:

        def reused() -> float:
            return first_ms(open_connection, time.monotonic())

        reused()  # warms up
        rounds = alternate(NUM_CONNECTIONS, reused, new)
    return Comparison("ms to first token", "lower", rounds, {"requests": NUM_CONNECTIONS})
