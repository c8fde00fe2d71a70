"""Techniques of the engine, measured on it alone: no server is in the way, and both sides run the product's stepper."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence
from typing import Any

from perf.stats import percentile
from perf.techniques.comparison import (
    Comparison,
    acceptance_of,
    alternate,
    gaps_within,
    shared_prefix,
    tokens_per_step,
)
from perf.techniques.ground import Ground
from perf.worker import Worker

# Answers of a mixed load, in tokens, as a chat has them: many short ones, some long ones, in any order. So many that
# the last ones, which run with less and less beside them, do not count for much.
LENGTHS = (8, 16, 32, 48, 64, 64, 96, 128, 128, 192, 256, 512)
NUM_OF_EACH_LENGTH, NUM_ONE_AT_A_TIME = 16, 24
STATIC_BATCH = 8
CACHED_PREFIX_TOKENS = 900
LONG_PROMPT_TOKENS = 3000
NUM_OTHERS = 4
NUM_DRAFT_TOKENS = 4  # as in target cpu's row
COPIED_TOKENS = 120
# A pool that the wide KV cache fits into: 16 sequences of 1,024 tokens.
SMALL_POOL = {"max_tokens_in_paged_kv_cache": 16384}

Asked = dict[str, Any]


def ask(ids: Sequence[int], max_tokens: int, after_s: float = 0.0) -> Asked:
    return {"ids": list(ids), "max_tokens": max_tokens, "after_s": after_s}


def rate(worker: Worker, *groups: Sequence[Asked]) -> float:
    """Tokens/s over all groups, one after the other."""
    answer = worker.ask({"groups": [list(group) for group in groups]})
    return float(sum(len(each["ids"]) for each in answer["answers"]) / answer["seconds"])


def first_token_ms(worker: Worker, ids: Sequence[int]) -> float:
    (answer,) = worker.ask({"groups": [[ask(ids, 2)]]})["answers"]
    return float(answer["times_s"][0] - answer["sent_s"]) * 1000


def in_flight_batching(ground: Ground) -> Comparison:
    """All requests at once, against batches that wait for their longest answer; and against one at a time."""
    lengths = random.Random(0).sample(LENGTHS * NUM_OF_EACH_LENGTH, len(LENGTHS) * NUM_OF_EACH_LENGTH)

    def load() -> list[Asked]:
        return [ask(ground.prompt(ground.question()), length) for length in lengths]

    with ground.engine() as engine:
        rounds = alternate(
            ground.num_rounds,
            lambda: rate(engine, load()),
            lambda: rate(engine, *in_batches(load(), STATIC_BATCH)),
        )
        serial = rate(engine, *in_batches(load()[:NUM_ONE_AT_A_TIME], 1))
    on = statistics.median(on for on, _ in rounds)
    facts = {
        "answer_tokens": [min(LENGTHS), max(LENGTHS)],
        "static_batch": STATIC_BATCH,
        "one_at_a_time": round(serial, 1),
        "ratio_to_one_at_a_time": round(on / serial, 3),
        "requests": len(lengths),
    }
    return Comparison("tokens/s", "higher", rounds, facts)


def in_batches(asked: Sequence[Asked], size: int) -> list[list[Asked]]:
    return [list(asked[start : start + size]) for start in range(0, len(asked), size)]


def prefix_cache(ground: Ground) -> Comparison:
    """First token of a long prompt that differs from the one before only in its last line, against one that is new."""
    num_tokens = 0
    with ground.engine() as engine:
        rounds = []
        for _ in range(ground.num_rounds):
            text = ground.long_text(CACHED_PREFIX_TOKENS)
            cold, warm = (ground.prompt(f"{text}\n{ground.question()}") for _ in range(2))
            num_tokens = len(cold)
            cold_ms = first_token_ms(engine, cold)
            rounds.append((first_token_ms(engine, warm), cold_ms))
    return Comparison("ms to first token", "lower", rounds, {"prompt_tokens": num_tokens})


def chunked_prefill(ground: Ground) -> Comparison:
    """The 99th percentile of the gaps between the tokens of streams beside which a long prompt arrives."""
    long_ms: dict[bool, list[float]] = {True: [], False: []}
    num_tokens = 0
    # Whole: the prompt fits into one step.
    whole_settings = {"enable_chunked_context": "false", "max_num_tokens": 8192}
    with ground.engine() as chunked, ground.engine(**whole_settings) as whole:

        def run(engine: Worker) -> float:
            nonlocal num_tokens
            ids = ground.prompt(ground.long_text(LONG_PROMPT_TOKENS))
            num_tokens = len(ids)
            others = [ask(ground.prompt(ground.question()), 120) for _ in range(NUM_OTHERS)]
            *streams, late = engine.ask({"groups": [[*others, ask(ids, 2, after_s=1.0)]]})["answers"]
            start, end = late["sent_s"], late["times_s"][0]
            long_ms[engine is chunked].append((end - start) * 1000)
            gaps = [gap for stream in streams for gap in gaps_within(stream["times_s"], start, end)]
            return percentile(gaps, 99) * 1000

        rounds = alternate(ground.num_rounds, lambda: run(chunked), lambda: run(whole))
    facts = {
        "long_prompt_tokens": num_tokens,
        "streams": NUM_OTHERS,
        "long_prompt_ttft_ms": {
            "on": round(statistics.median(long_ms[True]), 1),
            "off": round(statistics.median(long_ms[False]), 1),
        },
    }
    return Comparison("ms between tokens of others, p99", "lower", rounds, facts)


def speculation(ground: Ground) -> Comparison:
    """Drafts from the prompt's own n-grams, for text that is copied; the text is the same as without."""
    step_tokens: list[int] = []
    pairs: dict[tuple[int, ...], list[list[int]]] = {}
    settings = {"kv_cache_precision": "f32", **SMALL_POOL}
    drafting = {"speculation": "prompt_lookup", "num_draft_tokens": NUM_DRAFT_TOKENS}
    with ground.engine(**settings, **drafting) as on, ground.engine(**settings) as off:

        def run(engine: Worker, prompts: Sequence[Sequence[int]]) -> float:
            reply = engine.ask({"groups": [[ask(ids, COPIED_TOKENS)] for ids in prompts]})
            for ids, answer in zip(prompts, reply["answers"]):
                pairs.setdefault(tuple(ids), []).append(answer["ids"])
                if engine is on:
                    step_tokens.extend(decoded_by_step(answer["times_s"]))
            return float(sum(len(answer["ids"]) for answer in reply["answers"]) / reply["seconds"])

        rounds = []
        for number in range(ground.num_rounds):
            copy = "Repeat the following text word for word, and say nothing else."
            prompts = [ground.prompt(f"{copy}\n\n{ground.long_text(COPIED_TOKENS, ground.number())}") for _ in range(3)]
            first, second = (on, off) if number % 2 == 0 else (off, on)
            rates = {engine is on: run(engine, prompts) for engine in (first, second)}
            rounds.append((rates[True], rates[False]))
    acceptance = acceptance_of(step_tokens, NUM_DRAFT_TOKENS)
    facts = {
        "draft_tokens": NUM_DRAFT_TOKENS,
        "acceptance": round(acceptance, 4),
        "tokens_per_step": round(statistics.mean(step_tokens), 3),
        "tokens_per_step_by_formula": round(tokens_per_step(acceptance, NUM_DRAFT_TOKENS), 3),
        "same_text": round(float(statistics.mean(first == second for first, second in pairs.values())), 4),
    }
    return Comparison("tokens/s", "higher", rounds, facts)


