"""The queue before a model: interactive requests come before batch ones, and nobody enters who would be late.

A model runs what it gets in the order it came. So it gets no more than it runs side by side; who waits, waits here.
Batch requests have a share of the turns for their own: those that wait longest would otherwise wait forever while
interactive ones keep coming. A share, and not their age: it holds without a clock, and what it costs the interactive
ones is bounded however many batch ones have grown old.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from orchestrator.errors import OverloadedError

# "aside" is what nobody waits for; it comes behind all others.
Class: TypeAlias = Literal["interactive", "batch", "aside"]
CLASSES: tuple[Class, ...] = ("interactive", "batch", "aside")

# While both wait, so many interactive requests have their turn for each batch one: of ten turns one is a batch
# request's. One with N batch ones before it has its turn at the latest as the 10 * (N + 1)th.
INTERACTIVE_TURNS = 9


class Pace:
    """A live estimate of how long an engine or tier takes for an answer, from those it has just made."""

    # Of each new answer; the first ones are averaged. The last ten make up two thirds.
    WEIGHT = 0.1
    # A request that does not say how long its answer may be is taken for one token, until so many answers and more have
    # told otherwise: that one was long does not say that the next one will be.
    NUM_SHORT = 4
    # Older ones say nothing: a tier that refuses everybody because it was slow would never hear that it is not.
    MEMORY_S = 30.0

    def __init__(self, clock: Callable[[], float] = time.monotonic, engine: Pace | None = None) -> None:
        """`engine` is what a tier's pace falls back on while nothing is known of the tier: but not on its lengths."""
        self._clock = clock
        self._engine = engine
        self._seen_s = -math.inf
        self._num_seen = 0
        self._first_token_s = self._token_s = self._num_tokens = self._total_s = 0.0

    def observe(self, first_token_s: float, total_s: float, num_tokens: int) -> None:
        """One whole answer: seconds to its first token and to its last, from when the engine got the request."""
        if not self._is_known:
            self._num_seen, self._token_s = 0, 0.0
        self._num_seen += 1
        self._seen_s = self._clock()
        weight = max(self.WEIGHT, 1 / self._num_seen)
        self._first_token_s += weight * (first_token_s - self._first_token_s)
        self._total_s += weight * (total_s - self._total_s)
        if num_tokens > 1:  # one token has no pace
            self._token_s += weight * ((total_s - first_token_s) / (num_tokens - 1) - self._token_s)
        self._num_tokens += weight * (num_tokens - self._num_tokens)

    def predict_s(self, max_tokens: float | None = None) -> float:
        """Seconds that an answer of at most so many tokens will take, if its request says it; 0 if nothing is known."""
        if not self._is_known:
            return 0.0 if self._engine is None else self._engine.predict_s(max_tokens or 1)
        num_further = max(0.0, self._num_tokens - 1)
        if max_tokens is None:
            num_further *= self._num_seen / (self.NUM_SHORT + self._num_seen)
        else:
            num_further = min(max(0.0, max_tokens - 1), num_further)
        return self._first_token_s + self._token_s * num_further

    @property
    def average_s(self) -> float:
        """Seconds that the last answers took; 0 when nothing is known."""
        return self._total_s if self._is_known else 0.0

    @property
    def known_s(self) -> float:
        """Seconds after which all this is forgotten, unless another answer comes; 0 when nothing is known."""
        own_s = max(0.0, self._seen_s + self.MEMORY_S - self._clock())
        return own_s if own_s or self._engine is None else self._engine.known_s

    @property
    def _is_known(self) -> bool:
        return self._clock() - self._seen_s < self.MEMORY_S


