"""`python -m build.onnx_graph`: the ONNX graph of a model row in a precision, for TensorRT; needs no GPU.

Into the folder go `model.onnx`, the graph as every target has it (FP32, what the plan is compared with), `graph.onnx`,
the same in the precision asked for, and `samples.npz`, inputs to calibrate and to compare with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from build.bert_onnx import write_bert_onnx
from build.complexity_onnx import write_complexity_onnx
from build.e5_file import read_e5
from build.errors import BuildError
from build.fetch import cache_folder, fetch
from build.model_rows import AnyModelRow, ComplexityRow, EmbedderRow, OcrRow
from build.ocr_onnx import write_detector_onnx, write_recognizer_onnx
from build.precision import QUANTISED, convert
from build.router_adapter import read_adapter
from build.rows import HERE
from build.tokenizer import write_word_pieces
from orchestrator.config import ConfigError, read_toml
from orchestrator.contracts import ATTENTION_MASK, CROP, EMBEDDING_INPUT_IDS, PIXELS
from orchestrator.embedding.tokenizer import WordPieces

Samples = list[dict[str, npt.NDArray[Any]]]
TEXTS = HERE / "data" / "router.jsonl"
NUM_SAMPLES = 64
BATCH = 4
SEED = 7
MODEL, GRAPH, SAMPLES = "model.onnx", "graph.onnx", "samples.npz"


def write_model(engine: str, row: AnyModelRow, cache: Path, path: Path, *, is_unpacked: bool = False) -> None:
    """The FP32 graph of `engine` to `path`, as its recipe without TensorRT writes it.

    With `is_unpacked` what it keeps in 4 bits, whose operators TensorRT does not have, is FP32 too.
    """
    if engine == "encoder" and isinstance(row, EmbedderRow):
        write_bert_onnx(fetch(row.weights, cache, *row.sources), row, path)
    elif engine == "complexity" and isinstance(row, ComplexityRow):
        write_complexity_onnx(read_e5(fetch(row.weights, cache)), read_adapter(), row, path, is_unpacked=is_unpacked)
    elif engine == "ocr_detector" and isinstance(row, OcrRow):
        write_detector_onnx(fetch(row.detector, cache, *row.sources), path)
    elif engine == "ocr_recognizer" and isinstance(row, OcrRow):
        write_recognizer_onnx(fetch(row.recognizer, cache, *row.sources), row, path)
    else:
        raise BuildError(f"engine {engine!r} has no ONNX graph of model {row.name!r}")


def make_samples(engine: str, row: AnyModelRow, cache: Path, folder: Path) -> Samples:
    """Inputs as requests have them: for the embedder texts; for the others noise, whose results are only compared."""
    random = np.random.default_rng(SEED)
    if isinstance(row, EmbedderRow):
        return list(_texts(row, cache, folder))
    if isinstance(row, ComplexityRow):
        ids = [random.integers(3, row.architecture.vocab_size, (BATCH, size), np.int32) for size in (16, 64, 256)]
        return [{EMBEDDING_INPUT_IDS.name: each, ATTENTION_MASK.name: np.ones_like(each)} for each in ids]
    name, shapes = (
        (PIXELS.name, ((1, 320, 320, 3), (2, 64, 640, 3)))
        if engine == "ocr_detector"
        else (CROP.name, ((4, 48, 96, 3), (2, 48, 320, 3)))
    )
    return [{name: random.integers(0, 256, shape, np.uint8)} for shape in shapes]


def _texts(row: EmbedderRow, cache: Path, folder: Path) -> Iterator[dict[str, npt.NDArray[Any]]]:
    tokens = folder / "tokenizer.json"
    write_word_pieces(fetch(row.tokenizer, cache, *row.sources), row, tokens)
    pieces = WordPieces(tokens, max_input_tokens=row.max_input_tokens, pad_id=row.token_ids.pad)
    tokens.unlink()
    texts = [json.loads(line)["messages"][-1]["content"] for line in TEXTS.read_text(encoding="utf-8").splitlines()]
    # 200 letters are sure to fit the window.
    chosen = [texts[index][:200].encode() for index in range(0, len(texts), len(texts) // NUM_SAMPLES)][:NUM_SAMPLES]
    for start in range(0, NUM_SAMPLES, BATCH):
        encoded = pieces.encode(chosen[start : start + BATCH], "sample")
        yield {EMBEDDING_INPUT_IDS.name: encoded.input_ids, ATTENTION_MASK.name: encoded.attention_mask}


def save_samples(samples: Samples, path: Path) -> None:
    """Arrays called `<index>.<tensor>`."""
    np.savez(path, **{f"{index}.{name}": array for index, feeds in enumerate(samples) for name, array in feeds.items()})


def load_samples(path: Path) -> Samples:
    """What `save_samples` wrote."""
    samples: Samples = []
    with np.load(path) as file:
        for key in file.files:
            index, _, name = key.partition(".")
            while len(samples) <= int(index):
                samples.append({})
            samples[int(index)][name] = file[key]
    return samples


def write_graph(engine: str, row: AnyModelRow, precision: str, cache: Path, folder: Path) -> None:
    """All three files, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(engine, row, cache, folder / MODEL)
    samples = make_samples(engine, row, cache, folder)
    save_samples(samples, folder / SAMPLES)
    given = samples if precision in QUANTISED else ()
    write_model(engine, row, cache, folder / GRAPH, is_unpacked=True)
    onnx.save(convert(onnx.load(folder / GRAPH), precision, given), folder / GRAPH)


# The row of each engine's model.
ROWS: Mapping[str, Callable[[Path], AnyModelRow]] = {
    "encoder": lambda path: read_toml(path, EmbedderRow),
    "complexity": lambda path: read_toml(path, ComplexityRow),
    "ocr_detector": lambda path: read_toml(path, OcrRow),
    "ocr_recognizer": lambda path: read_toml(path, OcrRow),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m build.onnx_graph")
    parser.add_argument("--engine", choices=sorted(ROWS), required=True)
    parser.add_argument("--model", required=True, help="the name of a row in build/models")
    parser.add_argument("--precision", choices=("fp32", "fp16", "int8", "fp8"), required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    options = parser.parse_args(argv)
    try:
        row = ROWS[options.engine](HERE / "models" / f"{options.model}.toml")
        write_graph(options.engine, row, options.precision, cache_folder(), options.output_dir)
    except (BuildError, ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
