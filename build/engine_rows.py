"""What each engine can be told: the `parameters` tables of `targets/*.toml`. `build.rows` reads them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from build.model_rows import Checkpoint, Count, Name
from orchestrator.config import Row


class OpenVINOParameters(Row):
    """Engine `openvino`: OpenVINO GenAI's continuous batching. Where TensorRT-LLM has a name, it is used.

    The KV pool is `max_tokens_in_paged_kv_cache` tokens, `max_num_tokens` is the most tokens in one step over
    all requests; `num_draft_tokens` and `max_ngram_size` matter with `speculation` "prompt_lookup". While eight or more
    requests run, a chunk is sent when it holds `stream_interval` tokens.
    """

    engine: Literal["openvino"]
    max_tokens_in_paged_kv_cache: Count
    kv_cache_precision: Literal["u8", "f16", "bf16", "f32"]
    enable_kv_cache_reuse: bool
    enable_chunked_context: bool
    max_num_tokens: Count
    exclude_input_in_output: bool
    stream_interval: Count
    speculation: Literal["none", "prompt_lookup"]
    num_draft_tokens: Count
    max_ngram_size: Count


class ScriptedParameters(Row):
    """Engine `scripted`: no model; it answers as the prompt tells it, at a pace set here (ms)."""

    engine: Literal["scripted"]
    exclude_input_in_output: bool
    first_token_ms: Annotated[float, Field(ge=0)]
    itl_ms: Annotated[float, Field(ge=0)]


Acceptance = Annotated[float, Field(gt=0, lt=1)]


class Lookahead(Row):
    """Draft tokens out of n-grams that the model itself guesses: no second model, no weights."""

    method: Literal["lookahead"]
    window_size: Count
    ngram_size: Count
    verification_set_size: Count

    @property
    def max_draft_len(self) -> int:
        """Tokens of one step's window and verification branches (TensorRT-LLM, examples/lookahead/README.md)."""
        width = self.window_size - 1 + self.verification_set_size
        return max(self.ngram_size - 2, 0) + width * (self.ngram_size - 1)


class DraftTarget(Row):
    """A small model of the same vocabulary, `draft_model`, drafts and the target verifies.

    `acceptance_rate` is what the plan reckons with: an assumption until it is measured.
    """

    method: Literal["draft_target"]
    draft_model: Name
    max_draft_len: Count
    acceptance_rate: Acceptance


class Medusa(Row):
    """Heads trained on the target's last layer draft a tree; `heads` is where they are."""

    method: Literal["medusa"]
    heads: Checkpoint
    num_heads: Count
    max_draft_len: Count


class Eagle(Row):
    """A one-layer draft model on the target's hidden states; `draft` is where it is."""

    method: Literal["eagle"]
    draft: Checkpoint
    max_draft_len: Count
    acceptance_rate: Acceptance


class NGram(Row):
    """Draft tokens looked up in the prompt and the answer so far."""

    method: Literal["ngram"]
    max_draft_len: Count
    max_matching_ngram_size: Count
    acceptance_rate: Acceptance


Speculation = Lookahead | DraftTarget | Medusa | Eagle | NGram


class AdapterRow(Row):
    """A LoRA adapter as PEFT saves it; callers choose it by `model:name`."""

    name: Name
    checkpoint: Checkpoint


