"""What cleans up after `serve`, also when `serve` itself is killed.

    python cleaner.py SHARED_MEMORY_PREFIX        standard input: one process group id a line, negative when it is gone

At the end of its input, which comes when the supervisor closes it or dies, it kills those groups and removes
what they left in /dev/shm. A process of its own, because nothing else is left to do it: Triton's Python stubs
can hang when Triton is killed under them, and the kernel's parent-death signal does not reach grandchildren.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")


def main() -> None:
    prefix = sys.argv[1]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a service manager may signal every process: this one ends last
    groups: list[int] = []
    for line in sys.stdin:
        group = int(line)
        if group > 0:
            groups.append(group)
        else:
            groups.remove(-group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            pass
    for region in _SHARED_MEMORY.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
