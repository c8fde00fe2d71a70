"""`python -m perf openai`: AIPerf against the gateway, one kind of traffic after the other.

The cheapest tier of a target is asked over HTTP, streamed. What was measured before an interruption, or beside a kind
that failed, is kept.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from perf import aiperf
from perf.aiperf import Limits
from perf.environment import size_mib
from perf.errors import PerfError
from perf.report import format_table, say
from perf.stack import Stack, find_artifact, running_stack, served_stack

_TURNS = 3
_PREFIX_TOKENS = 400
_CANCELLED_PERCENT, _CANCELLED_AFTER_S = 30, 0.4
_SEED = 7


def traffic(rate: float, num_requests: int) -> dict[str, list[str]]:
    """The kinds of traffic, each with AIPerf's flags for it: about `num_requests` requests, `rate` a second."""
    poisson = ["--request-rate", f"{rate:g}", "--arrival-pattern", "poisson"]
    requests = [*poisson, "--request-count", str(num_requests)]
    num_conversations = max(1, num_requests // _TURNS)
    return {
        "poisson": [*requests, "--num-dataset-entries", str(num_requests)],
        "shared-prefix": [
            *(*requests, "--num-dataset-entries", str(num_requests)),
            *("--shared-system-prompt-length", str(_PREFIX_TOKENS)),
        ],
        "multi-turn": [
            *(*poisson, "--conversation-num", str(num_conversations)),
            *("--conversation-turn-mean", str(_TURNS), "--conversation-turn-stddev", "0"),
            *("--conversation-turn-delay-mean", "500"),
        ],
        "cancellation": [
            *(*requests, "--num-dataset-entries", str(num_requests)),
            *("--request-cancellation-rate", str(_CANCELLED_PERCENT)),
            *("--request-cancellation-delay", str(_CANCELLED_AFTER_S)),
        ],
    }


KINDS = tuple(traffic(1.0, 1))


def openai(
    artifacts: Path,
    target: str,
    run_dir: Path | None,
    kinds: Sequence[str],
    rate: float,
    num_requests: int,
    shape: Mapping[str, int],
    limits: Limits,
    keep: Callable[[dict[str, Any]], object] = lambda _: None,
) -> tuple[str, dict[str, Any]]:
    """Send `kinds` of traffic to `target`, or to what is served already with `run_dir`; returns table and result.

    Raises `PerfError` when AIPerf cannot be installed. See `perf.triton.triton` for what an interruption leaves.
    """
    environment = aiperf.install_aiperf()
    artifact = find_artifact(artifacts, target)
    measured: dict[str, dict[str, Any]] = {}
    result: dict[str, Any] = {
        "command": "openai",
        "aiperf": aiperf.VERSION,
        "environment_mib": size_mib(environment),
        "rate": rate,
        **shape,
        "limits": {"ttft_ms": limits.ttft_ms, "tpot_ms": limits.tpot_ms},
        "traffic": measured,
    }
    served: AbstractContextManager[Stack]
    served = running_stack(artifact) if run_dir is None else nullcontext(served_stack(artifact, run_dir))
    try:
        with served as stack, tempfile.TemporaryDirectory(prefix="perf-aiperf-") as folder:
            if stack.tier.tokenizer is None:
                raise PerfError(f"tier {stack.tier.name!r} is a cloud tier; its tokens cannot be counted here")
            for place, (kind, flags) in enumerate(traffic(rate, num_requests).items()):
                if kind not in kinds:
                    continue
                say(f"{kind} ({place + 1} of {len(KINDS)})")
                output = Path(folder) / kind
                tokenizer = artifact / stack.tier.tokenizer
                seed = _SEED + place  # prompts of its own: none is in a prefix cache from the kind before
                command = aiperf.command(environment, stack.gateway_url, tokenizer, output, shape, flags, seed)
                try:
                    measured[kind] = aiperf.read_records(aiperf.run(command, output), limits, shape["output_tokens"])
                except PerfError as error:
                    measured[kind] = {"failed": str(error)}
                    result["failed"] = str(error)
                keep(result)
    except KeyboardInterrupt:
        result["interrupted"] = True
    return _table(measured), result


def _table(measured: Mapping[str, Mapping[str, Any]]) -> str:
    rows: list[tuple[object, ...]] = []
    for kind, each in measured.items():
        if "goodput" not in each:
            rows.append((kind, "nothing ended well", *[""] * 6))
            continue
        rows.append(
            (
                kind,
                f"{each['num']}, {each['failed']}, {each['cancelled']}",
                *(each["ttft_ms"]["p50"], each["ttft_ms"]["p99"], each["tpot_ms"]["p50"], each["tokens_per_s"]),
                *(each["goodput"]["requests_per_s"], each["goodput"]["share"]),
            )
        )
    header = ("traffic", "ended, failed, cancelled", "TTFT p50 ms", "p99", "TPOT p50 ms", "tokens/s", "good/s", "share")
    return format_table(header, rows)
