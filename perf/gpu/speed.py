"""Llama 3.1 8B's shape, each side with prompts of the same lengths.

Parts `first-bf16`, `first-fp8`: the first token of prompts of four lengths, one at a time; through the stack also the
first token behind a cached prefix. Parts `speed-bf16`, `speed-fp8`: tokens/s of 1 to 512 streams that all start
together. Part `tp2`: both, over two GPUs. The stack is asked by SSE and, as side `grpc`, through its gRPC front. All
answers are greedy, of exactly as many tokens as asked for, which each stream is held to.

A card whose memory holds an engine for each side has all of them at once, and they are asked in turn: what the card,
warmer or cooler, does to one it does to all. On a smaller one each side has the card to itself, one after another.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build.model_rows import ModelRow
from build.plan import matrix_bytes
from build.rows import load_models, load_target
from perf.engine_client import EngineClient
from perf.errors import PerfError
from perf.gpu.rows import ENGINE, LLAMA, TARGET, make_artifact, make_row
from perf.gpu.sides import (
    SERVED_MODEL,
    bare,
    gpu_facts,
    memory_bytes_per_s,
    own_server,
    processor_us,
    sse_load,
    whole_stack,
)
from perf.report import say
from perf.stack import Stack
from perf.stats import summarize
from perf.worker import Worker

PROMPTS = (128, 512, 2048, 8192)
FIRST_TOKENS, WAKING_PROMPT, REST_S = 20, 32, 0.02
LOADS, LOADS_OF_TWO = (1, 16, 64, 256, 512), (1, 64)
ROUNDS = 2
LOAD_PROMPT = 128
# So that the KV cache of a third of a card holds all of them.
LOAD_TOKENS = {512: 256}
LOAD_TOKENS_OF_OTHERS = 512
PREFIX, PREFIX_ROUNDS = 4000, 10
VOCABULARY = 49152  # ids of SmolLM2's own tokens, which both models have
# Of the card's memory, which each of three engines takes; and the least memory where 26 GiB of it are KV cache, which
# is what the loads need beside 16 GB of weights.
SHARE_OF_THREE, MIN_MEMORY_MIB = 0.31, 135_000

Ask = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Side:
    """Who is asked, through `worker`; `stack` where it is ours."""

    worker: Worker
    stack: Stack | None = None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        answer = self.worker.ask(dict(request))
        answer.pop("token_ids", None)  # which AsyncLLM alone tells
        return answer

    def ask_counting(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Also counts our processor time, which takes a while: for loads alone."""
        if self.stack is None:
            return self.ask(request)
        before = processor_us(self.stack)
        answer = self.ask(request)
        spent = {role: us - before[role] for role, us in processor_us(self.stack).items()}
        return {**answer, "us_per_token": {role: round(us / answer["tokens"], 1) for role, us in spent.items()}}


def speed(
    precision: str,
    work: Path,
    cache: Path,
    out: Path,
    gateway_workers: int,
    *,
    sides: list[str],
    lengths: tuple[int, ...] = (),
    loads: tuple[int, ...] = (),
    num_gpus: int = 1,
    **changes: Any,
) -> dict[str, Any]:
    """Measure `sides` ("bare", "own", "stack"): first tokens of prompts of `lengths`, and `loads` of so many streams.

    The engines are spread over `num_gpus` by tensor parallelism. Raises `PerfError` where there are fewer.
    """
    gpus = gpu_facts()
    if 0 < gpus.get("cards", 0) < num_gpus:
        raise PerfError(f"{num_gpus} GPUs are needed, and there are {gpus['cards']}")
    together = gpus.get("memory_mib", 0) >= MIN_MEMORY_MIB
    changes |= {"tp_size": num_gpus, "gpu_device_ids": list(range(num_gpus))}
    row = make_row(
        f"gpu-{precision}-tp{num_gpus}",
        LLAMA,
        precision=precision,
        load_format="dummy",
        max_seq_len=9216,
        **{**({"gpu_memory_share": SHARE_OF_THREE} if together else {}), **changes},
    )
    artifact = make_artifact(row, work, cache)
    result: dict[str, Any] = {
        "engine": row.models[ENGINE].model_dump(mode="json"),
        **(
            {"load": {"prompt_tokens": LOAD_PROMPT, "tokens_per_stream": {n: tokens_of(n) for n in loads}}}
            if loads
            else {}
        ),
        "together": together,
        "gateway_workers": gateway_workers,
    }
    bytes_per_s = memory_bytes_per_s()
    logs = out / "logs"
    for group in [sides] if together else [[side] for side in sides]:
        with ExitStack() as started:
            running: dict[str, Side] = {}
            for side in group:
                log = logs / f"{row.name}-{side}"
                running |= started.enter_context(start(side, artifact, log, gateway_workers))
            measure(running, result, lengths, loads)
            if lengths and (stack_side := running.get("stack")):
                result["prefix_cache"] = prefix_cache(stack_side.ask)
    result["ratios"] = ratios(result)
    if bytes_per_s is not None and loads:
        result["decode_floor"] = decode_floor(result, bytes_per_s * num_gpus, precision)
    return result


