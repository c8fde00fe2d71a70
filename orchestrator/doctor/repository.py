"""Every config.pbtxt of an artifact: nothing unfilled, no number left empty, no path of another machine.

`python -m build` cannot write such a file; hands and templates can. Triton and TensorRT-LLM tell of them by a
protobuf or JSON error, or take a default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from orchestrator.doctor.findings import Finding
from orchestrator.manifest import MODEL_REPOSITORY, Manifest

CHECK = "config"
TENSORRT_LLM = "tensorrtllm"
# Parameters of backend `tensorrtllm` that hold a number or a boolean; empty, most of them silently are the default, and
# a few end in an error that does not name them.
NUMERIC = frozenset(
    (
        *("max_beam_width", "max_tokens_in_paged_kv_cache", "max_attention_window_size", "sink_token_length"),
        *("kv_cache_free_gpu_mem_fraction", "cross_kv_cache_fraction", "kv_cache_host_memory_bytes"),
        *("kv_cache_onboard_blocks", "exclude_input_in_output", "cancellation_check_period_ms"),
        *("stats_check_period_ms", "iter_stats_max_iterations", "request_stats_max_iterations"),
        *("enable_kv_cache_reuse", "normalize_log_probs", "enable_chunked_context", "num_nodes"),
        *("lora_cache_optimal_adapter_size", "lora_cache_max_adapter_size", "lora_cache_gpu_memory_fraction"),
        *("lora_cache_host_memory_bytes", "lookahead_window_size", "lookahead_ngram_size"),
        *("lookahead_verification_set_size", "gpu_weights_percent", "enable_context_fmha_fp32_acc"),
        *("multi_block_mode", "cuda_graph_mode", "cuda_graph_cache_size", "speculative_decoding_fast_logits"),
        "recv_poll_period_ms",
    )
)


def read_config(root: Path, model: str) -> Any:
    """The `ModelConfig` of a model; raises `OSError` or `text_format.ParseError`."""
    text = _path(root, model).read_text(encoding="utf-8")
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def _path(root: Path, model: str) -> Path:
    return root / MODEL_REPOSITORY / model / "config.pbtxt"


def check_repository(root: Path, manifest: Manifest) -> Iterator[Finding]:
    """One finding for each fault, or one for all models."""
    names = sorted(path.name for path in (root / MODEL_REPOSITORY).glob("*") if path.is_dir())
    faults = [fault for name in names for fault in _find_faults(root, name, manifest)]
    yield from faults or [Finding(CHECK, f"{len(names)} models, all filled in: {', '.join(names)}")]


def _find_faults(root: Path, name: str, manifest: Manifest) -> Iterator[Finding]:
    path, fix = _path(root, name), manifest.rebuild
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        yield Finding(CHECK, f"{path}: cannot be read: {error}", "the model's configuration", fix)
        return
    unfilled = list(_find_unfilled(path, text, fix))
    if unfilled:
        yield from unfilled
        return
    try:
        config = text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        yield Finding(CHECK, f"{path}: not a model configuration: {error}", "what the build wrote", fix)
        return
    for key, value in config.parameters.items():
        given = value.string_value
        if given.startswith("/") or re.match(r"[A-Za-z]:\\", given):
            yield Finding(
                CHECK, f"{path}: parameters.{key} is {given!r}, a path of one machine", "a path in the artifact", fix
            )
        elif config.backend == TENSORRT_LLM and key in NUMERIC and not given.strip():
            yield Finding(CHECK, f"{path}: parameters.{key} is empty", "a number or a boolean", fix)
    row = manifest.row.models.get(name)
    if row is not None and row.parameters is not None and row.parameters.engine == "tensorrt_llm":
        yield from _find_engine_faults(path, config, row.instance_count, fix)


def _find_unfilled(path: Path, text: str, fix: str) -> Iterator[Finding]:
    key = ""
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.search(r'\bkey:\s*"([^"]*)"', line):
            key = found[1]
        if line.lstrip().startswith("#") or (variable := re.search(r"\$\{[^}]*\}?", line)) is None:
            continue
        field = re.match(r"\s*([a-z_]+)\s*:", line)
        what = key if field is None or field[1] == "string_value" else field[1]
        yield Finding(CHECK, f"{path}:{number}: {what}: {variable[0]} was never filled in", "a value", fix)


def _find_engine_faults(path: Path, config: Any, instance_count: int, fix: str) -> Iterator[Finding]:
    if not config.model_transaction_policy.decoupled:
        yield Finding(CHECK, f"{path}: model_transaction_policy.decoupled is false", "true: without it no stream", fix)
    count = sum(group.count for group in config.instance_group)
    if count != instance_count:
        yield Finding(CHECK, f"{path}: instance_group.count is {count}", f"{instance_count}, the row's", fix)
    groups = config.parameters["gpu_device_ids"].string_value.split(";")
    if config.backend == TENSORRT_LLM and len(groups) != count:
        yield Finding(CHECK, f"{path}: gpu_device_ids has {len(groups)} groups", f"{count}, one an instance", fix)
