"""A running server as server tests see it: its gateway over HTTP, its Triton over gRPC, its metrics and logs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import pytest
import tritonclient.grpc as triton
from standins.dress import dress, write_machine

from build.rows import load_target
from orchestrator.inference_key import INFERENCE_KEY_METADATA
from perf.stack import triton_keys_below

ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 180.0
CHAT_PATH = "/v1/chat/completions"
PORTS = ("port", "triton-http-port", "triton-grpc-port", "triton-metrics-port", "grpc-front-port")
# A GPU target in whose artifact, behind stand-ins, the shared servers run their engines (`scripts/test --all`).
TARGET = os.environ.get("TRITON_REALTIME_TEST_TARGET")
# Why a test of guided decoding is not one of a GPU target's.
NO_GUIDES = "no guided decoding there: NVIDIA's xgrammar needs a file that nothing makes yet"
# Triton hands a request to any instance of a model, also one that stops another: that is then cancelled a little later.
one_instance = pytest.mark.skipif(
    load_target(TARGET or "scripted").models["llm_small"].instance_count > 1,
    reason=f"target {TARGET}: several instances of the engine, which do not know of each other's requests",
)
T = TypeVar("T")


def wait_for(what: Callable[[], T], timeout_s: float = 10.0) -> T:
    """What `what` returns once that is true; fails when it is not in time."""
    deadline_s = time.monotonic() + timeout_s
    while not (result := what()):
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s in vain"
        time.sleep(0.01)
    return result


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def script(**fields: Any) -> list[dict[str, str]]:
    """Messages that tell the scripted engine what to do."""
    return ask(f"#script {json.dumps(fields, ensure_ascii=False)}")


@dataclass
class Answer:
    """One streamed answer: its events, and when each came (in seconds from the request)."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)
    is_done: bool = False
    error: dict[str, Any] | None = None

    @property
    def deltas(self) -> list[str]:
        choices = [choice for event in self.events for choice in event["choices"]]
        return [choice["delta"]["content"] for choice in choices if choice["delta"].get("content")]

    @property
    def text(self) -> str:
        return "".join(self.deltas)

    @property
    def finish_reason(self) -> str | None:
        choices = [choice for event in self.events for choice in event["choices"]]
        return choices[-1]["finish_reason"] if choices else None

    @property
    def rt(self) -> dict[str, Any]:
        return self.events[-1]["rt"]