def decode_floor(result: Mapping[str, Any], bytes_per_s: float, precision: str) -> dict[str, Any]:
    """What a token of one stream takes at least, in ms: its weights are read once, by all GPUs together; and each
    side's share of that.
    """
    model = load_models(load_target(TARGET))["llama-3.1-8b-instruct"]
    assert isinstance(model, ModelRow)
    head_bytes = 2 * model.architecture.num_embedding_weights
    num_bytes = matrix_bytes(model.architecture, precision) + head_bytes
    floor_ms = num_bytes / bytes_per_s * 1000
    shares = {
        side: round(floor_ms / each["loads"]["1"]["tpot_ms"]["p50"], 3)
        for side, each in result.items()
        if isinstance(each, dict) and "loads" in each
    }
    return {"memory_bytes_per_s": bytes_per_s, "ms_per_token": round(floor_ms, 3), "share": shares}


def tokens_of(num_streams: int) -> int:
    """The tokens of each stream of a load."""
    return LOAD_TOKENS.get(num_streams, LOAD_TOKENS_OF_OTHERS)


@contextmanager
def start(side: str, artifact: Path, logs: Path, gateway_workers: int) -> Iterator[dict[str, Side]]:
    """One side, ready; the stack is two."""
    if side == "bare":
        with bare(artifact) as worker:
            yield {side: Side(worker)}
    elif side == "own":
        with own_server(artifact, logs.with_suffix(".log")) as url, sse_load(url, SERVED_MODEL) as worker:
            yield {side: Side(worker)}
    else:
        with (
            whole_stack(artifact, logs, gateway_workers) as stack,
            sse_load(stack.gateway_url, "simple") as worker,
            sse_load(f"grpc://{stack.grpc_front_url}", "simple") as grpc_worker,
        ):
            yield {side: Side(worker, stack), "grpc": Side(grpc_worker, stack)}


def measure(
    sides: Mapping[str, Side], result: dict[str, Any], lengths: tuple[int, ...], loads: tuple[int, ...]
) -> None:
    """First tokens, then loads, of all `sides` in turn, into `result`; a load's numbers are those of its best round."""
    prompts = {side: Prompts(number) for number, side in enumerate(sides)}  # two sides share an engine, and its cache
    for num_streams in (1, 8, 64):  # what is compiled at first use
        for name, side in sides.items():
            side.ask({"prompts": prompts[name].take(num_streams, LOAD_PROMPT), "max_tokens": 16})
    with ExitStack() as clients:
        first: dict[str, Callable[[list[int]], float]] = {
            name: first_token_of(side.ask) for name, side in sides.items()
        }
        if "stack" in sides and (stack := sides["stack"].stack) is not None:
            client = clients.enter_context(EngineClient(stack.triton_grpc_url, ENGINE, stack.inference_key()))
            first["engine_model"] = lambda prompt: client.first_token_ms(prompt, 2)
        if lengths:
            for name, ttft in first_tokens(first, seed=20, lengths=lengths).items():
                result.setdefault(name, {})["ttft_ms"] = ttft
    for num_streams in loads:
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for number in range(ROUNDS):
            for name in list(sides)[:: -1 if number % 2 else 1]:
                request = {
                    "prompts": prompts[name].take(num_streams, LOAD_PROMPT),
                    "max_tokens": tokens_of(num_streams),
                }
                rounds[name].append(sides[name].ask_counting(request))
        for name, done in rounds.items():
            best = max(done, key=lambda each: float(each["tokens_per_s"]))
            rates = [each["tokens_per_s"] for each in done]
            result.setdefault(name, {}).setdefault("loads", {})[str(num_streams)] = {
                **best,
                "rounds_tokens_per_s": rates,
            }
            say(f"  {num_streams} streams, {name}: {rates} tokens/s")


