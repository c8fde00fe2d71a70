"""The classifier's conversations: what the files hold, how they are split, what a wrong line is told."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from build import router_data
from build.errors import BuildError
from build.router_data import Labelled, assign_folds, read_labelled
from orchestrator.routing.complexity import TIERS

UNSEEN = Path(__file__).parents[1] / "data" / "router_unseen.jsonl"


@pytest.fixture(scope="module")
def training() -> list[Labelled]:
    return read_labelled(router_data.PATH)


def key(row: Labelled) -> tuple[str, ...]:
    """What two rows share that say the same."""
    return tuple(turn.text.strip().casefold() for turn in row.turns)


def test_the_training_file_is_wide(training: list[Labelled]) -> None:
    assert len(training) >= 1000
    tiers = Counter(row.tier for row in training)
    assert set(tiers) == set(TIERS) and min(tiers.values()) >= len(training) / 8
    languages = Counter(row.lang for row in training)
    assert set(languages) == {"en", "de", "es", "fr", "zh"} and min(languages.values()) >= 300
    assert len({row.domain for row in training}) >= 50
    assert sum(len(row.messages) > 1 for row in training) >= len(training) / 10
    num_words = [len(row.turns[-1].text.split()) for row in training]
    assert min(num_words) == 1 and max(num_words) >= 400
    assert all(row.messages[-1].role == "user" and row.group for row in training)


def test_no_conversation_is_in_it_twice(training: list[Labelled]) -> None:
    assert [text for text, count in Counter(map(key, training)).items() if count > 1] == []


def test_the_unseen_conversations_are_unseen(training: list[Labelled]) -> None:
    unseen = read_labelled(UNSEEN)
    assert len(unseen) >= 400
    assert set(map(key, unseen)).isdisjoint(map(key, training))


def test_a_group_is_in_one_fold(training: list[Labelled]) -> None:
    folds = assign_folds(training, 5, seed=0)
    fold_of: dict[str | None, set[int]] = {}
    for row, fold in zip(training, folds.tolist()):
        fold_of.setdefault(row.group, set()).add(fold)
    assert {len(each) for each in fold_of.values()} == {1}
    sizes = Counter(folds.tolist())
    assert set(sizes) == set(range(5)) and min(sizes.values()) >= len(training) / 7
    assert (assign_folds(training, 5, seed=0) == folds).all()


def test_rows_without_a_group_stand_alone() -> None:
    rows = [Labelled.model_validate({"messages": [{"role": "user", "content": "a"}], "tier": "simple"})] * 10
    assert Counter(assign_folds(rows, 5, seed=1).tolist()) == dict.fromkeys(range(5), 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [{"role": "user", "content": "a"}], "tier": "easy"}', r"rows\.jsonl:2: tier: "),
        ('{"messages": [], "tier": "simple"}', r"rows\.jsonl:2: messages: "),
        ('{"messages": [{"role": "user"}], "tier": "simple"}', r"rows\.jsonl:2: messages\.0\.content: "),
        ('{"messages": [{"role": "user", "content": "a"}], "tier": "simple", "x": 1}', r"rows\.jsonl:2: x: "),
        ("tier", r"rows\.jsonl:2: the line: "),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    good = '{"messages": [{"role": "user", "content": "a"}], "tier": "simple"}'
    (tmp_path / "rows.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(BuildError, match=message):
        read_labelled(tmp_path / "rows.jsonl")


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    with pytest.raises(BuildError, match="no conversations; one JSON a line"):
        read_labelled(tmp_path / "rows.jsonl")
