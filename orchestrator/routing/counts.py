"""What the router did, for the metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from orchestrator.routing.policy import Kind


@dataclass
class RoutingCounts:
    """`routed` by tier and kind of reason; the others by the tier that failed: what was tried again on it, what went on
    to another, and what ended by its silence."""

    routed: Counter[tuple[str, Kind]] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    timeouts: Counter[str] = field(default_factory=Counter)
    saved: Counter[str] = field(default_factory=Counter)  # prompt tokens that compression left out, by tier
