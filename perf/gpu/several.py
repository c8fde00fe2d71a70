"""Parts `several` and `replicas`: two orchestrators with an engine each, both on the first GPU.

`several`: two servers on one Redis, asked at the same moment: what one has stored the other one serves, a quota is
both's together, and each generates a question once. `replicas`: two of them behind one gateway, beside one alone.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from orchestrator.limits.keys import Key, KeyFile, change_keys, digest_of, new_secret
from orchestrator.redis_address import REDIS_VARIABLE
from perf.errors import PerfError
from perf.gpu.rows import SMOLLM2, make_artifact, make_row
from perf.gpu.sides import READY_TIMEOUT_S, sse_load
from perf.gpu.speed import Prompts
from perf.gpu.text import Client, message
from perf.prompts import fresh_question
from perf.report import say
from perf.stack import running_stack

NUM_SERVERS = 2
ROW = {"precision": "bf16", "max_seq_len": 8192, "gpu_memory_share": 0.3}
NUM_QUESTIONS, ANSWER_TOKENS, NUM_ASKING = 40, 1024, 4
NUM_TOGETHER = 80
QUOTA, NUM_OF_QUOTA = 100, 200  # requests a minute, and how many come at once
STREAMS_EACH, STREAM_TOKENS, STREAM_PROMPT, NUM_LOADS, ROUNDS = 256, 512, 128, 4, 2


def several(work: Path, cache: Path, out: Path, gateway_workers: int, **changes: Any) -> dict[str, Any]:
    """Raises `PerfError` only when a server does not start or answer."""
    row = make_row("gpu-several", SMOLLM2, has_cache=True, **{**ROW, **changes})
    with two_servers(make_artifact(row, work, cache), out / "logs") as (one, other, limited):
        checks = {"cache": share_hits(one, other), "single_flight": fly(one, other), "quota": spend(*limited)}
    failed = [name for name, check in checks.items() if not check["holds"]]
    say(f"  checks that failed: {', '.join(failed) or 'none'}; {checks}")
    return {"checks": checks, "failed": failed}


def replicas(work: Path, cache: Path, out: Path, gateway_workers: int, **changes: Any) -> dict[str, Any]:
    """Tokens/s of one and of two, with as many streams for each."""
    artifact = make_artifact(make_row("gpu-replicas", SMOLLM2, **{**ROW, **changes}), work, cache)
    rates = {num: rounds_of(artifact, num, gateway_workers, out / "logs") for num in (1, NUM_SERVERS)}
    return {
        "streams_of_each": STREAMS_EACH,
        "tokens_per_s_by_replicas": rates,
        "two_over_one": round(max(rates[NUM_SERVERS]) / max(rates[1]), 3),
    }


@contextmanager
def two_servers(artifact: Path, logs: Path) -> Iterator[tuple[Client, Client, tuple[Client, Client]]]:
    """On one Redis and one file of keys: a client of each, and two with a key of `QUOTA`."""
    from perf.redis_server import RedisServer  # its package need not be there for the other parts

    redis = RedisServer()
    redis.start()
    try:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
            keys = Path(folder) / "keys.json"
            free, limited = add_key(keys, "free"), add_key(keys, "limited", requests_per_minute=QUOTA)
            stacks = [
                started.enter_context(
                    running_stack(
                        artifact,
                        f"--keys={keys}",
                        logs=logs / f"several-{number}",
                        ready_timeout_s=READY_TIMEOUT_S,
                        environ={REDIS_VARIABLE: redis.url},
                    )
                )
                for number in range(NUM_SERVERS)
            ]
            one, other = (Client(stack.gateway_url, free) for stack in stacks)
            few, fewer = (Client(stack.gateway_url, limited) for stack in stacks)
            yield one, other, (few, fewer)
    finally:
        redis.stop()


def add_key(keys: Path, name: str, **rights: Any) -> str:
    """Put the key of a tenant `name` into the file; it."""
    secret = new_secret()
    key = Key.model_validate({"id": name, "digest": digest_of(secret), "tenant": name, **rights})
    change_keys(keys, lambda file: KeyFile(keys=(*file.keys, key)))
    return secret


def share_hits(one: Client, other: Client) -> dict[str, Any]:
    """What ended by itself and was stored by one server is an exact hit of the other, with the same text."""
    questions = [fresh_question(number, number) for number in range(NUM_QUESTIONS)]
    for client in (one, other):  # opens its connections to Redis
        ask(client, questions[0])
    with ThreadPoolExecutor(NUM_ASKING) as pool:
        first = list(pool.map(lambda question: ask(one, question), questions))
        again = list(pool.map(lambda question: ask(other, question), questions))
    stored = [(a, b) for a, b in zip(first, again) if a["choices"][0]["finish_reason"] == "stop"]
    hits = [text_of(a) == text_of(b) and b["rt"]["cache"] == "exact" for a, b in stored]
    return {"holds": bool(hits) and all(hits), "stored": len(stored), "hits": sum(hits)}


def fly(one: Client, other: Client) -> dict[str, Any]:
    """Of many callers of one question at both servers one a server has it generated; all have one of these texts."""
    question = fresh_question(3, 777)
    with ThreadPoolExecutor(NUM_TOGETHER) as pool:
        clients = (one, other) * (NUM_TOGETHER // 2)
        answers = list(pool.map(lambda client: ask(client, question), clients))
    how = Counter("shared" if each["rt"].get("shared") else each["rt"]["cache"] for each in answers)
    texts = Counter(map(text_of, answers))
    return {"holds": how["miss"] <= NUM_SERVERS and len(texts) <= how["miss"], "how": dict(how), "texts": len(texts)}


def spend(few: Client, fewer: Client) -> dict[str, Any]:
    """A quota of both together: of more requests than it has, at once, exactly so many are admitted."""
    body = {"model": "simple", "max_tokens": 2}
    bodies = [{**body, "messages": [message(fresh_question(0, number))]} for number in range(NUM_OF_QUOTA)]
    clients: Sequence[Client] = (few, fewer) * (NUM_OF_QUOTA // 2)
    with ThreadPoolExecutor(NUM_OF_QUOTA) as pool:
        statuses = Counter(
            answer["status"] for answer in pool.map(lambda client, body: client.ask(body), clients, bodies)
        )
    holds = statuses == {200: QUOTA, 429: NUM_OF_QUOTA - QUOTA}
    return {"holds": holds, "statuses": {str(status): num for status, num in statuses.items()}}


def ask(client: Client, question: str) -> Mapping[str, Any]:
    """A whole greedy answer. Raises `PerfError` where it is none."""
    body = {"model": "simple", "messages": [message(question)], "temperature": 0, "max_tokens": ANSWER_TOKENS}
    answer = client.ask(body)
    if answer["status"] != 200:
        raise PerfError(f"status {answer['status']}: {answer['body']}")
    found: Mapping[str, Any] = answer["body"]
    return found


def text_of(answer: Mapping[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def rounds_of(artifact: Path, num_replicas: int, gateway_workers: int, logs: Path) -> list[float]:
    """Tokens/s of `STREAMS_EACH` streams for each of the replicas, all started together, round by round."""
    with ExitStack() as started:
        stack = started.enter_context(
            running_stack(
                artifact,
                f"--replicas={num_replicas}",
                f"--gateway-workers={gateway_workers * NUM_SERVERS}",
                logs=logs / f"scale-{num_replicas}",
                ready_timeout_s=READY_TIMEOUT_S,
            )
        )
        loads = [started.enter_context(sse_load(stack.gateway_url, "simple")) for _ in range(NUM_LOADS)]
        prompts = Prompts(num_replicas)
        pool = started.enter_context(ThreadPoolExecutor(NUM_LOADS))

        def run(num_tokens: int) -> float:
            requests = [
                {
                    "prompts": prompts.take(num_replicas * STREAMS_EACH // NUM_LOADS, STREAM_PROMPT),
                    "max_tokens": num_tokens,
                }
                for _ in loads
            ]
            answers = pool.map(lambda load, request: load.ask(request), loads, requests)
            return round(sum(float(answer["tokens_per_s"]) for answer in answers), 1)

        run(16)  # what is compiled at first use
        rates = [run(STREAM_TOKENS) for _ in range(ROUNDS)]
    say(f"  {num_replicas} replicas, {num_replicas * STREAMS_EACH} streams: {rates} tokens/s")
    return rates
