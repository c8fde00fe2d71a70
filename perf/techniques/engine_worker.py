"""A worker: target cpu's stepper alone. `python -m perf.techniques.engine_worker MODEL_FOLDER CHANGES`

CHANGES is a JSON object of engine parameters, and `warm_up` (false: without). A request holds groups, each begun when
the one before has ended; in a group each prompt comes at its time:

{"groups": [[{"ids": [token id, ...], "max_tokens": n, "after_s": s}, ...], ...]}
→ {"seconds": s, "answers": [{"sent_s": s, "ids": [token id, ...], "times_s": [s, ...]}, ...], "peak_mib": m}

Times count from the request's begin; `times_s` has one for each token. Answers are greedy, and `max_tokens` long.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from orchestrator.engines import EngineRequest, Stepper
from orchestrator.engines.openvino import OpenVINOStepper
from perf.bare_engine import read_parameters
from perf.errors import PerfError
from perf.worker import answer_requests


class Unwarmed(OpenVINOStepper):
    def warm_up(self) -> None:
        pass


def load(folder: Path, changes: dict[str, Any]) -> OpenVINOStepper:
    kind = OpenVINOStepper if changes.pop("warm_up", True) else Unwarmed
    return kind.load(folder / "1", {**read_parameters(folder), **{name: str(value) for name, value in changes.items()}})


def run(stepper: Stepper, groups: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Raises `PerfError` when the engine fails."""
    begun_s = time.monotonic()
    answers: list[dict[str, Any]] = []
    for group in groups:
        answers += _run_group(stepper, group, begun_s)
    seconds = time.monotonic() - begun_s
    return {
        "seconds": seconds,
        "answers": answers,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def _run_group(stepper: Stepper, group: list[dict[str, Any]], begun_s: float) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = [{"ids": [], "times_s": []} for _ in group]
    waiting = deque(sorted(range(len(group)), key=lambda place: group[place]["after_s"]))
    group_begun_s = time.monotonic()
    while waiting or stepper.has_requests():
        while waiting and time.monotonic() - group_begun_s >= group[waiting[0]]["after_s"]:
            place = waiting.popleft()
            answers[place]["sent_s"] = time.monotonic() - begun_s
            stepper.add(EngineRequest(str(place), group[place]["ids"], group[place]["max_tokens"]))
        if not stepper.has_requests():
            time.sleep(0.001)
            continue
        chunks = stepper.step()
        at_s = time.monotonic() - begun_s
        for name, chunk in chunks.items():
            if chunk.error is not None:
                raise PerfError(f"the engine failed: {chunk.error}")
            answers[int(name)]["ids"] += chunk.token_ids
            answers[int(name)]["times_s"] += [at_s] * len(chunk.token_ids)
    return answers


def main() -> None:
    stepper = load(Path(sys.argv[1]), json.loads(sys.argv[2]))
    answer_requests(lambda request: run(stepper, request["groups"]))


if __name__ == "__main__":
    main()
