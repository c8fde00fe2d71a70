"""Our metrics on Triton's own metrics page."""

from __future__ import annotations

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
