"""Resident memory of every process of a server while it is under load, and whether it stays the same."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perf.processes import descendants

GROWTH_BAR = 0.05
# What comes before says nothing: pools and caches fill.
WARM_UP_S = 300.0
_MIN_SAMPLES = 10
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / (1 << 20)
# A part of a process's command line says what it is; the first that fits counts.
_NAMES = (
    ("orchestrator.engines.worker", "engine's process"),
    ("orchestrator.gateway", "gateway"),
    ("orchestrator.grpc_front", "gRPC front"),
    ("triton/cleaner.py", "cleaner"),
    ("redis-server", "redis"),
    ("orchestrator serve", "serve"),
    ("model_repository/", ""),  # a model's, by whose name it is called
    ("tritonserver", "triton"),
)


class Series(NamedTuple):
    """Of one process: MiB by seconds since the soak began."""

    name: str
    pid: int
    samples: list[tuple[float, float]]


class Memory:
    """Looks every `period_s` while entered; `others` are processes beside those below `pid`."""

    def __init__(self, pid: int, others: Callable[[], Sequence[int]], period_s: float) -> None:
        self.series: dict[int, Series] = {}
        self._pid, self._others, self._period_s = pid, others, period_s
        self._began_s = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory")

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._look()
            if self._is_over.wait(self._period_s):
                return

    def _look(self) -> None:
        at_s = time.monotonic() - self._began_s
        for pid in self._pids():
            try:
                mib = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_MIB
                if pid not in self.series:
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    self.series[pid] = Series(name_of(command), pid, [])
            except (OSError, IndexError):  # it has just ended
                continue
            self.series[pid].samples.append((at_s, mib))

    def _pids(self) -> Iterator[int]:
        yield self._pid
        yield from self._others()
        try:
            yield from descendants(self._pid)
        except OSError:  # one has just ended; the rest comes with the next look
            return


def name_of(command: str) -> str:
    for part, name in _NAMES:
        if part in command:
            return name or "model " + command.partition(part)[2].partition("/")[0]
    return command.partition(" ")[0].rpartition("/")[2]


def describe(series: Sequence[Series], seconds: float) -> tuple[list[dict[str, Any]], list[str]]:
    """What each process had, and which ones grew.

    Compared are the medians of the first and the last fifth of what comes after minute 5, of the soak or of a process
    that was started anew. Without enough samples `growth` is None.
    """
    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    for name, pid, samples in series:
        is_late = samples[0][0] > min(WARM_UP_S, seconds) * 0.1
        from_s = WARM_UP_S + (samples[0][0] if is_late else 0.0)
        settled = [mib for at_s, mib in samples if at_s >= from_s]
        row: dict[str, Any] = {"process": name, "pid": pid, "started_late": is_late, "num": len(samples)}
        row |= {"first_mib": round(samples[0][1], 1), "last_mib": round(samples[-1][1], 1), "growth": None}
        if len(settled) >= _MIN_SAMPLES:
            fifth = len(settled) // 5
            first, last = statistics.median(settled[:fifth]), statistics.median(settled[-fifth:])
            row |= {"from_s": round(from_s), "from_mib": round(first, 1), "to_mib": round(last, 1)}
            row["growth"] = round(last / first - 1, 4)
            if row["growth"] > GROWTH_BAR:
                by = f"{100 * row['growth']:.1f} %, {first:.1f} to {last:.1f} MiB"
                faults.append(f"memory: {name} ({pid}) grew by {by}")
        rows.append(row)
    return rows, faults
