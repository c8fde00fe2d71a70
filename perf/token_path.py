"""`python -m perf token-path`: what a token costs on its way, in processor time of each process it passes.

The scripted engine makes tokens for nothing, so that all that is spent is spent on the way. At a fixed pace every
stream gets its token when it is due, as a model's decode step would give it; at full speed the engine never waits, and
the slowest process of the way sets the rate.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from perf.errors import PerfError
from perf.processes import descendants, processor_s
from perf.prompts import script
from perf.report import format_table, say
from perf.stack import Stack, find_artifact, running_stack
from perf.worker import Worker

# A part of a process's command line says what it is; the first that fits counts.
_ROLES = {
    "engine's process": "orchestrator.engines.worker",
    "engine model": "/llm_small/",
    "orchestrator": "/orchestrator/1/",
    "gateway": "orchestrator.gateway",
    "triton": "tritonserver",
}
_WARM_UP_TOKENS = 50


def token_path(
    artifacts: Path, numbers_of_streams: list[int], max_tokens: int, itl_ms: float
) -> tuple[str, dict[str, Any]]:
    """Measure every number of streams at a pace of `itl_ms` and at full speed. Raises `PerfError`."""
    numbers = itertools.count()
    result: dict[str, Any] = {"command": "token-path", "tokens_per_stream": max_tokens, "itl_ms": itl_ms}
    rows: list[tuple[object, ...]] = []
    with (
        running_stack(find_artifact(artifacts, "scripted")) as stack,
        Worker("perf.sse_load", stack.gateway_url) as sse,
    ):

        def load(num_streams: int, num_tokens: int, gap_ms: float) -> dict[str, Any]:
            prompts = [script("a " * num_tokens, gap_ms, gap_ms, next(numbers)) for _ in range(num_streams)]
            before = _processor_us(stack)
            answer = sse.ask({"prompts": prompts, "max_tokens": num_tokens})
            spent = {role: us - before[role] for role, us in _processor_us(stack).items()}
            if answer["tokens"] != num_streams * num_tokens:
                raise PerfError(f"{answer['tokens']} tokens from {num_streams} streams of {num_tokens}")
            us_per_token = {role: round(us / answer["tokens"], 1) for role, us in spent.items()}
            return {
                "tokens_per_s": round(answer["tokens"] / answer["seconds"], 1),
                "tokens_per_event": round(answer["tokens"] / answer["events"], 3),
                "us_per_token": {**us_per_token, "all": round(sum(us_per_token.values()), 1)},
            }

        load(max(numbers_of_streams), _WARM_UP_TOKENS, 0.0)
        for pace, gap_ms in (("paced", itl_ms), ("full speed", 0.0)):
            for num_streams in numbers_of_streams:
                measured = load(num_streams, max_tokens, gap_ms)
                result.setdefault(pace.replace(" ", "_"), {})[str(num_streams)] = measured
                say(f"  {num_streams} streams, {pace}: {measured['tokens_per_s']} tokens/s")
                cells = measured["us_per_token"].values()
                rows.append((pace, num_streams, measured["tokens_per_s"], measured["tokens_per_event"], *cells))
    header = ("pace", "streams", "tokens/s", "tokens/event", *(f"{role}, us" for role in (*_ROLES, "all")))
    return format_table(header, rows), result


def _processor_us(stack: Stack) -> dict[str, float]:
    """Processor time so far, user and system, of the processes of each role, in microseconds."""
    spent = dict.fromkeys(_ROLES, 0.0)
    for process in descendants(stack.serve_pid):
        command = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
        role = next((role for role, part in _ROLES.items() if part in command), None)
        if role is not None:
            spent[role] += processor_s(process) * 1e6
    return spent