class Queue:
    """For one event loop. Up to `max_running` run, and so many of each class wait.

    `pace` is of all that pass; how long one of them takes by itself, a pace of its own may tell better.
    """

    def __init__(
        self, max_running: int, max_waiting: Mapping[Class, int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.pace = Pace(clock)
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._clock = clock
        self._num_running = 0
        self._waiting: dict[Class, deque[Ticket]] = {priority: deque() for priority in CLASSES}
        self._num_passed = 0  # interactive ones let in while a batch one waited, since one was let in

    def num_waiting(self, priority: Class) -> int:
        return len(self._waiting[priority])

    def enter(
        self,
        priority: Class,
        ends_at_s: float | None = None,
        max_tokens: float | None = None,
        pace: Pace | None = None,
    ) -> Ticket:
        """A place; raises `OverloadedError` with `retry-after` where there is none, or none in time for `ends_at_s`."""
        wait_s = self._expect_wait_s(priority)
        if self._is_full(priority):
            raise OverloadedError(
                f"{self._max_waiting[priority]} {priority} requests wait already, which is the limit; try again later",
                headers=_retry_after(wait_s),
            )
        if ends_at_s is not None:
            check_in_time(ends_at_s - self._clock(), wait_s, max_tokens, pace or self.pace)
        ticket = Ticket(self)
        if self._num_running < self._max_running:
            self._let_in(ticket)
        else:
            self._waiting[priority].append(ticket)
        return ticket

    def expect_s(self, priority: Class, max_tokens: float | None = None, pace: Pace | None = None) -> float:
        """Seconds until an answer of at most so many tokens would be whole; infinite where there is no place."""
        if self._is_full(priority):
            return math.inf
        return self._expect_wait_s(priority) + (pace or self.pace).predict_s(max_tokens)

    def _is_full(self, priority: Class) -> bool:
        return self._num_running >= self._max_running and self.num_waiting(priority) >= self._max_waiting[priority]

    def _expect_wait_s(self, priority: Class) -> float:
        if self._num_running < self._max_running:
            return 0.0
        interactive, batch, aside = (self.num_waiting(each) for each in CLASSES)
        if priority == "interactive":
            ahead = interactive + min(batch, (self._num_passed + interactive) // INTERACTIVE_TURNS)
        elif priority == "batch":
            ahead = batch + min(interactive, INTERACTIVE_TURNS * (batch + 1) - self._num_passed)
        else:
            ahead = interactive + batch + aside
        return (ahead + 1) / self._max_running * self.pace.average_s

    def _let_in(self, ticket: Ticket) -> None:
        self._num_running += 1
        ticket.started_s = self._clock()
        ticket.turn.set()

    def _leave(self, ticket: Ticket) -> None:
        if ticket.started_s is None:
            for waiting in self._waiting.values():
                if ticket in waiting:
                    waiting.remove(ticket)
            return
        self._num_running -= 1
        for priority in self._order():
            if waiting := self._waiting[priority]:
                self._num_passed = 0 if priority == "batch" else self._num_passed + bool(self._waiting["batch"])
                self._let_in(waiting.popleft())
                return

    def _order(self) -> tuple[Class, ...]:
        return CLASSES if self._num_passed < INTERACTIVE_TURNS else ("batch", "interactive", "aside")


def check_in_time(left_s: float, wait_s: float, max_tokens: float | None, pace: Pace) -> None:
    """Raises `OverloadedError` with `retry-after` where an answer that begins after `wait_s` would be late."""
    answer_s = pace.predict_s(max_tokens)
    if answer_s > left_s:  # however short the wait; so until the pace is another, or forgotten
        raise OverloadedError(
            f"the deadline cannot be met: {left_s:.3f} s are left, and the answer alone is expected to take "
            f"{answer_s:.3f} s; allow more time, or ask for less",
            headers=_retry_after(pace.known_s),
        )
    if wait_s + answer_s > left_s:
        raise OverloadedError(
            f"the deadline cannot be met: {left_s:.3f} s are left, a place is expected in {wait_s:.3f} s and "
            f"the answer {answer_s:.3f} s later; allow more time, ask for less, or try again later",
            headers=_retry_after(wait_s),
        )


def _retry_after(wait_s: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(wait_s)))}


class Ticket:
    """One request's place. `leave` it exactly once, however the request ended."""

    def __init__(self, queue: Queue) -> None:
        self.started_s: float | None = None  # when its turn came
        self.turn = asyncio.Event()
        self._queue = queue

    async def wait(self) -> None:
        """Until it is this one's turn, or until `give_up`."""
        await self.turn.wait()

    async def give_up(self) -> None:
        """End the waiting; the place is kept until `leave`."""
        self.turn.set()

    def leave(self) -> None:
        self._queue._leave(self)
