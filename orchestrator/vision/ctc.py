"""The recogniser's answer as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

BLANK = 0  # the class that is no character (Graves et al., "Connectionist Temporal Classification", 2006)


def read_alphabet(path: Path) -> list[str]:
    """The characters by class, from a file of one a line; `BLANK` stands for none, and the space comes last."""
    return ["", *path.read_text(encoding="utf-8").removesuffix("\n").split("\n"), " "]


def decode(
    characters: npt.NDArray[np.int32], certainties: npt.NDArray[np.float32], alphabet: Sequence[str]
) -> tuple[str, float]:
    """The text of the most probable class of each column, and how certain its characters are on average; 0 for none.

    A character in several columns is one; a blank between makes it two.
    """
    is_kept = characters != BLANK
    is_kept[1:] &= characters[1:] != characters[:-1]
    if not is_kept.any():
        return "", 0.0
    text = "".join(alphabet[index] for index in characters[is_kept].tolist())
    return text, float(certainties[is_kept].mean())
