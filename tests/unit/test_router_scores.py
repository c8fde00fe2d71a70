"""The numbers by which the classifier is judged, against ones worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from build.router import summarise
from build.router_scores import COSTS, calibration_error, choose_temperature, score, soft_max
from build.rows import load_target


def sure_of(*tiers: int) -> np.ndarray:
    return np.eye(4)[list(tiers)]


def test_each_way_to_be_wrong_is_counted_apart() -> None:
    found = score(sure_of(0, 0, 0, 2, 3, 1), np.array([0, 1, 3, 2, 1, 1]))
    assert found.rows == 6 and found.accuracy == 3 / 6
    assert (found.under1_rate, found.under2_rate, found.over_rate) == (1 / 6, 1 / 6, 1 / 6)
    # F1 of the tiers: 2·1/(3+1), 2·1/(1+3), 2·1/(1+1), 0/(1+1)
    assert found.macro_f1 == pytest.approx((0.5 + 0.5 + 1 + 0) / 4)
    assert found.regret == pytest.approx((8.0 - 0.6) / (0.1 + 0.6 * 3 + 8.0 + 2.0))


def test_costs_are_those_of_target_cpu() -> None:
    assert tuple(tier.output_price_per_million_tokens for tier in load_target("cpu").tiers) == COSTS


def test_calibration_is_judged_in_bins_of_equal_mass() -> None:
    sure = np.repeat([0.6, 0.9], 50)
    probabilities = np.stack([sure, 1 - sure, 0 * sure, 0 * sure], axis=1)
    labels = np.concatenate([np.arange(50) % 5 >= 3, np.arange(50) % 2 == 0]).astype(np.int64)  # right: 0.6, 0.5
    assert calibration_error(probabilities, labels) == pytest.approx((0.0 + 0.4) / 2)
    assert calibration_error(sure_of(0, 0, 0), np.array([0, 0, 0])) == 0


def test_the_temperature_is_found_again() -> None:
    randomness = np.random.default_rng(0)
    logits = randomness.normal(0, 2, (4000, 4))
    labels = np.array([randomness.choice(4, p=row) for row in soft_max(logits, 1.7)])
    assert choose_temperature(logits, labels) == pytest.approx(1.7, abs=0.12)
    assert calibration_error(soft_max(logits, 1.7), labels) < 0.03 < calibration_error(soft_max(logits, 0.6), labels)


def test_the_report_calibrates_each_fold_by_the_others() -> None:
    randomness = np.random.default_rng(0)
    labels = randomness.integers(0, 4, 1000)
    logits = (3 * np.eye(4)[labels] + randomness.normal(0, 1, (1000, 4))).astype(np.float32)
    folds = np.arange(1000) % 5
    logits[folds == 4] *= 10  # one fold is ten times as sure: its own temperature would hide it
    found = summarise(logits, labels, folds)
    assert found["folds"] == 5 and found["temperature"] > 0
    assert found["out_of_fold"]["rows"] == 1000
    assert found["out_of_fold"]["accuracy"] == (logits.argmax(axis=1) == labels).mean()
    probabilities = soft_max(logits[folds == 4], choose_temperature(logits[folds == 4], labels[folds == 4]))
    assert calibration_error(probabilities, labels[folds == 4]) < found["out_of_fold"]["ece"] * 5