class TensorRTLLMParameters(Row):
    """Engine `tensorrt_llm`: TensorRT-LLM, as a compiled engine behind NVIDIA's C++ backend (`runtime` "engine") or as
    its PyTorch runtime behind NVIDIA's Python model ("llmapi"). What cannot go together is in `build.pairs`.

    `precision` is that of the layers' weights; embeddings, head and norms stay in 16 bits. `kv_cache_precision` "auto"
    is the 16 bits of the activations. `gpu_device_ids` are those of all instances, one after another, each `tp_size` x
    `pp_size` of them. `max_input_len` and `max_seq_len` (prompt and answer) count the tokens of one request,
    `max_num_tokens` those of one step over all requests. `kv_cache_share` is the engine's part of the memory that
    weights and reserves leave free on its GPUs: all engines on a GPU share it. `adapters` may be put on the engine,
    each of a rank up to `max_lora_rank`.
    """

    engine: Literal["tensorrt_llm"]
    runtime: Literal["engine", "llmapi"]
    precision: Literal["bf16", "fp16", "fp8", "int8_sq", "int8_wo", "int4_awq", "int4_wo", "w4a8_awq"]
    kv_cache_precision: Literal["auto", "int8", "fp8"]
    tp_size: Count
    pp_size: Count
    gpu_device_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    max_input_len: Count
    max_seq_len: Count
    max_num_tokens: Count
    tokens_per_block: Literal[32, 64, 128]
    kv_cache_share: Annotated[float, Field(gt=0, lt=1)]
    enable_kv_cache_reuse: bool
    enable_chunked_context: bool
    batch_scheduler_policy: Literal["guaranteed_no_evict", "max_utilization"]
    exclude_input_in_output: Literal[True]
    gemm_plugin: Literal["auto", "fp8", "disable"]
    multiple_profiles: bool
    speculation: Annotated[Speculation, Field(discriminator="method")] | None = None
    adapters: Annotated[list[AdapterRow], Field(default_factory=list)]
    max_lora_rank: Annotated[int, Field(gt=0, le=64)] | None = None  # the backend's default of its largest is 64

    @property
    def world_size(self) -> int:
        """GPUs of one instance."""
        return self.tp_size * self.pp_size

    @property
    def max_draft_len(self) -> int:
        """The most draft tokens of one request in one step; 0 without speculation."""
        return 0 if self.speculation is None else self.speculation.max_draft_len


class VLLMParameters(Row):
    """Engine `vllm`: vLLM's AsyncLLM, in a process of its own, on `tp_size` GPUs.

    `precision` is that of the layers' weights: "fp8" makes it of the checkpoint's 16 bits while loading (a checkpoint
    that is FP8 already says so itself; leave "bf16"). `gpu_memory_share` is how much of each GPU's memory the engine
    takes in all. `max_seq_len` counts the tokens of one sequence, `max_num_tokens` those of one step. `load_format`
    "dummy" is for measuring speed: the weights are random. `cuda_graph_sizes` are the batches that CUDA graphs are
    made for, none meaning vLLM's own choice. `max_responses_per_s` is what gateway and orchestrator can pass on: with
    so many streams that a token each would be more, tokens travel in groups. `num_draft_tokens` and `max_ngram_size`
    matter with `speculation` "ngram".
    """

    engine: Literal["vllm"]
    precision: Literal["bf16", "fp8"]
    kv_cache_precision: Literal["auto", "fp8"]
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    tp_size: Count
    gpu_device_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    gpu_memory_share: Annotated[float, Field(gt=0, lt=1)]
    max_seq_len: Count
    max_num_tokens: Count
    enable_kv_cache_reuse: bool
    enable_chunked_context: bool
    cuda_graph_sizes: Annotated[list[Count], Field(default_factory=list)]
    speculation: Literal["none", "ngram"]
    num_draft_tokens: Count
    max_ngram_size: Count
    max_responses_per_s: Count
    exclude_input_in_output: Literal[True]

    @model_validator(mode="after")
    def _fits_together(self) -> VLLMParameters:
        ids = self.gpu_device_ids
        if len(ids) != self.tp_size or len(set(ids)) != len(ids):
            raise ValueError(f"gpu_device_ids is {ids}; allowed: as many different ones as tp_size, {self.tp_size}")
        if not self.enable_chunked_context and self.max_num_tokens < self.max_seq_len:
            raise ValueError(
                f"max_num_tokens is {self.max_num_tokens}; without enable_chunked_context a prompt is computed in one "
                f"step, so allowed are max_seq_len, {self.max_seq_len}, and more"
            )
        return self


class WordPieceParameters(Row):
    """Engine `wordpiece`: the tokenizer of a sentence embedder."""

    engine: Literal["wordpiece"]


class EncoderParameters(Row):
    """Engine `encoder`: a sentence embedder's graph in ONNX Runtime; `num_threads` is how many compute one batch.

    `precision` "int8_blockwise" is that of its matrices and of what they are multiplied with (`build.blockwise`).
    """

    engine: Literal["encoder"]
    runtime: Literal["onnxruntime"]
    num_threads: Count
    precision: Literal["fp32", "int8_blockwise"]


class ComplexityParameters(Row):
    """Engine `complexity`: the classifier's graph in ONNX Runtime; `num_threads` is how many compute one batch.

    With `precision` "int8" its matrices are, one scale a column, and what they are multiplied with is quantised as it
    comes. On a CPU a short text takes as long as its weights take to be read.
    """

    engine: Literal["complexity"]
    runtime: Literal["onnxruntime"]
    num_threads: Count
    precision: Literal["fp32", "int8"]


