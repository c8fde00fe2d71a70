"""Parts `chunked`, `ngram` and `hits`, through the whole stack.

Chunked prefill and n-gram speculation, on against off; the exact cache and its single flight at a steady rate.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perf.errors import PerfError
from perf.gpu.rows import LLAMA, SMOLLM2, make_artifact, make_row
from perf.gpu.sides import sse_load, whole_stack
from perf.gpu.speed import Prompts
from perf.prompts import fresh_question
from perf.report import say
from perf.stats import summarize
from perf.worker import Worker

NUM_STREAMS, STREAM_TOKENS = 32, 400
NUM_ARRIVING, ARRIVING_PROMPT = 4, 8000
HITS_PER_S, HIT_TOKENS, KNOWN_QUESTIONS = 1000, 1024, 20


def chunked(work: Path, cache: Path, out: Path, gateway_workers: int, **changes: Any) -> dict[str, Any]:
    """The gaps of streams of Llama 3.1 8B's shape while long prompts arrive."""
    result: dict[str, Any] = {}
    for name, is_on in (("chunked", True), ("whole", False)):
        row = make_row(
            f"gpu-prefill-{name}",
            LLAMA,
            precision="bf16",
            load_format="dummy",
            max_seq_len=9216,
            max_num_tokens=1024 if is_on else 9216,
            enable_chunked_context=is_on,
            **changes,
        )
        artifact = make_artifact(row, work, cache)
        with (
            whole_stack(artifact, out / "logs" / f"prefill-{name}", gateway_workers) as stack,
            sse_load(stack.gateway_url, "simple") as load,
            sse_load(stack.gateway_url, "simple") as other,
        ):
            for _ in range(2):
                load.ask({"prompts": Prompts(3).take(NUM_STREAMS, 64), "max_tokens": 16})
            result[f"gaps_{name}"] = _arrivals(load, other)
    return result


def _arrivals(load: Any, other: Any) -> dict[str, Any]:
    """`NUM_STREAMS` decode; meanwhile long prompts come, one after another."""
    prompts = Prompts(5)
    first_ms: list[float] = []

    def arrive() -> None:
        time.sleep(0.7)
        for prompt in prompts.take(NUM_ARRIVING, ARRIVING_PROMPT):
            first_ms.append(other.ask({"prompts": [prompt], "max_tokens": 2})["ttft_ms"]["max"])

    quiet = load.ask({"prompts": Prompts(6).take(NUM_STREAMS, 64), "max_tokens": STREAM_TOKENS})
    thread = threading.Thread(target=arrive)
    thread.start()
    busy = load.ask({"prompts": Prompts(8).take(NUM_STREAMS, 64), "max_tokens": STREAM_TOKENS})
    thread.join()
    say(f"  gaps: {quiet['gap_ms']} quiet, {busy['gap_ms']} while prompts of {ARRIVING_PROMPT} arrive")
    return {"quiet_gap_ms": quiet["gap_ms"], "busy_gap_ms": busy["gap_ms"], "arriving_ttft_ms": first_ms}


def ngram(work: Path, cache: Path, out: Path, gateway_workers: int, **changes: Any) -> dict[str, Any]:
    """Tokens/s of one stream that repeats its prompt, with n-gram speculation and without; the texts must be equal."""
    result: dict[str, Any] = {}
    texts = {}
    for speculation in ("none", "ngram"):
        row = make_row(
            f"gpu-speculation-{speculation}",
            SMOLLM2,
            precision="bf16",
            max_seq_len=8192,
            gpu_memory_share=0.3,
            speculation=speculation,
            **changes,
        )
        artifact = make_artifact(row, work, cache)
        with whole_stack(artifact, out / "logs" / f"speculation-{speculation}", gateway_workers) as stack:
            sentence = "The lighthouse keeper found a green bottle, and in it a letter that nobody had read. "
            prompt = stack.load_tokenizer().encode(sentence * 12)
            with sse_load(stack.gateway_url, "simple") as load:
                request = {"prompts": [prompt], "max_tokens": 256, "texts": True}
                rounds = [load.ask(request) for _ in range(5)]
        best = max(rounds, key=lambda each: float(each["tokens_per_s"]))
        texts[speculation] = rounds[-1].pop("texts")[0]
        best.pop("texts", None)
        result[speculation] = best
    faster = result["ngram"]["tokens_per_s"] / result["none"]["tokens_per_s"]
    return {**result, "ratio": round(faster, 3), "texts_equal": texts["none"] == texts["ngram"]}


def hits(work: Path, cache: Path, out: Path, gateway_workers: int, **changes: Any) -> dict[str, Any]:
    """`HITS_PER_S` requests a second, whatever is answered: of one new question, then of some that are known.

    Of one question all that come while its answer is made are one flight, and later ones exact hits.
    """
    row = make_row(
        "gpu-hits", SMOLLM2, has_cache=True, precision="bf16", max_seq_len=8192, gpu_memory_share=0.3, **changes
    )
    artifact = make_artifact(row, work, cache)
    with (
        whole_stack(artifact, out / "logs" / "hits", gateway_workers) as stack,
        Worker("perf.open_load", stack.gateway_url) as load,
    ):
        known = _learn(load)
        flight = _at_rate(load, [fresh_question(1000, 1000)], 1.0)
        exact = _at_rate(load, known, 4.0)
    say(f"  {HITS_PER_S} requests/s: {flight['cache']} of one question, {exact['cache']} of known ones")
    return {"requests_per_s": HITS_PER_S, "single_flight": flight, "exact": exact}


def _learn(load: Worker) -> list[str]:
    """Questions whose answers end by themselves, and so were stored."""
    questions = [fresh_question(index, index) for index in range(4 * KNOWN_QUESTIONS)]
    answers = load.ask({"asks": [[0.0, each, HIT_TOKENS] for each in questions], "may_end": True})["answers"]
    known = [each for each, answer in zip(questions, answers) if answer.get("tokens", HIT_TOKENS) < HIT_TOKENS]
    if not known:
        raise PerfError(f"of {len(questions)} answers none ended before its {HIT_TOKENS}th token: {answers[0]}")
    return known[:KNOWN_QUESTIONS]


def _at_rate(load: Worker, questions: list[str], duration_s: float) -> dict[str, Any]:
    num = int(HITS_PER_S * duration_s)
    asks = [[index / HITS_PER_S, questions[index % len(questions)], HIT_TOKENS] for index in range(num)]
    answers = load.ask({"asks": asks, "may_end": True})["answers"]
    done = [each for each in answers if "failed" not in each]
    if not done:
        raise PerfError(f"all of {num} requests failed, the first by: {answers[0]['failed']}")
    late_ms = [(each["sent_s"] - at_s) * 1000 for each, (at_s, _, _) in zip(answers, asks) if "failed" not in each]
    return {
        "requests": num,
        "failed": num - len(done),
        "cache": dict(Counter(_how(each["rt"]) for each in done)),
        "ttft_ms": summarize([(each["times_s"][0] - each["sent_s"]) * 1000 for each in done]),
        "sent_late_ms": summarize(late_ms),
    }


def _how(rt: Mapping[str, Any]) -> str:
    return "shared" if rt.get("shared") else str(rt["cache"])
