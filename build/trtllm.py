"""TensorRT-LLM's engines: the commands of its container that turn a checkpoint into one, in order.

    fetch    the checkpoint from the Hugging Face Hub, at one commit
    convert  quantize.py writes TensorRT-LLM's checkpoint by itself; 16-bit weights go through convert_checkpoint.py
    build    trtllm-build: paged KV cache, in-flight batching, one file for each GPU
    verify   the engine against the original (`build.verify_engine`)

Every flag and value is held against NVIDIA's own lists by tests/unit/test_trtllm_flags.py. The paths are those of the
image (tensorrtllm_backend's documentation); all flags are those of TensorRT-LLM 1.2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from build.engine_rows import AdapterRow, DraftTarget, Eagle, Lookahead, Medusa, TensorRTLLMParameters
from build.errors import BuildError
from build.gpu_rows import Container, Gpu
from build.lora import MODULES as LORA_MODULES
from build.model_rows import Checkpoint, ModelRow
from build.pairs import AWQ_BLOCK, SIXTEEN_BITS
from build.plan_commands import VERIFIED, hash_code, tool_versions
from build.products import InCache, Output, Product, of_ours
from build.rows import TritonModel

EXAMPLES = "/app/examples"
LLMAPI_MODEL = "/app/all_models/llmapi/tensorrt_llm/1"
# quantize.py's own defaults, written out so that the manifest has them.
CALIBRATION = ("--calib_dataset", "cnn_dailymail", "--calib_size", "512", "--calib_max_seq_length", "512")
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
# Names of the speculative modes as trtllm-build has them.
MODES = {Lookahead: "lookahead_decoding", DraftTarget: "draft_tokens_external", Medusa: "medusa"}


def fetch_checkpoint(checkpoint: Checkpoint) -> Product:
    """The repository's files without Meta's second copy of the weights (`original/`)."""
    return Product(
        name=f"checkpoint-{checkpoint.repo.replace('/', '--').lower()}",
        words=(
            *("hf", "download", checkpoint.repo, "--revision", checkpoint.revision),
            *("--exclude", "original/*", "--local-dir", Output()),
        ),
        versions={},
        files=("config.json", "*.safetensors", "tokenizer.json", "tokenizer_config.json"),
    )


def fetch_draft(checkpoint: Checkpoint) -> Product:
    """Medusa heads or an EAGLE layer: files of their own, without a tokenizer."""
    return Product(
        name=f"draft-{checkpoint.repo.replace('/', '--').lower()}",
        words=("hf", "download", checkpoint.repo, "--revision", checkpoint.revision, "--local-dir", Output()),
        versions={},
        files=("config.json",),
    )


def fetch_adapter(adapter: AdapterRow) -> Product:
    """A LoRA adapter as PEFT saves it."""
    checkpoint = adapter.checkpoint
    return Product(
        name=f"adapter-{checkpoint.repo.replace('/', '--').lower()}",
        words=("hf", "download", checkpoint.repo, "--revision", checkpoint.revision, "--local-dir", Output()),
        versions={},
        files=("adapter_config.json", "adapter_model.safetensors"),
    )


def convert(model: ModelRow, parameters: TensorRTLLMParameters, container: Container) -> Product:
    """TensorRT-LLM's checkpoint: quantised weights and KV scales, split over the GPUs."""
    assert model.checkpoint is not None  # `build.pairs` refused it
    source = fetch_checkpoint(model.checkpoint)
    split = ("--tp_size", str(parameters.tp_size), "--pp_size", str(parameters.pp_size))
    is_plain = parameters.precision in SIXTEEN_BITS and parameters.kv_cache_precision == "auto"
    words: tuple[str | Output | InCache | Product, ...]
    if is_plain and not isinstance(parameters.speculation, Medusa):
        script = f"{EXAMPLES}/models/core/{model.converter}/convert_checkpoint.py"
        words = (
            "python3",
            script,
            "--model_dir",
            source,
            "--output_dir",
            Output(),
            "--dtype",
            _dtype(parameters),
            *split,
        )
    else:
        words = (
            *("python3", f"{EXAMPLES}/quantization/quantize.py", "--model_dir", source, "--output_dir", Output()),
            *("--dtype", _dtype(parameters), "--qformat", _qformat(parameters), *split, *CALIBRATION, "--seed", "1234"),
        )
        if "awq" in parameters.precision:
            words += ("--awq_block_size", str(AWQ_BLOCK))
        if parameters.kv_cache_precision != "auto":
            words += ("--kv_cache_dtype", parameters.kv_cache_precision)
        if isinstance(parameters.speculation, Medusa):
            words += ("--medusa_model_dir", fetch_draft(parameters.speculation.heads))
            words += ("--num_medusa_heads", str(parameters.speculation.num_heads))
            words += ("--max_draft_len", str(parameters.speculation.max_draft_len))
    return Product(
        name=f"converted-{model.name}-{parameters.precision}",
        words=words,
        versions={"tensorrt_llm": container.tensorrt_llm},
        files=("config.json", *_ranks(parameters, "rank{}.safetensors")),
    )


