"""The model's clock and its balancer; what happened to all requests, summed up.

A request goes to the replica with the fewest, as a balancer that counts does. Not modelled: prefixes that only one
replica has in its cache, replicas that fail, and the way between callers and balancer.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from perf.simulation.replica import Machine, Replica, Request, Service
from perf.simulation.traffic import Ask, Tier, draw
from perf.stats import percentile

_MOST_GAPS = 200_000  # gaps between tokens of which the percentiles are made, drawn evenly


@dataclass(frozen=True)
class Users:
    """Each asks, reads the answer and thinks, `think_s` on average, and asks again."""

    count: int
    think_s: float
    tiers: Sequence[Tier]


class Simulation:
    """`num_replicas` of `service`, `per_machine` of them on each machine of `machine_cores`.

    Without `machine_cores` each has its cores for itself. One run each.
    """

    def __init__(
        self, service: Service, num_replicas: int, *, machine_cores: float | None = None, per_machine: int = 1
    ) -> None:
        cores = service.cores * per_machine if machine_cores is None else machine_cores
        machines = [Machine(cores) for _ in range(-(-num_replicas // per_machine))]
        self.now_s = 0.0
        self.requests: list[Request] = []
        self.replicas = [
            Replica(service, machines[number // per_machine], lambda: self.now_s, self._schedule, self._ended)
            for number in range(num_replicas)
        ]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._ties = itertools.count()
        self._num_live = 0
        self._live_s = 0.0  # requests in the system x seconds
        self._counted_s = 0.0
        self._again: Callable[[Request, float], None] = lambda request, now_s: None

    @property
    def mean_live(self) -> float:
        """Requests in the system, on average over the time so far."""
        return self._live_s / self.now_s if self.now_s else 0.0

    def run(self, arrivals: Iterable[tuple[float, Ask]]) -> None:
        """All `arrivals`, in the order of their times, until the last has ended."""
        coming = iter(arrivals)

        def arrive_next() -> None:
            if (following := next(coming, None)) is not None:
                at_s, ask = following
                self._schedule(at_s, lambda now_s: arrive(ask, now_s))

        def arrive(ask: Ask, now_s: float) -> None:
            self._arrive(Request(ask, now_s), now_s)
            arrive_next()

        arrive_next()
        self._go_on(None)

    def run_users(self, users: Users, seconds: float, seed: int) -> None:
        """`users` for so many seconds; who is under way then is left so, without an outcome."""
        chance = random.Random(seed)

        def ask(user: int, now_s: float) -> None:
            self._arrive(Request(draw(users.tiers, chance), now_s, user), now_s)

        def again(request: Request, now_s: float) -> None:
            assert request.user is not None
            self._schedule(now_s + chance.expovariate(1 / users.think_s), partial(ask, request.user))

        self._again = again
        for user in range(users.count):
            self._schedule(chance.random() * users.think_s, partial(ask, user))
        self._go_on(seconds)

    def _arrive(self, request: Request, now_s: float) -> None:
        self.requests.append(request)
        self._count(1)
        min(self.replicas, key=lambda replica: replica.num_live).take(request, now_s)

    def _ended(self, request: Request, now_s: float) -> None:
        self._count(-1)
        self._again(request, now_s)

    def _count(self, change: int) -> None:
        self._live_s += self._num_live * (self.now_s - self._counted_s)
        self._counted_s = self.now_s
        self._num_live += change

    def _schedule(self, at_s: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._ties), what))

    def _go_on(self, until_s: float | None) -> None:
        while self._events and (until_s is None or self._events[0][0] <= until_s):
            self.now_s, _, what = heapq.heappop(self._events)
            what(self.now_s)
        self.now_s = self.now_s if until_s is None else until_s
        self._count(0)


def describe(simulation: Simulation, from_s: float = 0.0) -> dict[str, Any]:
    """What became of the requests that arrived from `from_s` on; who is still under way is counted apart.

    `goodput` has those that finished with their first token within their tier's limit.
    """
    requests = [each for each in simulation.requests if each.arrived_s >= from_s]
    seconds = simulation.now_s - from_s
    finished = [each for each in requests if each.outcome == "finished"]
    result: dict[str, Any] = {
        "arrived": len(requests),
        **{name: sum(each.outcome == name for each in requests) for name in ("finished", "refused", "late")},
        "under_way": sum(not each.outcome for each in requests),
        "requests_per_s": round(len(finished) / seconds, 3),
        "busy": round(
            sum(each.busy_s for each in simulation.replicas) / simulation.now_s / len(simulation.replicas), 4
        ),
    }
    if not finished:
        return result
    ttfts_s = [each.first_s - each.arrived_s for each in finished if each.first_s is not None]
    good = sum(ttft_s <= each.ask.tier.ttft_limit_s for each, ttft_s in zip(finished, ttfts_s))
    queued_s = [each.started_s - each.arrived_s for each in finished if each.started_s is not None]
    result |= {
        "tokens_per_s": round(sum(each.ask.output_tokens for each in finished) / seconds, 2),
        "goodput": {
            "requests_per_s": round(good / seconds, 3),
            "share": round(good / max(1, len(requests) - result["under_way"]), 4),
        },
        "ttft_ms": points([ttft_s * 1000 for ttft_s in ttfts_s]),
        "total_ms": points([(each.ended_s - each.arrived_s) * 1000 for each in finished if each.ended_s is not None]),
    }
    if queued_s:
        result["before_engine_ms"] = points([each * 1000 for each in queued_s])
    if gaps_ms := _gaps_ms(simulation.replicas):
        result["itl_ms"] = points(gaps_ms)
    return result


def points(values: Sequence[float]) -> dict[str, float]:
    """Mean, p50, p95 and p99."""
    percentiles = {f"p{percent}": round(percentile(values, percent), 3) for percent in (50, 95, 99)}
    return {"mean": round(sum(values) / len(values), 3), **percentiles}


def _gaps_ms(replicas: Sequence[Replica]) -> list[float]:
    """The gap before each token, evenly thinned out."""
    gaps = [(took_s, count) for replica in replicas for took_s, count in replica.step_gaps]
    thin = max(1, sum(count for _, count in gaps) // _MOST_GAPS)
    return [took_s * 1000 for took_s, count in gaps for _ in range(-(-count // thin))]
