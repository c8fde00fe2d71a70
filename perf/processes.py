"""Processor time of a process and of those below it, from /proc: what others do on the machine is not in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


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
