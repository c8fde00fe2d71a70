"""The Tritons of `serve`: started, watched, started again, replaced while requests run.

One alone: its death is the end of everything, and another one is started beside it before it goes. Several: one that
died is started again, after a pause that grows; they are replaced one after the other, each where it was.
"""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from orchestrator.contracts import ORCHESTRATOR_MODEL
from orchestrator.replica_set import ALONE, FOLLOW_PERIOD_S, REPLICAS_FILE, Address, ReplicaSet, State
from orchestrator.triton.artifact import Artifact
from orchestrator.triton.ports import LOOPBACK, Ports, settle_beside
from orchestrator.triton.process import Child, ChildDied, Cleaner, StartError
from orchestrator.triton.server import TritonLaunch

# Far above what loading the largest engine from a cold disk takes; a stub that cannot start says nothing at all.
START_TIMEOUT_S = 600.0
# Before one that died is started again: doubled each time, until one has run for `STEADY_S`, which starts at once.
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
STEADY_S = 60.0
# After the set has changed: by then every gateway and front has looked at it several times.
SWITCH_S = 8 * FOLLOW_PERIOD_S
# For one that has nothing left to do. It loses nothing if it is killed then.
END_TIMEOUT_S = 15.0
_LOOK_PERIOD_S = 0.2
_PROBE_TIMEOUT_S = 2.0
_LIVE = re.compile(rf'^rt_live_requests{{[^}}]*model="{ORCHESTRATOR_MODEL}"[^}}]*}} (\S+)$', re.MULTILINE)


class Launch(Protocol):
    """How a Triton is started."""

    def __call__(self, artifact: Artifact, replica: Replica, shm_prefix: str) -> TritonLaunch: ...


class Wait(Protocol):
    """Watches over everything until `until()`; raises `StartError` after `timeout_s`, `Stopped` at a signal."""

    def __call__(self, until: Callable[[], bool], timeout_s: float, waits_for: Child | None = None) -> None: ...


class Stopped(Exception):
    """`serve` shall end."""


class Replica:
    """The place of one Triton; the processes in it change."""

    def __init__(self, name: str, index: int, ports: Ports, artifact: Artifact, log: Path) -> None:
        self.name = name
        self.index = index
        self.ports = ports
        self.artifact = artifact
        self.log = log
        self.child: Child | None = None
        self.shm_prefix = ""
        self.generations = 1
        self.is_ready = False
        self.is_leaving = False  # whoever replaces it looks after it
        self.num_restarts = 0
        self.pause_s = 0.0
        self.changed_s = 0.0  # when it was started, became ready or died

    @property
    def state(self) -> State:
        if not self.is_ready:
            return "down"
        return "leaving" if self.is_leaving else "serving"

    @property
    def grpc_url(self) -> str:
        return f"{LOOPBACK}:{self.ports.triton_grpc}"

    @property
    def metrics_url(self) -> str:
        return f"http://{LOOPBACK}:{self.ports.triton_metrics}/metrics"

    def facts(self) -> dict[str, Any]:
        """For `serve.json`."""
        return {
            "name": self.name,
            "pid": None if self.child is None else self.child.pid,
            "state": self.state,
            "artifact": str(self.artifact.root),
            "http_url": f"http://{LOOPBACK}:{self.ports.triton_http}",
            "grpc_url": self.grpc_url,
            "metrics_url": self.metrics_url,
            "log": str(self.log),
        }

    def answers(self) -> bool:
        """Whether it says that it is ready."""
        return read_page(LOOPBACK, self.ports.triton_http, "/v2/health/ready") is not None

    def num_live(self) -> float | None:
        """Requests that its orchestrator has; None when it does not say."""
        page = read_page(LOOPBACK, self.ports.triton_metrics, "/metrics")
        found = None if page is None else _LIVE.search(page)
        return None if found is None else float(found[1])


