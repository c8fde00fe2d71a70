"""Adding cases to the classifier's training: taken over only if they help, and taken back."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from build import router
from build.__main__ import main
from build.errors import BuildError
from build.router_adapter import Adapter, read_adapter, write_adapter
from build.router_cases import (
    Comparison,
    cases_file,
    compare,
    group_near_copies,
    previous,
    read_cases,
    read_kept,
    roll_back,
    take_over,
)
from build.router_data import Labelled
from build.router_scores import Scores


def row(text: str, tier: str = "simple", **fields: Any) -> Labelled:
    return Labelled.model_validate({"messages": [{"role": "user", "content": text}], "tier": tier, **fields})


def words_of(seed: int) -> str:
    """A text unlike that of any other seed."""
    digest = hashlib.sha256(f"{seed}".encode()).digest()
    return "".join(chr(ord("a") + byte % 26) for byte in digest)


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


def test_near_copies_are_held_out_together() -> None:
    """Also with those from before, whose own groups stay whole."""
    before = [row("base question of some length", group="g"), row("what is 7 plus 8?", group="g"), row("another")]
    cases = [*(row(f"What is {number} plus {number * 3}?") for number in range(60)), row("哪座城市是法国的首都?")]
    groups = [each.group for each in group_near_copies([*before, *cases], len(before))]
    assert len(set(groups[3:63])) == 1 and groups[3] == groups[0] == groups[1]
    assert len({groups[0], groups[2], groups[63]}) == 3
    rows = [*(row(text) for text in "abcdefghij"), *cases[:60]]
    with pytest.raises(BuildError, match="the 60 cases are too alike to train on some and judge by others"):
        compare(None, [], rows, 10, 0, lambda what: lambda epoch, loss: None)  # type: ignore[arg-type]


def test_the_adapter_in_use_must_be_beaten_on_the_cases() -> None:
    better = (scores(0.7), scores(0.8), scores(0.8), scores(0.8), 1.0)
    assert Comparison(*better, scores(0.5), scores(0.6)).is_better
    assert not Comparison(*better, scores(0.6), scores(0.6)).is_better
    assert not Comparison(*better, scores(0.5, 0.0), scores(0.6, 0.1)).is_better
    assert "10 cases 50.0% by the adapter in use and 60.0%" in Comparison(*better, scores(0.5), scores(0.6)).describe()


class Knowing:
    """A trainer whose classifier knows the rows that it was taught, and those of the tier that most of them had."""

    def __init__(self, *_: object) -> None: ...

    def train(self, sequences: Any, labels: list[int], report: object) -> dict[str, Any]:
        known = np.full(4, -1, np.float32)
        known[sorted(set(labels))] = 1
        return {"head.0.bias": known}

    def predict(self, tensors: dict[str, Any], sequences: Any) -> Any:
        known = tensors["head.0.bias"]
        return np.array([np.eye(4)[each[1] if known[each[1]] > 0 else 0] * 9 for each in sequences], np.float32)


def test_a_second_addition_forgets_nothing_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = dataclasses.make_dataclass("Settings", [("num_epochs", int, 1), ("seed", int, 0)])
    training = types.SimpleNamespace(Settings=settings, Trainer=Knowing)
    monkeypatch.setitem(sys.modules, "build.router_training", training)
    monkeypatch.setattr(router, "_origin", lambda data, rows, settings: {"rows": len(rows)})
    monkeypatch.setattr(
        router, "_prepare", lambda rows: (None, [np.array([place, row.label]) for place, row in enumerate(rows)])
    )

    output = tmp_path / "adapter.safetensors"
    write_adapter(Adapter({"head.0.bias": np.array([1, -1, -1, -1], np.float32)}, {"temperature": 1.0}), output)
    data = write(tmp_path / "data.jsonl", *(row(words_of(each)) for each in range(100)))
    first = write(tmp_path / "a.jsonl", *(row(words_of(each), "medium") for each in range(100, 140)))
    second = write(tmp_path / "b.jsonl", *(row(words_of(each), "complex") for each in range(140, 180)))
    command = ["router", f"--data={data}", f"--output={output}", "--add"]
    assert main([*command, str(first)]) == 0
    assert read_adapter(output).training["rows"] == 140
    assert cases_file(output).stat().st_mode & 0o777 == 0o600
    assert main([*command, str(second)]) == 0
    assert read_adapter(output).training["rows"] == 180
    assert read_adapter(output).tensors["head.0.bias"].tolist() == [1, 1, 1, -1]
    assert main([*command, str(first)]) == 1  # nothing that is not known
    roll_back(output)
    assert len(read_kept(read_adapter(output), output)) == 40
    cases_file(output).write_text("")
    with pytest.raises(BuildError, match="has not the 40 cases .* put the file back"):
        read_kept(read_adapter(output), output)


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
    rows = [row(words_of(number), label) for number, label in enumerate(labels)]
    report: Callable[[str], Callable[[int, float], None]] = lambda what: lambda epoch, loss: None  # noqa: E731
    found = compare(trainer, sequences, rows, num_before, 0, report)
    assert found.is_better == are_right, found.describe()
