"""The system under measurement: `python -m orchestrator serve` on free ports, started and always stopped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config import Tier, load_tiers
from orchestrator.inference_key import GRPC_PREFIX, INFERENCE_KEY_METADATA
from orchestrator.streaming.tokenizer import ChatTokenizer
from perf.errors import PerfError
from perf.processes import descendants, stop
from perf.report import say

READY_TIMEOUT_S = 120.0
_POLL_INTERVAL_S = 0.05
_DRAIN_TIMEOUT_S = 5.0
# `serve` ends its children in order: drain time for the gateway, then for Triton, with its own margins.
_STOP_TIMEOUT_S = 30.0
_HURRY_TIMEOUT_S = 5.0
_LOG_TAIL_LINES = 20


@dataclass(frozen=True)
class Stack:
    """What is running. `triton_grpc_url` and `grpc_front_url` are host:port, as gRPC wants it."""

    artifact: Path
    gateway_url: str
    grpc_front_url: str
    triton_grpc_url: str
    triton_metrics_url: str
    triton_log: Path
    serve_pid: int

    def replicas(self) -> list[dict[str, Any]]:
        """What `serve.json` says of each Triton now (`orchestrator.triton.fleet.Replica.facts`)."""
        facts: dict[str, Any] = json.loads((self.triton_log.parent / "serve.json").read_text(encoding="utf-8"))
        replicas: list[dict[str, Any]] = facts["replicas"]
        return replicas

    def triton_keys(self) -> dict[str, str]:
        """As `triton_keys_below`."""
        return triton_keys_below(self.serve_pid)

    def inference_key(self) -> str:
        return self.triton_keys()[INFERENCE_KEY_METADATA]

    @property
    def tier(self) -> Tier:
        """The cheapest one, which is asked."""
        return load_tiers(self.artifact / "tiers.toml").tier[0]

    def load_tokenizer(self) -> ChatTokenizer:
        if self.tier.tokenizer is None:
            raise PerfError(f"tier {self.tier.name!r} is a cloud tier; the cheapest must be an engine's to be measured")
        return ChatTokenizer.load(self.artifact / self.tier.tokenizer)


def triton_keys_below(serve_pid: int) -> dict[str, str]:
    """What opens the Triton below `serve_pid`, as gRPC metadata, out of its command line.

    Raises `PerfError` when there is no such Triton.
    """
    for pid in descendants(serve_pid):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        keys = [
            argument.rpartition(":")[2].split("=", 1)
            for argument in arguments
            if argument.startswith("--grpc-restricted-protocol=")
        ]
        if keys:
            return {GRPC_PREFIX + name: key for name, key in keys}
    raise PerfError(f"serve, process {serve_pid}: no Triton with locked APIs below it")


def find_artifact(artifacts: Path, target: str) -> Path:
    """The built artifact of `target` below `artifacts`; raises `PerfError` with the command that makes it."""
    artifact = artifacts / target
    if not (artifact / "manifest.json").is_file():
        raise PerfError(f"{artifact}: no finished artifact here\nfix: python -m build --target {target}")
    return artifact


def served_stack(artifact: Path, run_dir: Path) -> Stack:
    """What a `serve` of `artifact` with that `--run-dir` runs; raises `PerfError` when there is none."""
    ready_file = run_dir / "serve.json"
    if not ready_file.exists():
        raise PerfError(
            f"{ready_file}: not there, so nothing is served from {run_dir}\nfix: scripts/serve --background"
        )
    facts = json.loads(ready_file.read_text(encoding="utf-8"))
    return Stack(
        artifact,
        facts["gateway_url"],
        facts["grpc_front_url"],
        facts["triton_grpc_url"],
        facts["triton_metrics_url"],
        Path(facts["replicas"][0]["log"]),
        facts["pid"],
    )


@contextmanager
def running_stack(
    artifact: Path,
    *more_flags: str,
    logs: Path | None = None,
    ready_timeout_s: float = READY_TIMEOUT_S,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Stack]:
    """Serve `artifact` until the block ends, however it ends. With `logs` its logs are kept in that folder.

    `environ` is what its environment has beside ours.

    Raises `PerfError` with the last lines of `serve`'s output when it does not become ready.
    """
    with tempfile.TemporaryDirectory(prefix="perf-") as folder:
        run_dir = Path(folder)
        flags = ("--port", "--triton-http-port", "--triton-grpc-port", "--triton-metrics-port", "--grpc-front-port")
        command = [
            *(sys.executable, "-m", "orchestrator", "serve", str(artifact)),
            *(f"{flag}=0" for flag in flags),
            f"--run-dir={run_dir}",
            f"--drain-timeout-s={_DRAIN_TIMEOUT_S}",
            *more_flags,
        ]
        say(f"starting {artifact}")
        with (run_dir / "serve.log").open("wb") as log:
            # In a session of its own Ctrl-C does not reach it: it is stopped once, in order, below.
            serve = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **(environ or {})},
            )
        try:
            yield _wait_until_ready(serve, artifact, run_dir, ready_timeout_s)
            _check_running(serve, run_dir)
        finally:
            stop(serve, _STOP_TIMEOUT_S, _HURRY_TIMEOUT_S)  # the second SIGTERM tells it to hurry
            if logs is not None:
                logs.mkdir(parents=True, exist_ok=True)
                for log_file in run_dir.glob("*.log"):
                    shutil.copyfile(log_file, logs / log_file.name)


def _wait_until_ready(serve: subprocess.Popen[bytes], artifact: Path, run_dir: Path, timeout_s: float) -> Stack:
    ready_file = run_dir / "serve.json"
    deadline_s = time.monotonic() + timeout_s
    while not ready_file.exists():
        _check_running(serve, run_dir)
        if time.monotonic() > deadline_s:
            raise PerfError(f"{artifact}: not ready after {timeout_s:.0f} s")
        time.sleep(_POLL_INTERVAL_S)
    return served_stack(artifact, run_dir)


def _check_running(serve: subprocess.Popen[bytes], run_dir: Path) -> None:
    if serve.poll() is not None:
        lines = (run_dir / "serve.log").read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(lines[-_LOG_TAIL_LINES:])
        raise PerfError(f"serve ended with exit code {serve.returncode}; its last lines:\n{tail}")
