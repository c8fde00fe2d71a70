"""How soon the quality monitor finds a tier that starts to answer nonsense, and how often it is wrong about a good one.

The product's own monitor takes in simulated verdicts, as 5 % of requests give them. What share of a good tier's answers
is like the expert's differs: it is drawn for each run and topic. Of nonsense 2 % are, which is more than was measured.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from orchestrator.cache.lookup import Embedder
from orchestrator.config import QualityPolicy
from orchestrator.quality.clusters import Vector
from orchestrator.quality.monitor import Change, Monitor, Sample
from orchestrator.quality.track import NUM_USUAL_OF_TIER, Track
from perf.errors import PerfError
from perf.report import format_table, say
from perf.stats import summarize
from perf.topics import THINGS, TOPICS

TIER = "simple"
GOOD_SHARES = (0.3, 0.45, 0.6, 0.75, 0.9)
NONSENSE_SHARE = 0.02
REQUESTS = 10_000
# How long the search goes on after a drift began, in requests; beyond the bar, so that what misses it is seen.
_MOST_REQUESTS = 6_000
_DIMENSIONS = 384
_NUM_DIRECTIONS = 10
# Of a cluster's own requests; enough before the drift that what is usual for it is known.
_OWN_BEFORE = 1_500
_OWN_MOST = 1_500


class Run(NamedTuple):
    """`false_alarms` and `false_calls` of the good requests; `delay` in requests of the drift, None: not found."""

    false_alarms: int
    false_calls: int
    delay: int | None


def quality_drift(num_runs: int, num_topic_runs: int, embedder: Embedder | None) -> tuple[str, dict[str, Any]]:
    """All of it; returns the table and the JSON line. Without an embedder, nothing about real questions."""
    rows, tier = [], {}
    for share in GOOD_SHARES:
        runs = [simulate_tier(share, seed) for seed in range(num_runs)]
        tier[str(share)] = _describe(runs)
        rows.append(_row(f"tier, usually {share:.0%} good", runs))
        say(f"tier at {share}")
    clusters = [simulate_cluster(seed) for seed in range(num_runs)]
    rows.append(_row("cluster, its own requests", clusters))
    say("clusters")
    at_bar = sum(_has_alarm_at_bar(seed) for seed in range(5 * num_runs))
    result: dict[str, Any] = {
        "command": "quality",
        "sampling": _policy().sampling,
        "tier": tier,
        "cluster": _describe(clusters),
        "false_alarms_at_the_bar": round(at_bar / (5 * num_runs), 4),
    }
    table = format_table(("what drifts", "runs", "false alarms", "false calls", "found", "p50", "p99", "most"), rows)
    if embedder is not None:
        vectors = embed_topics(embedder)
        topics = [simulate_topic(vectors, seed) for seed in range(num_topic_runs)]
        result["topics"] = _describe_topics(topics)
        table += f"\n\nreal questions by topic: {result['topics']}"
    return table, result


def _policy() -> QualityPolicy:
    return QualityPolicy(tiers=[TIER])


def _has_doubt(changes: Sequence[Change]) -> bool:
    return any(change.kind == "doubtful" for change in changes)


def simulate_tier(good_share: float, seed: int, num_requests: int = REQUESTS) -> Run:
    """Good requests of ten kinds of questions, then nonsense for all of them, until the tier itself is doubtful."""
    policy, chance = _policy(), random.Random(f"{seed} {good_share}")
    monitor, directions = Monitor(policy, {TIER: ""}), _directions(seed)
    alarms = 0
    for _ in range(round(num_requests * policy.sampling)):
        vector = _near(directions[chance.randrange(len(directions))], chance)
        alarms += _has_doubt(monitor.add(Sample(TIER, vector, chance.random() < good_share, 1.0)))
    calls = monitor.calls[TIER]
    for num in range(1, round(_MOST_REQUESTS * policy.sampling) + 1):
        vector = _near(directions[chance.randrange(len(directions))], chance)
        monitor.add(Sample(TIER, vector, chance.random() < NONSENSE_SHARE, 1.0))
        if monitor.is_doubtful(TIER, None):
            return Run(alarms, calls, round(num / policy.sampling))
    return Run(alarms, calls, None)


def simulate_cluster(seed: int) -> Run:
    """Kinds of questions with a usual share each; one drifts, until a new question of that kind is doubtful."""
    policy, chance = _policy(), random.Random(seed)
    monitor, directions = Monitor(policy, {TIER: ""}), _directions(seed)
    shares = [chance.uniform(0.3, 0.95) for _ in directions]
    num_own = alarms = calls = 0
    while True:
        kind = chance.randrange(len(directions))
        num_own += kind == 0
        num_drifted = num_own - round(_OWN_BEFORE * policy.sampling)
        has_begun = num_drifted > 0
        share = NONSENSE_SHARE if has_begun and kind == 0 else shares[kind]
        vector = _near(directions[kind], chance)
        changes = monitor.add(Sample(TIER, vector, chance.random() < share, 1.0))
        if not has_begun:
            alarms, calls = alarms + _has_doubt(changes), monitor.calls[TIER]
        elif kind == 0:
            if monitor.is_doubtful(TIER, _near(directions[0], chance)):
                return Run(alarms, calls, round(num_drifted / policy.sampling))
            if num_drifted > _MOST_REQUESTS * policy.sampling:
                return Run(alarms, calls, None)


def _has_alarm_at_bar(seed: int) -> bool:
    """Whether 10,000 requests give an alarm for a tier that is exactly as good as the worst that is not doubtful."""
    policy, chance = _policy(), random.Random(seed)
    usual = chance.uniform(policy.min_quality / (1 - policy.max_drop), 1.0)
    track = Track(NUM_USUAL_OF_TIER, num_usual=NUM_USUAL_OF_TIER, usual_good=round(usual * NUM_USUAL_OF_TIER))
    bar = track.bar(policy)
    return any(track.add(chance.random() < bar, policy) for _ in range(round(REQUESTS * policy.sampling)))


def _directions(seed: int) -> npt.NDArray[np.float32]:
    """Kinds of questions far from each other, as unit vectors."""
    made = np.random.default_rng(seed).normal(size=(_NUM_DIRECTIONS, _DIMENSIONS))
    units: npt.NDArray[np.float32] = (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)
    return units


def _near(direction: Vector, chance: random.Random) -> Vector:
    """A question of a kind: at a cosine of about 0.7."""
    noise = np.random.default_rng(chance.getrandbits(32)).normal(size=len(direction)) / len(direction) ** 0.5
    vector = direction + noise
    unit: Vector = (vector / np.linalg.norm(vector)).astype(np.float32)
    return unit


# --- real questions ------------------------------------------------------------------------------------------


class TopicRun(NamedTuple):
    """After the topic's 1,500 requests: what share of its questions, and of the others', is lifted. `delay`: until half
    of its questions were, in its own requests."""

    topic: str
    delay: int | None
    lifted: float
    others_lifted: float
    false_alarms: int


def embed_topics(embedder: Embedder) -> dict[str, list[Vector]]:
    """Every question of `TOPICS` as a vector. Raises `PerfError` for one that is too long."""
    vectors: dict[str, list[Vector]] = {}
    for topic, questions in TOPICS.items():
        vectors[topic] = []
        for question in questions:
            for text in [question.replace("{}", thing) for thing in THINGS] if "{}" in question else [question]:
                vector = embedder.embed(text)
                if vector is None:
                    raise PerfError(f"perf/topics.py: {text!r} is longer than the embedder's window")
                vectors[topic].append(vector)
    return vectors


def simulate_topic(vectors: Mapping[str, Sequence[Vector]], seed: int) -> TopicRun:
    """All topics alike often, each with a usual share of its own; one drifts after 3,000 sampled answers."""
    policy, chance = _policy(), random.Random(seed)
    monitor, names = Monitor(policy, {TIER: ""}), list(vectors)
    shares, drifting = {name: chance.uniform(0.4, 0.95) for name in names}, names[seed % len(names)]

    def lifted(topics: Sequence[str]) -> float:
        return float(np.mean([monitor.is_doubtful(TIER, vector) for name in topics for vector in vectors[name]]))

    num_own, delay, alarms = 0, None, 0
    for number in range(1_000_000):
        topic = chance.choice(names)
        has_begun = number >= 3000
        share = NONSENSE_SHARE if has_begun and topic == drifting else shares[topic]
        changes = monitor.add(Sample(TIER, chance.choice(vectors[topic]), chance.random() < share, 1.0))
        alarms += _has_doubt(changes) and not has_begun
        if has_begun and topic == drifting:
            num_own += 1
            if delay is None and lifted([drifting]) >= 0.5:
                delay = round(num_own / policy.sampling)
            if num_own >= _OWN_MOST * policy.sampling:
                break
    others = [name for name in names if name != drifting]
    return TopicRun(drifting, delay, lifted([drifting]), lifted(others), alarms)


# --- what is said of it --------------------------------------------------------------------------------------


def _describe(runs: Sequence[Run]) -> dict[str, Any]:
    delays = [float(run.delay) for run in runs if run.delay is not None]
    return {
        "runs": len(runs),
        "runs_with_false_alarm": sum(run.false_alarms > 0 for run in runs),
        "runs_with_false_call": sum(run.false_calls > 0 for run in runs),
        "found": len(delays),
        "delay_requests": summarize(delays) if delays else None,
    }


def _row(name: str, runs: Sequence[Run]) -> list[object]:
    found = _describe(runs)
    delays = found["delay_requests"] or {"p50": "-", "p99": "-", "max": "-"}
    counts = (found["runs"], found["runs_with_false_alarm"], found["runs_with_false_call"], found["found"])
    return [name, *counts, *(delays[key] for key in ("p50", "p99", "max"))]


def _describe_topics(runs: Sequence[TopicRun]) -> dict[str, Any]:
    delays = [float(run.delay) for run in runs if run.delay is not None]
    return {
        "runs": len(runs),
        "half_lifted_in_1500": len(delays),
        "delay_requests": summarize(delays) if delays else None,
        "lifted": round(float(np.mean([run.lifted for run in runs])), 3),
        "others_lifted": round(float(np.mean([run.others_lifted for run in runs])), 4),
        "runs_with_false_alarm": sum(run.false_alarms > 0 for run in runs),
        "not_half_lifted": sorted(run.topic for run in runs if run.delay is None),
    }
