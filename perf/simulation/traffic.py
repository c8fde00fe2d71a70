"""Who asks what, and when: seeded, so that the same numbers give the same traffic."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.limits.queue import Class


@dataclass(frozen=True)
class Tokens:
    """A length in tokens: lognormal by its median and sigma (0: always the median), at least 1, at most `most`."""

    median: float
    sigma: float = 0.0
    most: int = 8192

    def draw(self, chance: random.Random) -> int:
        drawn = self.median * math.exp(self.sigma * chance.gauss(0, 1)) if self.sigma else self.median
        return max(1, min(self.most, round(drawn)))


@dataclass(frozen=True)
class Tier:
    """A kind of requests: `share` of all. `hit_rate` of them are answered by the cache, no engine needed.

    `deadline_s` is of the whole answer; a good request has its first token within `ttft_limit_s`.
    """

    name: str
    share: float
    input_tokens: Tokens
    output_tokens: Tokens
    hit_rate: float = 0.0
    deadline_s: float | None = None
    ttft_limit_s: float = 0.5
    priority: Class = "interactive"


@dataclass(frozen=True)
class Ask:
    """One request to come."""

    tier: Tier
    input_tokens: int
    output_tokens: int
    is_hit: bool = False


def draw(tiers: Sequence[Tier], chance: random.Random) -> Ask:
    """One request of some tier, by their shares."""
    (tier,) = chance.choices(tiers, [tier.share for tier in tiers])
    is_hit = chance.random() < tier.hit_rate
    return Ask(tier, tier.input_tokens.draw(chance), tier.output_tokens.draw(chance), is_hit)


def poisson(tiers: Sequence[Tier], rate: float, seconds: float, seed: int) -> Iterator[tuple[float, Ask]]:
    """`rate` requests a second at random times, until `seconds`; the times in seconds."""
    chance = random.Random(seed)
    at_s = chance.expovariate(rate)
    while at_s < seconds:
        yield at_s, draw(tiers, chance)
        at_s += chance.expovariate(rate)
