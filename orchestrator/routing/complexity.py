"""What the model `complexity` says of a conversation: how probable it is that each tier is the one it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# From cheap to dear; the model's output is in this order.
TIERS = ("simple", "medium", "complex", "expert")


class Complexity(NamedTuple):
    """`probabilities` by tier, in the order of `TIERS`, calibrated, of sum 1."""

    probabilities: tuple[float, float, float, float]

    @property
    def tier(self) -> str:
        """The most probable tier."""
        return TIERS[max(range(len(TIERS)), key=self.probabilities.__getitem__)]

    def suffices(self, tier: str) -> float:
        """The probability that a model of `tier` is enough: that no dearer tier is needed.

        Raises `ValueError` for a name that is none of `TIERS`.
        """
        return min(1.0, sum(self.probabilities[: TIERS.index(tier) + 1]))


def read_probabilities(values: Sequence[float]) -> Complexity:
    """The model's output, FP32 [4]. Raises `ValueError` when it is no distribution, as of a damaged model."""
    found = tuple(float(value) for value in values)
    if len(found) != len(TIERS) or not all(0 <= value <= 1 for value in found) or abs(sum(found) - 1) > 1e-3:
        raise ValueError(f"probabilities: {len(TIERS)} numbers from 0 to 1 whose sum is 1 (got {list(found)})")
    return Complexity((found[0], found[1], found[2], found[3]))
