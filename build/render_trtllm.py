"""What TensorRT-LLM's two Triton models are told: parameters of config.pbtxt, and model.yaml.

Paths are relative to the artifact, so it can be moved; Triton is started in it. Names and allowed values are NVIDIA's
(triton_backend/all_models of TensorRT-LLM 1.2); tests/unit/test_render_trtllm.py holds them against its lists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from build.engine_rows import DraftTarget, Eagle, Lookahead, Medusa, NGram, TensorRTLLMParameters
from build.plan import EnginePlan
from build.rows import TritonModel
from build.trtllm import DTYPES

# How soon a cancelled request is seen; NVIDIA's default of 100 ms is most of what we promise (150 ms).
CANCELLATION_CHECK_MS = 10


def backend_parameters(name: str, parameters: TensorRTLLMParameters, plan: EnginePlan) -> dict[str, str]:
    """The parameters of backend `tensorrtllm` for the Triton model `name`.

    The last three must be there for the backend to load, even empty. They would turn on guided decoding.
    """
    values: dict[str, str | int | float | bool] = {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": f"model_repository/{name}/1/engine",
        "gpu_device_ids": _device_ids(parameters),
        "max_beam_width": 1,
        "decoding_mode": _decoding_mode(parameters),
        "batch_scheduler_policy": parameters.batch_scheduler_policy,
        "max_tokens_in_paged_kv_cache": plan.max_tokens_in_paged_kv_cache,
        "kv_cache_free_gpu_mem_fraction": plan.kv_cache_free_gpu_mem_fraction,
        "enable_kv_cache_reuse": parameters.enable_kv_cache_reuse,
        "enable_chunked_context": parameters.enable_chunked_context,
        "exclude_input_in_output": parameters.exclude_input_in_output,
        "cancellation_check_period_ms": CANCELLATION_CHECK_MS,
        "tokenizer_dir": "",
        "guided_decoding_backend": "",
        "xgrammar_tokenizer_info_path": "",
    }
    if isinstance(parameters.speculation, Lookahead):
        values |= {
            "lookahead_window_size": parameters.speculation.window_size,
            "lookahead_ngram_size": parameters.speculation.ngram_size,
            "lookahead_verification_set_size": parameters.speculation.verification_set_size,
        }
    if parameters.max_lora_rank is not None:
        # The fraction is NVIDIA's default; `kv_cache_share` leaves as much.
        values |= {
            "lora_cache_max_adapter_size": parameters.max_lora_rank,
            "lora_cache_optimal_adapter_size": min(parameters.max_lora_rank, 8),
            "lora_cache_gpu_memory_fraction": 0.05,
        }
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in values.items()}


def llmapi_parameters(parameters: TensorRTLLMParameters) -> dict[str, str]:
    """The parameters in config.pbtxt of NVIDIA's LLM-API model; all else is in model.yaml."""
    return {"gpu_device_ids": _device_ids(parameters)}


def model_yaml(name: str, settings: TritonModel, parameters: TensorRTLLMParameters, plan: EnginePlan) -> str:
    """model.yaml of NVIDIA's LLM-API model: arguments of `LLM` at the top level, and `triton_config`.

    `decoupled` and batch size are also in config.pbtxt, equal, because a server started with
    --disable-auto-complete-config never asks the model for them.
    """
    values: dict[str, Any] = {
        "model": f"model_repository/{name}/1/checkpoint",
        "backend": "pytorch",
        "dtype": DTYPES[parameters.precision],
        "tensor_parallel_size": parameters.tp_size,
        "pipeline_parallel_size": parameters.pp_size,
        "max_batch_size": settings.max_batch_size,
        "max_input_len": parameters.max_input_len,
        "max_seq_len": parameters.max_seq_len,
        "max_num_tokens": parameters.max_num_tokens,
        "max_beam_width": 1,
        "enable_chunked_prefill": parameters.enable_chunked_context,
        "kv_cache_config": {
            "enable_block_reuse": parameters.enable_kv_cache_reuse,
            "max_tokens": plan.max_tokens_in_paged_kv_cache,
            "free_gpu_memory_fraction": plan.kv_cache_free_gpu_mem_fraction,
            "dtype": parameters.kv_cache_precision,
            "tokens_per_block": parameters.tokens_per_block,
        },
        "scheduler_config": {"capacity_scheduler_policy": parameters.batch_scheduler_policy.upper()},
        "triton_config": {
            "max_batch_size": 0,
            "decoupled": True,
            "cancellation_check_period_ms": CANCELLATION_CHECK_MS,
        },
    }
    if parameters.speculation is not None:
        values["speculative_config"] = _speculative_config(name, parameters)
    return _to_yaml(values)


def _speculative_config(name: str, parameters: TensorRTLLMParameters) -> dict[str, Any]:
    speculation = parameters.speculation
    assert isinstance(speculation, (DraftTarget, Eagle, NGram))  # `build.pairs` refused the others
    values: dict[str, Any] = {"max_draft_len": speculation.max_draft_len}
    if isinstance(speculation, NGram):
        return {"decoding_type": "NGram", "max_matching_ngram_size": speculation.max_matching_ngram_size} | values
    decoding_type = "Eagle" if isinstance(speculation, Eagle) else "Draft_Target"
    return {"decoding_type": decoding_type, "speculative_model_dir": f"model_repository/{name}/1/draft"} | values


def _device_ids(parameters: TensorRTLLMParameters) -> str:
    """Commas within an instance, semicolons between instances."""
    ids, size = parameters.gpu_device_ids, parameters.world_size
    return ";".join(",".join(map(str, ids[start : start + size])) for start in range(0, len(ids), size))


def _decoding_mode(parameters: TensorRTLLMParameters) -> str:
    return parameters.speculation.method if isinstance(parameters.speculation, (Lookahead, Medusa)) else "top_k_top_p"


def _to_yaml(values: Mapping[str, Any], indent: str = "") -> str:
    # JSON's strings, numbers and booleans are YAML's.
    return "".join(
        f"{indent}{key}:\n{_to_yaml(value, indent + '  ')}"
        if isinstance(value, dict)
        else f"{indent}{key}: {json.dumps(value)}\n"
        for key, value in values.items()
    )
