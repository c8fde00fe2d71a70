"""Latencies on Triton's own metrics page. Told from one thread, apart from the one that counts."""

from __future__ import annotations

import time

from orchestrator.latencies import Latencies
from orchestrator.triton.metrics import HistogramFamily

# How old they may be: up to a dozen buckets change with each answer.
PERIOD_S = 2.0


class LatencyMetrics:
    def __init__(self, latencies: Latencies) -> None:
        self._latencies = latencies
        by_answer = ("tier", "cache", "class")
        self._ttft = HistogramFamily("rt_ttft_seconds", "From a request's arrival to its first token", *by_answer)
        self._total = HistogramFamily("rt_request_seconds", "From a request's arrival to its last event", *by_answer)
        self._queue = HistogramFamily("rt_queue_seconds", "What a request waited for its engine's turn", *by_answer)
        self._itl = HistogramFamily("rt_itl_seconds", "From one token to the next", "tier")
        self._next_s = 0.0

    def publish(self) -> None:
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + PERIOD_S
        self._ttft.tell(self._latencies.ttft)
        self._total.tell(self._latencies.total)
        self._queue.tell(self._latencies.queue)
        self._itl.tell(self._latencies.itl)
