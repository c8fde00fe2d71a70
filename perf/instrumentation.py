"""`python -m perf instrumentation`: what logging, counting, timing and tracing every request costs.

Two servers of one artifact stand side by side. One has all of it, and a collector of traces in this process; the other
has `TRITON_REALTIME_INSTRUMENTATION=off`. They are asked in turns, A B B A and so on, so that a machine that gets
slower or faster meanwhile favours neither. With a real engine the cost is a share of an answer's time; the scripted one
makes tokens for nothing.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from orchestrator.instrumentation import VARIABLE
from orchestrator.tracing import ENDPOINT_VARIABLES
from perf.errors import PerfError
from perf.prompts import fresh_question, script
from perf.report import format_table, say
from perf.stack import find_artifact, running_stack
from perf.stats import upper_bound_95
from perf.trace_sink import TraceSink
from perf.worker import Worker

COST_BAR = 0.05
SIDES = ("on", "off")
_WAVES = 4  # of a side in a pair: enough requests that one slow one does not decide
_WARM_UP_PAIRS = 1
_LOG_TIMEOUT_S = 2.0


def instrumentation(
    artifacts: Path, target: str, num_pairs: int, num_streams: int, max_tokens: int
) -> tuple[str, dict[str, Any]]:
    """Measure `num_pairs`, at least two; returns table and result. Ctrl-C leaves those that were.

    Raises `PerfError`, also when a side was not as its name says.
    """
    artifact = find_artifact(artifacts, target)
    pairs: list[dict[str, float]] = []
    asked = dict.fromkeys(SIDES, 0)
    is_interrupted = False
    with TraceSink() as sink:
        environ = {"on": {VARIABLE: "on", ENDPOINT_VARIABLES[0]: sink.url}, "off": {VARIABLE: "off"}}
        with ExitStack() as opened:
            stacks = {side: opened.enter_context(running_stack(artifact, environ=environ[side])) for side in SIDES}
            loads = {
                side: opened.enter_context(Worker("perf.sse_load", stack.gateway_url)) for side, stack in stacks.items()
            }
            prompts = _prompts(target, max_tokens)

            def rate(side: str) -> float:
                """Tokens a second."""
                num_tokens, seconds = 0, 0.0
                for _ in range(_WAVES):
                    wave = list(itertools.islice(prompts, num_streams))
                    answer = loads[side].ask({"prompts": wave, "max_tokens": max_tokens})
                    num_tokens, seconds = num_tokens + answer["tokens"], seconds + answer["seconds"]
                asked[side] += _WAVES * num_streams
                if num_tokens != _WAVES * num_streams * max_tokens:
                    raise PerfError(f"{side}: {num_tokens} tokens from {_WAVES * num_streams} streams of {max_tokens}")
                return num_tokens / seconds

            try:
                for number in range(-_WARM_UP_PAIRS, num_pairs):
                    rates = {side: rate(side) for side in (SIDES if number % 2 else SIDES[::-1])}
                    if number >= 0:
                        pairs.append(rates)
                        said = ", ".join(f"{side} {rates[side]:.0f} tokens/s" for side in SIDES)
                        say(f"  pair {number + 1} of {num_pairs}: {said}")
            except KeyboardInterrupt:
                if len(pairs) < 2:
                    raise
                is_interrupted = True
            lines = {side: _num_request_lines(stacks[side].triton_log, asked[side]) for side in SIDES}
        num_traces, num_spans = sink.count_spans()  # the rest of them was sent when the server stopped
    if not is_interrupted and (lines, num_traces) != ({"on": asked["on"], "off": 0}, asked["on"]):
        raise PerfError(f"{asked['on']} requests on, and {lines} lines in the logs, {num_traces} traces")
    result = {
        "command": "instrumentation",
        **describe(pairs),
        "target": target,
        "streams": num_streams,
        "tokens_per_stream": max_tokens,
        "requests": asked,
        "spans": num_spans,
        **({"interrupted": True} if is_interrupted else {}),
    }
    return _table(result), result


def describe(pairs: list[dict[str, float]]) -> dict[str, Any]:
    """The cost is the share of tokens/s that is lost, in each pair; its mean is what the bound is of."""
    costs = [1 - pair["on"] / pair["off"] for pair in pairs]
    return {
        "cost": {"mean": round(statistics.fmean(costs), 4), "upper_95": round(upper_bound_95(costs), 4)},
        "pairs": [
            {**{side: round(pair[side], 1) for side in SIDES}, "cost": round(cost, 4)}
            for pair, cost in zip(pairs, costs)
        ],
    }


def _prompts(target: str, max_tokens: int) -> Iterator[str]:
    for number in itertools.count():
        yield script("a " * max_tokens, 0, 0, number) if target == "scripted" else fresh_question(number, number)


def _num_request_lines(log: Path, num_wanted: int) -> int:
    """Log lines of requests; those of the last ones come just after their answers."""
    ends_s = time.monotonic() + _LOG_TIMEOUT_S
    while True:
        with log.open("rb") as lines:
            num_lines = sum(line.startswith(b'{"event": "request",') for line in lines)
        if num_lines >= num_wanted or time.monotonic() > ends_s:
            return num_lines
        time.sleep(0.1)


def _table(result: dict[str, Any]) -> str:
    rows: list[tuple[object, ...]] = [
        (number, pair["on"], pair["off"], f"{100 * pair['cost']:.1f} %", "")
        for number, pair in enumerate(result["pairs"], 1)
    ]
    cost = result["cost"]
    rows += [
        ("mean", "", "", f"{100 * cost['mean']:.1f} %", ""),
        ("95 % upper bound", "", "", f"{100 * cost['upper_95']:.1f} %", f"<= {100 * COST_BAR:.0f} %"),
    ]
    return format_table(("pair", "on, tokens/s", "off, tokens/s", "cost", "bar"), rows)
