"""NVIDIA's AIPerf: an environment of its own, the command line of a run, and what its records say.

Percentiles and goodput are made here from its records of single requests, by the definitions of perf/README.md.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.environment import install
from perf.errors import PerfError
from perf.stats import percentile

VERSION = "0.13.0"
_CONSTRAINTS = Path(__file__).parent / "aiperf-constraints.txt"
_RUN_TIMEOUT_S = 600.0
_LEAVING_S = 15.0
RECORDS = "profile_export.jsonl"


@dataclass(frozen=True)
class Limits:
    """What a good request keeps: its first token and its mean time per output token, in ms."""

    ttft_ms: float
    tpot_ms: float


def install_aiperf() -> Path:
    """The folder of AIPerf's environment. Raises `PerfError`: it needs Python 3.11."""
    if sys.version_info < (3, 11):
        raise PerfError(
            f"AIPerf {VERSION} needs Python 3.11 or newer, and this is {sys.version.split()[0]}\n"
            "fix: make .venv with python3.11 (TRITON_REALTIME_PYTHON=python3.11)"
        )
    return install(f"aiperf-{VERSION}", [f"aiperf=={VERSION}"], "--constraint", str(_CONSTRAINTS))


def command(
    environment: Path,
    url: str,
    tokenizer: Path,
    output: Path,
    shape: Mapping[str, int],
    flags: Sequence[str],
    seed: int,
) -> list[str]:
    """A run against the cheapest tier behind `url`; `shape` has `input_tokens` and `output_tokens` of a request.

    `tokenizer` is a folder, which it takes without a network only by its absolute path. Answers have exactly as many
    tokens as are asked for, and are not cached (`ignore_eos`).
    """
    output_tokens = shape["output_tokens"]
    return [
        *(str(environment / "bin" / "aiperf"), "profile", "--model", "simple", "--url", url),
        *("--endpoint-type", "chat", "--streaming", "--tokenizer", str(tokenizer.absolute())),
        *("--isl", str(shape["input_tokens"]), "--osl", str(output_tokens)),
        *("--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{output_tokens}"),
        *("--extra-inputs", "temperature:0", "--random-seed", str(seed), "--use-server-token-count"),
        # One process of each kind: it runs on the cores that it measures.
        *("--workers-max", "1", "--record-processors", "1", "--ui", "none"),
        *("--no-gpu-telemetry", "--no-server-metrics", "--export-level", "records"),
        *("--output-artifact-dir", str(output)),
        *flags,
    ]


def run(arguments: Sequence[str], output: Path) -> list[dict[str, Any]]:
    """Its records of the run. Raises `PerfError` with its last words when it fails or leaves none.

    An interruption ends it and all that it started.
    """
    with _started(arguments, output / "aiperf.log") as process:
        try:
            code = process.wait(_RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise PerfError(f"aiperf: not done after {_RUN_TIMEOUT_S:.0f} s") from None
    records = output / RECORDS
    if code != 0 or not records.exists():
        tail = (output / "aiperf.log").read_text(encoding="utf-8", errors="replace")[-2000:]
        raise PerfError(f"aiperf ended with exit code {code}; its last words:\n{tail}")
    return [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]


@contextmanager
def _started(arguments: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    # With HF_HUB_OFFLINE it does not find a tokenizer by its path.
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**env, "HF_HUB_DISABLE_TELEMETRY": "1"},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for number, patience_s in ((signal.SIGINT, _LEAVING_S), (signal.SIGKILL, 5.0)):
            if not _is_group_alive(process):
                break
            os.killpg(process.pid, number)
            deadline_s = time.monotonic() + patience_s
            while _is_group_alive(process) and time.monotonic() < deadline_s:
                time.sleep(0.1)


def _is_group_alive(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def read_records(
    records: Sequence[Mapping[str, Any]], limits: Limits, output_tokens: int | None = None
) -> dict[str, Any]:
    """What a run's records say: only requests that ended well are in the times, others are counted.

    `other_length` counts answers that have not the `output_tokens` that were asked for.

    `goodput`: requests a second that kept both limits, and their share of all that were not cancelled by the client.
    """
    timed = [each for each in records if each["metadata"].get("benchmark_phase", "profiling") == "profiling"]
    cancelled = [each for each in timed if each["metadata"].get("was_cancelled")]
    failed = [each for each in timed if each.get("error") and not each["metadata"].get("was_cancelled")]
    good = [each["metrics"] for each in timed if not each.get("error") and not each["metadata"].get("was_cancelled")]
    result: dict[str, Any] = {"num": len(good), "failed": len(failed), "cancelled": len(cancelled)}
    if failed:
        result["first_failure"] = str(failed[0]["error"])[:300]
    if not good:
        return result
    times = {
        "ttft_ms": [each["time_to_first_token"]["value"] for each in good],
        # What AIPerf calls a request's inter-token latency is its mean.
        "tpot_ms": [each["inter_token_latency"]["value"] for each in good],
        "total_ms": [each["request_latency"]["value"] for each in good],
    }
    begin_ns = min(each["metadata"]["request_start_ns"] for each in timed)
    end_ns = max(each["metadata"]["request_end_ns"] for each in timed)
    seconds = (end_ns - begin_ns) / 1e9
    kept = sum(
        ttft <= limits.ttft_ms and tpot <= limits.tpot_ms for ttft, tpot in zip(times["ttft_ms"], times["tpot_ms"])
    )
    lengths = [each["output_sequence_length"]["value"] for each in good]
    tokens = sum(lengths)
    result |= {name: _points(values) for name, values in times.items()}
    result["input_tokens_p50"] = percentile([each["input_sequence_length"]["value"] for each in good], 50)
    result["output_tokens_p50"] = percentile(lengths, 50)
    if output_tokens is not None:
        result["other_length"] = sum(length != output_tokens for length in lengths)
    result["requests_per_s"] = round(len(good) / seconds, 3)
    result["tokens_per_s"] = round(tokens / seconds, 2)
    result["goodput"] = {
        "requests_per_s": round(kept / seconds, 3),
        "share": round(kept / (len(good) + len(failed)), 4),
    }
    return result


def _points(values: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": round(percentile(values, percent), 3) for percent in (50, 90, 95, 99)}
