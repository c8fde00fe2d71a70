"""The system under measurement: `python -m orchestrator serve` on free ports, started and always stopped."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config import Tier, load_tiers
from orchestrator.streaming.tokenizer import ChatTokenizer
from orchestrator.triton.process import POLL_INTERVAL_S, Child
from perf.errors import PerfError
from perf.report import say

_READY_TIMEOUT_S = 120.0
_DRAIN_TIMEOUT_S = 5.0
# `serve` ends its children in order: drain time for the gateway, then for Triton, with its own margins.
_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Stack:
    """What is running. `triton_grpc_url` is host:port, as gRPC wants it."""

    artifact: Path
    gateway_url: str
    triton_grpc_url: str
    triton_log: Path

    @property
    def tier(self) -> Tier:
        """The tier that the model "auto" stands for: the cheapest."""
        return load_tiers(self.artifact / "tiers.toml").tier[0]

    def load_tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer.load(self.artifact / self.tier.tokenizer)


def find_artifact(artifacts: Path, target: str) -> Path:
    """The built artifact of `target` below `artifacts`; raises `PerfError` with the command that makes it."""
    artifact = artifacts / target
    if not (artifact / "manifest.json").is_file():
        raise PerfError(f"{artifact}: no finished artifact here\nfix: python -m build --target {target}")
    return artifact


@contextmanager
def running_stack(artifact: Path) -> Iterator[Stack]:
    """Serve `artifact` until the block ends, however it ends.

    Raises `PerfError` with the last lines of `serve`'s output when it does not become ready.
    """
    with tempfile.TemporaryDirectory(prefix="perf-") as folder:
        run_dir = Path(folder)
        flags = ("--port", "--triton-http-port", "--triton-grpc-port", "--triton-metrics-port")
        command = [
            *(sys.executable, "-m", "orchestrator", "serve", str(artifact)),
            *(f"{flag}=0" for flag in flags),
            f"--run-dir={run_dir}",
            f"--drain-timeout-s={_DRAIN_TIMEOUT_S}",
        ]
        say(f"starting {artifact}")
        serve = Child("serve", command, run_dir / "serve.log")
        try:
            yield _wait_until_ready(serve, artifact, run_dir / "serve.json")
            if not serve.is_running():
                raise PerfError(serve.obituary())
        finally:
            serve.stop(_STOP_TIMEOUT_S)


def _wait_until_ready(serve: Child, artifact: Path, ready_file: Path) -> Stack:
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    while not ready_file.exists():
        if not serve.is_running():
            raise PerfError(serve.obituary())
        if time.monotonic() > deadline_s:
            raise PerfError(f"{artifact}: not ready after {_READY_TIMEOUT_S:.0f} s")
        time.sleep(POLL_INTERVAL_S)
    facts = json.loads(ready_file.read_text(encoding="utf-8"))
    return Stack(artifact, facts["gateway_url"], facts["triton_grpc_url"], Path(facts["logs"]["triton"]))
