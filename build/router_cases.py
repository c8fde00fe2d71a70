"""`python -m build router --add CASES.jsonl`: train again with conversations that a tier answered poorly.

Their labels are not people's, so whether they help is measured: one part in five of all rows is held out, whole groups
of them, and two classifiers are trained on the rest, with the cases and without. Only if that with them is right more
often, and no less often on the rows from before, is one trained on everything; it takes the adapter's place, and the
old one is kept beside it for `--rollback`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from build.errors import BuildError
from build.router_adapter import Adapter, Floats, read_adapter, write_adapter
from build.router_data import Labelled, assign_folds, read_labelled
from build.router_scores import Scores, choose_temperature, score, soft_max

if TYPE_CHECKING:
    from build.router_training import Trainer

# The held-out part is one of so many.
NUM_PARTS = 5
Say = Callable[[int, float], None]


class Comparison(NamedTuple):
    """On the held-out part: both over all of it, and over its rows from before. `temperature` fits the new one."""

    old: Scores
    new: Scores
    old_before: Scores
    new_before: Scores
    temperature: float

    @property
    def is_better(self) -> bool:
        return (
            self.new.accuracy > self.old.accuracy
            and self.new.under2_rate <= self.old.under2_rate
            and self.new_before.accuracy >= self.old_before.accuracy
        )

    def describe(self) -> str:
        return (
            f"held out, {self.new.rows} rows: right {self.old.accuracy:.1%} without the cases, {self.new.accuracy:.1%} "
            f"with them; on the {self.new_before.rows} from before {self.old_before.accuracy:.1%} and "
            f"{self.new_before.accuracy:.1%}; two or more tiers too low {self.old.under2_rate:.1%} and "
            f"{self.new.under2_rate:.1%}"
        )


def read_cases(files: Sequence[Path], rows: Sequence[Labelled]) -> list[Labelled]:
    """The conversations of the files that are not in `rows`, each once, with its last label.

    Raises `BuildError` for a wrong line, and when nothing is left.
    """
    known = {_key(row) for row in rows}
    cases = {_key(row): row for file in files for row in read_labelled(file) if _key(row) not in known}
    if not cases:
        raise BuildError(f"--add: {', '.join(map(str, files))}: nothing that is not in the training file already")
    return list(cases.values())


def compare(
    trainer: Trainer,
    sequences: Sequence[npt.NDArray[np.int32]],
    rows: Sequence[Labelled],
    num_before: int,
    seed: int,
    report: Callable[[str], Say],
) -> Comparison:
    """Two trainings. The first `num_before` rows are those from before, the others the cases."""
    labels = np.array([row.label for row in rows])
    is_held_out = assign_folds(rows, NUM_PARTS, seed) == 0
    is_before = np.arange(len(rows)) < num_before
    held_out = np.flatnonzero(is_held_out)
    if not (is_held_out & is_before).any() or not (~is_held_out & is_before).any():
        raise BuildError(f"--add: {num_before} rows from before are too few to hold out one part in {NUM_PARTS}")

    def judge(taught: npt.NDArray[np.bool_], what: str) -> Floats:
        places = np.flatnonzero(taught)
        tensors = trainer.train([sequences[place] for place in places], labels[places].tolist(), report(what))
        return trainer.predict(tensors, [sequences[place] for place in held_out])

    old = judge(~is_held_out & is_before, "without cases")
    new = judge(~is_held_out, "with cases")
    own, before = labels[held_out], is_before[held_out]
    return Comparison(
        old=score(soft_max(old, 1.0), own),
        new=score(soft_max(new, 1.0), own),
        old_before=score(soft_max(old[before], 1.0), own[before]),
        new_before=score(soft_max(new[before], 1.0), own[before]),
        temperature=choose_temperature(new, own),
    )


def take_over(adapter: Adapter, path: Path) -> None:
    """`adapter` takes the place of the one at `path`, which is kept for `roll_back`."""
    draft = path.with_name(f".{path.name}.draft")
    write_adapter(adapter, draft)
    if path.exists():
        shutil.copyfile(path, previous(path))
    os.replace(draft, path)


def roll_back(path: Path) -> None:
    """The adapter before takes the place of the present one, and the other way round; raises `BuildError`."""
    kept = previous(path)
    if not kept.exists():
        raise BuildError(f"--rollback: {kept}: there is none; --add keeps one when a new adapter takes over")
    read_adapter(kept)
    draft = path.with_name(f".{path.name}.draft")
    shutil.copyfile(path, draft)
    os.replace(kept, path)
    os.replace(draft, kept)


def previous(path: Path) -> Path:
    """Where the adapter before that at `path` is kept."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def _key(row: Labelled) -> tuple[tuple[str, str], ...]:
    return tuple((turn.role, turn.text) for turn in row.turns)
