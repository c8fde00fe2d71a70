"""The limits on Triton's own metrics page. Told from one thread, apart from the one that counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from orchestrator.limits.gate import Gate


class LimitsMetrics:
    """Only what changed is told, for telling is a round trip to the server."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._refusals = _family("rt_limits_refusals_total", "Requests refused or ended, by their error's code")
        self._errors = _family("rt_limits_store_errors_total", "What the shared store of quotas failed to do")
        self._waiting = _family("rt_queued_requests", "Requests that wait for an engine", is_gauge=True)
        self._metrics: dict[tuple[str, str], Any] = {}
        self._told: dict[tuple[str, str], int] = {}

    def publish(self, num_waiting: Mapping[str, int]) -> None:
        for code, count in list(self._gate.refusals.items()):
            self._tell(self._refusals, "code", code, count)
        self._tell(self._errors, "", "", self._gate.num_store_errors)
        for name, count in num_waiting.items():
            self._tell(self._waiting, "class", name, count, is_gauge=True)

    def _tell(self, family: Any, label: str, value: str, count: int, *, is_gauge: bool = False) -> None:
        key = (label, value)
        metric = self._metrics.get(key)
        if metric is None:
            metric = self._metrics[key] = family.Metric(labels={label: value} if label else {})
        told = self._told.get(key, 0)
        if count != told:
            self._told[key] = count
            if is_gauge:
                metric.set(count)
            else:
                metric.increment(count - told)


def _family(name: str, description: str, *, is_gauge: bool = False) -> Any:
    kind = pb_utils.MetricFamily.GAUGE if is_gauge else pb_utils.MetricFamily.COUNTER
    return pb_utils.MetricFamily(name=name, description=description, kind=kind)
