"""GPU targets varied in a few keys, and NVIDIA's lists to hold what is made of them against."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from build.compiler import build
from build.model_rows import AnyModelRow, ComplexityRow, EmbedderRow, ModelRow, OcrRow
from build.rows import HERE, TargetRow, list_targets, load_target
from orchestrator.config import read_toml

DATA = Path(__file__).parent / "data"
FLAGS: dict[str, Any] = json.loads((DATA / "trtllm_flags.json").read_text(encoding="utf-8"))
MODELS: dict[str, Any] = json.loads((DATA / "trtllm_models.json").read_text(encoding="utf-8"))
IMAGES: dict[str, Any] = json.loads((DATA / "trtllm_images.json").read_text(encoding="utf-8"))

GPU_TARGETS = [name for name in list_targets() if load_target(name).gpu is not None]
LANGUAGE_MODELS = [
    "llama-3.1-70b-instruct",
    "llama-3.1-8b-instruct",
    "llama-3.2-1b-instruct",
    "qwen2.5-7b-instruct",
    "smollm2-135m-instruct",
]

# Three of the speculative methods need weights that no row of ours has; any commit serves to look at the flags.
WEIGHTS = {"repo": "someone/draft", "revision": "0" * 40}
SPECULATION: dict[str, dict[str, Any] | None] = {
    "none": None,
    "lookahead": {"method": "lookahead", "window_size": 7, "ngram_size": 7, "verification_set_size": 7},
    "draft_target": {
        "method": "draft_target",
        "draft_model": "llama-3.2-1b-instruct",
        "max_draft_len": 5,
        "acceptance_rate": 0.8,
    },
    "medusa": {"method": "medusa", "heads": WEIGHTS, "num_heads": 4, "max_draft_len": 63},
    "eagle": {"method": "eagle", "draft": WEIGHTS, "max_draft_len": 5, "acceptance_rate": 0.8},
    "ngram": {"method": "ngram", "max_draft_len": 5, "max_matching_ngram_size": 3, "acceptance_rate": 0.5},
}


# Parameters of an engine with adapters, and of one by the LLM API.
ADAPTERS: dict[str, Any] = {
    "precision": "int8_sq",
    "kv_cache_precision": "auto",
    "adapters": [{"name": "legal", "checkpoint": WEIGHTS}, {"name": "medical", "checkpoint": WEIGHTS}],
    "max_lora_rank": 16,
}
LLMAPI: dict[str, Any] = {"runtime": "llmapi", "precision": "bf16", "kv_cache_precision": "auto"}


def with_onnx(target_name: str, *names: str) -> TargetRow:
    """The target with some of its plans as ONNX graphs for Triton's backend `onnxruntime`."""
    row = copy.deepcopy(_read(target_name))
    for name in names:
        model = row["models"][name]
        model["backend"] = "onnxruntime"
        for key in ("profile_sizes", "opt_batch_size"):
            del model["parameters"][key]
        model["parameters"]["runtime"] = "onnxruntime_gpu"
    return TargetRow.model_validate(row)


@contextmanager
def quiet(step: str) -> Iterator[None]:
    """A build's progress that says nothing."""
    yield


def render(target: TargetRow, models: dict[str, AnyModelRow], folder: Path) -> Path:
    """The artifact of `target` in `folder`, without engines."""
    build(target, models, folder / target.name, cache=folder, progress=quiet, render_only=True)
    return folder / target.name


@functools.cache
def _read(target_name: str) -> dict[str, Any]:
    return load_target(target_name).model_dump()


@functools.cache
def _read_model(name: str, kind: type[AnyModelRow]) -> AnyModelRow:
    return read_toml(HERE / "models" / f"{name}.toml", kind)


def _with_models(target: TargetRow) -> tuple[TargetRow, dict[str, AnyModelRow]]:
    """What `load_models` gives, and each file read once in all tests."""
    drafts = {"llama-3.2-1b-instruct"}
    rows = {name: _read_model(name, ModelRow) for name in {model for model, _ in target.engines.values()} | drafts}
    readers = {name: _read_model(name, OcrRow) for name, _ in target.readers.values()}
    classifiers = {name: _read_model(name, ComplexityRow) for name, _ in target.classifiers.values()}
    return target, rows | readers | classifiers | {target.embedder: _read_model(target.embedder, EmbedderRow)}


def vary(
    target_name: str, engine: str = "llm_large", settings: dict[str, Any] | None = None, **parameters: Any
) -> tuple[TargetRow, dict[str, AnyModelRow]]:
    """The target with some settings and parameters of one engine changed, read as a file would be, and its models."""
    row = copy.deepcopy(_read(target_name))
    model = row["models"][engine]
    model["parameters"] |= parameters
    if model["parameters"]["runtime"] == "llmapi":
        model |= {"backend": "python", "max_queue_delay_microseconds": None}
    model |= settings or {}
    return _with_models(TargetRow.model_validate(row))


def alone(
    target_name: str, settings: dict[str, Any] | None = None, **parameters: Any
) -> tuple[TargetRow, dict[str, AnyModelRow]]:
    """The same with `llm_large` as the only engine, all tiers on it."""
    row = copy.deepcopy(_read(target_name))
    del row["models"]["llm_small"]
    for tier in row["tiers"]:
        tier["model"] = "llm_large"
    model = row["models"]["llm_large"]
    model["parameters"] |= {"kv_cache_share": 0.9} | parameters
    if model["parameters"]["runtime"] == "llmapi":
        model |= {"backend": "python", "max_queue_delay_microseconds": None}
    model |= settings or {}
    return _with_models(TargetRow.model_validate(row))
