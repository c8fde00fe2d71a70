"""Our metrics on Triton's own metrics page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from orchestrator.cache.store import Size
from orchestrator.contracts import ORCHESTRATOR_MODEL
from orchestrator.latencies import Histogram


class Family:
    """One metric by its labels. Only what changed is told, for telling is a round trip to the server.

    A gauge that `adds_up` is the sum over all who tell the same labels, such as the instances of one model.
    """

    def __init__(self, name: str, description: str, *, is_gauge: bool = False, adds_up: bool = False) -> None:
        kind = pb_utils.MetricFamily.GAUGE if is_gauge else pb_utils.MetricFamily.COUNTER
        # Triton deletes a family's metrics with the family.
        self._family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
        self._is_set = is_gauge and not adds_up
        self._metrics: dict[tuple[str, ...], Any] = {}
        self._told: dict[tuple[str, ...], float] = {}

    def tell(self, number: float, **labels: str) -> None:
        """The number now, a counter's is its total; the names of the labels are the same each time. For one thread."""
        key = tuple(labels.values())
        if key not in self._metrics:
            self._metrics[key] = self._family.Metric(labels=labels)
        told = self._told.get(key, 0.0)
        if number != told:
            self._told[key] = number
            if self._is_set:
                self._metrics[key].set(number)
            else:
                self._metrics[key].increment(number - told)


class HistogramFamily:
    """A histogram as Prometheus reads one. Triton 2.51's Python backend has counters and gauges alone."""

    def __init__(self, name: str, description: str, *labels: str) -> None:
        self._labels = labels
        self._buckets = Family(f"{name}_bucket", f"{description}: as many as took at most `le` seconds")
        self._sum = Family(f"{name}_sum", f"{description}: seconds, all together")
        self._count = Family(f"{name}_count", f"{description}: how many")

    def tell(self, histogram: Histogram) -> None:
        for values, counts in list(histogram.counts.items()):
            labels, num_below = dict(zip(self._labels, values)), 0
            for bound, count in zip((*map(str, histogram.bounds), "+Inf"), list(counts)):
                num_below += count
                self._buckets.tell(num_below, **labels, le=bound)
            self._count.tell(num_below, **labels)
            self._sum.tell(histogram.sums[values], **labels)


def live_requests_gauge() -> Family:
    return Family("rt_live_requests", "Requests taken in and not ended", is_gauge=True, adds_up=True)


def kv_cache_usage_gauge() -> Family:
    description = "Share of the KV blocks that live requests hold, 0 to 1; what only the prefix cache knows is free"
    return Family("rt_kv_cache_usage_ratio", description, is_gauge=True)


class OutcomeMetrics:
    """How requests ended. Told from one thread, apart from the one that counts."""

    def __init__(self, answers: Mapping[str, int], beside: Mapping[tuple[str, str], int]) -> None:
        """`answers` by outcome, `beside` by the model beside the orchestrator and outcome."""
        self._answers = answers
        self._beside = beside
        description = "Requests that reached the orchestrator, or a model beside it, by their outcome in the log"
        self._requests = Family("rt_requests_total", description)

    def publish(self) -> None:
        # Copies, because the other thread goes on counting.
        for outcome, count in list(self._answers.items()):
            self._requests.tell(count, model=ORCHESTRATOR_MODEL, outcome=outcome)
        for (model, outcome), count in list(self._beside.items()):
            self._requests.tell(count, model=model, outcome=outcome)


class CacheMetrics:
    """`orchestrator.cache.stage.Counts` as metrics. Counting is free; `publish` tells Triton, which takes a while."""

    def __init__(self) -> None:
        self.answers = Family("rt_cache_answers_total", "Requests by what the cache had for them, as rt.cache says it")
        self.rejections = Family("rt_cache_guard_rejections_total", "Nearest stored questions that a guard held back")
        self.errors = Family("rt_cache_store_errors_total", "What the cache's store failed to do")
        self.stored_bytes = Family("rt_cache_stored_bytes", "Bytes of stored answers", is_gauge=True)
        self.stored_entries = Family("rt_cache_stored_entries", "Stored answers", is_gauge=True)
        self._answers = Counter(dict.fromkeys(("exact", "semantic", "miss", "bypass"), 0))
        self._rejections: Counter[str] = Counter()
        self._num_errors = 0

    def count_answer(self, kind: str) -> None:
        self._answers[kind] += 1

    def count_rejection(self, guard: str) -> None:
        self._rejections[guard] += 1

    def count_store_error(self) -> None:
        self._num_errors += 1

    def publish(self, size: Size | None, store_errors: Mapping[str, int]) -> None:
        """`store_errors` are the store's own counts, by kind; without `size` the last one stays. Not for several
        threads at once."""
        for kind, count in list(self._answers.items()):
            self.answers.tell(count, cache=kind)
        for guard, count in list(self._rejections.items()):
            self.rejections.tell(count, guard=guard)
        for kind, count in [("failed", self._num_errors), *store_errors.items()]:
            self.errors.tell(count, kind=kind)
        if size is not None:
            self.stored_bytes.tell(size.num_bytes)
            self.stored_entries.tell(size.num_entries)
