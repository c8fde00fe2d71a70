"""Money, safety and quality on Triton's own metrics page. Told from one thread, apart from the one that counts."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from orchestrator.afterwards import Afterwards
from orchestrator.money import Spending


class Numbers:
    """One family of metrics. Only what changed is told, for telling is a round trip to the server."""

    def __init__(self, name: str, description: str, *labels: str, is_gauge: bool = False) -> None:
        kind = pb_utils.MetricFamily.GAUGE if is_gauge else pb_utils.MetricFamily.COUNTER
        self._family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
        self._labels = labels
        self._is_gauge = is_gauge
        self._metrics: dict[tuple[str, ...], Any] = {}
        self._told: dict[tuple[str, ...], float] = {}

    def tell(self, number: float, *values: str) -> None:
        """The number of the metric whose labels have these values; a counter's is its total."""
        if values not in self._metrics:
            self._metrics[values] = self._family.Metric(labels=dict(zip(self._labels, values)))
        told = self._told.get(values, 0.0)
        if number != told:
            self._told[values] = number
            if self._is_gauge:
                self._metrics[values].set(number)
            else:
                self._metrics[values].increment(number - told)


class AfterwardsMetrics:
    def __init__(self, spending: Spending, afterwards: Afterwards) -> None:
        self._spending = spending
        self._afterwards = afterwards
        by_tier = ("tenant", "tier")
        self._requests = Numbers("rt_tenant_requests_total", "Requests that had an answer, by whose", *by_tier)
        self._tokens = Numbers("rt_tenant_tokens_total", "Tokens that a tenant pays for", *by_tier, "direction")
        self._cost = Numbers("rt_tenant_cost_usd_total", "What they cost, in US dollars", *by_tier)
        self._flagged = Numbers("rt_safety_flagged_total", "What the safety filter found in answers", "kind", "when")
        quality = afterwards.quality
        if quality is not None:
            self._samples = Numbers("rt_quality_samples_total", "Answers compared to the expert's", "tier", "verdict")
            self._dropped = Numbers("rt_quality_dropped_total", "Samples that came to nothing", "reason")
            self._doubtful = Numbers("rt_quality_doubtful", "1 while a tier is doubtful", "tier", is_gauge=True)
            self._clusters = Numbers(
                "rt_quality_doubtful_clusters", "Clusters of questions a tier is doubtful for", "tier", is_gauge=True
            )
            self._calls = Numbers("rt_quality_retraining_calls_total", "Calls for the classifier's retraining", "tier")
            self._asked = Numbers("rt_quality_cost_usd_total", "What asking again cost, in US dollars")
            self._errors = Numbers("rt_quality_store_errors_total", "What the store of quality failed to do")

    def publish(self) -> None:
        # Copies, because the other thread goes on counting.
        for (tenant, tier), count in list(self._spending.requests.items()):
            self._requests.tell(count, tenant, tier)
        for (tenant, tier, direction), count in list(self._spending.tokens.items()):
            self._tokens.tell(count, tenant, tier, direction)
        for (tenant, tier), nano_usd in list(self._spending.nano_usd.items()):
            self._cost.tell(nano_usd / 1e9, tenant, tier)
        for (kind, when), count in list(self._afterwards.num_flagged.items()):
            self._flagged.tell(count, kind, when)
        if self._afterwards.quality is not None:
            self._publish_quality()

    def _publish_quality(self) -> None:
        quality = self._afterwards.quality
        assert quality is not None
        monitor = quality.monitor
        for tier in monitor.policy.tiers:
            for verdict in ("good", "poor"):
                self._samples.tell(monitor.samples[tier, verdict], tier, verdict)
            self._doubtful.tell(float(monitor.is_doubtful(tier, None)), tier)
            self._clusters.tell(monitor.num_doubtful_clusters(tier), tier)
            self._calls.tell(monitor.calls[tier], tier)
        for reason, count in list(quality.dropped.items()):
            self._dropped.tell(count, reason)
        self._asked.tell(quality.nano_usd / 1e9)
        self._errors.tell(quality.num_store_errors)
