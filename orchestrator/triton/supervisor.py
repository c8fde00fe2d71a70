"""`python -m orchestrator serve`: Triton and the gateway as children, started, watched and stopped in order.

Check artifact, ports and Triton; start Triton, wait until it is ready; the same with the gateway; watch.
A signal: the gateway drains and ends, then Triton, and `serve` returns.
A dead child: the other one ends, and `ChildDied` shows the last lines of the dead one's log.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.triton.artifact import Artifact, check_artifact
from orchestrator.triton.ports import LOOPBACK, Ports, settle
from orchestrator.triton.process import POLL_INTERVAL_S, Child, Cleaner, StartError
from orchestrator.triton.server import TritonInstall, TritonLaunch, find_triton, launch

READY_FILE = "serve.json"
# After one child died, the other one's streams have lost what they need; it only has to tell its clients.
_FAILURE_DRAIN_S = 5.0
# Triton ends its in-flight requests itself after --exit-timeout-secs; this much later it counts as stuck.
_EXIT_MARGIN_S = 5.0
_PROBE_TIMEOUT_S = 2.0


class ChildDied(StartError):
    """Triton or the gateway ended although nobody asked it to."""


@dataclass(frozen=True)
class ServeOptions:
    """What `serve` was asked for. A port of 0 becomes a free one; `run_dir` takes logs and `serve.json`.

    `allowed_hosts` and `allowed_origins` are whom the gateway answers beside its own address and its own pages.
    """

    artifact: Path
    run_dir: Path
    host: str = LOOPBACK
    ports: Ports = Ports()
    drain_timeout_s: float = 30.0
    gateway_workers: int = 1
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServeFacts:
    """What is running, for people (`announce`) and for programs (`serve.json`)."""

    triton: TritonInstall
    host: str
    ports: Ports
    run_dir: Path

    def log(self, child: str) -> Path:
        return self.run_dir / f"{child}.log"

    @property
    def gateway_url(self) -> str:
        host = LOOPBACK if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.ports.gateway}"

    def as_json(self) -> str:
        facts = {
            "pid": os.getpid(),
            "triton": str(self.triton.binary),
            "gateway_url": self.gateway_url,
            "triton_http_url": f"http://{LOOPBACK}:{self.ports.triton_http}",
            "triton_grpc_url": f"{LOOPBACK}:{self.ports.triton_grpc}",
            "triton_metrics_url": _triton_metrics_url(self.ports),
            "logs": {"triton": str(self.log("triton")), "gateway": str(self.log("gateway"))},
        }
        return json.dumps(facts, indent=2) + "\n"

    def announce(self) -> str:
        question = [{"role": "user", "content": "Why is the sky blue?"}]
        body = json.dumps({"model": "auto", "stream": True, "messages": question})
        return f"""\
ready
  gateway   {self.gateway_url}/v1
  gRPC      {LOOPBACK}:{self.ports.triton_grpc}  (model `orchestrator`, ModelStreamInfer)
  metrics   {self.gateway_url}/metrics
  logs      {self.log("triton")}
            {self.log("gateway")}
