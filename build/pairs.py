"""What cannot go together on a GPU target, told before anything is fetched.

A rule is here when TensorRT-LLM itself would refuse, often only after an hour of quantising, or when it has no flag for
what the row wants. Each error names the target's file, the key, its value, and what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from build.engine_rows import (
    DraftTarget,
    Eagle,
    Lookahead,
    Medusa,
    NGram,
    OnnxParameters,
    PlanParameters,
    TensorRTLLMParameters,
    VLLMParameters,
)
from build.errors import BuildError
from build.gpu_rows import FIRST_FP8, Container, Gpu
from build.model_rows import AnyModelRow, EmbedderRow, ModelRow
from build.profiles import find_size_fault
from build.rows import TargetRow, TritonModel

# Ampere (support matrix of TensorRT-LLM 1.2).
FIRST_TRTLLM = (8, 0)
FP8_WEIGHTS = ("fp8", "w4a8_awq")
AWQ = ("int4_awq", "w4a8_awq")
AWQ_BLOCK = 128  # quantize.py --awq_block_size
SIXTEEN_BITS = ("bf16", "fp16")
# The backend's tree of drafts where no other is named (mc_sim_7b_63): its nodes, and how deep it is.
MEDUSA_NODES, MEDUSA_DEPTH = 63, 4
# The engine workflow ends with 1.3.0rc20 (release notes); its flags here are those of 1.2.
ENGINE_VERSIONS = "1.2."
# Its contract here is that of 1.2.1; earlier, cancelled requests piled up (TensorRT-LLM#8131).
FIRST_LLMAPI = (1, 2)


def check_pairs(target: TargetRow, models: Mapping[str, AnyModelRow]) -> None:
    """Raise `BuildError` for the first engine of `target` that cannot be built or run as its row says."""
    for name, (row, parameters) in target.engines.items():
        model = models[row]
        takes_checkpoints = parameters.engine in ("tensorrt_llm", "vllm")
        if not takes_checkpoints and isinstance(model, ModelRow) and model.gguf is None:
            raise BuildError(
                f"{target.name}.toml: models.{name}.model is {row!r}, whose row has no `gguf`, which engine "
                f"{parameters.engine!r} is made from"
            )
    for name, (settings, parameters) in target.trtllm_engines.items():
        assert target.gpu is not None and target.container is not None  # the row's own rule
        model = models[settings.model or ""]
        assert isinstance(model, ModelRow)
        for fault in (
            *_machine_faults(parameters, settings, target.gpu, target.container),
            *_model_faults(parameters, settings, model, models),
            *_limit_faults(parameters, settings, model),
            *(_engine_faults if parameters.runtime == "engine" else _llmapi_faults)(parameters, settings),
        ):
            raise BuildError(f"{target.name}.toml: models.{name}.{fault}")
    for name, (settings, vllm) in target.vllm_engines.items():
        model = models[settings.model or ""]
        assert isinstance(model, ModelRow)
        for fault in _vllm_faults(vllm, model):
            raise BuildError(f"{target.name}.toml: models.{name}.{fault}")
    for name, (settings, graph) in target.graphs.items():
        assert target.gpu is not None  # the row's own rule
        for fault in _graph_faults(graph, models[settings.model or ""], target.gpu):
            raise BuildError(f"{target.name}.toml: models.{name}.{fault}")


def _vllm_faults(parameters: VLLMParameters, model: ModelRow) -> Iterator[str]:
    numbers = model.architecture
    if parameters.max_seq_len > numbers.context_window:
        yield f"parameters.max_seq_len is {parameters.max_seq_len}; {model.name!r} takes up to {numbers.context_window}"
    if numbers.num_attention_heads % parameters.tp_size:
        yield (
            f"parameters.tp_size is {parameters.tp_size}; it must divide the {numbers.num_attention_heads} attention "
            f"heads of {model.name!r}"
        )


def _graph_faults(parameters: PlanParameters | OnnxParameters, model: AnyModelRow, gpu: Gpu) -> Iterator[str]:
    if isinstance(parameters, PlanParameters) and (fault := find_size_fault(parameters.engine, parameters, model)):
        yield fault
    if parameters.precision in ("int8", "fp8") and not isinstance(model, EmbedderRow):
        yield (
            f"parameters.precision is {parameters.precision!r}, which needs samples to find ranges with; there "
            "are some for the embedder alone; allowed here: 'fp32', 'fp16'"
        )
    if parameters.precision == "fp8" and gpu.architecture < FIRST_FP8:
        yield (
            f"parameters.precision is 'fp8'; {gpu.name} has SM {gpu.sm}, and FP8 needs 8.9 or later; allowed here: "
            "'fp32', 'fp16', 'int8'"
        )
    ids = parameters.gpu_device_ids
    if len(set(ids)) != len(ids) or max(ids) >= gpu.count:
        yield f"parameters.gpu_device_ids is {ids}; allowed: each of 0 to {gpu.count - 1} (gpu.count) at most once"


def _machine_faults(
    parameters: TensorRTLLMParameters, settings: TritonModel, gpu: Gpu, container: Container
) -> Iterator[str]:
    if gpu.architecture < FIRST_TRTLLM:
        yield (
            f"parameters.engine is 'tensorrt_llm'; {gpu.name} has SM {gpu.sm}, and TensorRT-LLM 1.2 needs 8.0 or later "
            "(BF16 came with it)"
        )
    if gpu.architecture < FIRST_FP8:
        if parameters.precision in FP8_WEIGHTS:
            yield (
                f"parameters.precision is {parameters.precision!r}; {gpu.name} has SM {gpu.sm}, and FP8 needs 8.9 or "
                "later; allowed here: 'bf16', 'fp16', 'int8_sq', 'int8_wo', 'int4_awq', 'int4_wo'"
            )
        if parameters.kv_cache_precision == "fp8":
            yield (
                f"parameters.kv_cache_precision is 'fp8'; {gpu.name} has SM {gpu.sm}, and FP8 needs 8.9 or later; "
                "allowed here: 'auto', 'int8'"
            )
    ids, wanted = parameters.gpu_device_ids, parameters.world_size * settings.instance_count
    if len(ids) != wanted:
        yield (
            f"parameters.gpu_device_ids is {ids}; {settings.instance_count} instances of tp_size "
            f"{parameters.tp_size} x pp_size {parameters.pp_size} take {wanted} GPUs"
        )
    if len(set(ids)) != len(ids) or max(ids) >= gpu.count:
        yield f"parameters.gpu_device_ids is {ids}; allowed: each of 0 to {gpu.count - 1} (gpu.count) at most once"
    if parameters.runtime == "llmapi" and _as_numbers(container.tensorrt_llm) < FIRST_LLMAPI:
        yield (
            f"parameters.runtime is 'llmapi', but container.tensorrt_llm is {container.tensorrt_llm}; earlier than 1.2 "
            "its cancelled requests pile up; take an image with 1.2 or later"
        )
    if parameters.runtime == "engine" and not container.tensorrt_llm.startswith(ENGINE_VERSIONS):
        yield (
            f"parameters.runtime is 'engine', but container.tensorrt_llm is {container.tensorrt_llm}; engines are "
            "built by 1.2 alone here; set runtime = 'llmapi', or an image with 1.2"
        )


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _model_faults(
    parameters: TensorRTLLMParameters, settings: TritonModel, model: ModelRow, models: Mapping[str, AnyModelRow]
) -> Iterator[str]:
    numbers, tp_size = model.architecture, parameters.tp_size
    if model.checkpoint is None:
        yield f"model is {model.name!r}, whose row has no `checkpoint`, which engine 'tensorrt_llm' is made from"
    for what, size in (("KV heads", numbers.num_kv_heads), ("attention heads", numbers.num_attention_heads)):
        if size % tp_size:
            allowed = ", ".join(str(each) for each in range(1, size + 1) if size % each == 0)
            yield f"parameters.tp_size is {tp_size}; it must divide the {size} {what} of {model.name}: {allowed}"
    if numbers.num_layers % parameters.pp_size:
        yield (
            f"parameters.pp_size is {parameters.pp_size}; it must divide the {numbers.num_layers} layers of "
            f"{model.name}"
        )
    if parameters.precision in AWQ:
        for what, size in (("hidden_size", numbers.hidden_size), ("intermediate_size", numbers.intermediate_size)):
            if size % (AWQ_BLOCK * tp_size):
                yield (
                    f"parameters.precision is {parameters.precision!r}; AWQ scales blocks of {AWQ_BLOCK}, and {what} "
                    f"{size} of {model.name} over tp_size {tp_size} is no multiple of that; take 'int8_sq' or 'fp8'"
                )
    if isinstance(parameters.speculation, DraftTarget):
        draft = models[parameters.speculation.draft_model]
        assert isinstance(draft, ModelRow)
        if draft.architecture.vocab_size != numbers.vocab_size:
            yield (
                f"parameters.speculation.draft_model is {draft.name!r}, with {draft.architecture.vocab_size} tokens; "
                f"it must share the {numbers.vocab_size} of {model.name}"
            )
        if draft.checkpoint is None:
            yield f"parameters.speculation.draft_model is {draft.name!r}, whose row has no `checkpoint`"


def _limit_faults(parameters: TensorRTLLMParameters, settings: TritonModel, model: ModelRow) -> Iterator[str]:
    window = model.architecture.context_window
    if settings.max_batch_size < 1:
        yield f"max_batch_size is {settings.max_batch_size}; an engine takes at least 1 sequence in a step"
    if parameters.max_seq_len > window:
        yield f"parameters.max_seq_len is {parameters.max_seq_len}; the context window of {model.name} is {window}"
    if parameters.max_input_len >= parameters.max_seq_len:
        yield (
            f"parameters.max_input_len is {parameters.max_input_len}; it must leave room for an answer below "
            f"max_seq_len, {parameters.max_seq_len}"
        )
    # The builder would raise it by itself, and Triton's limits would no longer be the engine's.
    least = settings.max_batch_size * (parameters.max_draft_len + 1)
    if parameters.max_num_tokens < least:
        yield (
            f"parameters.max_num_tokens is {parameters.max_num_tokens}; a step of max_batch_size "
            f"{settings.max_batch_size} sequences with {parameters.max_draft_len} draft tokens each has {least}"
        )
    if not parameters.enable_chunked_context and parameters.max_num_tokens < parameters.max_input_len:
        yield (
            f"parameters.max_num_tokens is {parameters.max_num_tokens}; without enable_chunked_context a whole prompt "
            f"goes through one step, so it must be at least max_input_len, {parameters.max_input_len}"
        )


def _adapter_faults(parameters: TensorRTLLMParameters) -> Iterator[str]:
    if bool(parameters.adapters) != (parameters.max_lora_rank is not None):
        yield "parameters.max_lora_rank goes with parameters.adapters: both or neither"
    names = [adapter.name for adapter in parameters.adapters]
    if len(set(names)) < len(names):
        yield f"parameters.adapters: {names}; each name once"
    # NVIDIA's template has lora_weights in FP16, so the plugin computes in it.
    if parameters.adapters and parameters.precision in ("bf16", "fp8"):
        yield (
            f"parameters.adapters with precision {parameters.precision!r}, whose activations are bfloat16; adapters "
            "are FP16 in NVIDIA's contract; allowed: 'fp16', 'int8_sq', 'int8_wo', 'int4_awq', 'int4_wo', 'w4a8_awq'"
        )


def _engine_faults(parameters: TensorRTLLMParameters, settings: TritonModel) -> Iterator[str]:
    yield from _adapter_faults(parameters)
    # Both from tensorrt_llm/builder.py and the attention plugin: "Paged Context FMHA doesn't work with int8 kv cache",
    # "FP8 Paged Context FMHA only works with fp8 quantization workflow". Reuse and chunks need paged context FMHA.
    needing = [key for key in ("enable_kv_cache_reuse", "enable_chunked_context") if getattr(parameters, key)]
    if needing and parameters.kv_cache_precision == "int8":
        yield (
            f"parameters.kv_cache_precision is 'int8' with {' and '.join(needing)}, which need paged context FMHA, and "
            "that has no INT8; take 'auto' (or 'fp8' with precision 'fp8'), or set both to false"
        )
    if needing and parameters.kv_cache_precision == "fp8" and parameters.precision != "fp8":
        yield (
            f"parameters.kv_cache_precision is 'fp8' with precision {parameters.precision!r} and "
            f"{' and '.join(needing)}; paged context FMHA takes an FP8 KV cache with FP8 weights alone; take 'auto', "
            "or set both to false"
        )
    if parameters.gemm_plugin == "fp8" and parameters.precision != "fp8":
        yield f"parameters.gemm_plugin is 'fp8' with precision {parameters.precision!r}; allowed: 'auto', 'disable'"
    if settings.max_queue_delay_microseconds is None:
        yield "max_queue_delay_microseconds is missing; NVIDIA's backend takes requests by Triton's dynamic batching"
    if isinstance(parameters.speculation, Eagle):
        yield (
            "parameters.speculation.method is 'eagle'; its checkpoint needs a converter whose flags are not in our "
            "copy of NVIDIA's contract; allowed with runtime 'engine': 'lookahead', 'draft_target', 'medusa'"
        )
    if isinstance(parameters.speculation, Lookahead) and parameters.max_draft_len < 1:
        yield (
            "parameters.speculation is a lookahead of no draft token; allowed: ngram_size above 1, and window_size or "
            "verification_set_size too"
        )
    if isinstance(parameters.speculation, Medusa):
        medusa = parameters.speculation
        if medusa.max_draft_len != MEDUSA_NODES or medusa.num_heads < MEDUSA_DEPTH:
            yield (
                f"parameters.speculation has num_heads {medusa.num_heads} and max_draft_len {medusa.max_draft_len}; "
                f"the backend's tree of drafts takes {MEDUSA_DEPTH} heads or more, and {MEDUSA_NODES} draft tokens"
            )
    if isinstance(parameters.speculation, NGram):
        yield (
            "parameters.speculation.method is 'ngram', which TensorRT-LLM has in its PyTorch runtime alone; allowed "
            "with runtime 'engine': 'lookahead', 'draft_target', 'medusa'"
        )


def _llmapi_faults(parameters: TensorRTLLMParameters, settings: TritonModel) -> Iterator[str]:
    if parameters.precision not in SIXTEEN_BITS:
        yield (
            f"parameters.precision is {parameters.precision!r}; runtime 'llmapi' loads the model's own checkpoint, and "
            "no release exports a quantised one for it (quantize.py --export_format); allowed: 'bf16', 'fp16'"
        )
    if parameters.kv_cache_precision == "int8":
        yield "parameters.kv_cache_precision is 'int8'; kv_cache_config.dtype of runtime 'llmapi' takes 'auto' or 'fp8'"
    if parameters.adapters or parameters.max_lora_rank is not None:
        yield "parameters.adapters: the contract of runtime 'llmapi' has no adapters in 1.2; allowed with 'engine'"
    if settings.instance_count != 1:
        yield (
            f"instance_count is {settings.instance_count}; several instances of runtime 'llmapi' need NVIDIA's "
            "launcher with --no-mpi; allowed: 1"
        )
    if settings.max_queue_delay_microseconds is not None:
        yield "max_queue_delay_microseconds is set; runtime 'llmapi' does not batch in Triton; leave it out"
    if isinstance(parameters.speculation, (Lookahead, Medusa)):
        yield (
            f"parameters.speculation.method is {parameters.speculation.method!r}, which TensorRT-LLM has for engines "
            "alone; allowed with runtime 'llmapi': 'draft_target', 'eagle', 'ngram'"
        )
