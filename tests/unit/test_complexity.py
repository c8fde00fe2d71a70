"""What is made of the classifier's output."""

from __future__ import annotations

import pytest

from build.model_rows import ComplexityRow
from build.rows import HERE, load_target
from orchestrator.config import read_toml
from orchestrator.contracts import PROBABILITIES
from orchestrator.routing.complexity import TIERS, read_probabilities
from orchestrator.routing.conversation import MAX_TOKENS


def test_a_tier_suffices_for_all_that_needs_less() -> None:
    found = read_probabilities([0.1, 0.2, 0.4, 0.3])
    assert found.tier == "complex"
    assert [round(found.suffices(tier), 6) for tier in TIERS] == [0.1, 0.3, 0.7, 1.0]
    with pytest.raises(ValueError, match="tuple"):
        found.suffices("cloud")


@pytest.mark.parametrize("values", [[], [1.0], [0.5, 0.5, 0.5, 0.5], [float("nan")] * 4, [-0.1, 0.4, 0.4, 0.3]])
def test_what_is_no_distribution_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="probabilities: 4 numbers from 0 to 1 whose sum is 1"):
        read_probabilities(values)


def test_all_who_know_the_tiers_agree() -> None:
    row = read_toml(HERE / "models" / "complexity.toml", ComplexityRow)
    assert row.max_input_tokens == MAX_TOKENS
    assert PROBABILITIES.dims == (len(TIERS),)
    assert tuple(tier.name for tier in load_target("cpu").tiers) == TIERS
