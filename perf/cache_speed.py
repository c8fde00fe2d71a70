"""`python -m perf cache-speed`: how long a hit takes over HTTP, and what a miss costs, for both stores.

Target scripted with target cpu's cache and embedder: the engine answers at once, so that what is left is the way there
and the cache. Whole answers, each client on one connection, the next request when the one before is over. The stored
questions are all of one partition: the worst case for the lookup. Each store and number of entries has a server of its
own, whose store has them when it starts (`perf.cache_fillers`).

A miss is compared with the same request under `Cache-Control: no-store`, in pairs, who goes first alternates.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from build.compiler import SOURCES, build
from build.fetch import cache_folder
from build.rows import load_models, load_target
from orchestrator.cache.guards import rejecting_guard
from orchestrator.cache.lookup import THRESHOLD, Embedder
from orchestrator.cache.redis_store import RedisStore, connect
from orchestrator.contracts import EMBEDDING_ENCODER_MODEL
from orchestrator.redis_address import REDIS_VARIABLE
from perf.cache_fillers import FILE_VARIABLE, fill, fillable_sources, write_fillers
from perf.cache_lookup_speed import STORES, Question, make_questions
from perf.embedder import ArtifactEmbedder
from perf.errors import PerfError
from perf.prompts import PARAPHRASES, fresh_question
from perf.redis_server import RedisServer
from perf.report import format_table, say
from perf.stack import Stack, running_stack
from perf.stats import percentile

EXACT_BAR_MS = 3.0
SEMANTIC_BAR_MS = 10.0
MISS_BAR_MS = 8.0
_PAIRS = Path("tests/data/cache_pairs.jsonl")  # whose questions fill the store
_MAX_BYTES = 1 << 30  # of 100,000 entries none has to leave
_READY_TIMEOUT_S = 600.0  # a graph of 100,000 vectors is built before
_MAX_LIKENESS = 0.5  # of what fills the store to what is asked
_WARM_UP = 20
_HITS_ONLY = "only-if-cached"  # a hit that comes too late would be stored, and be an exact one from then on
_MAX_OTHERS = 0.5
_MAX_TRIES = 100


def cache_speed(
    entries: Sequence[int],
    clients: Sequence[int],
    num_requests: int,
    stores: Sequence[str] = STORES,
    keep: Callable[[dict[str, Any]], object] = lambda _: None,
) -> tuple[str, dict[str, Any]]:
    """Measure each store with every number of entries and of clients; returns table and result.

    `keep` gets the result after each number of entries too. An interruption or a failure ends it early: the result then
    has `interrupted` or `failed`.
    """
    runs: list[dict[str, Any]] = []
    result: dict[str, Any] = {"command": "cache-speed", "runs": runs}
    try:
        with tempfile.TemporaryDirectory(prefix="perf-cache-") as folder:
            say("building target scripted with a cache")
            artifact, file = _build(Path(folder)), Path(folder) / "fillers"
            questions = _make_fillers(ArtifactEmbedder(artifact), max(entries))
            for store, num_entries in itertools.product(stores, sorted(entries)):
                say(f"{store}, {num_entries:,} entries: filling")
                write_fillers(file, artifact, questions[: max(0, num_entries - len(PARAPHRASES))])
                with _serving(artifact, store, file) as stack:
                    if num_entries > len(PARAPHRASES):
                        _check_is_stored(stack, questions[0].text)
                    measured = _measure_clients(stack, clients, num_requests)
                runs += [{"store": store, "entries": num_entries, **each} for each in measured]
                result |= _headline(runs)
                keep(result)
    except KeyboardInterrupt:
        result["interrupted"] = True
    except (PerfError, OSError) as error:
        result["failed"] = str(error)
    return _table(runs), result


def _build(folder: Path) -> Path:
    target, cpu = load_target("scripted"), load_target("cpu")
    assert cpu.cache is not None
    models = target.models | {EMBEDDING_ENCODER_MODEL: cpu.models[EMBEDDING_ENCODER_MODEL]}
    cache = cpu.cache.model_copy(update={"max_bytes": _MAX_BYTES})
    target = target.model_copy(update={"cache": cache, "models": models})
    artifact, sources = folder / "scripted", fillable_sources(SOURCES, folder / "sources")
    build(
        target,
        load_models(target),
        artifact,
        cache=cache_folder(),
        progress=lambda _: nullcontext(),
        sources=sources,
    )
    return artifact


def _make_fillers(embedder: Embedder, num: int) -> list[Question]:
    """`num` questions, none of which would be served in the place of what is asked."""
    own = list(itertools.chain(*PARAPHRASES))
    rows = np.stack([vector for text in own if (vector := embedder.embed(text)) is not None])

    def is_apart(question: Question) -> bool:
        likeness = rows @ question.vector
        return float(np.max(likeness)) < _MAX_LIKENESS and all(
            rejecting_guard(question.text, text) for text, like in zip(own, likeness) if like >= THRESHOLD
        )

    return list(itertools.islice(filter(is_apart, make_questions(_PAIRS, embedder, num)), num))


@contextmanager
def _serving(artifact: Path, store: str, file: Path) -> Iterator[Stack]:
    """The server, whose store has what `file` has."""
    if store == "memory":
        with running_stack(artifact, ready_timeout_s=_READY_TIMEOUT_S, environ={FILE_VARIABLE: str(file)}) as stack:
            yield stack
        return
    server = RedisServer()
    server.start()
    try:
        asyncio.run(_fill_redis(server.url, file))
        with running_stack(artifact, environ={REDIS_VARIABLE: server.url}) as stack:
            yield stack
    finally:
        server.stop()


async def _fill_redis(url: str, file: Path) -> None:
    client = connect(url)
    await fill(RedisStore(client, _MAX_BYTES), file)
    await client.aclose()


def _headline(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What one client had of the store in process with the most entries, or what comes nearest to it."""
    return max(runs, key=lambda run: (run["store"] == "memory", -run["clients"], run["entries"]))


