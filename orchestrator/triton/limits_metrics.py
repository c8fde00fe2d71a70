"""The limits on Triton's own metrics page. Told from one thread, apart from the one that counts."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.limits.gate import Gate
from orchestrator.triton.metrics import Family


class LimitsMetrics:
    """Refusals, the shared store's errors, and who waits."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._refusals = Family("rt_limits_refusals_total", "Requests refused or ended, by their error's code")
        self._errors = Family("rt_limits_store_errors_total", "What the shared store of quotas failed to do")
        self._waiting = Family(
            "rt_queued_requests", "Requests that wait for an engine, or a model beside the orchestrator", is_gauge=True
        )

    def publish(self, num_waiting: Mapping[str, int]) -> None:
        for code, count in list(self._gate.refusals.items()):
            self._refusals.tell(count, code=code)
        self._errors.tell(self._gate.num_store_errors)
        for name, count in num_waiting.items():
            self._waiting.tell(count, **{"class": name})