class Stack:
    """`python -m orchestrator serve` on free ports."""

    def __init__(self, process: subprocess.Popen[str], facts: dict[str, Any]) -> None:
        self.process = process
        self.facts = facts
        self.url: str = facts["gateway_url"]
        self.grpc_url: str = facts["triton_grpc_url"]
        self.front_url: str = facts["grpc_front_url"]
        # What is asked is generated: only tests of the cache, which have clients of their own, want stored answers.
        self._http = httpx.Client(base_url=self.url, timeout=30.0, headers={"cache-control": "no-store"})

    # --- Triton itself ---

    @property
    def inference_key(self) -> str:
        return triton_keys_below(self.process.pid)[INFERENCE_KEY_METADATA]

    def triton_client(self) -> triton.InferenceServerClient:
        """Of Triton's own port, with the key of inference."""
        client = triton.InferenceServerClient(self.grpc_url)
        headers = {INFERENCE_KEY_METADATA: self.inference_key}
        client.register_plugin(lambda request: request.headers.update(headers))
        return client

    # --- requests ---

    def get(self, path: str) -> httpx.Response:
        return self._http.get(path)

    def post(self, **fields: Any) -> httpx.Response:
        """A whole answer."""
        return self._http.post(CHAT_PATH, json=fields)

    def stream(self, **fields: Any) -> Answer:
        """A streamed answer, read to its end."""
        answer = Answer()
        started_s = time.monotonic()
        with self._http.stream("POST", CHAT_PATH, json={"stream": True, **fields}) as response:
            answer.status, answer.headers = response.status_code, dict(response.headers)
            if response.status_code != 200:
                answer.error = json.loads(response.read())["error"]
                return answer
            for line in response.iter_lines():
                if not line:
                    continue
                assert line.startswith("data: ") and not answer.is_done, line
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    answer.is_done = True
                elif "error" in (event := json.loads(data)):
                    answer.error = event["error"]
                else:
                    answer.came_s.append(time.monotonic() - started_s)
                    answer.events.append(event)
        return answer

    def connect(self) -> socket.socket:
        """A bare connection to the gateway."""
        address = urlsplit(self.url)
        return socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=10)

    def send(self, **fields: Any) -> socket.socket:
        """Send a request over a bare connection; the caller reads, or leaves."""
        body = json.dumps(fields).encode()
        connection = self.connect()
        connection.sendall(
            f"POST {CHAT_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        return connection

    # --- what the server says of itself ---

    def metric(self, name: str) -> float:
        """A sample without labels on the gateway's metrics page."""
        found = re.search(rf"^{name} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        assert found, name
        return float(found[1])

    def model_metric(self, name: str, model: str) -> float:
        """The sample `NAME{model="MODEL"}` of Triton's metrics page."""
        page = httpx.get(self.facts["triton_metrics_url"], timeout=10).text
        found = re.search(rf'^{name}{{[^}}]*model="{model}"[^}}]*}} (\S+)$', page, re.MULTILINE)
        assert found, page
        return float(found[1])

    def num_live(self, model: str) -> int:
        """Requests that `model` has taken in and not ended."""
        return int(self.model_metric("rt_live_requests", model))

    def wait_until_idle(self, timeout_s: float = 5.0) -> None:
        wait_for(lambda: self.num_live("orchestrator") == self.num_live("llm_small") == 0, timeout_s)

    def log(self, name: str = "triton") -> str:
        return Path(self.facts["logs"][name]).read_text(errors="replace")

    def log_length(self) -> int:
        return len(self.log())

    def logged(self, event: str, since: int = 0) -> list[dict[str, Any]]:
        """The log lines of one event, from the length `since` of the log on."""
        lines = [line for line in self.log()[since:].splitlines() if line.startswith("{")]
        return [line for line in map(json.loads, lines) if line.get("event") == event]

    def wait_for_log(self, event: str, since: int, timeout_s: float = 5.0) -> dict[str, Any]:
        return wait_for(lambda: self.logged(event, since), timeout_s)[0]

    def log_tails(self) -> list[tuple[str, str]]:
        return [(f"{name}.log", self.log(name)[-4000:]) for name in self.facts["logs"]]

    # --- processes ---

    def process_ids(self, mark: str) -> list[int]:
        """The processes below `serve` whose command line holds `mark`."""
        return [pid for pid in _descendants(self.process.pid) if mark in _command(pid)]

    def process_id(self, mark: str) -> int:
        """The one of them that there must be."""
        (found,) = self.process_ids(mark)
        return found

    def kill(self, mark: str) -> None:
        os.kill(self.process_id(mark), signal.SIGKILL)

    def stop(self) -> None:
        self._http.close()
        self.process.terminate()
        try:
            self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise


# Starts a server: the target that tells the engine, a folder, flags of `serve`, and environment.
Start = Callable[..., AbstractContextManager[Stack]]


@contextmanager
def running(artifact: Path, run_dir: Path, *flags: str, **env: str) -> Iterator[Stack]:
    """A server of `artifact`, ready; stopped at the end."""
    ports = [f"--{name}=0" for name in PORTS]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "orchestrator", "serve", str(artifact)),
            *(f"--run-dir={run_dir}", "--drain-timeout-s=5", *ports, *flags),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )
    ready_file = run_dir / "serve.json"
    try:
        wait_for(lambda: ready_file.exists() or process.poll() is not None, START_TIMEOUT_S)
        assert process.poll() is None, process.communicate()
        stack = Stack(process, json.loads(ready_file.read_text()))
    except BaseException:
        process.kill()
        process.communicate()
        raise
    try:
        yield stack
    finally:
        stack.stop()


@contextmanager
def running_rendered(target: str, source: Path, folder: Path, *flags: str, **env: str) -> Iterator[Stack]:
    """A server of a GPU target's configurations, behind stand-ins for NVIDIA's parts; engines as in artifact `source`.

    Everything is made in `folder`.
    """
    artifact = folder / target
    command = [sys.executable, "-m", "build", "--target", target, "--render-only", "--output", str(artifact)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60, capture_output=True)
    with running_dressed(artifact, source, folder, *flags, **env) as stack:
        yield stack


@contextmanager
def running_dressed(artifact: Path, source: Path, folder: Path, *flags: str, **env: str) -> Iterator[Stack]:
    """The same of an artifact that is rendered already."""
    dress(artifact, source)
    for name, path in write_machine(folder / "machine", artifact).items():
        env[name] = f"{path}:{os.environ.get(name, '')}"
    backends = f"--backend-directory={ROOT / 'tests' / 'standins'}"
    with running(artifact, folder / "run", backends, *flags, **env) as stack:
        yield stack


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from _descendants(child)


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
