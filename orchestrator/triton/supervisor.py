"""`python -m orchestrator serve`: Triton, gateway and gRPC front as children, started, watched and stopped in order.

Check artifact, machine and ports; start Triton, wait until it is ready; the same with the two before it; watch.
A signal: gateway and front drain and end, then Triton, and `serve` returns. SIGHUP: another Triton in its place.
A dead child: the others end, and `ChildDied` shows the last lines of the dead one's log. One of several Tritons is
started again instead (`fleet`).
"""

from __future__ import annotations

import contextlib
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
from typing import Any

from orchestrator.config import ConfigError, load_tiers
from orchestrator.contracts import CUDA_DEVICES_VARIABLE
from orchestrator.inference_key import INFERENCE_KEY_VARIABLE, find_inference_key
from orchestrator.limits.keys import KEYS_VARIABLE, read_keys
from orchestrator.local_socket import SOCKETS_VARIABLE
from orchestrator.quality import FOLDER_VARIABLE
from orchestrator.redis_address import REDIS_VARIABLE
from orchestrator.triton.artifact import Artifact, open_artifact
from orchestrator.triton.doctor import check_health
from orchestrator.triton.fleet import START_TIMEOUT_S, Fleet, Replica, Stopped, Wait, choose_gpus, read_page
from orchestrator.triton.front import FrontOptions, is_loopback
from orchestrator.triton.ports import LOOPBACK, Ports, settle
from orchestrator.triton.process import POLL_INTERVAL_S, Child, ChildDied, Cleaner, StartError
from orchestrator.triton.ranks import choose_ranks, start_with
from orchestrator.triton.reload import REQUEST_FILE, take_request, tell_outcome
from orchestrator.triton.server import TritonInstall, TritonLaunch, find_triton, gather_backends, launch, shell_safe

READY_FILE = "serve.json"
# After one child died, the others' streams have lost what they need; it only has to tell its clients.
_FAILURE_DRAIN_S = 5.0
# Triton ends its in-flight requests itself after --exit-timeout-secs; this much later it counts as stuck.
_EXIT_MARGIN_S = 5.0
_PROBE_TIMEOUT_S = 2.0
# gRPC's newer event engine hands each message to a thread of its own: of what a token costs the orchestrator a quarter,
# measured with grpcio 1.85 by `perf token-path`.
_GRPC_EXPERIMENTS = "-event_engine_client,-event_engine_listener"


@dataclass(frozen=True)
class ServeOptions:
    """What `serve` was asked for. A port of 0 becomes a free one; `run_dir` takes logs and `serve.json`.

    `keys` is the file of API keys. `backend_directory` holds Triton backends beside those of the installation.
    `allowed_hosts` and `allowed_origins` are whom the gateway answers beside its own address and its own pages.
    `num_replicas` Tritons are behind both.
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
    num_replicas: int = 1

    def check_replicas(self, environ: Mapping[str, str]) -> None:
        """Raises `StartError` when several Tritons would each count the whole quota."""
        if self.num_replicas > 1 and self.keys is not None and not environ.get(REDIS_VARIABLE):
            raise StartError(
                f"--replicas {self.num_replicas} with --keys: each Triton would count quotas and budgets by itself\n"
                f"fix: set {REDIS_VARIABLE} to a Redis 8 that they share (redis://127.0.0.1:6379/0), or --replicas 1"
            )

    def check_reload(self, environ: Mapping[str, str]) -> None:
        """Raises `StartError` when the Triton that takes over would count quotas anew."""
        if self.keys is None or environ.get(REDIS_VARIABLE):
            return
        limited = [key.id for key in read_keys(self.keys).keys if key.has_limits]
        if limited:
            raise StartError(
                f"reload with quotas and budgets ({limited[0]} has some): what was used is counted in the Triton that "
                f"goes, and would start at 0\nfix: serve with {REDIS_VARIABLE} set to a Redis 8, where it is kept"
            )

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

    def as_json(self, replicas: Sequence[Replica]) -> str:
        first = replicas[0].facts()
        facts: dict[str, Any] = {
            "pid": os.getpid(),
            "triton": str(self.triton.binary),
            "gateway_url": self.gateway_url,
            "grpc_front_url": self.grpc_front_url,
            **{f"triton_{name}": first[name] for name in ("http_url", "grpc_url", "metrics_url")},
            "logs": {
                **{each.name: str(each.log) for each in replicas},
                **{child: str(self.log(child)) for child in ("gateway", "grpc_front")},
            },
            "replicas": [each.facts() for each in replicas],
        }
        return json.dumps(facts, indent=2) + "\n"

    def announce(self, replicas: Sequence[Replica]) -> str:
        logs = "\n            ".join(str(each.log) for each in replicas)
        question = [{"role": "user", "content": "Why is the sky blue?"}]
        body = json.dumps({"model": "auto", "stream": True, "messages": question})
        return f"""\
