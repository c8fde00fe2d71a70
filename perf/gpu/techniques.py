"""Parts `chunked` and `ngram`: chunked prefill and n-gram speculation, through the whole stack, on against off."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from perf.gpu.rows import LLAMA, SMOLLM2, make_artifact, make_row
from perf.gpu.sides import sse_load, whole_stack
from perf.gpu.speed import Prompts
from perf.report import say

NUM_STREAMS, STREAM_TOKENS = 32, 400
NUM_ARRIVING, ARRIVING_PROMPT = 4, 8000


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
