"""Programs that tests need and PyPI does not have: the one in PATH, else out of Debian's packages, unpacked only."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from build.fetch import cache_folder
from build.locks import lock

TIMEOUT_S = 300.0


class NotToBeHad(Exception):
    """A program cannot be had here; the text says what was tried."""


@dataclass(frozen=True)
class Program:
    """`folder` is what the packages were unpacked into; None for a program that is installed."""

    path: Path
    folder: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What it runs in: with its libraries, where they are not installed."""
        if self.folder is None:
            return dict(os.environ)
        libraries = self.folder / "usr" / "lib" / "x86_64-linux-gnu"
        # Packages find their private ones by paths that hold only where they are installed.
        private = sorted({str(path.parent) for path in libraries.glob("*/lib*.so*")})
        return {**os.environ, "LD_LIBRARY_PATH": ":".join([str(libraries), *private])}


def find_program(name: str, package: str, inside: str, *, is_static: bool = False) -> Program:
    """`inside` is where in `package` it lies.

    Downloaded the first time; unless it `is_static`, with what the package needs and is not installed. Raises
    `NotToBeHad`.
    """
    if found := shutil.which(name):
        return Program(Path(found))
    folder = cache_folder() / f"debian-{package}"
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder / "lock"):
        if not (folder / "unpacked" / inside).exists():
            _unpack(package, folder, is_static=is_static)
    return Program(folder / "unpacked" / inside, folder / "unpacked")


def _unpack(package: str, folder: Path, *, is_static: bool) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        try:
            try:
                _download(package, scratch, is_static=is_static)
            except NotToBeHad:  # a fresh machine has no lists of packages
                _run("apt-get", "update", cwd=scratch)
                _download(package, scratch, is_static=is_static)
            for archive in sorted(Path(scratch).glob("*.deb")):
                _run("dpkg-deb", "--extract", str(archive), str(Path(scratch, "unpacked")), cwd=scratch)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotToBeHad(f"Debian's package {package} cannot be had: {error}") from error
        shutil.rmtree(folder / "unpacked", ignore_errors=True)
        os.replace(Path(scratch, "unpacked"), folder / "unpacked")


def _download(package: str, folder: str, *, is_static: bool) -> None:
    packages = [package]
    if not is_static:
        simulated = _run("apt-get", "install", "--simulate", "--no-install-recommends", package, cwd=folder)
        packages = [line.split()[1] for line in simulated.splitlines() if line.startswith("Inst ")]
    _run("apt-get", "download", *packages, cwd=folder)


def _run(*command: str, cwd: str) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        raise NotToBeHad(f"{' '.join(command[:3])}: {done.stderr.strip()}")
    return done.stdout
