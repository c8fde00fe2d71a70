"""A lock between processes that cannot outlive its holder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Wait for and hold the lock at `path`; the kernel frees it when the process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