def build_engine(
    model: ModelRow, settings: TritonModel, parameters: TensorRTLLMParameters, gpu: Gpu, container: Container
) -> Product:
    """The engine: config.json and one file for each GPU."""
    # KV reuse and chunked context both read the cache while they prefill.
    paged = parameters.enable_kv_cache_reuse or parameters.enable_chunked_context
    timing = InCache(f"timing/{gpu.name.replace(' ', '-')}-{container.tensorrt}.cache")
    words: tuple[str | Output | InCache | Product, ...] = (
        *("trtllm-build", "--checkpoint_dir", convert(model, parameters, container), "--output_dir", Output()),
        *("--max_batch_size", str(settings.max_batch_size), "--max_beam_width", "1"),
        *("--max_input_len", str(parameters.max_input_len), "--max_seq_len", str(parameters.max_seq_len)),
        *("--max_num_tokens", str(parameters.max_num_tokens)),
        *("--kv_cache_type", "paged", "--tokens_per_block", str(parameters.tokens_per_block)),
        *("--remove_input_padding", "enable", "--context_fmha", "enable", "--gpt_attention_plugin", "auto"),
        *("--use_paged_context_fmha", _switch(paged), "--use_fp8_context_fmha", _switch(parameters.precision == "fp8")),
        *("--gemm_plugin", parameters.gemm_plugin, "--multiple_profiles", _switch(parameters.multiple_profiles)),
        *("--logits_dtype", "float32", "--workers", str(parameters.world_size)),
        *("--input_timing_cache", timing, "--output_timing_cache", timing),
    )
    if parameters.speculation is not None:
        words += ("--speculative_decoding_mode", MODES[type(parameters.speculation)])
        words += ("--max_draft_len", str(parameters.max_draft_len))
    if parameters.max_lora_rank is not None:
        words += ("--lora_plugin", "float16", "--max_lora_rank", str(parameters.max_lora_rank))
        words += ("--lora_target_modules", *(name for name, _ in LORA_MODULES.values()))
    return Product(
        name=f"engine-{model.name}-{parameters.precision}",
        words=words,
        versions={
            "gpu": gpu.name,
            "sm": gpu.sm,
            "tensorrt_llm": container.tensorrt_llm,
            "tensorrt": container.tensorrt,
            "cuda": container.cuda,
        },
        files=("config.json", *_ranks(parameters, "rank{}.engine")),
    )


def verify_engine(
    model: ModelRow, settings: TritonModel, parameters: TensorRTLLMParameters, gpu: Gpu, container: Container
) -> Product:
    """`verified.json`: how far the engine's answers are from the original's. It fails when they are too far."""
    assert model.checkpoint is not None  # `build.pairs` refused it
    return Product(
        name=f"verified-{model.name}-{parameters.precision}",
        words=of_ours(
            "verify_engine",
            *("--engine", build_engine(model, settings, parameters, gpu, container)),
            *("--checkpoint", fetch_checkpoint(model.checkpoint), "--precision", parameters.precision),
            *("--end_id", str(model.token_ids.end), "--output_dir", Output()),
        ),
        versions={"code": hash_code(("verify_engine.py",))} | tool_versions("numpy", "torch", "transformers"),
        files=(VERIFIED,),
    )


def copy_llmapi_model(container: Container) -> Product:
    """NVIDIA's Python model for the PyTorch runtime, as its image has it."""
    return Product(
        name="llmapi-model",
        words=("cp", "-r", LLMAPI_MODEL, Output()),
        versions={"tensorrt_llm": container.tensorrt_llm},
        files=("model.py", "helpers.py"),
    )


def drafts(parameters: TensorRTLLMParameters, models: Mapping[str, ModelRow]) -> Product | None:
    """The second checkpoint that runtime "llmapi" loads to speculate, if it does."""
    if isinstance(parameters.speculation, Eagle):
        return fetch_draft(parameters.speculation.draft)
    if isinstance(parameters.speculation, DraftTarget):
        checkpoint = models[parameters.speculation.draft_model].checkpoint
        assert checkpoint is not None  # `build.pairs` refused it
        return fetch_checkpoint(checkpoint)
    return None


def check_engine(folder: Path, settings: TritonModel, parameters: TensorRTLLMParameters, container: Container) -> None:
    """Raise `BuildError` if the engine in `folder` is not what its row says: version, limits, number of GPUs.

    Limits are the engine's alone: what config.pbtxt says changes nothing about them, so the two must not differ.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
        version, built = config["version"], config["build_config"]
        found = {key: built[key] for key in ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BuildError(f"{folder}/config.json: not the configuration of an engine: {error!r}") from error
    expected = {
        "max_batch_size": settings.max_batch_size,
        "max_input_len": parameters.max_input_len,
        # trtllm-build makes room for the draft tokens (tensorrt_llm/builder.py).
        "max_seq_len": parameters.max_seq_len + parameters.max_draft_len,
        "max_num_tokens": parameters.max_num_tokens,
    }
    if version != container.tensorrt_llm:
        raise BuildError(
            f"{folder}/config.json: built with TensorRT-LLM {version}, the row says {container.tensorrt_llm}; an "
            "engine loads only in the version that built it"
        )
    for key, value in expected.items():
        if found[key] != value:
            raise BuildError(f"{folder}/config.json: build_config.{key} is {found[key]}, the row says {value}")
    ranks = len(list(folder.glob("rank*.engine")))
    if ranks != parameters.world_size:
        raise BuildError(f"{folder}: {ranks} files rank*.engine, the row says {parameters.world_size} GPUs an instance")


def _ranks(parameters: TensorRTLLMParameters, pattern: str) -> tuple[str, ...]:
    return tuple(pattern.format(rank) for rank in range(parameters.world_size))


def _switch(on: bool) -> str:
    return "enable" if on else "disable"


def _qformat(parameters: TensorRTLLMParameters) -> str:
    return "full_prec" if parameters.precision in SIXTEEN_BITS else parameters.precision


def _dtype(parameters: TensorRTLLMParameters) -> str:
    """INT8 and INT4 kernels were written for FP16 activations; FP8 follows the checkpoint (bfloat16)."""
    if parameters.precision == "fp8":
        return "auto"
    return DTYPES.get(parameters.precision, "float16")
