"""The Tritons of `serve`, small Python scripts in their place: started again, and replaced while requests run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.manifest import Manifest
from orchestrator.replica_set import ReplicaSet
from orchestrator.triton import fleet as fleet_module
from orchestrator.triton.artifact import Artifact
from orchestrator.triton.fleet import Fleet, Replica, choose_gpus
from orchestrator.triton.ports import LOOPBACK, Ports, settle
from orchestrator.triton.process import Child, ChildDied, Cleaner, StartError
from orchestrator.triton.server import TritonLaunch

# As many live requests as the file LIVE of the artifact says; with a file BROKEN there it does not start.
FAKE = """
import http.server, os, pathlib, signal, sys, threading
artifact, ports = pathlib.Path(sys.argv[1]), [int(port) for port in sys.argv[2:]]
if (artifact / "BROKEN").exists():
    sys.exit("this artifact is broken")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        live = (artifact / "LIVE").read_text()
        self.wfile.write(b'rt_live_requests{model="orchestrator",version="1"} %s\\n' % live.encode())
    def log_message(self, *args): pass
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
print("serving", artifact.name, flush=True)
first, second = (http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) for port in ports)
threading.Thread(target=first.serve_forever, daemon=True).start()
second.serve_forever()
"""


class World:
    """A fleet, and what `serve` does around it."""

    def __init__(self, folder: Path, cleaner: Cleaner, num_replicas: int) -> None:
        self.folder = folder
        self.prefixes: list[str] = []
        self.said: list[str] = []
        self.sets: list[ReplicaSet] = []
        ports = settle(Ports(0, 0, 0, 0, 0), LOOPBACK)
        old = self.artifact("old")
        self.fleet = Fleet(self._launch, old, num_replicas, ports, folder, cleaner, 5.0, self.said.append)
        self.fleet.on_change = lambda: self.sets.append(ReplicaSet.read(self.fleet.file))
        self.fleet.start()
        self.wait(self.fleet.are_ready, 20)

    def artifact(self, name: str, live: int = 0) -> Artifact:
        root = self.folder / name
        root.mkdir()
        (root / "LIVE").write_text(str(live))
        return Artifact(root, Manifest(schema=1, target=name, files={}))

    def _launch(self, artifact: Artifact, replica: Replica, shm_prefix: str) -> TritonLaunch:
        self.prefixes.append(shm_prefix)
        Path("/dev/shm", f"{shm_prefix}region").touch()
        ports = str(replica.ports.triton_http), str(replica.ports.triton_metrics)
        return TritonLaunch((sys.executable, "-c", FAKE, str(artifact.root), *ports), os.environ)

    def wait(self, until: Callable[[], bool], timeout_s: float, waits_for: Child | None = None) -> None:
        deadline_s = time.monotonic() + min(timeout_s, 30)
        while True:
            self.fleet.watch()
            if until():
                return
            if time.monotonic() > deadline_s:
                raise StartError("waited in vain")
            time.sleep(0.02)

    @property
    def pids(self) -> list[int]:
        return [each.child.pid for each in self.fleet.replicas if each.child is not None]

    @property
    def states(self) -> list[list[str]]:
        """Of each set that was published; in them nobody ever has nobody to ask."""
        states = [[each.state for each in known.replicas] for known in self.sets]
        assert all("serving" in each for each in states)
        return states


@pytest.fixture
def worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], World]]:
    monkeypatch.setattr(fleet_module, "SWITCH_S", 0.2)
    monkeypatch.setattr(fleet_module, "FIRST_PAUSE_S", 0.1)
    made: list[World] = []
    with Cleaner() as cleaner:

        def make(num_replicas: int) -> World:
            made.append(World(tmp_path, cleaner, num_replicas))
            return made[-1]

        yield make
        for world in made:
            world.fleet.stop(5, lambda: False)
            assert not world.fleet.file.exists()


def regions(world: World) -> list[str]:
    """The prefixes that something is left of."""
    return [prefix for prefix in world.prefixes if list(Path("/dev/shm").glob(f"{prefix}*"))]


def test_one_of_several_that_dies_is_started_again_where_it_was(worlds: Callable[[int], World]) -> None:
    world = worlds(3)
    before, addresses = world.pids, [each.grpc_url for each in world.fleet.replicas]
    os.kill(before[1], 9)
    world.wait(lambda: len(world.pids) == 2, 5)
    world.wait(lambda: all(each.is_ready for each in world.fleet.replicas), 10)
    assert [old == new for old, new in zip(before, world.pids)] == [True, False, True]
    assert [each.grpc_url for each in world.fleet.replicas] == addresses
    assert world.states[1:] == [["serving", "down", "serving"], ["serving"] * 3]
    assert [each.num_restarts for each in world.sets[-1].replicas] == [0, 1, 0]
    assert "triton-1 (pid" in world.said[0] and "killed by SIGKILL" in world.said[0]
    assert (world.folder / "triton-1.log.1").read_text() == "serving old\n"
    assert regions(world) == [world.prefixes[each] for each in (0, 2, 3)]


def test_who_dies_again_and_again_waits_longer_each_time(worlds: Callable[[int], World]) -> None:
    world = worlds(2)
    replica = world.fleet.replicas[0]
    pauses = []
    for _ in range(3):
        assert replica.child is not None
        os.kill(replica.child.pid, 9)
        world.wait(lambda: replica.child is None, 5)
        pauses.append(replica.pause_s)
        world.wait(lambda: replica.is_ready, 10)
    assert pauses == [0.1, 0.2, 0.4]
    replica.changed_s -= fleet_module.STEADY_S + 1
    assert replica.child is not None
    os.kill(replica.child.pid, 9)
    world.wait(lambda: replica.is_ready and replica.num_restarts == 4, 10)
    assert replica.pause_s == 0.0


def test_the_death_of_one_alone_is_the_end(worlds: Callable[[int], World]) -> None:
    world = worlds(1)
    os.kill(world.pids[0], 9)
    with pytest.raises(ChildDied, match="triton .* was killed by SIGKILL"):
        world.wait(lambda: False, 5)


def test_several_are_replaced_one_after_the_other(worlds: Callable[[int], World]) -> None:
    world = worlds(2)
    before = world.pids
    new = world.artifact("new")
    world.fleet.reload(new, world.wait)
    assert not set(before) & set(world.pids)
    assert world.states[1:] == [
        ["leaving", "serving"],
        ["down", "serving"],
        ["serving", "serving"],
        ["serving", "leaving"],
        ["serving", "down"],
        ["serving", "serving"],
        ["serving", "serving"],  # and the new artifact is what is told
    ]
    assert [(each.version, each.artifact.name) for each in world.sets[-2:]] == [(0, "old"), (1, "new")]
    assert world.fleet.artifact is new
    assert [each.num_restarts for each in world.sets[-1].replicas] == [0, 0]


def test_what_cannot_start_takes_nobodys_place(worlds: Callable[[int], World]) -> None:
    """The second one fails, so the first goes back too."""
    world = worlds(2)
    new = world.artifact("new")

    def breaks_after_the_first(until: Callable[[], bool], timeout_s: float, waits_for: Child | None = None) -> None:
        world.wait(until, timeout_s, waits_for)
        if world.fleet.replicas[0].artifact is new and world.fleet.replicas[0].is_ready:
            (new.root / "BROKEN").touch()

    with pytest.raises(StartError, match=r"triton-1 .* ended with exit code 1\n.*\n  \| this artifact is broken"):
        world.fleet.reload(new, breaks_after_the_first)
    world.wait(lambda: all(each.is_ready for each in world.fleet.replicas), 10)
    assert [each.artifact.target for each in world.fleet.replicas] == ["old", "old"]
    assert world.fleet.artifact.target == "old" and world.sets[-1].version == 0
    assert world.states[-1] == ["serving", "serving"]


def test_one_alone_gets_another_beside_it(worlds: Callable[[int], World]) -> None:
    world = worlds(1)
    (old_pid,) = world.pids
    (world.fleet.artifact.root / "LIVE").write_text("1")
    new = world.artifact("new")
    drains: list[float] = []

    def wait(until: Callable[[], bool], timeout_s: float, waits_for: Child | None = None) -> None:
        def is_over() -> bool:
            if len(world.sets[-1].replicas) == 2 and not drains:
                drains.append(time.monotonic())
            if drains and time.monotonic() > drains[0] + 0.6:
                (world.folder / "old" / "LIVE").write_text("0")
            return until()

        world.wait(is_over, timeout_s, waits_for)

    world.fleet.reload(new, wait)
    assert time.monotonic() - drains[0] > 0.6  # as long as it had something to do
    assert world.pids != [old_pid] and not Path(f"/proc/{old_pid}").exists()
    assert world.states == [["serving"], ["serving", "leaving"], ["serving"]]
    old, new_one = world.sets[0].replicas[0], world.sets[-1].replicas[0]
    assert old.name == new_one.name == "triton" and old.grpc_url != new_one.grpc_url
    assert world.sets[-1].version == 1 and world.sets[-1].artifact == new.root
    assert (world.folder / "triton.log").read_text() == "serving new\n"
    assert (world.folder / "triton-before.log").read_text() == "serving old\n"
    assert regions(world) == world.prefixes[1:]
    world.fleet.reload(world.fleet.artifact, world.wait)  # and again


def test_one_alone_stays_when_the_other_cannot_start(worlds: Callable[[int], World]) -> None:
    world = worlds(1)
    before = world.pids
    new = world.artifact("new")
    (new.root / "BROKEN").touch()
    with pytest.raises(StartError, match=r"ended with exit code 1\n.*triton-new.log:\n  \| this artifact is broken"):
        world.fleet.reload(new, world.wait)
    assert world.pids == before and len(world.sets) == 1
    assert (world.folder / "triton.log").read_text() == "serving old\n"
    assert regions(world) == world.prefixes[:1]


def test_what_does_not_drain_in_time_is_ended(worlds: Callable[[int], World], monkeypatch: pytest.MonkeyPatch) -> None:
    world = worlds(1)
    (world.fleet.artifact.root / "LIVE").write_text("1")
    monkeypatch.setattr(world.fleet, "_drain_timeout_s", 0.3)
    world.fleet.reload(world.artifact("new"), world.wait)
    assert world.states[-1] == ["serving"]


def test_each_has_gpus_of_its_own() -> None:
    assert [choose_gpus(index, 2, "") for index in range(2)] == ["0,1", "2,3"]
    assert choose_gpus(1, 1, "4,6") == "6"
    with pytest.raises(
        StartError, match="replica 1 needs 2 GPUs of its own, and CUDA_VISIBLE_DEVICES=4,6,7 leaves it 1"
    ):
        choose_gpus(1, 2, "4,6,7")
