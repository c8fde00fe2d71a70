"""How a process is stopped, and from /proc the processor time of one and of those below it, without others'."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path


def stop(process: subprocess.Popen[bytes], *patience_s: float) -> None:
    """SIGTERM, once for each of `patience_s`, so long it has then to end; at last SIGKILL."""
    for seconds in patience_s:
        process.terminate()
        try:
            process.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            pass
    process.kill()
    process.wait()


def descendants(pid: int) -> Iterator[int]:
    """The processes below `pid`."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield int(child)
            yield from descendants(int(child))


def processor_s(pid: int) -> float:
    """What `pid` itself has used so far, user and system, in seconds."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


class Others:
    """How many cores all other processes used since this was made: who measures is not alone on most machines."""

    def __init__(self) -> None:
        self._began_s, self._used_s = time.monotonic(), _others_s()

    def cores(self) -> float:
        """0 on a machine of our own. Processes of ours that ended meanwhile count as others'."""
        return max(0.0, _others_s() - self._used_s) / (time.monotonic() - self._began_s)


def _others_s() -> float:
    return busy_s() - sum(map(processor_s, (os.getpid(), *descendants(os.getpid()))))


def busy_s() -> float:
    """What all processes have used so far, and the machine's host took away, in seconds of a core."""
    # user, nice, system, idle, iowait, irq, softirq, steal (proc(5))
    times = [int(each) for each in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    return (sum(times) - times[3] - times[4]) / os.sysconf("SC_CLK_TCK")
