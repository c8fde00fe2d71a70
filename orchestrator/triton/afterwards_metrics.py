"""Money, safety and quality on Triton's own metrics page. Told from one thread, apart from the one that counts."""

from __future__ import annotations

from orchestrator.afterwards import Afterwards
from orchestrator.money import Spending
from orchestrator.triton.metrics import Family


class AfterwardsMetrics:
    def __init__(self, spending: Spending, afterwards: Afterwards) -> None:
        self._spending = spending
        self._afterwards = afterwards
        self._requests = Family("rt_tenant_requests_total", "Requests that had an answer, by whose")
        self._tokens = Family("rt_tenant_tokens_total", "Tokens that a tenant pays for")
        self._cost = Family("rt_tenant_cost_usd_total", "What they cost, in US dollars")
        self._flagged = Family("rt_safety_flagged_total", "What the safety filter found in answers")
        quality = afterwards.quality
        if quality is not None:
            self._samples = Family("rt_quality_samples_total", "Answers compared to the expert's")
            self._dropped = Family("rt_quality_dropped_total", "Samples that came to nothing")
            self._doubtful = Family("rt_quality_doubtful", "1 while a tier is doubtful", is_gauge=True)
            self._clusters = Family(
                "rt_quality_doubtful_clusters", "Clusters of questions a tier is doubtful for", is_gauge=True
            )
            self._calls = Family("rt_quality_retraining_calls_total", "Calls for the classifier's retraining")
            self._asked = Family("rt_quality_cost_usd_total", "What asking again cost, in US dollars")
            self._errors = Family("rt_quality_store_errors_total", "What the store of quality failed to do")

    def publish(self) -> None:
        # Copies, because the other thread goes on counting.
        for (tenant, tier), count in list(self._spending.requests.items()):
            self._requests.tell(count, tenant=tenant, tier=tier)
        for (tenant, tier, direction), count in list(self._spending.tokens.items()):
            self._tokens.tell(count, tenant=tenant, tier=tier, direction=direction)
        for (tenant, tier), nano_usd in list(self._spending.nano_usd.items()):
            self._cost.tell(nano_usd / 1e9, tenant=tenant, tier=tier)
        for (kind, when), count in list(self._afterwards.num_flagged.items()):
            self._flagged.tell(count, kind=kind, when=when)
        if self._afterwards.quality is not None:
            self._publish_quality()

    def _publish_quality(self) -> None:
        quality = self._afterwards.quality
        assert quality is not None
        monitor = quality.monitor
        for tier in monitor.policy.tiers:
            for verdict in ("good", "poor"):
                self._samples.tell(monitor.samples[tier, verdict], tier=tier, verdict=verdict)
            self._doubtful.tell(float(monitor.is_doubtful(tier, None)), tier=tier)
            self._clusters.tell(monitor.num_doubtful_clusters(tier), tier=tier)
            self._calls.tell(monitor.calls[tier], tier=tier)
        for reason, count in list(quality.dropped.items()):
            self._dropped.tell(count, reason=reason)
        self._asked.tell(quality.nano_usd / 1e9)
        self._errors.tell(quality.num_store_errors)
