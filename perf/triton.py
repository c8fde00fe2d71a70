"""`python -m perf triton`: perf_analyzer's sweeps over every model that a server has.

First so many requests at once, then, at random (Poisson), shares of the most that the model did in a second. Each
level is a run of its own, with prompts that were not asked before. What was measured before an interruption, or beside
a level that failed, is kept.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from orchestrator.contracts import (
    IMAGE_PREPROCESS_MODEL,
    OCR_DETECTION_MODEL,
    OCR_DETECTOR_MODEL,
    OCR_RECOGNIZER_MODEL,
)
from perf.analyzer import Analyzer, Level, Subject, find_analyzer
from perf.analyzer_inputs import write_inputs
from perf.errors import PerfError
from perf.report import format_table, say
from perf.stack import Stack, find_artifact, running_stack, served_stack

# Pixels go in, or come out.
_BULKY = (IMAGE_PREPROCESS_MODEL, OCR_DETECTION_MODEL, OCR_DETECTOR_MODEL, OCR_RECOGNIZER_MODEL)
# A window without a request ends perf_analyzer's run.
_LEAST_REQUESTS, _LONGEST_WINDOW_MS = 10, 15_000
_TOO_SHORT = "larger time window"  # what it then says
_PROMPTS_A_LEVEL = 1000  # the numbers in front of the prompts of one level


def triton(
    artifacts: Path,
    target: str | None,
    run_dir: Path | None,
    only: Sequence[str] | None,
    concurrency: Sequence[int],
    loads: Sequence[float],
    window_ms: int,
    keep: Callable[[dict[str, Any]], object] = lambda _: None,
) -> tuple[str, dict[str, Any]]:
    """Sweep the models of `target`, or of what is served of it already with `run_dir`; returns table and result.

    Without `target` it is cpu-voice, which has most models, if that is built, else cpu. `only` names models; `loads`
    are shares of a model's highest rate. An interruption ends it early: then the result has `interrupted`. Levels that
    failed have `failed`, and so has then the result. Raises `PerfError`.
    """
    if target is None:
        target = "cpu-voice" if (artifacts / "cpu-voice" / "manifest.json").is_file() else "cpu"
    artifact = find_artifact(artifacts, target)
    served: AbstractContextManager[Stack]
    served = running_stack(artifact) if run_dir is None else nullcontext(served_stack(artifact, run_dir))
    analyzer = find_analyzer()
    with served as stack:
        return sweep(stack, analyzer, choose_models(artifact, only), concurrency, loads, window_ms, keep)


def choose_models(artifact: Path, only: Sequence[str] | None) -> list[str]:
    """The models of `artifact`, or those of them in `only`; raises `PerfError` naming one that it does not have."""
    models = sorted(path.parent.name for path in (artifact / "model_repository").glob("*/config.pbtxt"))
    if missing := [name for name in only or () if name not in models]:
        raise PerfError(f"--only: {missing[0]!r} is no model of {artifact}; it has {', '.join(models)}")
    return [name for name in models if only is None or name in only]


def sweep(
    stack: Stack,
    analyzer: Analyzer,
    models: Sequence[str],
    concurrency: Sequence[int],
    loads: Sequence[float],
    window_ms: int,
    keep: Callable[[dict[str, Any]], object] = lambda _: None,
) -> tuple[str, dict[str, Any]]:
    """See `triton`."""
    measured: dict[str, dict[str, Any]] = {}
    result: dict[str, Any] = {"command": "triton", "perf_analyzer": analyzer.version, "models": measured}
    keys = stack.triton_keys()  # perf_analyzer asks for configurations and statistics too
    numbers = itertools.count(0, _PROMPTS_A_LEVEL)
    try:
        with tempfile.TemporaryDirectory(prefix="perf-triton-") as folder:
            inputs = Path(folder) / "inputs.json"
            for place, model in enumerate(models):
                config = _read_config(stack.artifact, model)
                subject = Subject(
                    model,
                    inputs,
                    stack.triton_grpc_url,
                    keys,
                    is_decoupled=config.model_transaction_policy.decoupled,
                    is_sequence=config.HasField("sequence_batching"),
                    is_bulky=model in _BULKY,
                )
                about = measured[model] = {"kind": _kind(config), "concurrency": {}, "rate": {}}
                most = 0.0
                for level in (
                    *(Level(concurrency=count) for count in concurrency),
                    *(Level(load=load) for load in loads),
                ):
                    if level.load is not None and not most:
                        continue  # nothing is known of a model that never answered
                    level = level.of(most)
                    say(f"{model} ({place + 1} of {len(models)}): {level}")
                    kind = "concurrency" if level.rate is None else "rate"
                    try:
                        write_inputs(model, stack.artifact, inputs, next(numbers))
                        each = _measure(
                            subject, analyzer, level, long_enough_ms(level.rate or most, window_ms), concurrency
                        )
                    except PerfError as error:
                        each = {"failed": str(error)}
                        result["failed"] = str(error)
                    about[kind][str(level.concurrency or f"{level.rate:g}")] = each
                    if level.rate is None:
                        most = max(most, each.get("requests_per_s", 0.0))
                    keep(result)
    except KeyboardInterrupt:
        result["interrupted"] = True
    return _table(measured), result


def _measure(
    subject: Subject, analyzer: Analyzer, level: Level, window_ms: int, concurrency: Sequence[int]
) -> dict[str, Any]:
    """Of a model slower than was known, once more with the longest windows."""
    try:
        return subject.measure(analyzer, level, window_ms, max(concurrency))
    except PerfError as error:
        if _TOO_SHORT not in str(error) or window_ms >= _LONGEST_WINDOW_MS:
            raise
        return subject.measure(analyzer, level, _LONGEST_WINDOW_MS, max(concurrency))


def long_enough_ms(rate: float, window_ms: int) -> int:
    """A window of at least `window_ms` in which about `_LEAST_REQUESTS` fall, `rate` a second (0: not known)."""
    if rate <= 0:
        return window_ms
    return max(window_ms, min(_LONGEST_WINDOW_MS, round(_LEAST_REQUESTS / rate * 1000)))


def _read_config(artifact: Path, model: str) -> Any:
    text = (artifact / "model_repository" / model / "config.pbtxt").read_text(encoding="utf-8")
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def _kind(config: Any) -> str:
    if config.HasField("ensemble_scheduling"):
        return "ensemble"
    if config.HasField("sequence_batching"):
        return "sequences"
    return "decoupled" if config.model_transaction_policy.decoupled else "plain"


def _table(measured: dict[str, dict[str, Any]]) -> str:
    rows: list[tuple[object, ...]] = []
    for model, about in measured.items():
        for kind, unit in (("concurrency", "at once"), ("rate", "a second")):
            for level, each in about[kind].items():
                name = f"{model}, {level} {unit}"
                if "failed" in each:
                    rows.append((name, "failed", "", "", "", ""))
                    continue
                first = each.get("first_response_ms", {}).get("p50", "")
                points = (each["ms"]["p50"], each["ms"]["p99"])
                rows.append((name, each["requests_per_s"], *points, first, "yes" if each["stable"] else "no"))
    return format_table(("model and load", "requests/s", "p50 ms", "p99 ms", "first response", "stable"), rows)
