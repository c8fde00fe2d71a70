"""Adding cases to the classifier's training: taken over only if they help, and taken back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from build.__main__ import main
from build.errors import BuildError
from build.router_adapter import Adapter, read_adapter, write_adapter
from build.router_cases import Comparison, compare, previous, read_cases, roll_back, take_over
from build.router_data import Labelled
from build.router_scores import Scores


def row(text: str, tier: str = "simple", **fields: Any) -> Labelled:
    return Labelled.model_validate({"messages": [{"role": "user", "content": text}], "tier": tier, **fields})


def scores(accuracy: float, under2_rate: float = 0.0) -> Scores:
    return Scores(10, accuracy, 0.0, 0.0, 0.0, under2_rate, 0.0, 0.0)


def adapter(value: float) -> Adapter:
    return Adapter({"head.0.bias": np.full(4, value, np.float32)}, {"temperature": 1.0})


# --- when it takes over --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "old_before", "new_before", "is_better"),
    [
        (scores(0.80), scores(0.85), scores(0.8), scores(0.8), True),
        (scores(0.80), scores(0.80), scores(0.8), scores(0.8), False),
        (scores(0.80), scores(0.85), scores(0.8), scores(0.79), False),
        (scores(0.80, 0.01), scores(0.85, 0.02), scores(0.8), scores(0.8), False),
        (scores(0.80), scores(0.75), scores(0.8), scores(0.9), False),
    ],
)
def test_only_what_is_better_is(
    old: Scores, new: Scores, old_before: Scores, new_before: Scores, is_better: bool
) -> None:
    found = Comparison(old, new, old_before, new_before, 1.0)
    assert found.is_better == is_better
    assert f"right {old.accuracy:.1%} without the cases, {new.accuracy:.1%}" in found.describe()


def test_the_one_before_is_kept_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "adapter.safetensors"
    with pytest.raises(BuildError, match="--rollback: .*adapter.previous.safetensors: there is none"):
        roll_back(path)
    write_adapter(adapter(1.0), path)
    take_over(adapter(2.0), path)
    assert read_adapter(path).tensors["head.0.bias"][0] == 2
    assert read_adapter(previous(path)).tensors["head.0.bias"][0] == 1
    assert main(["router", "--rollback", f"--output={path}"]) == 0
    assert read_adapter(path).tensors["head.0.bias"][0] == 1
    roll_back(path)
    assert read_adapter(path).tensors["head.0.bias"][0] == 2
    assert {each.name for each in tmp_path.iterdir()} == {path.name, previous(path).name}


def test_a_broken_one_does_not_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "adapter.safetensors"
    write_adapter(adapter(1.0), path)
    previous(path).write_bytes(b"no")
    assert main(["router", "--rollback", f"--output={path}"]) == 1
    assert "no adapter that can be read" in capsys.readouterr().err
    assert read_adapter(path).tensors["head.0.bias"][0] == 1


# --- which cases ---------------------------------------------------------------------------------------------


def write(path: Path, *rows: Labelled) -> Path:
    path.write_text("".join(json.dumps(each.model_dump(exclude_none=True)) + "\n" for each in rows))
    return path


def test_cases_are_those_that_are_not_there_yet(tmp_path: Path) -> None:
    first = write(tmp_path / "1.jsonl", row("known", "expert"), row("new", "medium"))
    second = write(tmp_path / "2.jsonl", row("new", "complex"), row("other"))
    found = read_cases([first, second], [row("known")])
    assert [(case.turns[-1].text, case.tier) for case in found] == [("new", "complex"), ("other", "simple")]
    with pytest.raises(BuildError, match="nothing that is not in the training file already"):
        read_cases([first], [row("known"), row("new")])


def test_too_few_rows_to_hold_some_out_are_told() -> None:
    with pytest.raises(BuildError, match="1 rows from before are too few"):
        compare(None, [], [row("a"), row("b")], 1, 0, lambda what: lambda epoch, loss: None)  # type: ignore[arg-type]


# --- a training ----------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")  # JAX's own
@pytest.mark.parametrize("are_right", [True, False])
def test_cases_that_help_take_over_and_wrong_ones_do_not(are_right: bool) -> None:
    """A tiny encoder, and tiers told by a word; of the word 3 the rows from before know nothing."""
    pytest.importorskip("jax", reason="training needs the extra `router`")
    pytest.importorskip("optax", reason="training needs the extra `router`")
    from test_complexity_onnx import NUMBERS, random_encoder
    from test_router_training import SETTINGS

    from build.router_training import Encoder, Trainer

    randomness = np.random.default_rng(0)
    weights = random_encoder(randomness)
    weights["embeddings.position_embeddings.weight"] = randomness.normal(0, 0.1, (16, 32)).astype(np.float32)
    words = randomness.normal(0, 0.5, (30, 32)).astype(np.float32)
    trainer = Trainer(Encoder(words, weights, NUMBERS.num_attention_heads, NUMBERS.layer_norm_eps), SETTINGS)
    num_before, num_cases = 200, 80
    told = [*randomness.integers(0, 3, num_before).tolist(), *[3] * num_cases]
    tiers = ("simple", "medium", "complex", "expert")
    labels = [tiers[each] for each in told]
    if not are_right:
        told[num_before:] = randomness.integers(0, 3, num_cases).tolist()
        labels[num_before:] = [tiers[(each + 2) % 3] for each in told[num_before:]]
    sequences = [np.append(randomness.integers(4, 30, 5), each).astype(np.int32) for each in told]
    rows = [row(f"question {number}", label) for number, label in enumerate(labels)]
    report: Callable[[str], Callable[[int, float], None]] = lambda what: lambda epoch, loss: None  # noqa: E731
    found = compare(trainer, sequences, rows, num_before, 0, report)
    assert found.is_better == are_right, found.describe()
