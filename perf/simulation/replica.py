"""One replica: the product's own queue before an engine that batches in flight, step by step.

The queue is `orchestrator.limits.queue` with the model's clock in the place of the real one: who waits for whom, and
who is refused because his deadline cannot be met, is not written a second time.
"""

from __future__ import annotations

import heapq
import itertools
import json
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from orchestrator.errors import OverloadedError
from orchestrator.limits.queue import CLASSES, Class, Queue, Ticket
from perf.errors import PerfError
from perf.simulation.traffic import Ask

Outcome = Literal["", "finished", "refused", "late"]


@dataclass(frozen=True)
class Service:
    """Measured times of one replica that has its cores for itself (`perf.simulation.calibrate`), in seconds.

    `steps` are (sequences in a step, seconds of the step), rising; between them it is linear, beyond the last one by
    the last two. A step that prefills takes `prefill_s_per_token` more for each of its prompt tokens, of which it takes
    `step_tokens` at most; one that ends a prompt takes `join_s` more, which embedder, cache and all else around the
    engine took from it. `before_s` passes outside of the engine, `hit_s` is a stored answer's whole time.
    `steps_together` false: each sequence has a clock of its own, and `first_token_s` before its first token (the
    scripted engine). `cores` is what a busy replica uses.
    """

    steps: tuple[tuple[int, float], ...]
    prefill_s_per_token: float = 0.0
    join_s: float = 0.0
    before_s: float = 0.0
    hit_s: float = 0.0
    first_token_s: float = 0.0
    step_tokens: int = 512
    max_running: int = 64
    max_live: int = 256
    cores: float = 1.0
    steps_together: bool = True

    def step_s(self, num_sequences: int) -> float:
        sizes = [size for size, _ in self.steps]
        if len(sizes) == 1 or num_sequences <= sizes[0]:
            return self.steps[0][1]
        place = min(bisect_left(sizes, num_sequences), len(sizes) - 1)
        (low, low_s), (high, high_s) = self.steps[place - 1], self.steps[place]
        return low_s + (high_s - low_s) * (num_sequences - low) / (high - low)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, path: Path) -> Service:
        """The `service` of a result of `perf simulate --validate`; raises `PerfError` for a file without one."""
        try:
            fields: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))["service"]
            return cls(**{**fields, "steps": tuple((int(size), float(s)) for size, s in fields["steps"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PerfError(
                f"{path}: no measured service times in it ({error!r})\n"
                f"fix: python -m perf simulate --validate --json {path}"
            ) from error


@dataclass
class Request:
    """One request on its way; times in seconds of the model's clock."""

    ask: Ask
    arrived_s: float
    user: int | None = None
    replica: Replica | None = None
    ticket: Ticket | None = None
    prefill_left: int = 0
    started_s: float | None = None
    first_s: float | None = None
    ended_s: float | None = None
    outcome: Outcome = ""

    @property
    def ends_at_s(self) -> float | None:
        deadline_s = self.ask.tier.deadline_s
        return None if deadline_s is None else self.arrived_s + deadline_s


@dataclass
class Machine:
    """Cores that several replicas share: they are slower when together they would use more than there are."""

    cores: float
    num_busy: int = 0

    def slowdown(self, cores: float) -> float:
        return max(1.0, self.num_busy * cores / self.cores)


# (when, what, to what): `schedule` of `perf.simulation.events`.
Schedule = Callable[[float, Callable[[float], None]], None]


@dataclass
class Replica:
    """`ended` is told of each request that has its outcome."""

    service: Service
    machine: Machine
    clock: Callable[[], float]
    schedule: Schedule
    ended: Callable[[Request, float], None]
    num_live: int = 0
    busy_s: float = 0.0
    step_gaps: list[tuple[float, int]] = field(
        default_factory=list
    )  # of each step: seconds, sequences that got a token

    def __post_init__(self) -> None:
        most: dict[Class, int] = dict.fromkeys(CLASSES, self.service.max_live)
        self._queue = Queue(self.service.max_running, most, self.clock)
        self._waiting: dict[Class, deque[Request]] = {priority: deque() for priority in CLASSES}
        self._prefilling: deque[Request] = deque()
        self._decoding: list[tuple[int, int, Request]] = []  # a heap: its last step, a tie-breaker, the request
        self._num_decoding = 0
        self._num_steps = 0
        self._is_stepping = False
        self._ties = itertools.count()
        self._steps_s: dict[int, float] = {}  # asked for at each step

    def take(self, request: Request, now_s: float) -> None:
        """A request arrives at this replica."""
        request.replica = self
        if self.num_live >= self.service.max_live:
            self.ended(self._settle(request, "refused", now_s), now_s)
            return
        self.num_live += 1
        if request.ask.is_hit:
            self.schedule(now_s + self.service.hit_s, lambda at_s: self._serve_hit(request, at_s))
        else:
            self.schedule(now_s + self.service.before_s, lambda at_s: self._enter(request, at_s))

    def _serve_hit(self, request: Request, now_s: float) -> None:
        request.first_s = now_s
        self._finish(request, "finished", now_s)

    def _enter(self, request: Request, now_s: float) -> None:
        priority = request.ask.tier.priority
        try:
            request.ticket = self._queue.enter(priority, request.ends_at_s, request.ask.output_tokens)
        except OverloadedError:
            self._finish(request, "refused", now_s)
            return
        if request.ends_at_s is not None:
            self.schedule(request.ends_at_s, lambda at_s: self._end_late(request, at_s))
        self._waiting[priority].append(request)
        self._let_in(now_s)

    def _let_in(self, now_s: float) -> None:
        """Whoever the queue gave a turn begins."""
        for waiting in self._waiting.values():
            while waiting and (waiting[0].outcome or (waiting[0].ticket and waiting[0].ticket.started_s is not None)):
                request = waiting.popleft()
                if not request.outcome:
                    self._start(request, now_s)

    def _start(self, request: Request, now_s: float) -> None:
        request.started_s = now_s
        if self.service.steps_together:
            request.prefill_left = request.ask.input_tokens
            self._prefilling.append(request)
            if not self._is_stepping:
                self._is_stepping = True
                self.machine.num_busy += 1
                self._step(now_s)
        else:
            first_s = now_s + self.service.first_token_s
            rest_s = (request.ask.output_tokens - 1) * self.service.step_s(1)
            self.schedule(first_s, lambda at_s: self._note_first(request, at_s))
            self.schedule(first_s + rest_s, lambda at_s: self._finish_decoding(request, at_s))

    def _note_first(self, request: Request, now_s: float) -> None:
        if not request.outcome:
            request.first_s = now_s

    # --- steps ---

    def _step(self, now_s: float) -> None:
        """Begin the next step with what there is, or stop until there is something."""
        room, taken, joining = self.service.step_tokens, 0, []
        while self._prefilling and room > 0:
            request = self._prefilling[0]
            if request.outcome:
                self._prefilling.popleft()
                continue
            chunk = min(room, request.prefill_left)
            request.prefill_left -= chunk
            taken, room = taken + chunk, room - chunk
            if request.prefill_left == 0:
                joining.append(self._prefilling.popleft())
        num_sequences = self._num_decoding + len(joining)
        if not num_sequences and not taken:
            self._is_stepping = False
            self.machine.num_busy -= 1
            return
        if (step_s := self._steps_s.get(num_sequences)) is None:
            step_s = self._steps_s[num_sequences] = self.service.step_s(max(1, num_sequences))
        took_s = step_s + taken * self.service.prefill_s_per_token + len(joining) * self.service.join_s
        took_s *= self.machine.slowdown(self.service.cores)
        self.busy_s += took_s
        if self._num_decoding:
            self.step_gaps.append((took_s, self._num_decoding))
        self.schedule(now_s + took_s, lambda at_s: self._end_step(joining, at_s))

    def _end_step(self, joining: list[Request], now_s: float) -> None:
        self._num_steps += 1
        for request in joining:
            if request.outcome:
                continue
            request.first_s = now_s
            last_step = self._num_steps + request.ask.output_tokens - 1
            heapq.heappush(self._decoding, (last_step, next(self._ties), request))
            self._num_decoding += 1
        while self._decoding and self._decoding[0][0] <= self._num_steps:
            request = heapq.heappop(self._decoding)[2]
            if not request.outcome:
                self._num_decoding -= 1
                self._finish_decoding(request, now_s)
        self._step(now_s)

    # --- ends ---

    def _end_late(self, request: Request, now_s: float) -> None:
        if request.outcome:
            return
        if self.service.steps_together and request.first_s is not None:
            self._num_decoding -= 1
        self._finish(request, "late", now_s)

    def _finish_decoding(self, request: Request, now_s: float) -> None:
        if request.outcome:
            return
        assert request.started_s is not None and request.first_s is not None
        self._queue.pace.observe(
            request.first_s - request.started_s, now_s - request.started_s, request.ask.output_tokens
        )
        self._finish(request, "finished", now_s)

    def _finish(self, request: Request, outcome: Outcome, now_s: float) -> None:
        self.num_live -= 1
        self._settle(request, outcome, now_s)
        if request.ticket is not None:
            request.ticket.leave()
            self._let_in(now_s)
        self.ended(request, now_s)

    @staticmethod
    def _settle(request: Request, outcome: Outcome, now_s: float) -> Request:
        request.outcome, request.ended_s = outcome, now_s
        return request
