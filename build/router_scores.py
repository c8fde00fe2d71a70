"""How good probabilities of tiers are, against labels."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from orchestrator.routing.complexity import TIERS

NUM_BINS = 10
# The output prices of the tiers of target cpu, in order.
COSTS = (0.10, 0.60, 2.00, 8.00)
_COST = np.array(COSTS)

Labels = npt.NDArray[np.int64]
Values = npt.NDArray[np.floating[Any]]


class Scores(NamedTuple):
    """Shares are of all rows. Under-routing is to a cheaper tier than the label's, by one (`under1_rate`) or by two or
    more tiers (`under2_rate`); over-routing is to a dearer one. `regret` is what that costs more, as a share of what
    the right tiers cost, at `COSTS` a row."""

    rows: int
    accuracy: float
    macro_f1: float
    ece: float
    under1_rate: float
    under2_rate: float
    over_rate: float
    regret: float

    def rounded(self) -> dict[str, float]:
        return {key: round(value, 4) for key, value in self._asdict().items()}


def score(probabilities: Values, labels: Labels) -> Scores:
    """`probabilities` is [rows, tiers]; `labels` counts tiers, [rows]; at least one row."""
    chosen = probabilities.argmax(axis=1)
    off = chosen - labels
    return Scores(
        rows=len(labels),
        accuracy=float((off == 0).mean()),
        macro_f1=_macro_f1(chosen, labels),
        ece=calibration_error(probabilities, labels),
        under1_rate=float((off == -1).mean()),
        under2_rate=float((off <= -2).mean()),
        over_rate=float((off > 0).mean()),
        regret=float(np.maximum(_COST[chosen] - _COST[labels], 0).sum() / _COST[labels].sum()),
    )


def calibration_error(probabilities: Values, labels: Labels, num_bins: int = NUM_BINS) -> float:
    """The mean gap between how sure the chosen tier was and how often it was right, over bins of equally many rows."""
    sure, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    bins = np.array_split(np.argsort(sure, kind="stable"), num_bins)
    return float(sum(len(rows) * abs(sure[rows].mean() - right[rows].mean()) for rows in bins if len(rows)) / len(sure))


def soft_max(logits: Values, temperature: float) -> Values:
    """[rows, tiers] -> probabilities."""
    cooled = logits / temperature
    powers = np.exp(cooled - cooled.max(axis=1, keepdims=True))
    found: Values = powers / powers.sum(axis=1, keepdims=True)
    return found


def choose_temperature(logits: Values, labels: Labels) -> float:
    """The temperature under which the labels are likeliest (Guo et al., 2017), to 0.01."""
    rows = np.arange(len(labels))

    def loss(temperature: float) -> float:
        return float(-np.log(soft_max(logits.astype(np.float64), temperature)[rows, labels] + 1e-12).mean())

    return float(min(np.arange(0.2, 5.0, 0.01).round(2), key=loss))


def _macro_f1(chosen: Labels, labels: Labels) -> float:
    """The mean over the tiers that occur, by label or by choice."""
    each = []
    for tier in range(len(TIERS)):
        hits = int(((chosen == tier) & (labels == tier)).sum())
        total = int((chosen == tier).sum() + (labels == tier).sum())
        if total:
            each.append(2 * hits / total)
    return float(np.mean(each))