ready
  gateway   {self.gateway_url}/v1
  gRPC      {self.grpc_front_url}  (model `orchestrator`, ModelStreamInfer)
  metrics   {self.gateway_url}/metrics
  logs      {logs}
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
    with Signals(options.run_dir / REQUEST_FILE) as signals:
        artifact = open_artifact(options.artifact)
        install = find_triton(os.environ.get("PATH", os.defpath))
        check_health(artifact, install, options.backend_directory)
        options.front.check()
        options.check_keys()
        options.check_replicas(os.environ)
        inference_key = find_inference_key(os.environ) or secrets.token_urlsafe()
        ports = settle(options.ports, options.host, options.front.host)
        _say(f"serving {artifact.root} (target {artifact.target})")
        _say(f"Triton: {install.binary} (found in {install.source})")
        if options.front.warning:
            _say(options.front.warning)
        run_dir = options.run_dir.resolve()
        run_dir.mkdir(parents=True, exist_ok=True)
        facts = ServeFacts(install, options.host, options.front.host, ports, run_dir)
        with Cleaner() as cleaner, contextlib.ExitStack() as links:
            environ = {
                "GRPC_EXPERIMENTS": _GRPC_EXPERIMENTS,
                **os.environ,
                SOCKETS_VARIABLE: f"/dev/shm/{cleaner.shm_prefix}socket-",
                INFERENCE_KEY_VARIABLE: inference_key,
            }
            launcher = _Launcher(options, install, run_dir, links, environ)
            fleet = Fleet(
                launcher.launch, artifact, options.num_replicas, ports, run_dir, cleaner, options.drain_timeout_s, _say
            )

            def find_artifact(folder: Path | None) -> Artifact:
                options.check_reload(os.environ)
                found = open_artifact(folder or fleet.artifact.root)
                check_health(found, install, options.backend_directory, replaces=options.num_replicas > 1)
                try:
                    load_tiers(found.root / "tiers.toml")
                except ConfigError as error:
                    raise StartError(str(error)) from error
                return found

            gateway = gateway_command(artifact, options, ports, fleet.file)
            front = options.front.command(artifact.root, ports, options.drain_timeout_s, fleet.file)
            supervise(fleet, gateway, front, environ, facts, options.drain_timeout_s, signals, cleaner, find_artifact)


class _Launcher:
    """How the Tritons of one `serve` are started."""

    def __init__(
        self,
        options: ServeOptions,
        install: TritonInstall,
        run_dir: Path,
        links: contextlib.ExitStack,
        environ: Mapping[str, str],
    ) -> None:
        self._options = options
        self._install = install
        self._run_dir = run_dir
        self._links = links
        self._environ = environ
        safe = links.enter_context(shell_safe(run_dir))
        self._backends = gather_backends(install, options.backend_directory, safe / "backends")

    def launch(self, artifact: Artifact, replica: Replica, shm_prefix: str) -> TritonLaunch:
        options = self._options
        root = self._links.enter_context(shell_safe(artifact.root))
        environ = {**self._environ, KEYS_VARIABLE: str(options.keys.absolute()) if options.keys else ""}
        folder = self._run_dir
        if options.num_replicas > 1:  # each has a state of its own, and GPUs
            folder = self._run_dir / replica.name
            folder.mkdir(exist_ok=True)
            if (gpu := artifact.manifest.row.gpu) is not None:
                visible = environ.get(CUDA_DEVICES_VARIABLE, "")
                environ[CUDA_DEVICES_VARIABLE] = choose_gpus(replica.index, gpu.count, visible)
        launched = launch(
            self._install,
            model_repository=root / artifact.model_repository.relative_to(artifact.root),
            ports=replica.ports,
            backends=self._backends,
            shm_prefix=shm_prefix,
            inference_key=self._environ[INFERENCE_KEY_VARIABLE],
            control_key=secrets.token_urlsafe(),
            exit_timeout_s=math.ceil(options.drain_timeout_s),
            environ={**environ, FOLDER_VARIABLE: str(folder)},
        )
        return start_with(launched, choose_ranks(artifact.manifest.trtllm_engines), shm_prefix)


def gateway_command(artifact: Artifact, options: ServeOptions, ports: Ports, replicas: Path) -> tuple[str, ...]:
    """The command line of the gateway, which reaches the Tritons in the file `replicas`, and their metrics pages."""
    return (
        *(sys.executable, "-m", "orchestrator.gateway"),
        *("--artifact", str(artifact.root)),
        *("--replicas", str(replicas)),
        *("--host", options.host),
        *("--port", str(ports.gateway)),
        *("--workers", str(options.gateway_workers)),
        *("--metrics-dir", str(replicas.parent / "gateway-metrics")),
        *(("--with-keys",) if options.keys else ()),
        *(f"--allow-host={name}" for name in options.allowed_hosts),
        *(f"--allow-origin={origin}" for origin in options.allowed_origins),
        *("--drain-timeout-s", str(math.ceil(options.drain_timeout_s))),
    )


