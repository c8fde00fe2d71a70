"""What each engine needs on disk, as steps. A new engine is a new entry in `RECIPES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from build.fetch import cached_path, fetch
from build.openvino_ir import write_openvino_ir
from build.rows import ModelRow
from build.tokenizer import write_tokenizer


@dataclass(frozen=True)
class Job:
    """One language model on its way into one Triton model: `folder` is the Triton model's version folder."""

    model: ModelRow
    folder: Path
    cache: Path

    @property
    def gguf(self) -> Path:
        return cached_path(self.model.gguf, self.cache)


class Step(NamedTuple):
    """A line of progress and what it does: `run` fills the job's folder or cache, or raises `BuildError`."""

    name: str
    run: Callable[[Job], None]


class Recipe(NamedTuple):
    """The steps of one engine, and the packages whose versions decide their result."""

    steps: tuple[Step, ...]
    tools: tuple[str, ...]


def fetch_weights(job: Job) -> None:
    """The model's GGUF into the cache."""
    fetch(job.model.gguf, job.cache)


def convert_tokenizer(job: Job) -> None:
    """`tokenizer/`: tokenizer.json, chat_template.jinja and the configurations other tools want."""
    write_tokenizer(job.gguf, job.model, job.folder / "tokenizer")


def convert_weights(job: Job) -> None:
    """`openvino/`: the IR of model, tokenizer and detokenizer."""
    write_openvino_ir(job.gguf, job.folder / "openvino")


FETCH = Step("fetch weights", fetch_weights)
TOKENIZER = Step("convert tokenizer", convert_tokenizer)
OPENVINO_IR = Step("convert weights to OpenVINO IR", convert_weights)

RECIPES: dict[str, Recipe] = {
    "openvino": Recipe(
        steps=(FETCH, TOKENIZER, OPENVINO_IR),
        tools=("gguf", "tokenizers", "openvino", "openvino-genai", "openvino-tokenizers"),
    ),
    # It answers through a real tokenizer, so that everything around an engine is exercised.
    "scripted": Recipe(steps=(FETCH, TOKENIZER), tools=("gguf", "tokenizers")),
}
