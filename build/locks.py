"""A lock between processes that cannot outlive its holders."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def lock(path: Path) -> Iterator[int]:
    """Wait for and hold the lock at `path`; yields its file descriptor.

    The kernel frees it when this process, and each that was given the descriptor, has ended, however it ends.
    """
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()
