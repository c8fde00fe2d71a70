"""The conversations that the classifier is trained on: `data/router.jsonl`, one JSON a line.

    {"messages": [{"role", "content"}, …], "tier": "simple" | "medium" | "complex" | "expert",
     "group"?: near-copies and variants share it, "lang"?, "domain"?}

A file of the same kind is what `python -m perf router-quality` judges.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from build.errors import BuildError
from orchestrator.routing.complexity import TIERS
from orchestrator.routing.conversation import Turn

PATH = Path(__file__).parent / "data" / "router.jsonl"


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Said(Strict):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Labelled(Strict):
    """A conversation, and the cheapest tier that answers it well."""

    messages: Annotated[list[Said], Field(min_length=1)]
    tier: Literal["simple", "medium", "complex", "expert"]
    group: str | None = None
    lang: str = "other"
    domain: str | None = None

    @property
    def turns(self) -> list[Turn]:
        return [Turn(said.role, said.content) for said in self.messages]

    @property
    def label(self) -> int:
        """The tier's place in `TIERS`."""
        return TIERS.index(self.tier)


def read_labelled(path: Path) -> list[Labelled]:
    """All lines of a file; raises `BuildError` naming the one that is wrong, and for a file without any."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            rows.append(Labelled.model_validate_json(line))
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(map(str, fault["loc"])) or "the line"
            raise BuildError(f"{path}:{number}: {where}: {fault['msg']}") from error
    if not rows:
        raise BuildError(f"{path}: no conversations; one JSON a line")
    return rows


def assign_folds(rows: Sequence[Labelled], num_folds: int, seed: int) -> npt.NDArray[np.int64]:
    """The fold of each row; those of one group are in one fold, a row without a group is one by itself."""
    groups = [row.group or f"row {index}" for index, row in enumerate(rows)]
    names = sorted(set(groups))
    order = np.random.default_rng(seed).permutation(len(names))
    fold_of = {name: int(place) % num_folds for name, place in zip(names, order)}
    return np.array([fold_of[group] for group in groups])