class Fleet:
    """For one thread. `on_change` is called whenever `replicas.json` was written anew."""

    def __init__(
        self,
        launch: Launch,
        artifact: Artifact,
        num_replicas: int,
        ports: Ports,
        run_dir: Path,
        cleaner: Cleaner,
        drain_timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        """The first one gets `ports`, all others free ones."""
        self._launch = launch
        self._artifact = artifact
        self._run_dir = run_dir
        self._cleaner = cleaner
        self._drain_timeout_s = drain_timeout_s
        self._say = say
        self._version = 0
        self._num_started = 0
        self._is_begun = False  # once all were ready, a death is no fault of the start
        self._beside: list[Replica] = []  # one that starts beside the only one, or goes
        self.on_change: Callable[[], None] = lambda: None
        self.replicas: list[Replica] = []
        for index in range(num_replicas):
            name = ALONE if num_replicas == 1 else f"{ALONE}-{index}"
            own = settle_beside([each.ports for each in self.replicas]) if self.replicas else ports
            self.replicas.append(Replica(name, index, own, artifact, run_dir / f"{name}.log"))

    @property
    def artifact(self) -> Artifact:
        return self._artifact

    @property
    def is_alone(self) -> bool:
        return len(self.replicas) == 1

    @property
    def file(self) -> Path:
        """Where gateway and front find the set."""
        return self._run_dir / REPLICAS_FILE

    @property
    def children(self) -> list[Child]:
        return [each.child for each in (*self.replicas, *self._beside) if each.child is not None]

    def start(self) -> None:
        for replica in self.replicas:
            self._start(replica)

    def are_ready(self) -> bool:
        """Whether all are; from then on they may come and go."""
        if all(replica.is_ready for replica in self.replicas):
            self._is_begun = True
        return self._is_begun

    def watch(self) -> None:
        """Note who became ready or died, and start again who did. Raises `ChildDied` for what cannot be survived."""
        for replica in self.replicas:
            if replica.is_leaving:
                continue
            now_s = time.monotonic()
            if replica.child is None:
                if now_s >= replica.changed_s + replica.pause_s:
                    replica.num_restarts += 1
                    self._start(replica)
            elif fate := replica.child.fate():
                self._bury(replica, fate)
            elif replica.is_ready:
                replica.child.rotate_log()
            elif replica.answers():
                self._welcome(replica)
                self._publish()
            elif self._is_begun and now_s > replica.changed_s + START_TIMEOUT_S:
                self._bury(replica, f"{replica.name} was not ready within {START_TIMEOUT_S:.0f} s; see {replica.log}")

    def reload(self, artifact: Artifact, wait: Wait) -> None:
        """Serve `artifact` instead, without ending a request before its time.

        Raises `StartError` when it does not become ready: what was served before is served on.
        """
        if self.is_alone:
            self._replace_alone(artifact, wait)
        else:
            self._replace_all(artifact, wait)
        self._artifact = artifact

    def stop(self, timeout_s: float, is_urgent: Callable[[], bool]) -> None:
        """End all, at the same time."""
        children = self.children
        for child in children:
            child.ask_to_end()
        ends_s = time.monotonic() + timeout_s
        for child in children:
            child.stop(max(0.0, ends_s - time.monotonic()), is_urgent)
        self.file.unlink(missing_ok=True)

    # --- replacing ---

    def _replace_alone(self, artifact: Artifact, wait: Wait) -> None:
        (old,) = self.replicas
        new = Replica(ALONE, 0, settle_beside([old.ports]), artifact, self._run_dir / f"{ALONE}-new.log")
        self._beside = [new]
        self._start(new)
        if fate := self._await(new, wait):
            self._end(new)
            self._beside = []
            raise StartError(fate)
        assert old.child is not None and new.child is not None
        old.log, new.log = self._run_dir / f"{ALONE}-before.log", old.log
        old.child.move_log(old.log)
        new.child.move_log(new.log)
        old.is_leaving = True
        self.replicas, self._beside = [new], [old]
        self._publish_version(artifact)
        self._drain(old, wait)
        self._end(old, wait)
        self._beside = []
        self._publish()

    def _replace_all(self, artifact: Artifact, wait: Wait) -> None:
        before = self._artifact
        replaced = []
        try:
            for replica in self.replicas:
                self._replace(replica, artifact, wait)
                replaced.append(replica)
        except StartError:
            for replica in replaced:
                self._replace(replica, before, wait)
            raise
        self._publish_version(artifact)

    def _replace(self, replica: Replica, artifact: Artifact, wait: Wait) -> None:
        others = [each for each in self.replicas if each is not replica]
        wait(lambda: all(each.is_ready for each in others), START_TIMEOUT_S)
        replica.is_leaving = True
        try:
            if replica.child is not None:  # else it has just died
                self._publish()
                self._drain(replica, wait)
                self._end(replica, wait)
                self._publish()
            before, replica.artifact = replica.artifact, artifact
            self._start(replica)
            if fate := self._await(replica, wait):
                self._end(replica)
                replica.artifact = before
                raise StartError(fate)
        finally:
            replica.is_leaving = False  # `watch` starts it, if it does not run
        self._publish()

    def _await(self, replica: Replica, wait: Wait) -> str | None:
        """Until it is ready (None), or why it will not be."""
        child = replica.child
        assert child is not None
        fates: list[str] = []

        def is_settled() -> bool:
            if fate := child.fate():
                fates.append(fate)
            return bool(fates) or replica.answers()

        try:
            wait(is_settled, START_TIMEOUT_S, child)
        except StartError as error:
            if isinstance(error, ChildDied):
                raise
            return str(error)
        if fates:
            return fates[0]
        self._welcome(replica)
        return None

    def _drain(self, replica: Replica, wait: Wait) -> None:
        """Until it has nothing to do, or `drain_timeout_s` is over. The set that says it leaves was just written."""
        child = replica.child
        assert child is not None
        looks_s = time.monotonic() + SWITCH_S
        ends_s = looks_s + self._drain_timeout_s

        def is_over() -> bool:
            nonlocal looks_s
            now_s = time.monotonic()
            if now_s > ends_s or not child.is_running():
                return True
            if now_s < looks_s:
                return False
            looks_s = now_s + _LOOK_PERIOD_S
            return replica.num_live() == 0

        wait(is_over, float("inf"))

    def _end(self, replica: Replica, wait: Wait | None = None) -> None:
        """Without `wait` at once."""
        child = replica.child
        assert child is not None
        if wait is not None:
            child.ask_to_end()
            ends_s = time.monotonic() + END_TIMEOUT_S
            wait(lambda: not child.is_running() or time.monotonic() > ends_s, float("inf"))
        child.stop(0)
        self._cleaner.forget(child)
        self._cleaner.remove_shared_memory(replica.shm_prefix)
        replica.child, replica.is_ready = None, False
        replica.changed_s = time.monotonic()

    # --- one process ---

    def _start(self, replica: Replica) -> None:
        self._num_started += 1
        replica.shm_prefix = f"{self._cleaner.shm_prefix}{self._num_started}-"
        launched = self._launch(replica.artifact, replica, replica.shm_prefix)
        if self._is_begun and replica.log.exists():
            replica.log.replace(replica.log.with_name(f"{replica.log.name}.1"))  # it may say of what the last one died
        replica.child = Child(replica.name, launched.command, replica.log, launched.env, launched.folder)
        replica.generations = launched.generations
        replica.changed_s = time.monotonic()
        self._cleaner.watch(replica.child)

    def _welcome(self, replica: Replica) -> None:
        assert replica.child is not None
        replica.child.needs_its_children(replica.generations)
        replica.is_ready = True
        replica.changed_s = time.monotonic()

    def _bury(self, replica: Replica, fate: str) -> None:
        if self.is_alone or not self._is_begun:
            raise ChildDied(fate)
        was_steady = replica.is_ready and time.monotonic() > replica.changed_s + STEADY_S
        replica.pause_s = 0.0 if was_steady else min(max(FIRST_PAUSE_S, 2 * replica.pause_s), MAX_PAUSE_S)
        self._end(replica)
        self._publish()
        self._say(f"{fate}\n{replica.name} is started again in {replica.pause_s:g} s; the others go on")

    def _publish_version(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self._version += 1
        self._publish()

    def _publish(self) -> None:
        leaving = [each for each in self._beside if each.is_ready]
        replicas = (*self.replicas, *leaving)
        if not self._is_begun and not all(each.is_ready for each in replicas):
            return  # nobody asks yet
        ReplicaSet(
            artifact=self._artifact.root,
            version=self._version,
            replicas=tuple(
                Address(
                    name=each.name,
                    grpc_url=each.grpc_url,
                    metrics_url=each.metrics_url,
                    state=each.state,
                    num_restarts=each.num_restarts,
                )
                for each in replicas
            ),
        ).write(self.file)
        self.on_change()


def read_page(host: str, port: int, path: str) -> str | None:
    """What a local HTTP server answers there; None unless that is a 200."""
    connection = http.client.HTTPConnection(host, port, timeout=_PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        page = response.read().decode(errors="replace")
        return page if response.status == http.HTTPStatus.OK else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def choose_gpus(index: int, num_gpus: int, visible: str) -> str:
    """CUDA_VISIBLE_DEVICES of one of several Tritons that need `num_gpus` each: its part of `visible`, or of all."""
    first, end = index * num_gpus, (index + 1) * num_gpus
    devices: Sequence[str] = visible.split(",") if visible else [str(number) for number in range(end)]
    if len(devices) < end:
        raise StartError(
            f"--replicas: replica {index} needs {num_gpus} GPUs of its own, and CUDA_VISIBLE_DEVICES={visible} "
            f"leaves it {max(0, len(devices) - first)}\nfix: fewer --replicas"
        )
    return ",".join(devices[first:end])
