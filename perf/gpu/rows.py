"""The artifacts that are measured: one engine `vllm`, and no more beside it than a target must have.

SmolLM2 says real text. `llama-8b-random` has the shape of Llama 3.1 8B, weights that vLLM draws itself, and a tokenizer
of as many tokens. The embedder, which nothing here asks, is one small layer of zeros.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from build import trtllm
from build.bert_onnx import weight_shapes
from build.compiler import build
from build.fetch import cached_path, fetch
from build.model_rows import (
    AnyModelRow,
    BertArchitecture,
    Checkpoint,
    EmbedderRow,
    EmbedderTokenIds,
    ModelRow,
    PackagedFile,
)
from build.rows import TargetRow, load_models, load_target
from build.tokenizer import model_config, write_tokenizer
from perf.report import say

TARGET = "h100-vllm"
SMOLLM2, LLAMA = "smollm2-135m-instruct", "llama-8b-random"
ENGINE = "llm_small"
# Batches with CUDA graphs: few, so that an engine starts soon; all sides have the same.
GRAPH_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512]
MAX_STREAMS = 512
_ALPHABET = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz01"]


def make_row(name: str, model: str, *, has_cache: bool = False, **parameters: Any) -> TargetRow:
    """Target `TARGET` with `model` as its one engine, whose parameters are changed by `parameters`.

    A cache is the exact one: the embedder here knows no words.
    """
    row = load_target(TARGET).model_dump(exclude_none=True)
    models = {
        each: row["models"][each] for each in ("orchestrator", ENGINE, "embedding_tokenizer", "embedding_encoder")
    }
    models[ENGINE] |= {"model": model, "max_batch_size": MAX_STREAMS}
    changes = {"gpu_memory_share": 0.85, "cuda_graph_sizes": GRAPH_SIZES, "kv_cache_precision": "auto", **parameters}
    models[ENGINE]["parameters"] |= changes
    for each in ("embedding_tokenizer", "embedding_encoder"):
        models[each]["model"] = "blank-embedder"
    limits = row["limits"] | {"max_live_requests": 2 * MAX_STREAMS, "max_running_requests": MAX_STREAMS}
    keep = {key: row[key] for key in ("description", "vllm")}
    if has_cache:
        keep["cache"] = {"ttl_s": 3600, "max_bytes": 256 << 20, "semantic": False, "max_temperature": 0.5}
    tiers = [{**row["tiers"][0], "model": ENGINE}]
    rest = {"name": name, "ensembles": ["embedding"], "models": models, "tiers": tiers, "limits": limits}
    return TargetRow.model_validate({**keep, **rest})


def make_artifact(row: TargetRow, work: Path, cache: Path) -> Path:
    """The artifact of `row` below `work`; made anew only when something changed."""
    model = row.models[ENGINE].model
    models: dict[str, AnyModelRow] = {"blank-embedder": _blank_embedder(cache)}
    smollm2 = load_models(load_target("cpu"))[SMOLLM2]
    assert isinstance(smollm2, ModelRow)
    models[str(model)] = smollm2 if model == SMOLLM2 else _random_llama(smollm2, cache)
    output = work / "artifacts" / row.name
    build(row, models, output, cache=cache, progress=_progress)
    return output


@contextmanager
def _progress(step: str) -> Iterator[None]:
    say(f"  {step}")
    yield


def _random_llama(smollm2: ModelRow, cache: Path) -> ModelRow:
    """The row, and in the cache what would be its checkpoint: all but the weights, which nobody has."""
    model = load_models(load_target(TARGET))["llama-3.1-8b-instruct"]
    assert isinstance(model, ModelRow)
    checkpoint = Checkpoint(repo=f"local/{LLAMA}", revision="0" * 40)
    row = ModelRow(
        name=LLAMA,
        licence="none",
        architecture=model.architecture,
        token_ids=smollm2.token_ids,
        checkpoint=checkpoint,
        converter="llama",
    )
    folder = trtllm.fetch_checkpoint(checkpoint).path(cache)
    if not folder.is_dir():
        assert smollm2.gguf is not None
        write_tokenizer(fetch(smollm2.gguf, cache), smollm2, folder)
        larger = enlarge(json.loads((folder / "tokenizer.json").read_bytes()), row.architecture.vocab_size)
        _write_json(folder / "tokenizer.json", larger)
        _write_json(folder / "config.json", {**model_config(row), "dtype": "bfloat16"})
    return row


def enlarge(tokenizer: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """tokenizer.json with words of their own for all ids up to `num_tokens`; no text becomes one of them."""
    vocab = tokenizer["model"]["vocab"]
    more = {f"Ġw{number}": number for number in range(len(vocab), num_tokens)}  # as byte-level BPE writes " w"
    return {**tokenizer, "model": {**tokenizer["model"], "vocab": {**vocab, **more}}}


def _blank_embedder(cache: Path) -> EmbedderRow:
    numbers = BertArchitecture(
        family="bert",
        num_layers=1,
        hidden_size=384,
        intermediate_size=16,
        num_attention_heads=12,
        vocab_size=len(_ALPHABET),
        max_position_embeddings=256,
        layer_norm_eps=1e-12,
    )

    def make(weights: PackagedFile, tokenizer: PackagedFile) -> EmbedderRow:
        return EmbedderRow(
            name="blank-embedder",
            licence="none",
            max_input_tokens=256,
            architecture=numbers,
            token_ids=EmbedderTokenIds(cls=2, sep=3, pad=0),
            weights=weights,
            tokenizer=tokenizer,
        )

    def packaged(name: str, content: bytes) -> PackagedFile:
        source = PackagedFile(
            package="blank-embedder",
            version="0",
            folder="blank",
            file=name,
            sha256=hashlib.sha256(content).hexdigest(),
        )
        path = cached_path(source, cache)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return source

    placeholder = packaged("model.safetensors", b"")
    shapes = weight_shapes(make(placeholder, placeholder))
    path = cached_path(placeholder, cache)
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, path)
    pieces = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {
            **pieces,
            "max_input_chars_per_word": 100,
            "vocab": {piece: number for number, piece in enumerate(_ALPHABET)},
        },
    }
    return make(
        packaged("model.safetensors", path.read_bytes()), packaged("tokenizer.json", json.dumps(tokenizer).encode())
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
