"""Histograms of latency, in seconds, by the facts of the answers."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence

from orchestrator.stages import Stage
from orchestrator.streaming.chunks import Choice

# Few, for each bucket of each line is told to the server by itself. An answer feels immediate up to 0.2 s.
REQUEST_BOUNDS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0, 60.0)
# From a large GPU's 2 ms to a pause that a reader sees.
TOKEN_BOUNDS_S = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 1.0)


class Histogram:
    """`counts[labels]` has one count a bound, and one for what is above them all; none is cumulative.

    Counted on one thread; another one may read.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts: dict[tuple[str, ...], list[int]] = {}
        self.sums: dict[tuple[str, ...], float] = {}

    def observe(self, seconds: float, labels: tuple[str, ...], times: int = 1) -> None:
        if labels not in self.counts:
            self.sums[labels] = 0.0
            self.counts[labels] = [0] * (len(self.bounds) + 1)
        self.counts[labels][bisect_left(self.bounds, seconds)] += times
        self.sums[labels] += seconds * times


class TokenGaps:
    """The time between the tokens of one answer, each choice by itself: an event of three tokens is three gaps."""

    def __init__(self) -> None:
        self.gaps: list[tuple[float, int]] = []
        self._last: dict[int, tuple[float, int]] = {}

    def note(self, choice: Choice) -> None:
        """Something of it is sent now."""
        now_s, num_tokens = time.monotonic(), choice.num_tokens
        last_s, last_num = self._last.get(choice.index, (now_s, num_tokens))
        self._last[choice.index] = now_s, num_tokens
        if num_new := num_tokens - last_num:
            self.gaps.append(((now_s - last_s) / num_new, num_new))


class Latencies:
    """Of all answers, by tier, what the cache had (as `rt.cache`), and class; gaps between tokens by tier alone."""

    def __init__(self) -> None:
        self.ttft = Histogram(REQUEST_BOUNDS_S)
        self.total = Histogram(REQUEST_BOUNDS_S)
        self.queue = Histogram(REQUEST_BOUNDS_S)
        self.itl = Histogram(TOKEN_BOUNDS_S)

    def observe(self, facts: dict[str, object], priority: str) -> None:
        """`facts` as `orchestrator.answer.CallerOutput.facts` gives them."""
        labels = (str(facts["tier"]), str(facts["cache"]), priority)
        for histogram, took_ms in (
            (self.ttft, facts["ttft_ms"]),
            (self.total, facts["total_ms"]),
            (self.queue, _queued_ms(facts)),
        ):
            if isinstance(took_ms, float):
                histogram.observe(took_ms / 1000, labels)

    def observe_gaps(self, gaps: TokenGaps, tier: str) -> None:
        for gap_s, num_tokens in gaps.gaps:
            self.itl.observe(gap_s, (tier,), num_tokens)


def _queued_ms(facts: dict[str, object]) -> object:
    stage: Stage = "queue"
    stages = facts["stages_ms"]
    return stages.get(stage) if isinstance(stages, dict) else None
