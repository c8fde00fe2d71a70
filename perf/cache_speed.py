"""`python -m perf cache-speed`: how long a hit takes over HTTP, and what a miss costs.

Target scripted with target cpu's cache and embedder: the engine answers at once, so that what is left is the way there
and the cache. Whole answers, each client on one connection, the next request when the one before is over. The stored
questions are all of one partition: the worst case for the lookup.

A miss is compared with the same request under `Cache-Control: no-store`, in pairs, who goes first alternates.
"""

from __future__ import annotations

import http.client
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from build.compiler import build
from build.fetch import cache_folder
from build.rows import load_models, load_target
from orchestrator.contracts import EMBEDDING_ENCODER_MODEL
from perf.errors import PerfError
from perf.prompts import fresh_question
from perf.report import format_table, say
from perf.stack import Stack, running_stack
from perf.stats import percentile

EXACT_BAR_MS = 3.0
SEMANTIC_BAR_MS = 10.0
MISS_BAR_MS = 8.0
# Stored, and asked in other words.
QUESTIONS = (
    ("What is the capital of France?", "what's the capital of France"),
    ("Who wrote Pride and Prejudice?", "who wrote pride and prejudice"),
    ("What is the boiling point of water?", "what's the boiling point of water"),
    ("How do I reset my password?", "how do i reset my password"),
)
_WARM_UP = 20
_FILLERS = 16  # clients that fill
_MAX_OTHERS = 0.02


def cache_speed(entries: Sequence[int], clients: Sequence[int], num_requests: int) -> tuple[str, dict[str, Any]]:
    """Measure every number of entries with every number of clients; returns table and result. Raises `PerfError`."""
    numbers = itertools.count()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="perf-cache-") as folder:
        say("building target scripted with a cache")
        with running_stack(_build(Path(folder) / "scripted")) as stack:
            num_stored = _fill(stack, [question for question, _ in QUESTIONS])
            for num_entries in sorted(entries):
                say(f"filling up to {num_entries} entries")
                missing = max(0, num_entries - num_stored)
                num_stored += _fill(stack, [_fresh(next(numbers)) for _ in range(missing)])
                for num_clients in clients:
                    say(f"  {num_clients} clients: hits")
                    times = _measure(stack, (("exact",), ("semantic",)), num_clients, num_requests, numbers)
                    runs.append({"entries": num_entries, "clients": num_clients, **_describe(times)})
            for run in runs[-len(clients) :]:  # last of all: misses are stored
                say(f"  {run['clients']} clients: misses")
                times = _measure(stack, (("miss", "bypass"),), run["clients"], num_requests, numbers)
                run.update(_describe(times))
                run["miss_added_ms"] = round(run["miss_ms"]["p50"] - run["bypass_ms"]["p50"], 3)
    alone = next((run for run in reversed(runs) if run["clients"] == 1), runs[-1])
    return _table(runs), {"command": "cache-speed", **alone, "runs": runs}


def _build(artifact: Path) -> Path:
    target, cpu = load_target("scripted"), load_target("cpu")
    models = target.models | {EMBEDDING_ENCODER_MODEL: cpu.models[EMBEDDING_ENCODER_MODEL]}
    target = target.model_copy(update={"cache": cpu.cache, "models": models})
    build(target, load_models(target), artifact, cache=cache_folder(), progress=lambda _: nullcontext())
    return artifact


def _fresh(number: int) -> str:
    """A question that was not asked before; its number keeps the guards from serving another's answer."""
    return fresh_question(number, number)


