"""Every config.pbtxt of an artifact: nothing unfilled, no number left empty, no path of another machine.

`python -m build` cannot write such a file; hands and templates can. Triton and TensorRT-LLM tell of them by a
protobuf or JSON error, or take a default.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from orchestrator.doctor.findings import Finding
from orchestrator.manifest import MODEL_REPOSITORY, Manifest, Parameters

CHECK = "config"
TENSORRT_LLM = "tensorrtllm"
POLICIES = ("guaranteed_no_evict", "max_utilization")
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
    if row is not None:
        is_llmapi = row.parameters is not None and row.parameters.runtime == "llmapi"
        wanted = {"name": name, "backend": row.backend, "max_batch_size": 0 if is_llmapi else row.max_batch_size}
        for field, value in wanted.items():
            if (found := getattr(config, field)) != value:
                yield Finding(CHECK, f"{path}: {field} is {found!r}", f"{value!r}, the row's", fix)
    if row is not None and row.parameters is not None and row.parameters.engine == "tensorrt_llm":
        yield from _find_engine_faults(path, config, row.instance_count, fix)
        if config.backend == TENSORRT_LLM:
            yield from _find_parameter_faults(path, config, name, row.parameters, fix)


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


def _find_parameter_faults(path: Path, config: Any, name: str, row: Parameters, fix: str) -> Iterator[Finding]:
    """Of NVIDIA's C++ backend; a number that is none has been told already where it is empty."""
    given = {key: value.string_value for key, value in config.parameters.items()}
    ids, size = row.gpu_device_ids, row.world_size
    groups = ";".join(",".join(map(str, ids[start : start + size])) for start in range(0, len(ids), size))
    wanted = {"gpt_model_path": f"{MODEL_REPOSITORY}/{name}/1/engine", "gpu_device_ids": groups}
    for key, value in wanted.items():
        if given.get(key) != value:
            yield Finding(CHECK, f"{path}: parameters.{key} is {given.get(key)!r}", f"{value!r}, the row's", fix)
    for key in ("tokenizer_dir", "guided_decoding_backend", "xgrammar_tokenizer_info_path"):
        if key not in given:
            yield Finding(
                CHECK, f"{path}: parameters.{key} is missing", "there, even if empty: else no engine loads", fix
            )
    policy = given.get("batch_scheduler_policy")
    if policy not in POLICIES:
        yield Finding(CHECK, f"{path}: parameters.batch_scheduler_policy is {policy!r}", " or ".join(POLICIES), fix)
    for key in sorted(NUMERIC & given.keys()):
        text = given[key].strip()
        if text and text not in ("true", "false") and not _is_number(text):
            yield Finding(CHECK, f"{path}: parameters.{key} is {text!r}", "a number or a boolean", fix)
    fraction = given.get("kv_cache_free_gpu_mem_fraction", "")
    if _is_number(fraction) and not 0 < float(fraction) <= 1:
        what = f"{path}: parameters.kv_cache_free_gpu_mem_fraction is {fraction}"
        yield Finding(CHECK, what, "above 0, up to 1: the planned share of what is free", fix)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _find_engine_faults(path: Path, config: Any, instance_count: int, fix: str) -> Iterator[Finding]:
    if not config.model_transaction_policy.decoupled:
        yield Finding(CHECK, f"{path}: model_transaction_policy.decoupled is false", "true: without it no stream", fix)
    count = sum(group.count for group in config.instance_group)
    if count != instance_count:
        yield Finding(CHECK, f"{path}: instance_group.count is {count}", f"{instance_count}, the row's", fix)
    groups = config.parameters["gpu_device_ids"].string_value.split(";")
    if config.backend == TENSORRT_LLM and len(groups) != count:
        yield Finding(CHECK, f"{path}: gpu_device_ids has {len(groups)} groups", f"{count}, one an instance", fix)
