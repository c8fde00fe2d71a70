"""Our metrics on Triton's own metrics page."""

from __future__ import annotations

from collections import Counter
from typing import Any

import triton_python_backend_utils as pb_utils


class ModelGauge:
    """A gauge `NAME{model="..."}`; only a change is told, for telling is a round trip to the server."""

    def __init__(self, name: str, description: str, model: str) -> None:
        # Triton deletes a family's metrics with the family.
        self._family = pb_utils.MetricFamily(name=name, description=description, kind=pb_utils.MetricFamily.GAUGE)
        self._metric = self._family.Metric(labels={"model": model})
        self._told: float | None = None

    def set(self, value: float) -> None:
        if value != self._told:
            self._told = value
            self._metric.set(value)


def live_requests_gauge(model: str) -> ModelGauge:
    return ModelGauge("rt_live_requests", "Requests taken in and not ended", model)


def kv_cache_usage_gauge(model: str) -> ModelGauge:
    description = "Share of the KV blocks that live requests hold, 0 to 1; what only the prefix cache knows is free"
    return ModelGauge("rt_kv_cache_usage_ratio", description, model)


class CacheMetrics:
    """`orchestrator.cache.stage.Counts` as metrics. Counting is free; `publish` tells Triton, which takes a while."""

    def __init__(self) -> None:
        def family(name: str, description: str, *, is_gauge: bool = False) -> Any:
            kind = pb_utils.MetricFamily.GAUGE if is_gauge else pb_utils.MetricFamily.COUNTER
            return pb_utils.MetricFamily(name=name, description=description, kind=kind)

        self._counted: Counter[tuple[str, str]] = Counter()
        self._told: Counter[tuple[str, str]] = Counter()
        self._families = {
            "cache": family("rt_cache_answers_total", "Requests by what the cache had for them, as rt.cache says it"),
            "guard": family("rt_cache_guard_rejections_total", "Nearest stored questions that a guard held back"),
            "store": family("rt_cache_store_errors_total", "What the cache's store failed to do"),
        }
        self._metrics: dict[tuple[str, str], Any] = {}
        for kind in ("exact", "semantic", "miss", "bypass"):
            self._counted["cache", kind] = 0
        self._counted["store", ""] = 0
        self._gauges = [
            family("rt_cache_stored_bytes", "Bytes of stored answers", is_gauge=True),
            family("rt_cache_stored_entries", "Stored answers", is_gauge=True),
        ]
        self._told_sizes: tuple[int, int] | None = None
        self._sizes = [gauge.Metric(labels={}) for gauge in self._gauges]

    def count_answer(self, kind: str) -> None:
        self._counted["cache", kind] += 1

    def count_rejection(self, guard: str) -> None:
        self._counted["guard", guard] += 1

    def count_store_error(self) -> None:
        self._counted["store", ""] += 1

    def publish(self, num_bytes: int, num_entries: int) -> None:
        """Not for several threads at once."""
        for key, value in list(self._counted.items()):
            metric = self._metrics.get(key)
            if metric is None:
                label, label_value = key
                labels = {label: label_value} if label_value else {}
                metric = self._metrics[key] = self._families[label].Metric(labels=labels)
            if value > self._told[key]:
                metric.increment(value - self._told[key])
                self._told[key] = value
        sizes = (num_bytes, num_entries)
        if sizes != self._told_sizes:
            for metric, size in zip(self._sizes, sizes):
                metric.set(size)
            self._told_sizes = sizes
