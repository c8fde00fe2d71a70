"""Prometheus' own checker: the one in PATH, else out of Debian's package `prometheus`, unpacked and not installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from build.fetch import cache_folder
from build.locks import lock

TIMEOUT_S = 100


class NoPromtool(Exception):
    """It cannot be had here; the text says what was tried."""


def find_promtool() -> Path:
    """Raises `NoPromtool`. Downloads 20 MB the first time."""
    if found := shutil.which("promtool"):
        return Path(found)
    folder = cache_folder() / "debian-prometheus"
    folder.mkdir(parents=True, exist_ok=True)
    binary = folder / "usr" / "bin" / "promtool"
    with lock(folder / "lock"):
        if not binary.exists():
            _unpack(folder)
    return binary


def _unpack(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        download = ("apt-get", "download", "prometheus")
        try:
            if _run(*download, cwd=scratch).returncode != 0:  # a fresh machine has no lists of packages
                _run("apt-get", "update", cwd=scratch)
                done = _run(*download, cwd=scratch)
                if done.returncode != 0:
                    raise NoPromtool(f"apt-get download prometheus: {done.stderr.strip()}")
            (package,) = Path(scratch).glob("prometheus_*.deb")
            unpacked = Path(scratch, "unpacked")
            done = _run("dpkg-deb", "--extract", str(package), str(unpacked), cwd=scratch)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoPromtool(f"promtool is not in PATH, and Debian's package cannot be had: {error}") from error
        if done.returncode != 0:
            raise NoPromtool(f"dpkg-deb: {done.stderr.strip()}")
        (folder / "usr" / "bin").mkdir(parents=True, exist_ok=True)
        os.replace(unpacked / "usr" / "bin" / "promtool", folder / "usr" / "bin" / "promtool")


def _run(*command: str, cwd: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S)
