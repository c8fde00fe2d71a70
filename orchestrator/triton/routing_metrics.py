"""The router on Triton's own metrics page. Told from one thread, apart from the one that counts."""

from __future__ import annotations

from orchestrator.dispatch import Dispatch
from orchestrator.triton.metrics import Family

# As `orchestrator.routing.breaker.State`.
STATES = {"closed": 0, "half_open": 1, "open": 2}


class RoutingMetrics:
    """What was routed where and why, what failed and went on, and which engines are out."""

    def __init__(self) -> None:
        self._routed = Family("rt_routed_requests_total", "Requests by the tier chosen, and the kind of reason for it")
        self._retries = Family("rt_tier_retries_total", "Second tries on a tier after a failure before its first token")
        self._fallbacks = Family("rt_tier_fallbacks_total", "Requests that went on to another tier, by the failed one")
        self._timeouts = Family("rt_tier_timeouts_total", "Attempts that ended by the tier's silence")
        self._overruns = Family(
            "rt_cloud_overruns_total", "Answers of a cloud tier cut at their limit, and usages that could not be true"
        )
        self._saved = Family("rt_prompt_tokens_saved_total", "Prompt tokens that compression left out, by tier")
        self._breakers = Family(
            "rt_breaker_state",
            "Circuit breaker of an engine or cloud tier: 0 closed, 1 half open, 2 open",
            is_gauge=True,
        )

    def publish(self, dispatch: Dispatch) -> None:
        counts = dispatch.counts
        for (tier, kind), count in list(counts.routed.items()):
            self._routed.tell(count, tier=tier, reason=kind)
        for family, counted in (
            (self._retries, counts.retries),
            (self._fallbacks, counts.fallbacks),
            (self._timeouts, counts.timeouts),
            (self._saved, counts.saved),
        ):
            for tier, count in list(counted.items()):
                family.tell(count, tier=tier)
        for (tier, what), count in list(dispatch.overruns.items()):
            self._overruns.tell(count, tier=tier, kind=what)
        for name, state in dispatch.breaker_states().items():
            self._breakers.tell(STATES[state], model=name)
