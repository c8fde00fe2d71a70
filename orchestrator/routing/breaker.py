"""A circuit breaker: an engine or API that fails again and again is left alone for a while, then tried by one request.

    closed ── failures in a row, or a hang ──▶ open ── `open_s` later ──▶ half open: one request, the probe
       ▲                                        ▲                             │
       └──────── the probe's first token ───────┼─────────────────────────────┤
                                                └── it failed: twice as long ─┘

What callers do wrong, or end, says nothing about an engine. Nor does what was sent to it before it opened. An engine
that does not let go of what a caller has left is slow, or hangs: that is a failure if it was silent for everybody
since, and one failure however many left at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Literal

State = Literal["closed", "half_open", "open"]
# How a request ended for the engine: "hang" is a failure by silence, "unstopped" silence when told to stop, "neutral"
# says nothing.
Verdict = Literal["success", "failure", "hang", "unstopped", "neutral"]

MAX_OPEN_S = 60.0


class Breaker:
    """Of one engine model, or one cloud tier. For one event loop."""

    def __init__(self, failures_to_open: int, open_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._failures_to_open = failures_to_open
        self._first_open_s = open_s
        self._clock = clock
        self._num_failures = 0  # in a row
        self._heard_s = self._failed_s = -math.inf
        self._open_s = open_s
        self._opened_s: float | None = None  # None: closed
        self._probe: Passage | None = None

    @property
    def state(self) -> State:
        if self._opened_s is None:
            return "closed"
        return "half_open" if self._probe is not None or self.wait_s == 0 else "open"

    @property
    def is_out(self) -> bool:
        """Whether nobody may pass now."""
        return self._opened_s is not None and (self._probe is not None or self.wait_s > 0)

    @property
    def wait_s(self) -> float:
        """Until the next probe may pass, unless there is one; 0 when closed."""
        return 0.0 if self._opened_s is None else max(0.0, self._opened_s + self._open_s - self._clock())

    def enter(self) -> Passage | None:
        """A request's way through, to be ended exactly once; None when nobody may pass."""
        if self.is_out:
            return None
        passage = Passage(self, is_probe=self._opened_s is not None, started_s=self._clock())
        if passage.is_probe:
            self._probe = passage
        return passage

    def _hear(self, passage: Passage) -> None:
        self._heard_s = passage.heard_s = self._clock()
        if passage is self._probe:
            self._probe = self._opened_s = None
            self._num_failures, self._open_s = 0, self._first_open_s

    def _show_life(self) -> None:
        self._heard_s = self._clock()

    def _end(self, passage: Passage, verdict: Verdict) -> None:
        is_silent = self._heard_s <= passage.heard_s  # nothing came for anybody meanwhile
        if verdict == "unstopped" and not (is_silent and passage.heard_s >= self._failed_s):
            verdict = "neutral"
        if verdict == "success":
            self._hear(passage)
            self._num_failures = 0
        elif passage is self._probe:
            self._probe = None
            if verdict != "neutral":
                self._open_s = min(MAX_OPEN_S, 2 * self._open_s)
                self._opened_s = self._clock()
        elif verdict != "neutral" and self._opened_s is None:
            self._num_failures += 1
            self._failed_s = self._clock()
            hangs = verdict == "hang" and is_silent  # it is not slow
            if hangs or self._num_failures >= self._failures_to_open:
                self._num_failures = 0
                self._opened_s = self._clock()


class Passage:
    """One request at an engine. `hear` when a token comes; `end` it once."""

    __slots__ = ("_breaker", "heard_s", "is_probe")

    def __init__(self, breaker: Breaker, *, is_probe: bool, started_s: float) -> None:
        self.is_probe = is_probe
        self.heard_s = started_s
        self._breaker = breaker

    def hear(self) -> None:
        """A token came."""
        self._breaker._hear(self)

    def show_life(self) -> None:
        """The engine ended the request, though perhaps without a token."""
        self._breaker._show_life()

    def end(self, verdict: Verdict) -> None:
        self._breaker._end(self, verdict)
