"""The one definition of a percentile, and the summaries made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The `percent`-th percentile (0 to 100) by linear interpolation between the closest ranks.

    The same as numpy's default: of n sorted values, rank ``percent / 100 * (n - 1)`` counted from 0.
    Raises `ValueError` for no values or a percentage out of range.
    """
    if not values:
        raise ValueError("values: empty; a percentile needs at least one value")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent: {percent} is not allowed; 0 to 100")
    ordered = sorted(values)
    rank = percent / 100 * (len(ordered) - 1)
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Count, p50, p90, p99 and maximum, rounded to 3 digits after the point."""
    points = {f"p{percent}": round(percentile(values, percent), 3) for percent in (50, 90, 99)}
    return {"num": len(values), **points, "max": round(max(values), 3)}
