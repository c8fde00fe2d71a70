"""Virtual environments of their own, in the cache, for programs that we measure with or beside: ours stays as it is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from build.fetch import cache_folder
from build.locks import lock
from perf.errors import PerfError
from perf.report import say


def install(name: str, packages: Sequence[str], *flags: str) -> Path:
    """The folder of the environment `name` with `packages`, made once; `flags` are pip's.

    `name` tells versions apart. Raises `PerfError` with pip's last words.
    """
    folder = cache_folder() / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    done = folder / "installed"
    with lock(folder.parent / f"{name}.lock"):
        if not done.exists():
            say(f"installing {', '.join(packages)} into {folder}")
            for command in (
                [sys.executable, "-m", "venv", "--clear", str(folder)],
                [
                    *(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
                    *(*flags, *packages),
                ],
            ):
                run = subprocess.run(command, capture_output=True, text=True)
                if run.returncode != 0:
                    raise PerfError(f"{' '.join(command)}: {run.stderr[-2000:]}")
            done.touch()
    return folder


def size_mib(folder: Path) -> int:
    """What lies in `folder`, in MiB."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink()) >> 20
