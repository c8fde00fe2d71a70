"""`python -m perf stagger`: does a stream that joins others wait longer for its first token than the first one did?

Six streams start 200 ms apart and all run until the last has begun. The same question for all, each with a number of
its own in front, so that they cost the same and find no cached prefix. The ratio is the last stream's first token over
the first stream's, of medians over rounds: one round is at the mercy of where in a step a request arrives.
"""

from __future__ import annotations

import itertools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from perf.prompts import fresh_question
from perf.report import format_table
from perf.sse import SseConnection, chat_body
from perf.stack import find_artifact, running_stack

RATIO_BAR = 1.5
_NUM_STREAMS = 6
_GAP_S = 0.2
_MAX_TOKENS = 60  # long enough that all six overlap on two cores


def stagger(artifacts: Path, num_rounds: int) -> tuple[str, dict[str, Any]]:
    """Measure `num_rounds` rounds; returns table and result. Raises `PerfError`."""
    numbers = itertools.count()
    with running_stack(find_artifact(artifacts, "cpu")) as stack, ThreadPoolExecutor(_NUM_STREAMS) as pool:

        def first_token_ms(body: bytes, after_s: float) -> float:
            time.sleep(after_s)
            with SseConnection(stack.gateway_url) as connection:
                return connection.ask(body).ttft_ms

        rounds: list[list[float]] = []
        for index in range(num_rounds + 1):
            bodies = [chat_body(fresh_question(0, next(numbers)), _MAX_TOKENS) for _ in range(_NUM_STREAMS)]
            streams = [pool.submit(first_token_ms, body, _GAP_S * place) for place, body in enumerate(bodies)]
            times_ms = [stream.result() for stream in streams]
            if index > 0:  # the first round warms up
                rounds.append(times_ms)
    medians = [round(statistics.median(times_ms), 1) for times_ms in zip(*rounds)]
    ratio = round(medians[-1] / medians[0], 3)
    rows = [(place + 1, median) for place, median in enumerate(medians)]
    table = format_table(("stream", "first token, ms"), [*rows, ("last / first", ratio), ("bar", f"<= {RATIO_BAR}")])
    return table, {"command": "stagger", "ratio": ratio, "first_token_ms": medians, "rounds": rounds}