def supervise(
    fleet: Fleet,
    gateway: Sequence[str],
    front: Sequence[str],
    environ: Mapping[str, str],
    facts: ServeFacts,
    drain_timeout_s: float,
    signals: Signals,
    cleaner: Cleaner,
    find_artifact: Callable[[Path | None], Artifact],
) -> None:
    """Start the children, tell when they are ready, wait for a signal or a death, leave nothing running.

    `environ` is that of gateway and front. `find_artifact` is what a reload serves: checked, in the folder that was
    named or where the one of now is; it raises `StartError`.
    """
    steps = (
        ("gateway", gateway, lambda: read_page(facts.host, facts.ports.gateway, "/ready") is not None),
        # It listens as soon as it serves, and Triton is ready by then.
        ("grpc_front", front, lambda: _accepts(facts.front_host, facts.ports.grpc_front)),
    )
    children: list[Child] = []
    ready_file = facts.run_dir / READY_FILE
    drain_limit_s = _FAILURE_DRAIN_S

    def wait(until: Callable[[], bool], timeout_s: float, waits_for: Child | None = None) -> None:
        _watch(fleet, children, signals, until, timeout_s, waits_for)
        if signals.count:
            raise Stopped

    def tell() -> None:
        if len(children) == len(steps):
            _write_atomically(ready_file, facts.as_json(fleet.replicas))

    try:
        with contextlib.suppress(Stopped):
            (facts.run_dir / REQUEST_FILE).unlink(missing_ok=True)  # of another time
            if not signals.count:
                fleet.start()
            wait(fleet.are_ready, START_TIMEOUT_S)
            for name, command, is_ready in steps:
                child = Child(name, command, facts.log(name), environ)
                cleaner.watch(child)
                children.append(child)
                wait(is_ready, START_TIMEOUT_S, child)
            fleet.on_change = tell
            tell()
            _say(facts.announce(fleet.replicas))
            while True:
                wait(signals.take_reload, math.inf)
                _reload(fleet, facts.run_dir, find_artifact, wait)
        drain_limit_s = drain_timeout_s + _EXIT_MARGIN_S
        _say("stopping: gateway and gRPC front drain, then Triton ends (signal again to stop at once)")
    finally:
        ready_file.unlink(missing_ok=True)
        # Triton last: the others take new requests and finish those they have. They drain at the same time.
        for child in children:
            child.ask_to_end()
        for child in reversed(children):
            child.stop(drain_limit_s, is_urgent=lambda: signals.count > 1)
        fleet.stop(drain_limit_s, is_urgent=lambda: signals.count > 1)
    _say("stopped")


def _reload(fleet: Fleet, run_dir: Path, find_artifact: Callable[[Path | None], Artifact], wait: Wait) -> None:
    """What was asked for, or what is served as it is now. Whatever keeps it from being done changes nothing."""
    request = take_request(run_dir)
    error = None
    try:
        artifact = find_artifact(None if request is None else request.artifact)
        _say(f"reloading {artifact.root} (target {artifact.target})")
        fleet.reload(artifact, wait)
        _say(f"reloaded {artifact.root}")
    except ChildDied:
        raise
    except StartError as fault:
        error = str(fault)
        _say(f"error: {error}\nnothing was reloaded: what was served is served on")
    if request is not None:
        tell_outcome(run_dir, request, error)


class Signals:
    """Counts SIGTERM and SIGINT while entered, instead of letting them end the process; and SIGHUP, which reloads.

    A terminal that is closed sends SIGHUP too: what runs in one ends with it, unless a request says why it came.
    """

    def __init__(self, request: Path | None = None) -> None:
        self.count = 0
        self._request = request
        self._is_reload_due = False

    def __enter__(self) -> Signals:
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        is_asked = self._request is not None and self._request.exists()
        if number == signal.SIGHUP and (is_asked or not _has_terminal()):
            self._is_reload_due = True
        else:
            self.count += 1

    def take_reload(self) -> bool:
        """Whether SIGHUP came since this was asked last."""
        is_due, self._is_reload_due = self._is_reload_due, False
        return is_due


def _has_terminal() -> bool:
    try:
        return os.isatty(0)
    except OSError:
        return False


def _watch(
    fleet: Fleet,
    children: Sequence[Child],
    signals: Signals,
    until: Callable[[], bool],
    timeout_s: float,
    waits_for: Child | None,
) -> None:
    """Wait for `until()` or for a signal. Raises `ChildDied` as soon as a child ends, `StartError` in vain."""
    deadline_s = time.monotonic() + timeout_s
    while not signals.count:
        if time.monotonic() > deadline_s:
            late = waits_for or fleet.children[-1]
            raise StartError(
                f"{late.name} was not ready within {timeout_s:.0f} s; its log says how far it came: {late.log}"
            )
        fleet.watch()
        for child in children:
            if fate := child.fate():
                raise ChildDied(fate)
            child.rotate_log()
        if until():
            return
        time.sleep(POLL_INTERVAL_S)


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
