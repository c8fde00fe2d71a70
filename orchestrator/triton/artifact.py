"""An artifact on disk: what `python -m build` made, checked against its manifest before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestrator.config import ConfigError
from orchestrator.doctor.files import Verified, find_file_faults
from orchestrator.manifest import MODEL_REPOSITORY, Manifest, read_manifest
from orchestrator.triton.process import StartError


@dataclass(frozen=True)
class Artifact:
    """An artifact as its manifest describes it. `root` is absolute."""

    root: Path
    manifest: Manifest

    @property
    def target(self) -> str:
        return self.manifest.target

    @property
    def model_repository(self) -> Path:
        return self.root / MODEL_REPOSITORY


def open_artifact(folder: Path) -> Artifact:
    """The artifact in `folder`, its files not looked at; raises `StartError` when there is none, with the fix."""
    root = folder.resolve()
    try:
        return Artifact(root, read_manifest(root))
    except ConfigError as error:
        raise StartError(str(error)) from None


def check_artifact(folder: Path, verified: Verified | None = None) -> Artifact:
    """The artifact in `folder`, after comparing every file with the manifest (see `find_file_faults`).

    Raises `StartError` naming the first file that is wrong, and the command that builds the artifact anew.
    """
    artifact = open_artifact(folder)
    for fault in find_file_faults(artifact.root, artifact.manifest, verified):
        raise StartError(fault.text)
    return artifact
