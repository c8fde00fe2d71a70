"""All that the doctor looks at, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from orchestrator.doctor.engines import check_engines, check_graphs
from orchestrator.doctor.files import CHECK as FILES
from orchestrator.doctor.files import Verified, find_file_faults
from orchestrator.doctor.findings import Finding
from orchestrator.doctor.hardware import check_backends, check_hardware
from orchestrator.doctor.machine import Machine
from orchestrator.doctor.repository import check_repository
from orchestrator.doctor.tokenizers import check_tokenizers
from orchestrator.manifest import Manifest


def examine(
    root: Path,
    manifest: Manifest,
    machine: Machine,
    *,
    backends: Mapping[str, Path] | None,
    programs: Sequence[str],
    verified: Verified | None,
) -> Iterator[Finding]:
    """Findings about the artifact in `root` on `machine`.

    `backends` are Triton's by name, None where there is no Triton to ask; `programs` must be in PATH. With `verified`
    large files that it knows are not read again.
    """
    files = list(find_file_faults(root, manifest, verified))
    size = sum(file.bytes for file in manifest.files.values())
    yield from files or [Finding(FILES, f"{len(manifest.files)} files, {size / 2**30:.2f} GiB, as they were built")]
    yield from check_repository(root, manifest)
    if manifest.render_only:
        yield Finding(
            "engine",
            "none: the artifact was made with --render-only",
            "engines and tokenizers",
            f"python -m build --target {manifest.target}",
        )
    else:
        yield from check_engines(root, manifest)
        yield from check_graphs(root, manifest)
        yield from check_tokenizers(root, manifest)
    if backends is not None:
        yield from check_backends(manifest, machine, backends)
    yield from check_hardware(root, manifest, machine, programs)
