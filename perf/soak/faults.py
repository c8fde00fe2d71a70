"""What goes wrong during a soak. The list is data: a further fault is a function and a line of `FAULTS`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from perf.errors import PerfError
from perf.processes import descendants
from perf.soak.accounts import are_all_up
from perf.stack import Stack

if TYPE_CHECKING:
    from perf.redis_server import RedisServer

BACK_TIMEOUT_S = 60.0
_REDIS_GONE_S = 5.0
_POLL_S = 0.05
# After a part is back: the breaker before an engine lets the next one through after 5 s at most.
_GRACE_S = 10.0
_KILL_S = 1.0  # around a kill: a line is written just after its answer


@dataclass(frozen=True)
class World:
    """What may be broken. `key` may read the metrics. `is_over` is set when the soak ends early."""

    stack: Stack
    redis: RedisServer
    key: str
    is_over: threading.Event

    def processes_of(self, mark: str) -> set[int]:
        """Those of the server whose command line holds `mark`; none while processes come and go."""
        found = set()
        try:
            for pid in descendants(self.stack.serve_pid):
                if mark.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" "):
                    found.add(pid)
        except OSError:  # one of them has just ended
            return set()
        return found

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Raises `PerfError` when it is not so in time."""
        ends_s = time.monotonic() + BACK_TIMEOUT_S
        while not is_so():
            if time.monotonic() > ends_s:
                raise PerfError(f"{what} is not back after {BACK_TIMEOUT_S:.0f} s")
            if self.is_over.wait(_POLL_S):
                return

    def wait_until_whole(self, what: str) -> None:
        """As the gateway sees it."""
        self.wait_until(lambda: are_all_up(self.stack.gateway_url, self.key), what)


class Fault(NamedTuple):
    """`strike` returns when what it broke is back, and raises `PerfError` when it does not come back.

    `at` are the shares of the soak's time at which it strikes. `codes` are the errors that callers may get meanwhile;
    whatever else they get is a failure of the soak. `needs_replicas`: where there is one Triton alone, its death is the
    end. `loses_lines`: who wrote the log of what was running is dead.
    """

    name: str
    at: tuple[float, ...]
    strike: Callable[[World], None]
    codes: frozenset[str] = frozenset()
    needs_replicas: bool = False
    loses_lines: bool = False


def restart_engine(world: World) -> None:
    """Kill an engine's process; the model that started it starts another one."""
    mark = "orchestrator.engines.worker"
    before: set[int] = set()

    def are_known() -> bool:
        before.update(world.processes_of(mark))
        return bool(before)

    world.wait_until(are_known, "the engine's process")
    killed = max(before, default=None)
    if killed is None:  # the soak is over
        return
    os.kill(killed, signal.SIGKILL)
    world.wait_until(lambda: len(world.processes_of(mark) - {killed}) == len(before), "the engine's process")
    world.wait_until_whole("the engine")


def kill_replica(world: World) -> None:
    """Kill the last Triton; `serve` starts another one in its place."""
    killed = world.stack.replicas()[-1]
    os.kill(killed["pid"], signal.SIGKILL)

    def is_another() -> bool:
        now = world.stack.replicas()[-1]
        return now["pid"] not in (None, killed["pid"]) and now["state"] == "serving"

    world.wait_until(is_another, killed["name"])
    world.wait_until_whole(killed["name"])


def lose_redis(world: World) -> None:
    """Redis crashes, and is there again some seconds later, empty."""
    world.redis.kill()
    world.is_over.wait(_REDIS_GONE_S)
    world.redis.start()


FAULTS = (
    Fault("engine-restart", (0.1, 0.6), restart_engine, frozenset({"engine_error", "tier_unavailable"})),
    Fault("redis-gone", (0.25,), lose_redis),
    Fault(
        "replica-killed",
        (0.4,),
        kill_replica,
        frozenset({"engine_error"}),
        needs_replicas=True,
        loses_lines=True,
    ),
)
NAMES = tuple(fault.name for fault in FAULTS)


@dataclass
class Strike:
    """One time that a fault struck, in seconds of `time.monotonic`; `not_back` says why it is not over."""

    fault: Fault
    began_s: float
    back_s: float | None = None
    not_back: str | None = None
    errors: dict[str, int] = field(default_factory=dict)  # that callers got for it, by code
    last_error_s: float | None = None

    def explains(self, code: str, sent_s: float, ended_s: float) -> bool:
        """Whether a request that ran from `sent_s` to `ended_s` may have got this error for it."""
        is_beside = ended_s >= self.began_s and (self.back_s is None or sent_s <= self.back_s + _GRACE_S)
        return code in self.fault.codes and is_beside

    def may_lose(self, sent_s: float, ended_s: float) -> bool:
        """Whether the line of such a request in the log may be lost: it was running as its server was killed."""
        return self.fault.loses_lines and sent_s <= self.began_s + _KILL_S and ended_s >= self.began_s - _KILL_S

    def note(self, code: str, ended_s: float) -> None:
        self.errors[code] = self.errors.get(code, 0) + 1
        self.last_error_s = ended_s


class Striking:
    """Lets `faults` strike at their times while entered, on a thread, one after the other."""

    def __init__(self, world: World, faults: Sequence[Fault], seconds: float, say: Callable[[str], None]) -> None:
        self.strikes: list[Strike] = []
        began_s = time.monotonic()
        self._planned = sorted(
            ((began_s + share * seconds, fault) for fault in faults for share in fault.at), key=lambda each: each[0]
        )
        self._world, self._say = world, say
        self._thread = threading.Thread(target=self._run, name="faults")

    def __enter__(self) -> Striking:
        self._thread.start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            self._world.is_over.set()
        self._thread.join()

    def _run(self) -> None:
        for at_s, fault in self._planned:
            if self._world.is_over.wait(max(0.0, at_s - time.monotonic())):
                return
            strike = Strike(fault, time.monotonic())
            self.strikes.append(strike)
            self._say(f"  {fault.name}")
            try:
                fault.strike(self._world)
            except (PerfError, OSError, RuntimeError) as error:
                strike.not_back = str(error)
                return
            strike.back_s = time.monotonic()
            self._say(f"  {fault.name}: back after {strike.back_s - strike.began_s:.1f} s")
