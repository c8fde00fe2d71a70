"""OpenVINO GenAI's continuous batching on the CPU: paged KV cache, prefix cache, chunked prefill, prompt lookup.

A guided request waits beside the others' steps until its guide has been tried in another process (`guide_checker`) and
then compiled in this one (`guides`), by a thread of the lowest priority. A guide that is known costs neither.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from pydantic import BaseModel, ConfigDict, Field, model_validator

from orchestrator import contracts
from orchestrator.engines import TRY_AGAIN, Chunk, EngineRefusal, EngineRequest
from orchestrator.engines.guide_checker import MAX_VERDICTS, Guide, GuideChecker
from orchestrator.engines.guides import COMPILE_NICENESS, GuideCompiler, to_structured_output
from orchestrator.engines.words import StopWords, check_ids

log = logging.getLogger("orchestrator.engine")

# Tokens in one KV block of OpenVINO's CPU plugin (its paged attention uses 32; read from a compiled model).
KV_BLOCK_TOKENS = 32

COMPUTE_NICENESS = 5

# Guides not known yet that may wait to be tried. Each may take `guide_checker.COMPILE_TIMEOUT_S`: a longer queue would
# keep the last one in doubt for longer than a caller waits.
MAX_NEW_GUIDES = 4

# GenAI forgets no guide that it has compiled (70 KB for a schema of eight properties, 3 MB for one of 16 KiB). Beyond
# this much, as the checker measured it (here it was up to three times that), the pipeline is loaded anew.
MAX_ALL_GUIDES_BYTES = 256 << 20

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
        # Tried on 2026.4 at temperature 0: with u8 the text differs from the one without speculation, with f32 as it is
        # set below not.
        if self.speculation == "prompt_lookup" and self.kv_cache_precision != "f32":
            raise ValueError(
                f"speculation: 'prompt_lookup' with kv_cache_precision {self.kv_cache_precision!r} changes the text; "
                "set kv_cache_precision to 'f32'"
            )
        return self


@dataclass(slots=True)
class Sequence:
    """A request in the pipeline; `awaits_guide` until the first token of a guided one."""

    handle: genai.GenerationHandle
    stop_words: StopWords
    log_probs: bool
    awaits_guide: bool


class OpenVINOStepper:
    """A `Stepper` over `ContinuousBatchingPipeline`."""

    def __init__(
        self,
        create: Callable[[], tuple[genai.ContinuousBatchingPipeline, GuideCompiler]],
        settings: Settings,
        checker: GuideChecker,
    ) -> None:
        self._create = create
        self._pipeline, self._compiler = create()
        self._settings = settings
        self._ids = itertools.count()
        self._sequences: dict[str, Sequence] = {}
        self._checker = checker
        self._waiting: dict[str, EngineRequest] = {}  # guided requests, in their order; while it drains, all new ones
        self._is_draining = False
        self._compiled: dict[Guide, None] = {}  # oldest first; GenAI remembers more, which then costs a hop
        self._compiling: tuple[Guide, Future[list[int]]] | None = None
        self._guide_bytes = 0
        self._thread = ThreadPoolExecutor(1, "guides", initializer=_lower_priority)

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
        if settings.kv_cache_precision == "f32":  # else a processor with bfloat16 computes in it, and takes no other
            options["INFERENCE_PRECISION_HINT"] = "f32"
            # Else activations are quantised in a way that depends on the number of tokens in a step: of five greedy
            # answers with drafts all differed from those without, after 12 to 57 tokens.
            options["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
        if settings.speculation == "prompt_lookup":
            options["prompt_lookup"] = True
        command = [sys.executable, "-m", "orchestrator.engines.guides", folder, str(settings.vocab_size)]
        checker = GuideChecker(command)

        def create() -> tuple[genai.ContinuousBatchingPipeline, GuideCompiler]:
            tokenizer = genai.Tokenizer(folder)
            pipeline = genai.ContinuousBatchingPipeline(folder, tokenizer, scheduler, "CPU", **options)
            return pipeline, GuideCompiler(tokenizer, settings.vocab_size)

        stepper = cls(create, settings, checker)
        stepper.warm_up()
        return stepper

    def warm_up(self) -> None:
        """Run a prompt and a few tokens, so that OpenVINO's kernels are compiled before the first caller waits.

        And compile the simplest guide: GenAI sorts the vocabulary when it meets its first.
        """
        self._compiler.generate(Guide("json", None))
        self._compiled[Guide("json", None)] = None
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
        check_ids(contracts.INPUT_IDS.name, request.input_ids, self._settings.vocab_size)
        for word in request.stop_words:
            check_ids(contracts.STOP_WORDS_LIST.name, word, self._settings.vocab_size)
        if request.bad_words:
            raise EngineRefusal(f"{contracts.BAD_WORDS_LIST.name}: OpenVINO GenAI cannot avoid words; leave it out")
        if request.guide_type is None:
            if self._is_draining:
                self._waiting[request.request_id] = request
            else:
                self._start(request, None)
            return
        # Without an end, GenAI goes on in free text where the guide is through; and it may not end before min_tokens.
        name = contracts.GUIDED_DECODING_GUIDE_TYPE.name
        if request.end_id is None:
            raise EngineRefusal(f"{name}: needs end_id, which ends the text where the guide does")
        if request.min_tokens > 0:
            raise EngineRefusal(f"{name}: the guide says how long the text is; leave {contracts.MIN_TOKENS.name} out")
        guide = Guide(request.guide_type, request.guide)
        to_structured_output(guide)  # refused at once, without the other process, if it is not followed or too large
        waiting = {Guide(each.guide_type, each.guide) for each in self._waiting.values() if each.guide_type}
        num_new = sum(not self._checker.knows(each) for each in waiting)
        if num_new >= MAX_NEW_GUIDES and guide not in waiting and not self._checker.knows(guide):
            raise EngineRefusal(
                f"{contracts.GUIDED_DECODING_GUIDE.name}: {num_new} new guides are being tried, which is the limit; "
                f"{TRY_AGAIN}"
            )
        self._waiting[request.request_id] = request

    def stop(self, request_id: str) -> None:
        if self._waiting.pop(request_id, None) is None:
            # A cancelled sequence is dropped when the next step schedules, before anything is computed for it.
            self._sequences.pop(request_id).handle.cancel()

    def step(self) -> dict[str, Chunk]:
        chunks = self._start_guided()
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        elif not chunks:
            time.sleep(0.001)  # all wait for their guides
        for request_id, sequence in list(self._sequences.items()):
            chunk = self._read(sequence)
            if chunk.finished:
                del self._sequences[request_id]
            if chunk.finished or chunk.token_ids:
                chunks[request_id] = chunk
        return chunks

    def has_requests(self) -> bool:
        return bool(self._waiting) or bool(self._pipeline.has_non_finished_requests())

    def kv_cache_usage(self) -> float:
        if not self._pipeline.has_non_finished_requests():
            self._pipeline.step()  # GenAI counts as a step begins; an empty one takes 20 us
        return round(float(self._pipeline.get_metrics().cache_usage) / 100, 4)

    def _read(self, sequence: Sequence) -> Chunk:
        token_ids: list[int] = []
        log_probs: list[float] = []
        while sequence.handle.can_read():
            for output in sequence.handle.read().values():
                token_ids += output.generated_ids
                log_probs += output.generated_log_probs
        sequence.awaits_guide = sequence.awaits_guide and not token_ids
        status = sequence.handle.get_status()
        cut = sequence.stop_words.cut(token_ids)
        if cut is not None and status == genai.GenerationStatus.RUNNING:
            sequence.handle.cancel()
        error = None
        if status == genai.GenerationStatus.IGNORED:
            error = "the KV cache has no room for this sequence; raise max_tokens_in_paged_kv_cache"
        return Chunk(
            token_ids[:cut],
            finished=cut is not None or status != genai.GenerationStatus.RUNNING,
            error=error,
            log_probs=log_probs[:cut] if sequence.log_probs else None,
        )

    def _start(self, request: EngineRequest, guide: Guide | None) -> None:
        ids = openvino.Tensor(np.asarray([request.input_ids], dtype=np.int64))  # [1, tokens]
        config = self._generation_config(request)
        if guide is not None:
            config.structured_output_config = to_structured_output(guide)
        self._sequences[request.request_id] = Sequence(
            self._pipeline.add_request(next(self._ids), ids, config),
            StopWords(request.stop_words),
            request.log_probs,
            awaits_guide=guide is not None,
        )

    def _start_guided(self) -> dict[str, Chunk]:
        """Start those waiting requests whose guide is compiled; returns the refused ones' ends.

        GenAI holds a lock while it compiles a guide and takes it for the first token of every guided request, inside
        the step. So no guide is compiled while such a token is awaited, and nobody is started while one is.
        """
        if self._compiling is not None and self._compiling[1].done():
            guide, future = self._compiling
            self._compiling = None
            error = future.exception()
            if error is None:
                self._compiled[guide] = None
            else:  # though the other process could
                self._checker.decide(guide, f"{contracts.GUIDED_DECODING_GUIDE.name}: cannot be compiled: {error}")
            if len(self._compiled) > MAX_VERDICTS:
                del self._compiled[next(iter(self._compiled))]
            self._guide_bytes += self._checker.num_bytes(guide)
            self._is_draining = self._guide_bytes > MAX_ALL_GUIDES_BYTES
        if self._is_draining:
            if not self._pipeline.has_non_finished_requests():
                self._forget_guides()
            return {}
        chunks: dict[str, Chunk] = {}
        for request_id, request in list(self._waiting.items()):
            if request.guide_type is None:  # came while it drained
                del self._waiting[request_id]
                self._start(request, None)
                continue
            guide = Guide(request.guide_type, request.guide)
            try:
                if not self._checker.check(guide) or self._compiling is not None:
                    continue
            except EngineRefusal as refusal:
                del self._waiting[request_id]
                chunks[request_id] = Chunk([], finished=True, error=str(refusal))
                continue
            if guide in self._compiled:
                del self._waiting[request_id]
                self._start(request, guide)
            elif not any(sequence.awaits_guide for sequence in self._sequences.values()):
                self._compiling = guide, self._thread.submit(self._compiler.generate, guide)
        return chunks

    def _forget_guides(self) -> None:
        """Load anew what holds the compiled guides; takes as long as a start, once in MAX_ALL_GUIDES_BYTES."""
        log.info(json.dumps({"event": "guides_forgotten", "num_bytes": self._guide_bytes}))
        # The old ones go first, or there would be two for a moment.
        del self._pipeline, self._compiler
        self._pipeline, self._compiler = self._create()
        self._compiled.clear()
        self._guide_bytes, self._is_draining = 0, False
        waiting, self._waiting = self._waiting, {}
        self.warm_up()
        self._waiting = waiting

    def _generation_config(self, request: EngineRequest) -> genai.GenerationConfig:
        config = genai.GenerationConfig(
            max_new_tokens=request.max_new_tokens,
            min_new_tokens=request.min_tokens,
            ignore_eos=request.end_id is None,
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            do_sample=request.sample,
            # Of the model's own probabilities: before temperature, penalties and guide.
            logprobs=int(request.log_probs),
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


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILE_NICENESS)
