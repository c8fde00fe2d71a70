"""Part `speed-bf16`, `speed-fp8`: Llama 3.1 8B's shape, each side in turn, the same prompts for all.

First token of prompts of four lengths, one at a time; then tokens/s of 1 to 512 streams that all start together.
Through the stack also the first token behind a cached prefix. All answers are greedy, of exactly as many tokens as
asked for, which each stream is held to.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from perf.engine_client import EngineClient
from perf.gpu.rows import ENGINE, LLAMA, make_artifact, make_row
from perf.gpu.sides import SERVED_MODEL, bare, own_server, processor_us, sse_load, whole_stack
from perf.report import say
from perf.stats import summarize

PROMPTS = (128, 512, 2048, 8192)
FIRST_TOKENS = 15
# The larger loads take the longest and vary the least.
ROUNDS = {1: 2, 16: 2, 64: 2, 256: 2, 512: 1}
LOAD_PROMPT, LOAD_TOKENS = 128, 512
PREFIX, PREFIX_ROUNDS = 4000, 10
VOCABULARY = 49152  # ids of SmolLM2's own tokens, which both models have

Ask = Callable[[Mapping[str, Any]], dict[str, Any]]


def speed(
    precision: str, work: Path, cache: Path, out: Path, sides: list[str], gateway_workers: int, **changes: Any
) -> dict[str, Any]:
    """Measure `sides` ("bare", "own", "stack") in turn."""
    row = make_row(
        f"gpu-{precision}",
        LLAMA,
        precision=precision,
        load_format="dummy",
        max_seq_len=9216,
        **changes,
    )
    artifact = make_artifact(row, work, cache)
    result: dict[str, Any] = {
        "engine": row.models[ENGINE].model_dump(mode="json"),
        "load": {"prompt_tokens": LOAD_PROMPT, "tokens_per_stream": LOAD_TOKENS},
    }
    if "bare" in sides:
        with bare(artifact) as worker:
            result["bare"] = measure(lambda request: {**worker.ask(dict(request)), "token_ids": None})
    if "own" in sides:
        with own_server(artifact, out / "logs" / f"{precision}-own.log") as url, sse_load(url, SERVED_MODEL) as load:
            result["own"] = measure(lambda request: load.ask(dict(request)))
    if "stack" in sides:
        logs = out / "logs" / f"{precision}-stack"
        with whole_stack(artifact, logs, gateway_workers) as stack, sse_load(stack.gateway_url, "simple") as load:

            def ask(request: Mapping[str, Any]) -> dict[str, Any]:
                before = processor_us(stack)
                answer = load.ask(dict(request))
                spent = {role: us - before[role] for role, us in processor_us(stack).items()}
                return {**answer, "us_per_token": {role: round(us / answer["tokens"], 1) for role, us in spent.items()}}

            result["stack"] = measure(lambda request: load.ask(dict(request)), ask)
            result["prefix_cache"] = prefix_cache(lambda request: load.ask(dict(request)))
            result["stack"]["gateway_workers"] = gateway_workers
            with EngineClient(stack.triton_grpc_url, ENGINE, stack.inference_key()) as engine:
                result["engine_model_ttft_ms"] = first_tokens(
                    lambda prompt: engine.first_token_ms(prompt, 2), seed=1, lengths=PROMPTS
                )
    result["ratios"] = ratios(result)
    return result


def measure(ask: Ask, ask_counting: Ask | None = None) -> dict[str, Any]:
    """First tokens, then loads; a load's numbers are those of its better round.

    `ask_counting` also counts processor time, which takes a while: between two first tokens it would be a pause, after
    which the engine is slower (by 8 ms for a prompt of 128 tokens, seen once); so it is for the loads alone.
    """
    prompts = Prompts(0)
    for num_streams in (1, 8, 64):  # what is compiled at first use
        ask({"prompts": prompts.take(num_streams, LOAD_PROMPT), "max_tokens": 16})
    ttft = first_tokens(
        lambda prompt: ask({"prompts": [prompt], "max_tokens": 2})["ttft_ms"]["max"], seed=2, lengths=PROMPTS
    )
    loads = {}
    for num_streams, num_rounds in ROUNDS.items():
        rounds = [
            (ask_counting or ask)({"prompts": prompts.take(num_streams, LOAD_PROMPT), "max_tokens": LOAD_TOKENS})
            for _ in range(num_rounds)
        ]
        best = max(rounds, key=lambda each: float(each["tokens_per_s"]))
        loads[str(num_streams)] = {**best, "rounds_tokens_per_s": [each["tokens_per_s"] for each in rounds]}
        say(f"  {num_streams} streams: {[each['tokens_per_s'] for each in rounds]} tokens/s")
    return {"ttft_ms": ttft, "loads": loads}


class Prompts:
    """Random token ids; the same for every side, and none twice."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def take(self, num: int, length: int) -> list[list[int]]:
        return [[self._random.randrange(100, VOCABULARY) for _ in range(length)] for _ in range(num)]


def first_tokens(ask: Callable[[list[int]], float], *, seed: int, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Milliseconds to the first token, by the prompt's length."""
    prompts = Prompts(seed)
    found = {}
    for length in lengths:
        ask(prompts.take(1, length)[0])  # the first of its length may compile something
        found[str(length)] = summarize([ask(prompt) for prompt in prompts.take(FIRST_TOKENS, length)])
        say(f"  first token of {length}: p50 {found[str(length)]['p50']} ms")
    return found


def prefix_cache(ask: Ask) -> dict[str, Any]:
    """The first token behind a prefix of `PREFIX` tokens that is in the prefix cache, and behind a new one."""
    prompts = Prompts(4)
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
    for side in ("bare", "own"):
        if side in result:
            mine, others = result["stack"], result[side]
            found[f"tokens_per_s_over_{side}"] = {
                num: round(mine["loads"][num]["tokens_per_s"] / others["loads"][num]["tokens_per_s"], 4)
                for num in mine["loads"]
            }
            found[f"added_ttft_ms_over_{side}"] = {
                num: round(mine["ttft_ms"][num]["p50"] - others["ttft_ms"][num]["p50"], 2) for num in mine["ttft_ms"]
            }
    if "engine_model_ttft_ms" in result:
        found["added_ttft_ms_over_engine_model"] = {
            num: round(result["stack"]["ttft_ms"][num]["p50"] - each["p50"], 2)
            for num, each in result["engine_model_ttft_ms"].items()
        }
    return found
