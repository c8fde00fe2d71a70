"""What the doctor asks the machine, behind a seam so that tests can be another one."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

_QUERY = "name,compute_cap,memory.total,memory.free,driver_version"
_TIMEOUT_S = 60


class GpuFacts(NamedTuple):
    """One GPU as `nvidia-smi` tells of it; memory is None where it does not (a MIG slice's, inside a container)."""

    name: str
    sm: str
    memory_mib: float | None
    free_mib: float | None
    driver: str


class Machine(Protocol):
    """A machine that an artifact may run on."""

    def gpus(self) -> list[GpuFacts]:
        """The GPUs by their numbers; empty where none can be used."""

    def version(self, package: str) -> str | None:
        """Of a Python package that is installed here, or in the Python that this virtual environment was made of."""

    def has_program(self, name: str) -> bool:
        """Whether a program is in PATH."""

    def missing_libraries(self, library: Path) -> list[str]:
        """What `library` is linked with and the loader does not find: libraries, or versions of symbols in them."""

    def shared_memory_bytes(self) -> int:
        """The size of /dev/shm."""


class ThisMachine:
    """The one we run on. `library_folders` are where the loader also looks for what Triton is linked with."""

    def __init__(self, library_folders: Sequence[Path] = ()) -> None:
        self._library_path = ":".join([*map(str, library_folders), os.environ.get("LD_LIBRARY_PATH", "")]).strip(":")

    def gpus(self) -> list[GpuFacts]:
        command = ("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", check=True, timeout=_TIMEOUT_S
            )
        except (OSError, subprocess.SubprocessError):
            return []
        rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]
        # "No devices were found" comes with exit code 0, too.
        return [
            GpuFacts(row[0], row[1], _as_number(row[2]), _as_number(row[3]), row[4]) for row in rows if len(row) == 5
        ]

    def version(self, package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return _version_outside(package) if sys.prefix != sys.base_prefix else None

    def has_program(self, name: str) -> bool:
        return shutil.which(name) is not None

    def missing_libraries(self, library: Path) -> list[str]:
        env = {**os.environ, "LD_LIBRARY_PATH": self._library_path}
        try:
            done = subprocess.run(
                ("ldd", str(library)), capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, env=env
            )
        except (OSError, subprocess.SubprocessError):
            return []
        said = f"{done.stdout}\n{done.stderr}"
        missing = re.findall(r"^\s*(\S+) => not found", said, re.MULTILINE)
        missing += re.findall(r": version `(\S+)' not found", said)
        if done.returncode and not missing:
            missing = [f"({said.strip().splitlines()[-1].strip() if said.strip() else 'no shared library'})"]
        return list(dict.fromkeys(missing))

    def shared_memory_bytes(self) -> int:
        try:
            facts = os.statvfs("/dev/shm")
        except OSError:
            return 0
        return facts.f_frsize * facts.f_blocks


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]", "[Insufficient Permissions]"
        return None


def _version_outside(package: str) -> str | None:
    """In a virtual environment, of the package in the Python below it: there a container has its TensorRT-LLM."""
    question = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    command = (str(Path(sys.base_prefix, "bin", "python3")), "-I", "-c", question, package)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
