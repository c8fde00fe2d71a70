"""Our metrics on Triton's own metrics page."""

from __future__ import annotations

from collections.abc import Callable

import triton_python_backend_utils as pb_utils


def live_requests_gauge(model: str) -> Callable[[int], None]:
    """A setter for `rt_live_requests{model="..."}`: requests that a model has taken in and not ended."""
    family = pb_utils.MetricFamily(
        name="rt_live_requests", description="Requests taken in and not ended", kind=pb_utils.MetricFamily.GAUGE
    )
    metric = family.Metric(labels={"model": model})

    def set_value(num_requests: int) -> None:
        assert family  # Triton deletes a family's metrics with the family
        metric.set(num_requests)

    return set_value