class _Client:
    """One keep-alive connection."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)

    def ask(self, question: str, control: str = "") -> tuple[float, str]:
        """How long the whole answer took, in ms, and what `rt.cache` says."""
        body = json.dumps({"model": "simple", "messages": [{"role": "user", "content": question}]})
        headers = {"content-type": "application/json", **({"cache-control": control} if control else {})}
        started_s = time.perf_counter()
        self._connection.request("POST", "/v1/chat/completions", body, headers)
        response = self._connection.getresponse()
        raw = response.read()
        took_ms = (time.perf_counter() - started_s) * 1000
        if response.status != http.HTTPStatus.OK:
            raise PerfError(f"{question!r}: {response.status} {raw.decode(errors='replace')}")
        return took_ms, json.loads(raw)["rt"]["cache"]


def _fill(stack: Stack, questions: Sequence[str]) -> int:
    """Have the answers to `questions` stored; returns how many there were."""

    def fill(part: int) -> None:
        client = _Client(stack.gateway_url)
        for question in questions[part::_FILLERS]:
            client.ask(question)

    def wait_for_embedder() -> None:
        """Answers are stored after they were sent, and embedded for it: this text stands in the queue behind theirs."""
        host = urlsplit(stack.gateway_url).netloc
        connection = http.client.HTTPConnection(host, timeout=60)
        body = json.dumps({"model": "embedding", "input": "Is everything stored?"})
        connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        connection.getresponse().read()
        connection.close()

    with ThreadPoolExecutor(_FILLERS) as pool:
        for done in [pool.submit(fill, part) for part in range(_FILLERS)]:
            done.result()
    wait_for_embedder()
    return len(questions)


def _measure(
    stack: Stack, phases: Sequence[Sequence[str]], num_clients: int, num_requests: int, numbers: itertools.count[int]
) -> dict[str, list[float]]:
    """Times in ms by what the cache had, `num_requests` of each kind over all clients.

    A hit whose vector comes too late on a busy machine is a miss, and is left out. Raises `PerfError` where there are
    more than a few.
    """
    times: dict[str, list[float]] = {kind: [] for kinds in phases for kind in kinds}
    others: dict[str, int] = {}

    def run(kinds: Sequence[str], number: int) -> None:
        client = _Client(stack.gateway_url)
        for index in range(-_WARM_UP, num_requests // num_clients):
            for kind in kinds if index % 2 else reversed(kinds):
                if kind in ("exact", "semantic"):
                    question = QUESTIONS[(index + number) % len(QUESTIONS)][kind == "semantic"]
                else:
                    question = _fresh(next(numbers))
                took_ms, got = client.ask(question, "no-store" if kind == "bypass" else "")
                if got != kind:
                    others[kind] = others.get(kind, 0) + 1
                elif index >= 0:
                    times[kind].append(took_ms)

    for kinds in phases:
        with ThreadPoolExecutor(num_clients) as pool:
            for done in [pool.submit(run, kinds, number) for number in range(num_clients)]:
                done.result()
    if max(others.values(), default=0) > _MAX_OTHERS * num_requests:
        raise PerfError(f"rt.cache was not what was expected in {others} of {num_requests} requests of each kind")
    return times


def _describe(times: dict[str, list[float]]) -> dict[str, Any]:
    return {
        f"{kind}_ms": {f"p{percent}": round(percentile(values, percent), 3) for percent in (50, 95, 99)}
        for kind, values in times.items()
    }


def _table(runs: Sequence[dict[str, Any]]) -> str:
    bars = {"exact": f"p50 <= {EXACT_BAR_MS:.0f}", "semantic": f"p50 <= {SEMANTIC_BAR_MS:.0f}"}
    rows: list[tuple[object, ...]] = []
    for run in runs:
        where = f"{run['entries']} entries, {run['clients']} clients"
        for kind in ("exact", "semantic", "miss", "bypass"):
            if (points := run.get(f"{kind}_ms")) is None:
                continue
            rows.append((f"{where}: {kind}", points["p50"], points["p95"], points["p99"], bars.get(kind, "")))
        if "miss_added_ms" in run:
            rows.append((f"{where}: miss - bypass", run["miss_added_ms"], "", "", f"p50 <= {MISS_BAR_MS:.0f}"))
    return format_table(("whole answer over HTTP, ms", "p50", "p95", "p99", "bar, alone"), rows)