def decoded_by_step(times_s: Sequence[float]) -> list[int]:
    """The number of tokens of each step after the first, which is the prompt's; those of one step come together."""
    return [len(list(together)) for _, together in itertools.groupby(times_s)][1:]


def kv_precision(ground: Ground) -> Comparison:
    """The KV cache in 8 bits against 32: pace of 16 streams, memory, and how long greedy answers stay the same."""
    num_streams, max_tokens = 16, 48
    texts: dict[bool, list[list[int]]] = {True: [], False: []}
    peak_mib: dict[bool, int] = {}
    with (
        ground.engine(kv_cache_precision="u8", **SMALL_POOL) as narrow,
        ground.engine(kv_cache_precision="f32", **SMALL_POOL) as wide,
    ):
        rounds = []
        for number in range(ground.num_rounds):
            asked = [ask(ground.prompt(ground.long_text(200, ground.number())), max_tokens) for _ in range(num_streams)]
            rates = {}
            for engine in (narrow, wide) if number % 2 == 0 else (wide, narrow):
                reply = engine.ask({"groups": [asked]})
                peak_mib[engine is narrow] = reply["peak_mib"]
                texts[engine is narrow] += [answer["ids"] for answer in reply["answers"]]
                rates[engine is narrow] = num_streams * max_tokens / reply["seconds"]
            rounds.append((rates[True], rates[False]))
    same = [shared_prefix(first, second) for first, second in zip(texts[True], texts[False])]
    facts = {
        "streams": num_streams,
        "peak_mib": {"on": peak_mib[True], "off": peak_mib[False]},
        "same_text": round(float(statistics.mean(tokens == max_tokens for tokens in same)), 4),
        "same_tokens_p50": percentile(same, 50),
    }
    return Comparison("tokens/s", "higher", rounds, facts)
