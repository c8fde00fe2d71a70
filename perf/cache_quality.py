"""How often the semantic cache serves a wrong answer, and how often it finds a right one.

Over pairs of requests, one JSON a line: ``{"cached": {"system"?, "messages"}, "asked": {…}, "expect": "hit"|"miss",
"kind", "lang"?}``. Each pair is looked up by the product's own code: the first request is stored, the second asked. The
same is done with a cosine threshold alone (0.92, the one published for this encoder), which is what others do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from orchestrator.cache.guards import rejecting_guard
from orchestrator.cache.key import Identity, Origin, identify
from orchestrator.cache.languages import guess_language
from orchestrator.cache.lookup import THRESHOLD, Embedder, Guard, Lookup, Outcome
from orchestrator.cache.store import Entry, MemoryStore
from orchestrator.quality.wilson import wilson_interval
from orchestrator.request import ChatRequest
from perf.errors import PerfError
from perf.report import format_table, say
from perf.stats import percentile

PLAIN_THRESHOLD = 0.92
_ORIGIN = Origin(tenant="default", policy="auto")


class Question(BaseModel):
    """A request of a pair: its messages, after a system prompt where there is one."""

    model_config = ConfigDict(extra="forbid")

    system: str | None = None
    messages: list[dict[str, Any]]

    def request(self) -> ChatRequest:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return ChatRequest.model_validate({"messages": [*system, *self.messages]})


class Pair(BaseModel):
    """One line of a file of pairs."""

    model_config = ConfigDict(extra="forbid")

    cached: Question
    asked: Question
    expect: Literal["hit", "miss"]
    kind: str
    lang: str | None = None


class Tally(NamedTuple):
    """Counts of one group of pairs, for one way to look up."""

    num_misses_due: int
    num_false_hits: int
    num_hits_due: int
    num_hits: int


class Judged(NamedTuple):
    """A pair, and what came of it with the guards and with the threshold alone."""

    pair: Pair
    language: str
    guarded: Outcome
    plain: Outcome
    lookup_us: float


def cache_quality(pairs_path: Path, embedder: Embedder, errors: Path | None = None) -> tuple[str, dict[str, Any]]:
    """Judge every pair of the file; returns the table and the JSON line. Writes the wrong ones to `errors`.

    Raises `PerfError` for a line that is no pair.
    """
    pairs = read_pairs(pairs_path)
    embed = cache(embedder.embed)
    judged = []
    for number, pair in enumerate(pairs, 1):
        judged.append(_judge(pair, embed))
        if number % 200 == 0:
            say(f"{number} of {len(pairs)} pairs")
    if errors is not None:
        errors.write_text("".join(_describe_error(each) for each in judged if _is_wrong(each)), encoding="utf-8")
    return _table(judged), _result(judged, pairs_path)


def read_pairs(path: Path) -> list[Pair]:
    """Raises `PerfError` naming the line that is wrong."""
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        try:
            pairs.append(Pair.model_validate_json(line))
        except ValidationError as error:
            raise PerfError(f"{path}:{number}: not a pair: {_describe(error)}") from error
    if not pairs:
        raise PerfError(f"{path}: no pairs")
    return pairs


def _describe(error: ValidationError) -> str:
    """The first fault, by its field."""
    first = error.errors()[0]
    return ".".join(map(str, first["loc"])) + (": " if first["loc"] else "") + first["msg"]


def _judge(pair: Pair, embed: Callable[[str], Any]) -> Judged:
    try:
        cached, asked = (identify(each.request(), _ORIGIN) for each in (pair.cached, pair.asked))
    except ValidationError as error:
        raise PerfError(f"a pair of kind {pair.kind!r} holds no request: {_describe(error)}") from error
    started = perf_counter()
    guarded = asyncio.run(_look_up(cached, asked, embed, THRESHOLD, rejecting_guard))
    lookup_us = (perf_counter() - started) * 1e6
    plain = asyncio.run(_look_up(cached, asked, embed, PLAIN_THRESHOLD, lambda one, other: None))
    language = pair.lang or guess_language(cached.question or "").language or "other"
    return Judged(pair, language, guarded, plain, lookup_us)


async def _look_up(
    cached: Identity, asked: Identity, embed: Callable[[str], Any], threshold: float, guard: Guard
) -> Outcome:
    store = MemoryStore(max_bytes=1 << 20, clock=lambda: 0.0)
    await store.put(Entry(cached, b"{}", "model", embed(cached.question or ""), stored_s=0.0, expires_s=1.0))
    lookup = Lookup(store, lambda: 0.0, threshold, guard)
    exact = await lookup.find_exact(asked)
    return exact if exact.kind == "exact" else await lookup.find_near(asked, embed(asked.question or ""))


def _tally(judged: Iterable[Judged], side: Literal["guarded", "plain"]) -> Tally:
    counts = [0, 0, 0, 0]
    for each in judged:
        due = 2 if each.pair.expect == "hit" else 0
        counts[due] += 1
        counts[due + 1] += getattr(each, side).kind != "miss"
    return Tally(*counts)


def _is_wrong(judged: Judged) -> bool:
    return (judged.guarded.kind != "miss") != (judged.pair.expect == "hit")


def _describe_error(judged: Judged) -> str:
    outcome = judged.guarded
    return (
        f"{'FALSE HIT' if judged.pair.expect == 'miss' else 'not found'} {judged.language} {judged.pair.kind} "
        f"{outcome.guard} {outcome.similarity if outcome.similarity is None else round(outcome.similarity, 2)}\n"
        f"    {judged.pair.cached.messages[-1]['content']}\n    {judged.pair.asked.messages[-1]['content']}\n"
    )


_HEADER = (
    "pairs",
    "misses due",
    "false hits",
    "%",
    "95 %",
    f"alone, {PLAIN_THRESHOLD}",
    "hits due",
    "found",
    "%",
    "95 %",
    f"alone, {PLAIN_THRESHOLD}",
)


def _row(name: str, judged: Sequence[Judged]) -> list[object]:
    guarded, plain = _tally(judged, "guarded"), _tally(judged, "plain")

    def cells(num_hits: int, num: int, num_plain: int) -> list[object]:
        if not num:
            return ["", "", "", "", ""]
        low, high = wilson_interval(num_hits, num)
        return [num, num_hits, f"{100 * num_hits / num:.1f}", f"{100 * low:.1f}-{100 * high:.1f}", num_plain]

    return [
        name,
        *cells(guarded.num_false_hits, guarded.num_misses_due, plain.num_false_hits),
        *cells(guarded.num_hits, guarded.num_hits_due, plain.num_hits),
    ]


def _groups(judged: Sequence[Judged], name: Callable[[Judged], str]) -> dict[str, list[Judged]]:
    groups: dict[str, list[Judged]] = {}
    for each in judged:
        groups.setdefault(name(each), []).append(each)
    return dict(sorted(groups.items()))


def _table(judged: Sequence[Judged]) -> str:
    rows = [_row(language, group) for language, group in _groups(judged, lambda each: each.language).items()]
    rows += [
        _row(f"  {kind}", group) for kind, group in _groups(judged, lambda each: each.pair.kind.split("/")[0]).items()
    ]
    return format_table(_HEADER, [*rows, _row("all", judged)])


def _result(judged: Sequence[Judged], path: Path) -> dict[str, Any]:
    def rates(group: Sequence[Judged], side: Literal["guarded", "plain"]) -> dict[str, Any]:
        tally = _tally(group, side)
        return {
            **tally._asdict(),
            "false_hit_rate": round(tally.num_false_hits / max(1, tally.num_misses_due), 4),
            "recall": round(tally.num_hits / max(1, tally.num_hits_due), 4),
        }

    guards: dict[str, int] = {}
    for each in judged:
        if each.guarded.kind == "miss":
            guards[each.guarded.guard or "identity"] = guards.get(each.guarded.guard or "identity", 0) + 1
    times = [each.lookup_us for each in judged]
    languages = _groups(judged, lambda each: each.language)
    return {
        "command": "cache-quality",
        "pairs": path.name,
        "threshold": THRESHOLD,
        **rates(judged, "guarded"),
        "threshold_alone": {"threshold": PLAIN_THRESHOLD, **rates(judged, "plain")},
        "languages": {language: rates(group, "guarded") for language, group in languages.items()},
        "guards": dict(sorted(guards.items())),
        # The first lookup of a pair, embedding included: both questions are new.
        "first_lookup_ms": {
            "p50": round(percentile(times, 50) / 1e3, 3),
            "p99": round(percentile(times, 99) / 1e3, 3),
        },
    }