class _Client:
    """One keep-alive connection. A context manager."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)

    def __enter__(self) -> _Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def ask(self, question: str, control: str = "") -> tuple[float, str]:
        """How long the whole answer took, in ms, and what `rt.cache` says."""
        body = json.dumps({"model": "simple", "messages": [{"role": "user", "content": question}]})
        headers = {"content-type": "application/json", **({"cache-control": control} if control else {})}
        started_s = perf_counter()
        self._connection.request("POST", "/v1/chat/completions", body, headers)
        response = self._connection.getresponse()
        raw = response.read()
        took_ms = (perf_counter() - started_s) * 1000
        if response.status == http.HTTPStatus.GATEWAY_TIMEOUT and control == _HITS_ONLY:
            return took_ms, "miss"
        if response.status != http.HTTPStatus.OK:
            raise PerfError(f"{question!r}: {response.status} {raw.decode(errors='replace')}")
        return took_ms, json.loads(raw)["rt"]["cache"]


def _check_is_stored(stack: Stack, question: str) -> None:
    with _Client(stack.gateway_url) as client:
        if client.ask(question)[1] == "miss":
            raise PerfError(f"{question!r}: is among what fills the store, and was a miss")


def _store_questions(stack: Stack) -> None:
    """Answers are stored after they were sent: each question is asked until it is a hit."""
    with _Client(stack.gateway_url) as client:
        for question, _ in PARAPHRASES:
            if not any(client.ask(question)[1] == "exact" for _ in range(_MAX_TRIES)):
                raise PerfError(f"{question!r}: asked {_MAX_TRIES} times, and its answer is not stored")


def _measure_clients(stack: Stack, clients: Sequence[int], num_requests: int) -> list[dict[str, Any]]:
    """A run for each number of clients: hits, and then misses, of which each is stored."""
    _store_questions(stack)
    numbers = itertools.count()
    runs: list[dict[str, Any]] = [{"clients": num_clients} for num_clients in clients]
    for phases in ((("exact",), ("semantic",)), (("miss", "bypass"),)):
        for run in runs:
            say(f"  {run['clients']} clients: {', '.join(itertools.chain(*phases))}")
            times, others = _measure(stack, phases, run["clients"], num_requests, numbers)
            run.update(_describe(times))
            run["others"] = {**run.get("others", {}), **others}
    for run in runs:
        run["miss_added_ms"] = round(run["miss_ms"]["p50"] - run["bypass_ms"]["p50"], 3)
    return runs


def _measure(
    stack: Stack, phases: Sequence[Sequence[str]], num_clients: int, num_requests: int, numbers: itertools.count[int]
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Times in ms by what the cache had, `num_requests` of each kind over all clients; and who were of another kind.

    A hit whose vector, or whose store, comes too late on a busy machine is a miss, and is left out. Raises `PerfError`
    where most are.
    """
    times: dict[str, list[float]] = {kind: [] for kinds in phases for kind in kinds}
    others = dict.fromkeys(times, 0)

    def run(kinds: Sequence[str], number: int) -> None:
        with _Client(stack.gateway_url) as client:
            for index in range(-_WARM_UP, num_requests // num_clients):
                for kind in kinds if index % 2 else reversed(kinds):
                    took_ms, got = ask(client, kind, index + number)
                    if got != kind:
                        others[kind] += index >= 0
                    elif index >= 0:
                        times[kind].append(took_ms)

    def ask(client: _Client, kind: str, place: int) -> tuple[float, str]:
        if kind in ("exact", "semantic"):
            return client.ask(PARAPHRASES[place % len(PARAPHRASES)][kind == "semantic"], _HITS_ONLY)
        number = next(numbers)  # it keeps the guards from serving another's answer
        return client.ask(fresh_question(number, number), "no-store" if kind == "bypass" else "")

    for kinds in phases:
        with ThreadPoolExecutor(num_clients) as pool:
            for done in [pool.submit(run, kinds, number) for number in range(num_clients)]:
                done.result()
    if max(others.values()) > _MAX_OTHERS * num_requests:
        raise PerfError(f"rt.cache was not what was expected in {others} of {num_requests} requests of each kind")
    return times, others


def _describe(times: dict[str, list[float]]) -> dict[str, Any]:
    return {
        f"{kind}_ms": {f"p{percent}": round(percentile(values, percent), 3) for percent in (50, 95, 99)}
        for kind, values in times.items()
    }


def _table(runs: Sequence[dict[str, Any]]) -> str:
    bars = {"exact": f"p50 <= {EXACT_BAR_MS:.0f}", "semantic": f"p50 <= {SEMANTIC_BAR_MS:.0f}"}
    rows: list[tuple[object, ...]] = []
    for run in runs:
        where = f"{run['store']}, {run['entries']:,} entries, {run['clients']} clients"
        for kind in ("exact", "semantic", "miss", "bypass"):
            points = run[f"{kind}_ms"]
            rows.append((f"{where}: {kind}", points["p50"], points["p95"], points["p99"], bars.get(kind, "")))
        rows.append((f"{where}: miss - bypass", run["miss_added_ms"], "", "", f"p50 <= {MISS_BAR_MS:.0f}"))
    return format_table(("whole answer over HTTP, ms", "p50", "p95", "p99", "bar, alone"), rows)