class OcrNetworkParameters(Row):
    """Engines `ocr_detector` and `ocr_recognizer`: a network of an OCR row, in ONNX Runtime.

    `num_threads` compute one batch. Of requests that Triton batched, those of equal size are computed together, as many
    as have `max_batch_pixels`: on a CPU larger batches gain nothing, and their activations leave its caches.
    """

    engine: Literal["ocr_detector", "ocr_recognizer"]
    runtime: Literal["onnxruntime"]
    num_threads: Count
    max_batch_pixels: Count


class GraphParameters(Row):
    """Of the engines that have an ONNX graph, what those that run it on GPUs have in common.

    `precision` is that of the graph (`build.precision`). Triton runs the row's `instance_count` on each of
    `gpu_device_ids`. `memory_mib` is what an instance may take on its GPU, weights included: the KV caches beside it
    are planned with it.
    """

    engine: str
    gpu_device_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    memory_mib: Count


class PlanParameters(GraphParameters):
    """Runtime "tensorrt": the graph compiled, behind NVIDIA's backend `tensorrt`.

    `profile_sizes` are the largest sizes of the optimisation profiles, from small to large (`build.profiles` says of
    what); kernels are chosen for `opt_batch_size`. The builder is held to `memory_mib`.
    """

    runtime: Literal["tensorrt"]
    precision: Literal["fp32", "fp16", "int8", "fp8"]
    profile_sizes: Annotated[list[Count], Field(min_length=1)]
    opt_batch_size: Count


class OnnxParameters(GraphParameters):
    """Runtime "onnxruntime_gpu": the graph itself, behind Triton's backend `onnxruntime`, where no plan can be had."""

    runtime: Literal["onnxruntime_gpu"]
    precision: Literal["fp32", "fp16"]


class EncoderPlan(PlanParameters):
    """The embedder's graph as a plan."""

    engine: Literal["encoder"]


class EncoderOnnx(OnnxParameters):
    """The embedder's graph by ONNX Runtime on GPUs."""

    engine: Literal["encoder"]


class ComplexityPlan(PlanParameters):
    """The classifier's graph as a plan."""

    engine: Literal["complexity"]


class ComplexityOnnx(OnnxParameters):
    """The classifier's graph by ONNX Runtime on GPUs."""

    engine: Literal["complexity"]


class OcrNetworkPlan(PlanParameters):
    """A network of an OCR row as a plan."""

    engine: Literal["ocr_detector", "ocr_recognizer"]


class OcrNetworkOnnx(OnnxParameters):
    """A network of an OCR row by ONNX Runtime on GPUs."""

    engine: Literal["ocr_detector", "ocr_recognizer"]


class OcrParameters(Row):
    """Engine `ocr`: reads an image by the two networks; it has their alphabet."""

    engine: Literal["ocr"]


class SpeechParameters(Row):
    """Engines `vad`, `stt`, `turn` and `tts`: a speech model on CPU, whose one inference `num_threads` compute."""

    engine: Literal["vad", "stt", "turn", "tts"]
    num_threads: Count


AnyOcrParameters = OcrNetworkParameters | OcrNetworkPlan | OcrNetworkOnnx | OcrParameters
EmbedderParameters = WordPieceParameters | EncoderParameters | EncoderPlan | EncoderOnnx
ClassifierParameters = ComplexityParameters | ComplexityPlan | ComplexityOnnx
EngineParameters = OpenVINOParameters | ScriptedParameters | TensorRTLLMParameters | VLLMParameters
AnyParameters = EngineParameters | EmbedderParameters | ClassifierParameters | AnyOcrParameters | SpeechParameters
# As a row is read: by `engine`, and then, where there are several, by `runtime`.
ReadParameters = Annotated[
    EngineParameters
    | WordPieceParameters
    | Annotated[EncoderParameters | EncoderPlan | EncoderOnnx, Field(discriminator="runtime")]
    | Annotated[ComplexityParameters | ComplexityPlan | ComplexityOnnx, Field(discriminator="runtime")]
    | Annotated[OcrNetworkParameters | OcrNetworkPlan | OcrNetworkOnnx, Field(discriminator="runtime")]
    | OcrParameters
    | SpeechParameters,
    Field(discriminator="engine"),
]
