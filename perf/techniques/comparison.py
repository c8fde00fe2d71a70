"""What a technique brings: the arithmetic, apart from what is measured."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from perf.errors import PerfError

Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Comparison:
    """Rounds of a technique on and off, in `unit`; `facts` are what else was seen."""

    unit: str
    better: Better
    rounds: Sequence[tuple[float, float]]
    facts: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """`on` and `off` are medians; `ratio` is by how much on is better, the median of the rounds' own ratios.

        Above 1 the technique helps, whichever way `better` points. Raises `PerfError` for a round that has nothing.
        """
        if any(min(each) <= 0 for each in self.rounds):
            raise PerfError(f"rounds: {list(self.rounds)} {self.unit}; nothing can be said of a side that is zero")
        ratios = [on / off if self.better == "higher" else off / on for on, off in self.rounds]
        return {
            "on": _rounded(statistics.median(on for on, _ in self.rounds)),
            "off": _rounded(statistics.median(off for _, off in self.rounds)),
            "ratio": _rounded(statistics.median(ratios)),
            "unit": self.unit,
            "better": self.better,
            "ratios": [_rounded(ratio) for ratio in ratios],
            **self.facts,
        }


def alternate(num_rounds: int, on: Callable[[], float], off: Callable[[], float]) -> list[tuple[float, float]]:
    """Rounds of both, one after the other; who goes first alternates."""
    rounds = []
    for number in range(num_rounds):
        if number % 2:
            second = off()
            rounds.append((on(), second))
        else:
            rounds.append((on(), off()))
    return rounds


def gaps_within(times: Sequence[float], start: float, end: float) -> list[float]:
    """The gaps between neighbouring `times` of which some part lies between `start` and `end`."""
    return [after - before for before, after in itertools.pairwise(times) if after > start and before < end]


def acceptance_of(step_tokens: Sequence[int], num_draft_tokens: int) -> float:
    """How probably a drafted token is accepted, from the tokens that each step brought: 1 to `num_draft_tokens` + 1.

    The most probable value, if each is accepted independently: the accepted ones by those that were decided, for a step
    decides one more than it accepts unless it accepts all. A step that had no draft counts as one rejected.
    """
    num_accepted = sum(tokens - 1 for tokens in step_tokens)
    num_rejected = sum(tokens <= num_draft_tokens for tokens in step_tokens)
    if any(not 1 <= tokens <= num_draft_tokens + 1 for tokens in step_tokens) or not step_tokens:
        raise PerfError(f"tokens of a step: 1 to {num_draft_tokens + 1} are possible (got {list(step_tokens)[:20]})")
    return num_accepted / (num_accepted + num_rejected) if num_accepted + num_rejected else 0.0


def tokens_per_step(acceptance: float, num_draft_tokens: int) -> float:
    """(1 − α^(K+1)) ÷ (1 − α): what a step brings on average (Leviathan et al., ICML 2023, equation 1)."""
    if acceptance >= 1:
        return num_draft_tokens + 1.0
    return (1 - acceptance ** (num_draft_tokens + 1)) / (1 - acceptance)


def shared_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two answers have in common from the beginning."""
    return next((place for place, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))


def _rounded(value: float) -> float:
    """To four significant digits: the sides range from microdollars to seconds."""
    return float(f"{value:.4g}")
