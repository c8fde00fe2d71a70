"""OpenVINO GenAI's continuous batching on the CPU: paged KV cache, prefix cache, chunked prefill, prompt lookup."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from pydantic import BaseModel, ConfigDict, Field, model_validator

from orchestrator.engines import Chunk, EngineRefusal, EngineRequest

# Tokens in one KV block of OpenVINO's CPU plugin (its paged attention uses 32; read from a compiled model).
KV_BLOCK_TOKENS = 32

COMPUTE_NICENESS = 5

# The length of the warm-up prompt: that of a short question.
WARM_UP_TOKENS = 64


class Settings(BaseModel):
    """The engine parameters of a target's row, under NVIDIA's names where NVIDIA has one.

    `max_tokens_in_paged_kv_cache` sizes the KV pool, `max_num_tokens` is the chunk budget (tokens computed in one
    step over all requests), `speculation` "prompt_lookup" drafts `num_draft_tokens` from n-grams of the prompt.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: str
    max_batch_size: int = Field(gt=0)
    max_tokens_in_paged_kv_cache: int = Field(gt=0)
    max_num_tokens: int = Field(gt=0)
    enable_kv_cache_reuse: bool
    enable_chunked_context: bool
    kv_cache_precision: str = Field(default="u8", pattern=r"^(u8|f16|bf16|f32)$")
    speculation: str = Field(default="none", pattern=r"^(none|prompt_lookup)$")
    num_draft_tokens: int = Field(default=4, gt=0)
    max_ngram_size: int = Field(default=3, gt=0)
    context_window: int = Field(gt=0)
    vocab_size: int = Field(gt=0)

    @model_validator(mode="after")
    def _check_speculation(self) -> Settings:
        # Tried on 2026.4 at temperature 0: with u8 the text differs from the one without speculation, with f32 not.
        if self.speculation == "prompt_lookup" and self.kv_cache_precision != "f32":
            raise ValueError(
                f"speculation: 'prompt_lookup' with kv_cache_precision {self.kv_cache_precision!r} changes the text; "
                "set kv_cache_precision to 'f32'"
            )
        return self


class OpenVINOStepper:
    """A `Stepper` over `ContinuousBatchingPipeline`."""

    def __init__(self, pipeline: genai.ContinuousBatchingPipeline, settings: Settings) -> None:
        self._pipeline = pipeline
        self._settings = settings
        self._ids = itertools.count()
        self._handles: dict[str, genai.GenerationHandle] = {}

    @classmethod
    def load(cls, model_dir: Path, parameters: Mapping[str, str]) -> OpenVINOStepper:
        """Load `model_dir`/openvino; raises `ValueError` for a parameter that is unknown or out of range."""
        settings = Settings.model_validate(dict(parameters))
        if settings.max_tokens_in_paged_kv_cache < settings.context_window:
            raise ValueError(
                f"max_tokens_in_paged_kv_cache: {settings.max_tokens_in_paged_kv_cache} tokens hold less than one "
                f"sequence of context_window = {settings.context_window}; raise it in the target's row"
            )
        # The engine keeps every core busy: it must not make each hop of its own tokens wait for a scheduler slice.
        os.setpriority(os.PRIO_PROCESS, 0, COMPUTE_NICENESS)
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = settings.max_tokens_in_paged_kv_cache // KV_BLOCK_TOKENS
        scheduler.max_num_seqs = settings.max_batch_size
        scheduler.max_num_batched_tokens = settings.max_num_tokens
        scheduler.enable_prefix_caching = settings.enable_kv_cache_reuse
        scheduler.dynamic_split_fuse = settings.enable_chunked_context
        folder = str(model_dir / "openvino")
        options: dict[str, Any] = {"KV_CACHE_PRECISION": settings.kv_cache_precision}
        if settings.speculation == "prompt_lookup":
            options["prompt_lookup"] = True
        pipeline = genai.ContinuousBatchingPipeline(folder, genai.Tokenizer(folder), scheduler, "CPU", **options)
        stepper = cls(pipeline, settings)
        stepper.warm_up()
        return stepper

    def warm_up(self) -> None:
        """Run a prompt and a few tokens, so that OpenVINO's kernels are compiled before the first caller waits."""
        prompt = list(range(min(WARM_UP_TOKENS, self._settings.vocab_size)))
        self.add(EngineRequest("warm-up", prompt, max_new_tokens=4))
        while self.has_requests():
            self.step()

    def add(self, request: EngineRequest) -> None:
        num_tokens = len(request.input_ids) + request.max_new_tokens
        if num_tokens > self._settings.context_window:
            raise EngineRefusal(
                f"input_ids, request_output_len: {len(request.input_ids)} + {request.max_new_tokens} tokens are more "
                f"than the context window of {self._settings.context_window}"
            )
        ids = np.asarray([request.input_ids], dtype=np.int64)  # [1, tokens]
        if ids.min() < 0 or ids.max() >= self._settings.vocab_size:
            raise EngineRefusal(f"input_ids: ids must be 0 to {self._settings.vocab_size - 1}")
        self._handles[request.request_id] = self._pipeline.add_request(
            next(self._ids), openvino.Tensor(ids), self._generation_config(request)
        )

    def stop(self, request_id: str) -> None:
        # A cancelled sequence is dropped when the next step schedules, before anything is computed for it.
        self._handles.pop(request_id).cancel()

    def step(self) -> dict[str, Chunk]:
        self._pipeline.step()
        chunks = {}
        for request_id, handle in list(self._handles.items()):
            token_ids: list[int] = []
            while handle.can_read():
                for output in handle.read().values():
                    token_ids += output.generated_ids
            status = handle.get_status()
            if status == genai.GenerationStatus.RUNNING:
                if token_ids:
                    chunks[request_id] = Chunk(token_ids)
                continue
            del self._handles[request_id]
            error = None
            if status == genai.GenerationStatus.IGNORED:
                error = "the KV cache has no room for this sequence; raise max_tokens_in_paged_kv_cache"
            chunks[request_id] = Chunk(token_ids, finished=True, error=error)
        return chunks

    def has_requests(self) -> bool:
        return bool(self._pipeline.has_non_finished_requests())

    def _generation_config(self, request: EngineRequest) -> genai.GenerationConfig:
        config = genai.GenerationConfig(
            max_new_tokens=request.max_new_tokens,
            min_new_tokens=request.min_tokens,
            ignore_eos=request.end_id is None,
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            do_sample=request.sample,
            apply_chat_template=False,
        )
        if request.end_id is not None:
            config.eos_token_id = request.end_id
            config.stop_token_ids = {request.end_id}
        if request.sample:
            config.temperature = request.temperature
            config.top_p = request.top_p
            if request.top_k:
                config.top_k = request.top_k
            # GenAI's own default is one fixed seed for everybody.
            config.rng_seed = secrets.randbits(32) if request.seed is None else request.seed
        if self._settings.speculation == "prompt_lookup":
            config.num_assistant_tokens = self._settings.num_draft_tokens
            config.max_ngram_size = self._settings.max_ngram_size
        return config
