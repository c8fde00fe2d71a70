"""An artifact on disk: what `python -m build` made, checked against its manifest before anything starts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from orchestrator.config import describe
from orchestrator.triton.process import StartError

MANIFEST = "manifest.json"
MODEL_REPOSITORY = "model_repository"


class _File(BaseModel):
    sha256: str
    bytes: int


class _Manifest(BaseModel):
    """The part of manifest.json that serving needs; the rest records how the artifact was made."""

    version: Literal[1] = Field(alias="schema")
    target: str
    files: dict[str, _File]


@dataclass(frozen=True)
class Artifact:
    """An artifact whose files are the ones that were built. `root` is absolute."""

    root: Path
    target: str

    @property
    def model_repository(self) -> Path:
        return self.root / MODEL_REPOSITORY


def check_artifact(folder: Path) -> Artifact:
    """The artifact in `folder`, after comparing every file's sha256 with the manifest.

    Raises `StartError` naming the first file that is missing, changed, or there without being in the manifest
    (Triton loads whatever lies in the model repository), and the command that builds the artifact anew.
    """
    root = folder.resolve()
    manifest = _read_manifest(root)
    rebuild = f"fix: python -m build --target {manifest.target} --force"
    for name, built in sorted(manifest.files.items()):
        path = root / name
        if not path.is_file():
            raise StartError(f"{path}: in {MANIFEST}, but missing\n{rebuild}")
        if path.stat().st_size != built.bytes or _sha256(path) != built.sha256:
            raise StartError(f"{path}: changed since the build (its sha256 differs from {MANIFEST})\n{rebuild}")
    for name in _files_below(root):
        if name not in manifest.files:
            raise StartError(f"{root / name}: not in {MANIFEST}, so it is not part of what was built\n{rebuild}")
    return Artifact(root, manifest.target)


def _read_manifest(root: Path) -> _Manifest:
    path = root / MANIFEST
    try:
        return _Manifest.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise StartError(
            f"{root}: no finished artifact here ({MANIFEST} is missing)\nfix: python -m build --target cpu"
        ) from None
    except ValidationError as error:
        faults = "\n".join(f"{path}: {line}" for line in describe(error))
        raise StartError(f"{faults}\nfix: build the artifact again with --force") from None


def _files_below(root: Path) -> Iterator[str]:
    """Relative paths of what must be in the manifest. Python's caches appear when Triton runs a model."""
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        if name != Path(MANIFEST) and "__pycache__" not in name.parts and not path.is_dir():
            yield name.as_posix()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
