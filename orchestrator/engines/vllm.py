"""vLLM's AsyncLLM on GPUs: paged KV cache, prefix cache, chunked prefill, n-gram speculation, tensor parallelism.

It runs in the engine's own process (`engines.process`) and speaks the worker's JSON lines (`engines.worker`). Not by
the worker's loop: AsyncLLM steps in yet another process, and hands its tokens to an event loop. So the Python that has
vLLM, and vLLM's numpy, are none of Triton's matter (`process.PYTHON_VARIABLE`).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from orchestrator import contracts
from orchestrator.engines import EngineRefusal, EngineRequest
from orchestrator.engines.guide_grammar import to_grammar
from orchestrator.engines.vllm_relay import AsyncEngine, Relay
from orchestrator.engines.words import check_ids
from orchestrator.engines.worker import CommandReader, write_line

CHECKPOINT, TOKENIZER = "checkpoint", "tokenizer"
# The length of the warm-up prompt: that of a short question.
WARM_UP_TOKENS = 64
# vLLM takes a lower temperature for this one (`_MAX_TEMP` in its sampling_params.py) and complains in its log.
MIN_TEMPERATURE = 0.01


class Settings(BaseModel):
    """The engine parameters of a target's row, under NVIDIA's names where NVIDIA has one.

    `max_seq_len` counts the tokens of one sequence, `max_num_tokens` those computed in one step over all of them.
    `gpu_memory_share` is how much of each GPU's memory the engine takes for weights, activations and KV cache.
    `cuda_graph_sizes` are the batches that CUDA graphs are made for, none meaning those that vLLM chooses.

    Whatever stands behind the engine handles up to `max_responses_per_s`: with so many streams that one token each
    would be more, a response takes several tokens of its stream along.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: Literal["vllm"]
    max_batch_size: int = Field(gt=0)
    precision: Literal["bf16", "fp8"]
    kv_cache_precision: Literal["auto", "fp8"]
    load_format: Literal["safetensors", "dummy"]
    tp_size: int = Field(gt=0)
    gpu_device_ids: list[int] = Field(min_length=1)
    gpu_memory_share: float = Field(gt=0, lt=1)
    max_seq_len: int = Field(gt=0)
    max_num_tokens: int = Field(gt=0)
    enable_kv_cache_reuse: bool
    enable_chunked_context: bool
    cuda_graph_sizes: list[int]
    speculation: Literal["none", "ngram"]
    num_draft_tokens: int = Field(gt=0)
    max_ngram_size: int = Field(gt=0)
    max_responses_per_s: float = Field(gt=0)
    context_window: int = Field(gt=0)
    vocab_size: int = Field(gt=0)

    @model_validator(mode="before")
    @classmethod
    def _read_lists(cls, values: dict[str, Any]) -> dict[str, Any]:
        # config.pbtxt holds text alone; lists are in it as JSON.
        lists = ("gpu_device_ids", "cuda_graph_sizes")
        return {key: json.loads(value) if key in lists else value for key, value in values.items()}


def engine_arguments(settings: Settings, model_dir: Path) -> dict[str, Any]:
    """What `AsyncEngineArgs` of vLLM 0.22 is made with."""
    arguments: dict[str, Any] = {
        "model": str(model_dir / CHECKPOINT),
        "tokenizer": str(model_dir / TOKENIZER),  # for guided decoding alone
        "load_format": settings.load_format,
        "dtype": "bfloat16",
        "quantization": "fp8" if settings.precision == "fp8" else None,
        "kv_cache_dtype": settings.kv_cache_precision,
        "tensor_parallel_size": settings.tp_size,
        "gpu_memory_utilization": settings.gpu_memory_share,
        "max_model_len": settings.max_seq_len,
        "max_num_seqs": settings.max_batch_size,
        "max_num_batched_tokens": settings.max_num_tokens,
        "enable_prefix_caching": settings.enable_kv_cache_reuse,
        "enable_chunked_prefill": settings.enable_chunked_context,
        "structured_outputs_config": {"backend": "xgrammar"},
        "generation_config": "vllm",  # no sampling defaults out of the checkpoint: ours are the contract's
        "enable_log_requests": False,
        "disable_log_stats": True,
    }
    if settings.cuda_graph_sizes:
        arguments["cudagraph_capture_sizes"] = settings.cuda_graph_sizes
    if settings.speculation == "ngram":
        arguments["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": settings.num_draft_tokens,
            "prompt_lookup_max": settings.max_ngram_size,
        }
    return arguments


def check_request(request: EngineRequest, settings: Settings) -> None:
    """Raises `EngineRefusal` naming the tensor for what the engine cannot run."""
    num_tokens = len(request.input_ids) + request.max_new_tokens
    if num_tokens > settings.max_seq_len:
        raise EngineRefusal(
            f"input_ids, request_output_len: {len(request.input_ids)} + {request.max_new_tokens} tokens are more "
            f"than the context window of {settings.max_seq_len}"
        )
    check_ids(contracts.INPUT_IDS.name, request.input_ids, settings.vocab_size)
    for name, words in (
        (contracts.STOP_WORDS_LIST.name, request.stop_words),
        (contracts.BAD_WORDS_LIST.name, request.bad_words),
        (contracts.END_ID.name, [] if request.end_id is None else [[request.end_id]]),
    ):
        for word in words:
            check_ids(name, word, settings.vocab_size)
    if request.guide_type is not None:
        name = contracts.GUIDED_DECODING_GUIDE_TYPE.name
        if request.end_id is None:
            raise EngineRefusal(f"{name}: needs end_id, which ends the text where the guide does")
        if request.min_tokens > 0:
            raise EngineRefusal(f"{name}: the guide says how long the text is; leave {contracts.MIN_TOKENS.name} out")


