"""`python -m build router --add CASES.jsonl`: train again with conversations that a tier answered poorly.

Their labels are not people's, so whether they help is measured: one part in five of all rows is held out, whole groups
of them and near-copies together, and two classifiers are trained on the rest, with the cases and without. Only if that
with them is right more often, no less often on the rows from before, and on the cases held out more often than the
adapter in use, is one trained on everything; it takes the adapter's place, and the old one is kept beside it for
`--rollback`. (On the rows from before the adapter in use is no measure: it was trained on those held out, too.)

The cases of an adapter are kept beside it, in the order in which they came, for the next `--add`: an adapter was
trained on the first lines of that file, so many as it says.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from build.errors import BuildError
from build.router_adapter import Adapter, Floats, Weights, read_adapter, write_adapter
from build.router_data import Labelled, assign_folds, read_labelled
from build.router_scores import Scores, choose_temperature, score, soft_max

if TYPE_CHECKING:
    from build.router_training import Trainer

# The held-out part is one of so many.
NUM_PARTS = 5
# Texts that share more of their letters' triples than that are near-copies, digits counting as alike.
MAX_LIKENESS = 0.5
_NUM_BUCKETS = 4096  # that the triples are hashed into
Say = Callable[[int, float], None]


class Comparison(NamedTuple):
    """On the held-out part: both over all of it, and over its rows from before. `temperature` fits the new one.

    `in_use` and `new_cases` are over its cases alone; None where no adapter is in use.
    """

    old: Scores
    new: Scores
    old_before: Scores
    new_before: Scores
    temperature: float
    in_use: Scores | None = None
    new_cases: Scores | None = None

    @property
    def is_better(self) -> bool:
        if self.in_use is not None and self.new_cases is not None:
            if self.new_cases.accuracy <= self.in_use.accuracy:
                return False
            if self.new_cases.under2_rate > self.in_use.under2_rate:
                return False
        return (
            self.new.accuracy > self.old.accuracy
            and self.new.under2_rate <= self.old.under2_rate
            and self.new_before.accuracy >= self.old_before.accuracy
        )

    def describe(self) -> str:
        cases = ""
        if self.in_use is not None and self.new_cases is not None:
            cases = (
                f"; on its {self.new_cases.rows} cases {self.in_use.accuracy:.1%} by the adapter in use and "
                f"{self.new_cases.accuracy:.1%}"
            )
        return (
            f"held out, {self.new.rows} rows: right {self.old.accuracy:.1%} without the cases, {self.new.accuracy:.1%} "
            f"with them; on the {self.new_before.rows} from before {self.old_before.accuracy:.1%} and "
            f"{self.new_before.accuracy:.1%}; two or more tiers too low {self.old.under2_rate:.1%} and "
            f"{self.new.under2_rate:.1%}{cases}"
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
    in_use: Weights | None = None,
) -> Comparison:
    """Two trainings. The first `num_before` rows are those from before, the others the cases.

    `in_use` are the tensors of the adapter that would be replaced.
    """
    labels = np.array([row.label for row in rows])
    is_before = np.arange(len(rows)) < num_before
    is_held_out = _hold_out(group_near_copies(rows, num_before), is_before, seed)
    held_out = np.flatnonzero(is_held_out)

    def judge(taught: npt.NDArray[np.bool_], what: str) -> Floats:
        places = np.flatnonzero(taught)
        tensors = trainer.train([sequences[place] for place in places], labels[places].tolist(), report(what))
        return trainer.predict(tensors, [sequences[place] for place in held_out])

    old = judge(~is_held_out & is_before, "without cases")
    new = judge(~is_held_out, "with cases")
    own, before = labels[held_out], is_before[held_out]
    cases = np.flatnonzero(is_held_out & ~is_before)
    used = None if in_use is None else trainer.predict(in_use, [sequences[place] for place in cases])
    return Comparison(
        old=score(soft_max(old, 1.0), own),
        new=score(soft_max(new, 1.0), own),
        old_before=score(soft_max(old[before], 1.0), own[before]),
        new_before=score(soft_max(new[before], 1.0), own[before]),
        temperature=choose_temperature(new, own),
        in_use=None if used is None else score(soft_max(used, 1.0), labels[cases]),
        new_cases=None if used is None else score(soft_max(new[~before], 1.0), labels[cases]),
    )


def _hold_out(rows: Sequence[Labelled], is_before: npt.NDArray[np.bool_], seed: int) -> npt.NDArray[np.bool_]:
    """One part of the rows, with rows from before and cases in it, and such left to train on."""
    folds = assign_folds(rows, NUM_PARTS, seed)
    parts: list[npt.NDArray[np.bool_]] = [folds == part for part in range(NUM_PARTS)]
    parts = [part for part in parts if (part & is_before).any() and (~part & is_before).any()]
    if not parts:
        raise BuildError(f"--add: {is_before.sum()} rows from before are too few to hold out one part in {NUM_PARTS}")
    for part in parts:
        if (part & ~is_before).any() and (~part & ~is_before).any():
            return part
    raise BuildError(
        f"--add: the {(~is_before).sum()} cases are too alike to train on some and judge by others: "
        "near-copies of one question tell nothing of the next; collect more"
    )


def group_near_copies(rows: Sequence[Labelled], num_before: int) -> list[Labelled]:
    """The rows, cases in one group with all that they are near-copies of; groups there were stay whole."""
    roots = list(range(len(rows)))

    def find(place: int) -> int:
        while roots[place] != place:
            roots[place] = place = roots[roots[place]]
        return place

    first: dict[str, int] = {}
    for place, row in enumerate(rows):
        if row.group is not None:
            roots[place] = find(first.setdefault(row.group, place))
    marks = np.stack([_triples(row) for row in rows])
    sizes = marks.sum(1)
    for place in range(num_before, len(rows)):
        shared = marks[:place] @ marks[place]
        for other in np.flatnonzero(shared > MAX_LIKENESS * (sizes[:place] + sizes[place] - shared)):
            roots[find(place)] = find(int(other))
    return [row.model_copy(update={"group": f"copies of {find(place)}"}) for place, row in enumerate(rows)]


def _triples(row: Labelled) -> Floats:
    """FP32 [buckets]: 1 where the conversation's last turn has a triple of characters that falls into it."""
    text = f"  {' '.join(row.turns[-1].text.lower().split())}  "
    text = "".join("0" if char.isdecimal() else char for char in text)
    found = np.zeros(_NUM_BUCKETS, np.float32)
    for place in range(len(text) - 2):
        found[zlib.crc32(text[place : place + 3].encode("utf-8", "replace")) % _NUM_BUCKETS] = 1
    return found