def first_token_of(ask: Ask) -> Callable[[list[int]], float]:
    return lambda prompt: float(ask({"prompts": [prompt], "max_tokens": 2})["ttft_ms"]["max"])


class Prompts:
    """Random token ids; the same for every side, and none twice."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def take(self, num: int, length: int) -> list[list[int]]:
        return [[self._random.randrange(100, VOCABULARY) for _ in range(length)] for _ in range(num)]


def first_tokens(
    sides: Mapping[str, Callable[[list[int]], float]], *, seed: int, lengths: tuple[int, ...]
) -> dict[str, dict[str, Any]]:
    """Milliseconds to the first token, by side and by the prompt's length. No side gets the prompt of another.

    After a pause an engine is slower (by 8 ms for a prompt of 128 tokens, seen once), and two sides share one: so
    before each that counts the same side has a short prompt, as from the traffic that it would be in. Right behind an
    answer vLLM still runs a step that it had begun ahead; whoever comes within it waits for it (5 ms), hence the rest.
    """
    prompts = Prompts(seed)
    found: dict[str, dict[str, Any]] = {name: {} for name in sides}
    for length in lengths:
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(1 + FIRST_TOKENS):
            for name, ask in sides.items():
                ask(prompts.take(1, WAKING_PROMPT)[0])
                time.sleep(REST_S)
                times[name].append(ask(prompts.take(1, length)[0]))
        for name, each in times.items():
            del each[0]  # the first of its length may compile something
            found[name][str(length)] = {**summarize(each), "all": [round(ms, 2) for ms in each]}
        say(f"  first token of {length}: p50 { {name: each[str(length)]['p50'] for name, each in found.items()} } ms")
    return found


def prefix_cache(ask: Ask) -> dict[str, Any]:
    """The first token behind a prefix of `PREFIX` tokens that is in the prefix cache, and behind a new one."""
    prompts = Prompts(40)
    shared = prompts.take(1, PREFIX)[0]

    def first_ms(start: list[int]) -> float:
        request = {"prompts": [start + prompts.take(1, 16)[0]], "max_tokens": 2}
        return float(ask(request)["ttft_ms"]["max"])

    cold = [first_ms(prompts.take(1, PREFIX)[0]) for _ in range(PREFIX_ROUNDS)]
    first_ms(shared)
    cached = [first_ms(shared) for _ in range(PREFIX_ROUNDS)]
    found = {"cold_ms": summarize(cold), "cached_ms": summarize(cached)}
    say(f"  a prefix of {PREFIX}: {found['cold_ms']['p50']} ms cold, {found['cached_ms']['p50']} ms cached")
    return {**found, "ratio": round(found["cold_ms"]["p50"] / found["cached_ms"]["p50"], 2)}


def ratios(result: Mapping[str, Any]) -> dict[str, Any]:
    """The stack over the other sides: tokens/s, and what it adds to the first token (p50, ms)."""
    found: dict[str, Any] = {}
    if "stack" not in result:
        return found
    for side in ("bare", "own", "engine_model", "grpc"):
        if side in result:
            mine, others = result["stack"], result[side]
            if "loads" in mine and "loads" in others:
                found[f"tokens_per_s_over_{side}"] = {
                    num: round(mine["loads"][num]["tokens_per_s"] / others["loads"][num]["tokens_per_s"], 4)
                    for num in mine["loads"]
                }
            if "ttft_ms" in mine:
                found[f"added_ttft_ms_over_{side}"] = {
                    num: round(mine["ttft_ms"][num]["p50"] - others["ttft_ms"][num]["p50"], 2)
                    for num in mine["ttft_ms"]
                }
    return found