def sampling_arguments(request: EngineRequest) -> dict[str, Any]:
    """What vLLM's `SamplingParams` is made with, guide and bad words aside.

    The end is the request's alone: a model's own end token stops nothing. Log probabilities are of the model's own
    distribution, before temperature and penalties, as vLLM gives them unless told otherwise.
    """
    return {
        "max_tokens": request.max_new_tokens,
        "min_tokens": request.min_tokens,
        "ignore_eos": True,
        "stop_token_ids": [] if request.end_id is None else [request.end_id],
        "temperature": max(request.temperature, MIN_TEMPERATURE) if request.sample else 0.0,
        "top_k": request.top_k if request.sample else 0,
        "top_p": request.top_p if request.sample else 1.0,
        "repetition_penalty": request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "seed": request.seed,
        "logprobs": 0 if request.log_probs else None,
        "detokenize": False,
    }


def make_params(request: EngineRequest) -> Any:
    """The request as vLLM's `SamplingParams`. Raises `EngineRefusal`, or `ValueError` as vLLM does."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    guide = None
    if request.guide_type is not None:
        guide = StructuredOutputsParams(grammar=to_grammar(request.guide_type, request.guide))
    params = SamplingParams(
        **sampling_arguments(request), structured_outputs=guide, output_kind=RequestOutputKind.DELTA
    )
    if request.bad_words:
        # vLLM makes this of its parameter `bad_words`, which is text.
        params._bad_words_token_ids = request.bad_words
    return params


def visible_devices(gpu_device_ids: list[int], visible: str) -> str:
    """CUDA_VISIBLE_DEVICES of the engine: its GPUs, numbered among those that `visible` names, or among all.

    One of several Tritons has a part of the machine's GPUs, and its row counts them from 0. Raises `ValueError` where
    there are fewer.
    """
    if not visible:
        return ",".join(map(str, gpu_device_ids))
    devices = visible.split(",")
    if max(gpu_device_ids) >= len(devices):
        raise ValueError(
            f"gpu_device_ids: {gpu_device_ids}, but {contracts.CUDA_DEVICES_VARIABLE}={visible} leaves {len(devices)}"
        )
    return ",".join(devices[number] for number in gpu_device_ids)


def load_engine(settings: Settings, model_dir: Path, note_usage: Callable[[float], None] | None = None) -> Any:
    """AsyncLLM with the model in `model_dir`/checkpoint, on the GPUs that the settings name.

    `note_usage` hears after a step what share of the KV blocks requests hold.
    """
    os.environ[contracts.CUDA_DEVICES_VARIABLE] = visible_devices(
        settings.gpu_device_ids, os.environ.get(contracts.CUDA_DEVICES_VARIABLE, "")
    )
    from vllm.config import StructuredOutputsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_arguments(settings, model_dir)
    arguments["structured_outputs_config"] = StructuredOutputsConfig(**arguments["structured_outputs_config"])
    loggers = None if note_usage is None else [_usage_logger(note_usage)]
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=loggers)


def _usage_logger(note: Callable[[float], None]) -> type[Any]:
    """In the place of vLLM's logger for Prometheus, which it adds otherwise: nobody reads that one here."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class UsageLogger(PrometheusStatLogger):  # type: ignore[misc]
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                note(scheduler_stats.kv_cache_usage)

        def log_engine_initialized(self) -> None:
            pass

    return UsageLogger


async def warm_up(engine: AsyncEngine, settings: Settings) -> None:
    """A prompt and a few tokens, so that what is compiled at first use is compiled before the first caller waits."""
    prompt = list(range(min(WARM_UP_TOKENS, settings.vocab_size, settings.max_seq_len // 2)))
    params = make_params(EngineRequest("warm-up", prompt, max_new_tokens=4))
    async for _ in engine.generate({"prompt_token_ids": prompt}, params, "warm-up"):
        pass


def run_worker(parameters: Mapping[str, str], model_dir: Path, commands: CommandReader, out_fd: int) -> None:
    """The engine's process: load, say so, and serve until the input ends.

    Raises `ValueError` for a parameter that is unknown, missing or out of range, and what vLLM raises when it fails.
    """
    import uvloop  # here as in the orchestrator; vLLM's own server runs on it too

    uvloop.run(_serve(Settings.model_validate(dict(parameters)), model_dir, commands, out_fd))


async def _serve(settings: Settings, model_dir: Path, commands: CommandReader, out_fd: int) -> None:
    relay: Relay | None = None

    def note_usage(share: float) -> None:
        if relay is not None:
            relay.note_usage(share)

    def prepare(request: EngineRequest) -> Any:
        check_request(request, settings)
        return make_params(request)

    engine = load_engine(settings, model_dir, note_usage)
    try:
        await warm_up(engine, settings)
        # A write that waits for a slow reader holds this loop up; AsyncLLM then joins what comes for a request.
        relay = Relay(engine, prepare, settings.max_responses_per_s, lambda message: write_line(out_fd, message))
        write_line(out_fd, {"ready": True, "kv_cache_usage": 0.0})
        await _read_commands(relay, commands)
    finally:
        engine.shutdown()


async def _read_commands(relay: Relay, commands: CommandReader) -> None:
    """Until the input ends; raises what the engine failed with."""
    loop, end = asyncio.get_running_loop(), relay.end

    def read() -> None:
        try:
            for command in commands.read(wait=False):
                relay.do(command)
        except Exception as error:
            end.set_exception(error)
        if commands.is_closed and not end.done():
            end.set_result(None)

    loop.add_reader(commands.fd, read)
    try:
        await end
    finally:
        loop.remove_reader(commands.fd)