try it:
  curl -N {self.gateway_url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{body}'"""


def serve(options: ServeOptions) -> None:
    """Run Triton and the gateway until SIGTERM or SIGINT; a second signal ends both at once.

    Writes logs, `serve.json` (while ready) and Triton's backend folder into `options.run_dir`, which is made.
    Raises `StartError` when something keeps it from starting, `ChildDied` when a child ends by itself.
    """
    with Signals() as signals:
        artifact = check_artifact(options.artifact)
        ports = settle(options.ports, options.host)
        install = find_triton(os.environ.get("PATH", os.defpath))
        _say(f"serving {artifact.root} (target {artifact.target})")
        _say(f"Triton: {install.binary} (found in {install.source})")
        run_dir = options.run_dir.resolve()
        run_dir.mkdir(parents=True, exist_ok=True)
        facts = ServeFacts(install, options.host, ports, run_dir)
        with Cleaner() as cleaner:
            triton = launch(
                install,
                model_repository=artifact.model_repository,
                ports=ports,
                run_dir=run_dir,
                shm_prefix=cleaner.shm_prefix,
                restricted_key=secrets.token_urlsafe(),
                exit_timeout_s=math.ceil(options.drain_timeout_s),
                environ=os.environ,
            )
            gateway = gateway_command(artifact, options, ports, run_dir)
            supervise(triton, gateway, facts, options.drain_timeout_s, signals, cleaner)


def gateway_command(artifact: Artifact, options: ServeOptions, ports: Ports, run_dir: Path) -> tuple[str, ...]:
    """The command line of the gateway, which reaches Triton by gRPC, and its metrics page."""
    return (
        *(sys.executable, "-m", "orchestrator.gateway"),
        *("--artifact", str(artifact.root)),
        *("--triton-grpc", f"{LOOPBACK}:{ports.triton_grpc}"),
        *("--triton-metrics", _triton_metrics_url(ports)),
        *("--host", options.host),
        *("--port", str(ports.gateway)),
        *("--workers", str(options.gateway_workers)),
        *("--metrics-dir", str(run_dir / "gateway-metrics")),
        *(f"--allow-host={name}" for name in options.allowed_hosts),
        *(f"--allow-origin={origin}" for origin in options.allowed_origins),
        *("--drain-timeout-s", str(math.ceil(options.drain_timeout_s))),
    )


def _triton_metrics_url(ports: Ports) -> str:
    return f"http://{LOOPBACK}:{ports.triton_metrics}/metrics"


def supervise(
    triton: TritonLaunch,
    gateway: Sequence[str],
    facts: ServeFacts,
    drain_timeout_s: float,
    signals: Signals,
    cleaner: Cleaner,
) -> None:
    """Start both children, tell when they are ready, wait for a signal or a death, leave nothing running."""
    steps = (
        ("triton", triton.command, triton.env, _probe(LOOPBACK, facts.ports.triton_http, "/v2/health/ready")),
        ("gateway", gateway, None, _probe(facts.host, facts.ports.gateway, "/ready")),
    )
    children: list[Child] = []
    ready_file = facts.run_dir / READY_FILE
    drain_limit_s = _FAILURE_DRAIN_S
    try:
        for name, command, env, is_ready in steps:
            if signals.count:
                break
            children.append(Child(name, command, facts.log(name), env))
            cleaner.watch(children[-1])
            _watch(children, signals, until=is_ready)
            if name == "triton":  # the gateway replaces a worker that died
                children[-1].needs_its_children()
        if not signals.count:
            _write_atomically(ready_file, facts.as_json())
            _say(facts.announce())
        _watch(children, signals)
        drain_limit_s = drain_timeout_s + _EXIT_MARGIN_S
        _say("stopping: the gateway drains, then Triton ends (signal again to stop at once)")
    finally:
        ready_file.unlink(missing_ok=True)
        # The gateway first: it is the one that takes new requests and finishes those it has.
        for child in reversed(children):
            child.stop(drain_limit_s, is_urgent=lambda: signals.count > 1)
    _say("stopped")


class Signals:
    """Counts SIGTERM and SIGINT while entered, instead of letting them end the process."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Signals:
        self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self.count += 1


def _watch(children: Sequence[Child], signals: Signals, until: Callable[[], bool] = lambda: False) -> None:
    """Wait for `until()` or for a signal. Raises `ChildDied` as soon as a child ends."""
    while not signals.count:
        for child in children:
            if fate := child.fate():
                raise ChildDied(fate)
        if until():
            return
        time.sleep(POLL_INTERVAL_S)


def _probe(host: str, port: int, path: str) -> Callable[[], bool]:
    """A question to an HTTP server: does `path` answer 200?"""

    def is_ready() -> bool:
        connection = http.client.HTTPConnection(host, port, timeout=_PROBE_TIMEOUT_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    return is_ready


def _write_atomically(path: Path, text: str) -> None:
    draft = path.with_suffix(".tmp")
    draft.write_text(text)
    draft.replace(path)


def _say(text: str) -> None:
    print(text, flush=True)
