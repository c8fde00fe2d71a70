"""The three sides, each with the GPU to itself: AsyncLLM alone, vLLM's own server, the whole stack."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from orchestrator.engines.process import PYTHON_VARIABLE
from orchestrator.engines.vllm import Settings, engine_arguments
from perf.errors import PerfError
from perf.gpu.rows import ENGINE
from perf.processes import descendants, processor_s, stop
from perf.report import say
from perf.stack import Stack, running_stack
from perf.worker import Worker

READY_TIMEOUT_S = 400.0
SERVED_MODEL = "model"
# A part of a process's command line says what it is; the first that fits counts.
ROLES = {
    "engine's core": "VLLM::EngineCore",
    "engine's process": "orchestrator.engines.worker",
    "engine model": f"/{ENGINE}/",
    "orchestrator": "/orchestrator/1/",
    "gateway": "orchestrator.gateway",
    "triton": "tritonserver",
}


def read_parameters(artifact: Path) -> dict[str, str]:
    """The engine's parameters, as the engine model gives them to its process."""
    path = artifact / "model_repository" / ENGINE / "config.pbtxt"
    config = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    parameters.pop("exclude_input_in_output")
    return {**parameters, "max_batch_size": str(config.max_batch_size)}


@contextmanager
def bare(artifact: Path) -> Iterator[Worker]:
    """AsyncLLM alone, loaded: a worker of `perf.gpu.bare`."""
    say(f"starting AsyncLLM alone for {artifact.name}")
    started_s = time.monotonic()
    folder = artifact / "model_repository" / ENGINE
    with Worker("perf.gpu.bare", str(folder), python=os.environ.get(PYTHON_VARIABLE) or "python3") as worker:
        worker.ask({"parameters": read_parameters(artifact)})
        say(f"  ready after {time.monotonic() - started_s:.0f} s")
        yield worker


@contextmanager
def own_server(artifact: Path, log: Path) -> Iterator[str]:
    """vLLM's own OpenAI server with the same engine; its URL."""
    say(f"starting vLLM's own server for {artifact.name}")
    started_s = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = Settings.model_validate(read_parameters(artifact))
    arguments = engine_arguments(settings, artifact / "model_repository" / ENGINE / "1")
    command = [
        *(os.environ.get(PYTHON_VARIABLE) or "python3", "-m", "vllm.entrypoints.openai.api_server"),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED_MODEL),
        "--disable-uvicorn-access-log",
        *to_flags(arguments),
    ]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as sink:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _is_healthy(url):
            if server.poll() is not None:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
                raise PerfError(f"vLLM's own server ended with exit code {server.returncode}:\n{tail}")
            if time.monotonic() - started_s > READY_TIMEOUT_S:
                raise PerfError(f"vLLM's own server was not ready after {READY_TIMEOUT_S:.0f} s; see {log}")
            time.sleep(0.2)
        say(f"  ready after {time.monotonic() - started_s:.0f} s")
        yield url
    finally:
        stop(server, 20)
        _wait_for_memory()


def to_flags(arguments: dict[str, Any]) -> list[str]:
    """vLLM's command line for `AsyncEngineArgs`' arguments. `disable_log_stats` has no opposite there."""
    words = []
    for key, value in arguments.items():
        flag = f"--{key.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(f"--no-{key.replace('_', '-')}")
        elif isinstance(value, dict):
            words += [flag, json.dumps(value)]
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        elif value is not None:
            words += [flag, str(value)]
    return words


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


@contextmanager
def whole_stack(artifact: Path, logs: Path, gateway_workers: int) -> Iterator[Stack]:
    """`python -m orchestrator serve`, ready."""
    started_s = time.monotonic()
    flags = (f"--gateway-workers={gateway_workers}",)
    with running_stack(artifact, *flags, logs=logs, ready_timeout_s=READY_TIMEOUT_S) as stack:
        say(f"  ready after {time.monotonic() - started_s:.0f} s")
        yield stack
    _wait_for_memory()


@contextmanager
def sse_load(url: str, model: str) -> Iterator[Worker]:
    """A worker of `perf.gpu.load`, with the Python that runs this."""
    with Worker("perf.gpu.load", url, model) as worker:
        yield worker


def processor_us(stack: Stack) -> dict[str, float]:
    """Processor time so far of the processes of each role, in microseconds."""
    spent = dict.fromkeys(ROLES, 0.0)
    for process in descendants(stack.serve_pid):
        try:
            command = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
            role = next((role for role, part in ROLES.items() if part in command), None)
            if role is not None:
                spent[role] += processor_s(process) * 1e6
        except OSError:  # it has just ended
            continue
    return spent


def _wait_for_memory(timeout_s: float = 20.0) -> None:
    """Until the GPU's memory is given back, which takes a moment after a process was killed: it falls no more."""
    deadline_s = time.monotonic() + timeout_s
    used = gpu_facts().get("memory_used_mib", 0)
    while time.monotonic() < deadline_s:
        time.sleep(1)
        before, used = used, gpu_facts().get("memory_used_mib", 0)
        if used >= before:
            return


def gpu_facts() -> dict[str, Any]:
    """Card, driver and memory as nvidia-smi says them; empty where there is none."""
    query = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return {}
    cards = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    name, driver, total, _ = cards[0]
    used = max(int(card[3]) for card in cards)
    return {"cards": len(cards), "card": name, "driver": driver, "memory_mib": int(total), "memory_used_mib": used}


def card_name() -> str:
    """As targets have it, say `h200`; `none` without a GPU."""
    found = re.match(r"NVIDIA (\w+)", gpu_facts().get("card", ""))
    return found[1].lower() if found else "none"


def memory_bytes_per_s() -> float | None:
    """Of the GPU, measured now; None where there is none."""
    if not gpu_facts():
        return None
    command = (os.environ.get(PYTHON_VARIABLE) or "python3", "-m", "perf.gpu.bandwidth")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0:
        raise PerfError(f"perf.gpu.bandwidth ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return float(done.stdout)


def versions() -> dict[str, str]:
    """Of what runs on the engine's side, asked in its own Python."""
    names: Sequence[str] = ("vllm", "torch", "transformers", "numpy")
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {list(names)!r}}}))"
    python = os.environ.get(PYTHON_VARIABLE) or sys.executable
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    found: dict[str, str] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found
