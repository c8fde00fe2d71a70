"""How long the cache's lookup takes by itself, for both stores: no HTTP, no embedding, one partition.

The questions are real ones, embedded; there are not enough of them, so the others are mixtures of two of them with some
noise, which lie about as near to each other as real ones do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from orchestrator.cache.key import Identity
from orchestrator.cache.lookup import NUM_CANDIDATES, Embedder, Lookup
from orchestrator.cache.redis_store import RedisStore, connect
from orchestrator.cache.store import Entry, MemoryStore, Store, Vector
from perf.cache_quality import read_pairs
from perf.errors import PerfError
from perf.redis_server import RedisServer
from perf.report import format_table, say
from perf.stats import percentile

STORES = ("memory", "redis")
_SEED = 7
_NUM_WARM_UP = 20
_TTL_S = 3600.0
_ANSWER = b'{"text": "' + b"x" * 600 + b'"}'
Operation = Callable[[int], Awaitable[bool]]


class Question(NamedTuple):
    """A question and its unit vector, FP32 [dimensions]."""

    text: str
    vector: Vector


def cache_lookup_speed(
    pairs_path: Path, embedder: Embedder, sizes: Sequence[int], num: int, names: Sequence[str] = STORES
) -> tuple[str, dict[str, Any]]:
    """`num` operations of each kind, with each number of entries, for each store; the table and the JSON line.

    Raises `PerfError` for pairs too few to ask `num` questions of, or a lookup that finds what it should not.
    """
    real = _read_questions(pairs_path, embedder)
    if len(real) < 2 * (num + _NUM_WARM_UP):
        raise PerfError(f"{pairs_path}: {len(real)} questions; {2 * (num + _NUM_WARM_UP)} are needed to ask {num}")
    asked, known = real[: num + _NUM_WARM_UP], real[num + _NUM_WARM_UP :]
    stored = known + _mixtures(known, max(sizes))
    server = RedisServer()
    server.start()
    try:
        results = asyncio.run(_measure(server.url, stored, known, asked, sizes, names))
    finally:
        server.stop()
    return _table(results), {"command": "cache-lookup", "operations": num, "stores": results}


def make_questions(pairs_path: Path, embedder: Embedder, num: int) -> list[Question]:
    """Those of the pairs, and `num` mixtures of them."""
    real = _read_questions(pairs_path, embedder)
    return real + _mixtures(real, num)


async def _measure(
    url: str,
    stored: Sequence[Question],
    known: Sequence[Question],
    asked: Sequence[Question],
    sizes: Sequence[int],
    names: Sequence[str],
) -> dict[str, Any]:
    results: dict[str, Any] = {name: {} for name in names}
    for size in sizes:
        client = connect(url)
        stores: dict[str, Store] = {
            "memory": MemoryStore(1 << 32),
            "redis": RedisStore(client, 1 << 32, prefix=f"perf-{size}"),
        }
        for name in names:
            store = stores[name]
            say(f"{name}: {size} entries")
            started_s = perf_counter()
            for each in stored[:size]:
                await store.put(_entry(each, store))
            fill_s = perf_counter() - started_s
            measured = await _operations(store, known[:size], stored[:size], asked)
            results[name][str(size)] = {**measured, "fill_s": round(fill_s, 1)}
        await client.flushall()
        await client.aclose()
    return results


async def _operations(
    store: Store, known: Sequence[Question], stored: Sequence[Question], asked: Sequence[Question]
) -> dict[str, Any]:
    lookup = Lookup(store, store.clock)
    rows = np.stack([each.vector for each in stored])
    num_found = num_due = 0

    async def find_exact(number: int) -> bool:
        return (await lookup.find_exact(_identity(known[number % len(known)].text))).kind == "exact"

    async def find_near_hit(number: int) -> bool:
        question = known[number % len(known)]
        # Another key, the same words: what passes every guard.
        return (await lookup.find_near(_identity(question.text + " ?"), question.vector)).entry is not None

    async def find_near_miss(number: int) -> bool:
        await lookup.find_near(_identity(asked[number].text), asked[number].vector)
        return True

    async def nearest(number: int) -> bool:
        nonlocal num_found, num_due
        near = await store.nearest(_identity(""), asked[number].vector, NUM_CANDIDATES)
        worst = np.sort(rows @ asked[number].vector)[-NUM_CANDIDATES:][0]
        num_found += sum(each.similarity >= worst - 1e-5 for each in near)
        num_due += min(NUM_CANDIDATES, len(rows))
        return True

    async def put(number: int) -> bool:
        question = asked[number]
        await store.put(_entry(Question(f"{question.text} {number} new", question.vector), store))
        return True

    operations: dict[str, Operation] = {
        "exact": find_exact,
        "near_hit": find_near_hit,
        "near_miss": find_near_miss,
        "put": put,
    }
    measured: dict[str, Any] = {}
    for name, operation in operations.items():
        if name == "put":
            for number in range(len(asked)):
                await nearest(number)
        times_ms, done = [], []
        for number in range(len(asked)):
            started_s = perf_counter()
            done.append(await operation(number))
            times_ms.append((perf_counter() - started_s) * 1e3)
        times_ms = times_ms[_NUM_WARM_UP:]
        measured[name] = {f"p{percent}": round(percentile(times_ms, percent), 3) for percent in (50, 95, 99)}
        measured[name]["share_done"] = round(sum(done) / len(done), 3)
    measured["recall_at_8"] = round(num_found / max(1, num_due), 4)
    return measured


def _read_questions(path: Path, embedder: Embedder) -> list[Question]:
    texts = {each.messages[-1]["content"] for pair in read_pairs(path) for each in (pair.cached, pair.asked)}
    chosen = sorted(text for text in texts if isinstance(text, str))
    np.random.default_rng(_SEED).shuffle(chosen)
    say(f"embedding {len(chosen)} questions")
    vectors = [embedder.embed(text) for text in chosen]
    return [Question(text, vector) for text, vector in zip(chosen, vectors) if vector is not None]


def _mixtures(known: Sequence[Question], num: int) -> list[Question]:
    """`num` questions like the known ones; each has the text of its nearer half and a number, as guards read texts."""
    random = np.random.default_rng(_SEED)
    rows = np.stack([each.vector for each in known])
    mixed = []
    for start in range(0, num, 10_000):
        count = min(10_000, num - start)
        nearer, farther, one, other = (random.integers(len(rows), size=count) for _ in range(4))
        weight = random.uniform(0.5, 1.0, size=(count, 1))
        vectors = _unit(weight * rows[nearer] + (1 - weight) * rows[farther])
        vectors += 0.35 * _unit(rows[one] - rows[other]) + 0.15 * _unit(random.normal(size=vectors.shape))
        vectors = _unit(vectors).astype(np.float32)
        mixed += [
            Question(f"{known[place].text} {start + number}", vector)
            for number, (place, vector) in enumerate(zip(nearer, vectors))
        ]
    return mixed


def _unit(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    unit: npt.NDArray[Any] = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
    return unit


def _identity(text: str) -> Identity:
    return Identity("default", "auto", "partition", text, text)


def _entry(question: Question, store: Store) -> Entry:
    now_s = store.clock()
    return Entry(_identity(question.text), _ANSWER, "model", question.vector, now_s, now_s + _TTL_S)


def _table(results: dict[str, Any]) -> str:
    rows = [
        [f"{store}, {size} entries, {name}", *(operation[f"p{percent}"] for percent in (50, 95, 99))]
        for store, by_size in results.items()
        for size, operations in by_size.items()
        for name, operation in operations.items()
        if isinstance(operation, dict)
    ]
    return format_table(("ms", "p50", "p95", "p99"), rows)
