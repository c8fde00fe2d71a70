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


def wilson_interval(num_hits: int, num: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share, 95 % by default: honest for small numbers and for shares near 0 or 1.

    E. B. Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", 1927. Of none, (0, 1).
    """
    if not 0 <= num_hits <= num:
        raise ValueError(f"num_hits: {num_hits} of {num}; 0 to {num} are allowed")
    if num == 0:
        return 0.0, 1.0
    share = num_hits / num
    middle = share + z * z / (2 * num)
    spread = z * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    below, above = (middle - spread) / (1 + z * z / num), (middle + spread) / (1 + z * z / num)
    return max(0.0, below), min(1.0, above)
