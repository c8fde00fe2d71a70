"""Where the time of a call went: one stage after the other without a gap, so that they add up to the whole."""

from __future__ import annotations

import time
from typing import Literal, NamedTuple

# In the order of a request's way. `admit`: parsed, the caller known. `lookup`: the cache, embedding included. `route`:
# tokenised, judged, decided. `queue`: for the engine's turn. `prefill`: sent to the engine, up to its first token.
# `decode`: from there to the last event. `replay`: a stored answer. `share`: with another caller's answer, not begun.
Stage = Literal["admit", "reserve", "lookup", "share", "route", "queue", "prefill", "decode", "replay"]


class Span(NamedTuple):
    """Both in seconds of `time.monotonic`."""

    stage: Stage
    started_s: float
    ended_s: float


class Stages:
    """A stage may come again, as `queue` does after a failed attempt."""

    def __init__(self, started_s: float) -> None:
        self._marks: list[tuple[Stage, float]] = [("admit", started_s)]

    def enter(self, stage: Stage) -> None:
        """Here one ends and the next begins; nothing, if it is the one that is on."""
        if self._marks[-1][0] != stage:
            self._marks.append((stage, time.monotonic()))

    def spans(self, until_s: float) -> list[Span]:
        """All so far, the last one until `until_s`."""
        ends = [*(started_s for _, started_s in self._marks[1:]), until_s]
        return [Span(stage, started_s, ended_s) for (stage, started_s), ended_s in zip(self._marks, ends)]

    def totals_ms(self, until_s: float) -> dict[Stage, float]:
        """Milliseconds by stage, in the order in which each came first."""
        totals: dict[Stage, float] = {}
        for stage, started_s, ended_s in self.spans(until_s):
            totals[stage] = totals.get(stage, 0.0) + (ended_s - started_s) * 1000
        return {stage: round(total, 3) for stage, total in totals.items()}