def read_kept(adapter: Adapter | None, path: Path) -> list[Labelled]:
    """The cases that the adapter at `path` was trained on, as `keep_cases` has told it; raises `BuildError`."""
    kept = None if adapter is None else adapter.training.get("cases")
    if kept is None:
        return []
    file = cases_file(path)
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)[: kept["rows"]] if file.exists() else []
    if _digest(lines) != kept["sha256"]:
        raise BuildError(
            f"{file}: has not the {kept['rows']} cases that {path} was trained with, and --add would forget them; "
            "put the file back, or start from the training file: python -m build router"
        )
    return [Labelled.model_validate_json(line) for line in lines]


def keep_cases(cases: Sequence[Labelled], path: Path) -> dict[str, object]:
    """Write them beside the adapter at `path`, for its owner alone; returns what its metadata says of them."""
    lines = [case.model_dump_json(exclude_none=True) + "\n" for case in cases]
    draft = cases_file(path).with_suffix(".draft")
    draft.unlink(missing_ok=True)
    with open(draft, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.writelines(lines)
    os.replace(draft, cases_file(path))
    return {"rows": len(lines), "sha256": _digest(lines)}


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def cases_file(path: Path) -> Path:
    """Where the cases of the adapter at `path`, and of that before it, are kept."""
    return path.with_name(f"{path.stem}.cases.jsonl")


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
