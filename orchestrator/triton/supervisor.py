"""`python -m orchestrator serve`: Triton, gateway and gRPC front as children, started, watched and stopped in order.

Check artifact, machine and ports; start Triton, wait until it is ready; the same with the two before it; watch.
A signal: gateway and front drain and end, then Triton, and `serve` returns.
A dead child: the others end, and `ChildDied` shows the last lines of the dead one's log.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config import ConfigError
from orchestrator.limits.keys import KEYS_VARIABLE, read_keys
from orchestrator.local_socket import SOCKETS_VARIABLE
from orchestrator.quality import FOLDER_VARIABLE
from orchestrator.triton.artifact import Artifact, open_artifact
from orchestrator.triton.doctor import check_health
from orchestrator.triton.front import FrontOptions, is_loopback
from orchestrator.triton.ports import LOOPBACK, Ports, settle
from orchestrator.triton.process import POLL_INTERVAL_S, Child, Cleaner, StartError
from orchestrator.triton.ranks import choose_ranks, start_with
from orchestrator.triton.server import TritonInstall, TritonLaunch, find_triton, launch, shell_safe

READY_FILE = "serve.json"
# After one child died, the others' streams have lost what they need; it only has to tell its clients.
_FAILURE_DRAIN_S = 5.0
# Triton ends its in-flight requests itself after --exit-timeout-secs; this much later it counts as stuck.
_EXIT_MARGIN_S = 5.0
_PROBE_TIMEOUT_S = 2.0
# gRPC's newer event engine hands each message to a thread of its own: of what a token costs the orchestrator a quarter,
# measured with grpcio 1.85 by `perf token-path`.
_GRPC_EXPERIMENTS = "-event_engine_client,-event_engine_listener"
# Far above what loading the largest engine from a cold disk takes; a stub that cannot start says nothing at all.
START_TIMEOUT_S = 600.0


class ChildDied(StartError):
    """Triton, the gateway or the gRPC front ended although nobody asked it to."""


@dataclass(frozen=True)
class ServeOptions:
    """What `serve` was asked for. A port of 0 becomes a free one; `run_dir` takes logs and `serve.json`.

    `keys` is the file of API keys. `backend_directory` holds Triton backends beside those of the installation.
    `allowed_hosts` and `allowed_origins` are whom the gateway answers beside its own address and its own pages.
    """

    artifact: Path
    run_dir: Path
    host: str = LOOPBACK
    front: FrontOptions = FrontOptions()
    ports: Ports = Ports()
    drain_timeout_s: float = 30.0
    gateway_workers: int = 1
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    keys: Path | None = None
    backend_directory: Path | None = None

    def check_keys(self) -> None:
        """Raises `StartError` when the keys cannot be used, or when there are none and strangers could call."""
        if self.keys is not None:
            try:
                read_keys(self.keys)
            except ConfigError as error:
                raise StartError(str(error)) from error
            return
        for flag, host in (("--host", self.host), ("--grpc-front-host", self.front.host)):
            if not is_loopback(host):
                raise StartError(
                    f"{flag} {host}: without keys everybody who reaches this machine could call\n"
                    "fix: python -m orchestrator keys add --keys keys.json --tenant NAME, then "
                    f"serve {flag} {host} --keys keys.json; or listen on {LOOPBACK}"
                )


@dataclass(frozen=True)
class ServeFacts:
    """What is running, for people (`announce`) and for programs (`serve.json`)."""

    triton: TritonInstall
    host: str
    front_host: str
    ports: Ports
    run_dir: Path

    def log(self, child: str) -> Path:
        return self.run_dir / f"{child}.log"

    @property
    def gateway_url(self) -> str:
        return f"http://{_reachable(self.host)}:{self.ports.gateway}"

    @property
    def grpc_front_url(self) -> str:
        return f"{_reachable(self.front_host)}:{self.ports.grpc_front}"

    def as_json(self) -> str:
        facts = {
            "pid": os.getpid(),
            "triton": str(self.triton.binary),
            "gateway_url": self.gateway_url,
            "grpc_front_url": self.grpc_front_url,
            "triton_http_url": f"http://{LOOPBACK}:{self.ports.triton_http}",
            "triton_grpc_url": f"{LOOPBACK}:{self.ports.triton_grpc}",
            "triton_metrics_url": _triton_metrics_url(self.ports),
            "logs": {child: str(self.log(child)) for child in ("triton", "gateway", "grpc_front")},
        }
        return json.dumps(facts, indent=2) + "\n"

    def announce(self) -> str:
        question = [{"role": "user", "content": "Why is the sky blue?"}]
        body = json.dumps({"model": "auto", "stream": True, "messages": question})
        return f"""\
ready
  gateway   {self.gateway_url}/v1
  gRPC      {self.grpc_front_url}  (model `orchestrator`, ModelStreamInfer)
  metrics   {self.gateway_url}/metrics
  logs      {self.log("triton")}
            {self.log("gateway")}
            {self.log("grpc_front")}
