"""What each engine needs on disk, as steps. A new engine is a new entry in `RECIPES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from build.bert_onnx import write_bert_onnx
from build.fetch import cached_path, fetch
from build.openvino_ir import write_openvino_ir
from build.rows import AnyModelRow, EmbedderRow, ModelRow
from build.tokenizer import write_tokenizer, write_word_pieces


@dataclass(frozen=True)
class Job:
    """One model on its way into one Triton model: `folder` is the Triton model's version folder."""

    model: AnyModelRow
    folder: Path
    cache: Path

    @property
    def llm(self) -> ModelRow:
        assert isinstance(self.model, ModelRow)
        return self.model

    @property
    def embedder(self) -> EmbedderRow:
        assert isinstance(self.model, EmbedderRow)
        return self.model

    @property
    def gguf(self) -> Path:
        return cached_path(self.llm.gguf, self.cache)


class Step(NamedTuple):
    """A line of progress and what it does: `run` fills the job's folder or cache, or raises `BuildError`."""

    name: str
    run: Callable[[Job], None]


class Recipe(NamedTuple):
    """The steps of one engine, and the packages whose versions decide their result."""

    steps: tuple[Step, ...]
    tools: tuple[str, ...]


def fetch_weights(job: Job) -> None:
    """The model's files into the cache."""
    first, *others = job.model.sources
    fetch(first, job.cache, *others)


def convert_tokenizer(job: Job) -> None:
    """`tokenizer/`: tokenizer.json, chat_template.jinja and the configurations other tools want."""
    write_tokenizer(job.gguf, job.llm, job.folder / "tokenizer")


def convert_weights(job: Job) -> None:
    """`openvino/`: the IR of model, tokenizer and detokenizer."""
    write_openvino_ir(job.gguf, job.folder / "openvino")


def copy_word_pieces(job: Job) -> None:
    """`tokenizer.json`, of an embedder."""
    write_word_pieces(fetch(job.embedder.tokenizer, job.cache), job.embedder, job.folder / "tokenizer.json")


def export_onnx(job: Job) -> None:
    """`model.onnx`: the embedder's graph, pooling and norm inside."""
    write_bert_onnx(fetch(job.embedder.weights, job.cache), job.embedder, job.folder / "model.onnx")


FETCH = Step("fetch weights", fetch_weights)
TOKENIZER = Step("convert tokenizer", convert_tokenizer)
OPENVINO_IR = Step("convert weights to OpenVINO IR", convert_weights)
WORD_PIECES = Step("copy tokenizer", copy_word_pieces)
ONNX = Step("export weights to ONNX", export_onnx)

RECIPES: dict[str, Recipe] = {
    "openvino": Recipe(
        steps=(FETCH, TOKENIZER, OPENVINO_IR),
        tools=("gguf", "tokenizers", "openvino", "openvino-genai", "openvino-tokenizers"),
    ),
    # It answers through a real tokenizer, so that everything around an engine is exercised.
    "scripted": Recipe(steps=(FETCH, TOKENIZER), tools=("gguf", "tokenizers")),
    "wordpiece": Recipe(steps=(FETCH, WORD_PIECES), tools=("tokenizers",)),
    "onnxruntime": Recipe(steps=(FETCH, ONNX), tools=("numpy", "onnx", "safetensors")),
}
