"""The doctor with the Triton of this machine: `python -m orchestrator doctor`, and what `serve` asks first."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from orchestrator.doctor.examination import examine
from orchestrator.doctor.files import Verified
from orchestrator.doctor.findings import Finding
from orchestrator.doctor.hardware import MEMORY
from orchestrator.doctor.machine import Machine, ThisMachine
from orchestrator.triton.artifact import Artifact, open_artifact
from orchestrator.triton.process import StartError
from orchestrator.triton.ranks import choose_ranks
from orchestrator.triton.server import TritonInstall, find_backends, find_triton, library_folders


def check_health(
    artifact: Artifact,
    install: TritonInstall,
    more_backends: Path | None,
    machine: Machine | None = None,
    *,
    replaces: bool = False,
) -> None:
    """What `serve` must know before it starts; large files are read only if they were not read since they changed.

    `replaces` says that it takes the place of what runs now, and so its memory.
    Raises `StartError` with every fault, each with its fix.
    """
    verified = Verified.of_user()
    findings = _diagnose(artifact, install, more_backends, machine, verified)
    faults = [finding.text for finding in findings if finding.is_fault and not (replaces and finding.check == MEMORY)]
    verified.save()
    if faults:
        raise StartError("\n".join(faults))


def _diagnose(
    artifact: Artifact,
    install: TritonInstall | None,
    more_backends: Path | None,
    machine: Machine | None,
    verified: Verified | None,
) -> Iterator[Finding]:
    return examine(
        artifact.root,
        artifact.manifest,
        machine or ThisMachine([] if install is None else library_folders(install)),
        backends=None if install is None else find_backends(install, more_backends),
        programs=choose_ranks(artifact.manifest.trtllm_engines).programs,
        verified=verified,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `python -m orchestrator doctor`."""
    parser.add_argument("artifact", type=Path, help="what `python -m build` made, such as artifacts/h100")
    parser.add_argument("--backend-directory", type=Path, metavar="DIR", help="as for serve")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Read every file and print a line for each finding; raises `StartError` when something is wrong."""
    artifact = open_artifact(options.artifact)
    print(f"{artifact.root} (target {artifact.target})")
    install, num_faults = None, 0
    try:
        install = find_triton(os.environ.get("PATH", os.defpath))
        findings = [Finding("triton", f"{install.binary} (found in {install.source})")]
    except StartError as error:
        found, _, fix = str(error).partition("\nfix: ")
        findings = [Finding("triton", found, "a Triton server for this Python", fix)]
    verified = Verified.of_user()
    verified.forget(artifact.root)
    for each in (*findings, *_diagnose(artifact, install, options.backend_directory, None, verified)):
        print(each.as_line(), flush=True)
        num_faults += each.is_fault
    verified.save()
    if num_faults:
        raise StartError(f"{num_faults} faults; serve will not start with them")
    print("all is well")