try it:
  curl -N {self.gateway_url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{body}'"""


def _reachable(host: str) -> str:
    """An address to connect to what listens on `host`, as URLs write it."""
    host = LOOPBACK if host in ("0.0.0.0", "::") else host
    return f"[{host}]" if ":" in host else host


def serve(options: ServeOptions) -> None:
    """Run Triton, the gateway and the gRPC front until SIGTERM or SIGINT; a second signal ends all at once.

    Writes logs, `serve.json` (while ready) and Triton's backend folder into `options.run_dir`, which is made.
    Raises `StartError` when something keeps it from starting, `ChildDied` when a child ends by itself.
    """
    with Signals() as signals:
        artifact = open_artifact(options.artifact)
        install = find_triton(os.environ.get("PATH", os.defpath))
        check_health(artifact, install, options.backend_directory)
        options.front.check()
        options.check_keys()
        ports = settle(options.ports, options.host, options.front.host)
        _say(f"serving {artifact.root} (target {artifact.target})")
        _say(f"Triton: {install.binary} (found in {install.source})")
        if options.front.warning:
            _say(options.front.warning)
        run_dir = options.run_dir.resolve()
        run_dir.mkdir(parents=True, exist_ok=True)
        facts = ServeFacts(install, options.host, options.front.host, ports, run_dir)
        with Cleaner() as cleaner, shell_safe(artifact.root) as root, shell_safe(run_dir) as backends_dir:
            environ = {
                "GRPC_EXPERIMENTS": _GRPC_EXPERIMENTS,
                **os.environ,
                SOCKETS_VARIABLE: f"/dev/shm/{cleaner.shm_prefix}",
            }
            triton = launch(
                install,
                model_repository=root / artifact.model_repository.relative_to(artifact.root),
                ports=ports,
                backends_dir=backends_dir / "backends",
                shm_prefix=cleaner.shm_prefix,
                restricted_key=secrets.token_urlsafe(),
                exit_timeout_s=math.ceil(options.drain_timeout_s),
                environ={
                    **environ,
                    KEYS_VARIABLE: str(options.keys.absolute()) if options.keys else "",
                    FOLDER_VARIABLE: str(run_dir),
                },
                more_backends=options.backend_directory,
            )
            triton = start_with(triton, choose_ranks(artifact.manifest.trtllm_engines), cleaner.shm_prefix)
            gateway = gateway_command(artifact, options, ports, run_dir)
            front = options.front.command(artifact.root, ports, options.drain_timeout_s)
            supervise(triton, gateway, front, environ, facts, options.drain_timeout_s, signals, cleaner)


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
        *(("--with-keys",) if options.keys else ()),
        *(f"--allow-host={name}" for name in options.allowed_hosts),
        *(f"--allow-origin={origin}" for origin in options.allowed_origins),
        *("--drain-timeout-s", str(math.ceil(options.drain_timeout_s))),
    )


def _triton_metrics_url(ports: Ports) -> str:
    return f"http://{LOOPBACK}:{ports.triton_metrics}/metrics"


def supervise(
    triton: TritonLaunch,
    gateway: Sequence[str],
    front: Sequence[str],
    environ: Mapping[str, str],
    facts: ServeFacts,
    drain_timeout_s: float,
    signals: Signals,
    cleaner: Cleaner,
) -> None:
    """Start the children, tell when they are ready, wait for a signal or a death, leave nothing running.

    `environ` is that of gateway and front.
    """
    steps = (
        ("triton", triton.command, triton.env, _probe(LOOPBACK, facts.ports.triton_http, "/v2/health/ready")),
        ("gateway", gateway, environ, _probe(facts.host, facts.ports.gateway, "/ready")),
        # It listens as soon as it serves, and Triton is ready by then.
        ("grpc_front", front, environ, lambda: _accepts(facts.front_host, facts.ports.grpc_front)),
    )
    children: list[Child] = []
    ready_file = facts.run_dir / READY_FILE
    drain_limit_s = _FAILURE_DRAIN_S
    try:
        for name, command, env, is_ready in steps:
            if signals.count:
                break
            folder = triton.folder if name == "triton" else None
            children.append(Child(name, command, facts.log(name), env, folder))
            cleaner.watch(children[-1])
            _watch(children, signals, until=is_ready, timeout_s=START_TIMEOUT_S)
            if name == "triton":  # the gateway replaces a worker that died
                children[-1].needs_its_children(triton.generations)
        if not signals.count:
            _write_atomically(ready_file, facts.as_json())
            _say(facts.announce())
        _watch(children, signals)
        drain_limit_s = drain_timeout_s + _EXIT_MARGIN_S
        _say("stopping: gateway and gRPC front drain, then Triton ends (signal again to stop at once)")
    finally:
        ready_file.unlink(missing_ok=True)
        # Triton last: the others take new requests and finish those they have. They drain at the same time.
        for child in children[1:]:
            child.ask_to_end()
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


def _watch(
    children: Sequence[Child],
    signals: Signals,
    until: Callable[[], bool] = lambda: False,
    timeout_s: float = math.inf,
) -> None:
    """Wait for `until()` or for a signal. Raises `ChildDied` as soon as a child ends, `StartError` in vain."""
    deadline_s = time.monotonic() + timeout_s
    while not signals.count:
        if time.monotonic() > deadline_s:
            name, log = children[-1].name, children[-1].log
            raise StartError(f"{name} was not ready within {timeout_s:.0f} s; its log says how far it came: {log}")
        for child in children:
            if fate := child.fate():
                raise ChildDied(fate)
            child.rotate_log()
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


def _accepts(host: str, port: int) -> bool:
    """Whether something accepts connections there."""
    try:
        socket.create_connection((host, port), timeout=_PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _write_atomically(path: Path, text: str) -> None:
    draft = path.with_suffix(".tmp")
    draft.write_text(text)
    draft.replace(path)


def _say(text: str) -> None:
    print(text, flush=True)
