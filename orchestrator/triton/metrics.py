"""Our metrics on Triton's own metrics page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from orchestrator.cache.store import Size


class Family:
    """One metric by its labels. Only what changed is told, for telling is a round trip to the server."""

    def __init__(self, name: str, description: str, *, is_gauge: bool = False) -> None:
        kind = pb_utils.MetricFamily.GAUGE if is_gauge else pb_utils.MetricFamily.COUNTER
        # Triton deletes a family's metrics with the family.
        self._family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
        self._is_gauge = is_gauge
        self._metrics: dict[tuple[str, ...], Any] = {}
        self._told: dict[tuple[str, ...], int] = {}

    def tell(self, count: int, **labels: str) -> None:
        """The count so far; the names of the labels are the same each time. For one thread."""
        key = tuple(labels.values())
        if key not in self._metrics:
            self._metrics[key] = self._family.Metric(labels=labels)
        told = self._told.get(key, 0)
        if count != told:
            self._told[key] = count
            if self._is_gauge:
                self._metrics[key].set(count)
            else:
                self._metrics[key].increment(count - told)


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
            "kind": family("rt_cache_store_errors_total", "What the cache's store failed to do"),
        }
        self._metrics: dict[tuple[str, str], Any] = {}
        for kind in ("exact", "semantic", "miss", "bypass"):
            self._counted["cache", kind] = 0
        self._counted["kind", "failed"] = 0
        self._gauges = [
            family("rt_cache_stored_bytes", "Bytes of stored answers", is_gauge=True),
            family("rt_cache_stored_entries", "Stored answers", is_gauge=True),
        ]
        self._told_size: Size | None = None
        self._sizes = [gauge.Metric(labels={}) for gauge in self._gauges]

    def count_answer(self, kind: str) -> None:
        self._counted["cache", kind] += 1

    def count_rejection(self, guard: str) -> None:
        self._counted["guard", guard] += 1

    def count_store_error(self) -> None:
        self._counted["kind", "failed"] += 1

    def publish(self, size: Size | None, store_errors: Mapping[str, int]) -> None:
        """`store_errors` are the store's own counts, by kind; without `size` the last one stays. Not for several
        threads at once."""
        for kind, number in list(store_errors.items()):
            self._counted["kind", kind] = number
        for key, value in list(self._counted.items()):
            metric = self._metrics.get(key)
            if metric is None:
                label, label_value = key
                metric = self._metrics[key] = self._families[label].Metric(labels={label: label_value})
            if value > self._told[key]:
                metric.increment(value - self._told[key])
                self._told[key] = value
        if size is not None and size != self._told_size:
            for metric, number in zip(self._sizes, (size.num_bytes, size.num_entries)):
                metric.set(number)
            self._told_size = size
