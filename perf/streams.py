"""`python -m perf streams`: tokens/s that arrive as SSE, against the engine library alone.

Both sides answer the same prompts, all started together, with exactly the same number of tokens; every
prompt is new to both prefix caches. Rounds of the two alternate in one run, never at once, and who goes
first alternates too. The ratio is the median of the rounds' ratios, so that a disturbance of the machine
spoils a round, not the result.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

from perf.errors import PerfError
from perf.prompts import fresh_question
from perf.report import format_table, say
from perf.stack import find_artifact, running_stack
from perf.worker import Worker

RATIO_BAR = 0.90  # both bars are for 16 streams
TOKENS_PER_EVENT_BAR = 2.0
BAR_STREAMS = 16
_WARM_UP_STREAMS = 8


def streams(
    artifacts: Path, numbers_of_streams: list[int], num_rounds: int, max_tokens: int
) -> tuple[str, dict[str, Any]]:
    """Measure every number of streams; returns table and result. Raises `PerfError`."""
    artifact = find_artifact(artifacts, "cpu")
    numbers = itertools.count()
    rounds: dict[int, list[dict[str, dict[str, float]]]] = {num: [] for num in numbers_of_streams}
    with running_stack(artifact) as stack:
        tokenizer = stack.load_tokenizer()
        model_folder = artifact / "model_repository" / stack.tier.model
        with (
            Worker("perf.bare_engine", str(model_folder)) as bare,
            Worker("perf.sse_load", stack.gateway_url) as sse,
        ):

            def run_round(num_streams: int, first: str) -> dict[str, dict[str, float]]:
                texts = [fresh_question(index, next(numbers)) for index in range(num_streams)]
                token_ids = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
                asks = {"bare": (bare, token_ids), "sse": (sse, texts)}
                measured = {}
                for side in sorted(asks, reverse=first == "sse"):
                    worker, prompts = asks[side]
                    answer = worker.ask({"prompts": prompts, "max_tokens": max_tokens})
                    if answer["tokens"] != num_streams * max_tokens:
                        raise PerfError(f"{side}: {answer['tokens']} tokens from {num_streams} streams of {max_tokens}")
                    measured[side] = {**answer, "tokens_per_s": answer["tokens"] / answer["seconds"]}
                return measured

            run_round(_WARM_UP_STREAMS, "bare")
            for num_streams in numbers_of_streams:
                for index in range(num_rounds):
                    measured = run_round(num_streams, ("bare", "sse")[index % 2])
                    rounds[num_streams].append(measured)
                    rates = ", ".join(f"{side} {measured[side]['tokens_per_s']:.0f} tokens/s" for side in measured)
                    say(f"  {num_streams} streams, round {index + 1} of {num_rounds}: {rates}")
    details = {str(num): _describe(measured) for num, measured in rounds.items()}
    result = {
        "command": "streams",
        "ratio": {num: detail["ratio"] for num, detail in details.items()},
        "tokens_per_event": {num: detail["tokens_per_event"] for num, detail in details.items()},
        "streams": details,
        "rounds": num_rounds,
        "tokens_per_stream": max_tokens,
    }
    return _table(details), result


def _describe(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    ratios = [measured["sse"]["tokens_per_s"] / measured["bare"]["tokens_per_s"] for measured in rounds]
    num_tokens = sum(measured["sse"]["tokens"] for measured in rounds)
    num_events = sum(measured["sse"]["events"] for measured in rounds)
    return {
        "bare_tokens_per_s": _median(measured["bare"]["tokens_per_s"] for measured in rounds),
        "sse_tokens_per_s": _median(measured["sse"]["tokens_per_s"] for measured in rounds),
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "tokens_per_event": round(num_tokens / num_events, 4),
    }


def _median(values: Any) -> float:
    return round(float(statistics.median(values)), 1)


def _table(details: dict[str, dict[str, Any]]) -> str:
    rows = []
    for num, detail in details.items():
        bar = f"ratio >= {RATIO_BAR:.2f}, <= {TOKENS_PER_EVENT_BAR:.0f} per event" if int(num) == BAR_STREAMS else ""
        spread = f"{min(detail['ratios']):.2f}-{max(detail['ratios']):.2f}"
        rates = detail["bare_tokens_per_s"], detail["sse_tokens_per_s"]
        rows.append((num, *rates, detail["ratio"], spread, detail["tokens_per_event"], bar))
    header = ("streams", "bare tokens/s", "SSE tokens/s", "ratio", "spread", "tokens/event", "bar")
    return format_table(header, rows)
