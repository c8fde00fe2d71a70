"""The one definition of a percentile, and the summaries made of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# Student's t, one-sided 95 %, for 1, 2, ... degrees of freedom (NIST/SEMATECH e-Handbook of Statistical Methods,
# section 1.3.6.7.2). For more than the last it is a little smaller.
_T_95 = (
    *(6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812),
    *(1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725),
    *(1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697),
)


def upper_bound_95(values: Sequence[float]) -> float:
    """What the mean of whatever `values` are a sample of does not exceed, with 95 % confidence, one-sided.

    Raises `ValueError` for fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"values: {len(values)}; a bound needs at least two")
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) + _T_95[min(len(values) - 1, len(_T_95)) - 1] * error


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
