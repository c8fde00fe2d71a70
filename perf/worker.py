"""Load in a process of its own, so that our interpreter lock and memory are no part of what is measured.

A worker answers one JSON line on stdin with one on stdout. Between two it blocks in a read and costs
nothing. It ends when its stdin ends, also when we die.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from perf.errors import PerfError

_END_TIMEOUT_S = 10.0


class Worker:
    """`PYTHON -m MODULE ARGUMENTS`, which calls `answer_requests`. A context manager."""

    def __init__(self, module: str, *arguments: str, python: str = sys.executable) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [python, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is ours; the worker hears of it by the end of its stdin
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The worker's answer. Raises `PerfError` when it ended; its stderr, which is ours, says why."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self._process.stdout.readline()
        if not line:
            raise PerfError(f"{self._module}: ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def answer_requests(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The worker's side: call `answer` for every line until stdin ends."""
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
