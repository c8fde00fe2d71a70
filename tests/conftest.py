"""Artifacts, and servers that tests share: each is started once, on free ports, and stopped at the end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from serving import TARGET, Stack, Start, running, running_rendered

ROOT = Path(__file__).parents[1]


def serve(source: Path, folder: Path, *flags: str, **env: str) -> AbstractContextManager[Stack]:
    """A server of the artifact `source`, or of `TARGET` with its engine."""
    if TARGET is None:
        return running(source, folder / "run", *flags, **env)
    return running_rendered(TARGET, source, folder, *flags, **env)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The mark `own_target` says why a test is not one of a GPU target's."""
    for item in items:
        for mark in item.iter_markers("own_target"):
            (reason,) = mark.args
            if TARGET is not None:
                item.add_marker(pytest.mark.skip(reason=f"target {TARGET} behind stand-ins: {reason}"))


@pytest.fixture(scope="session")
def artifact() -> Callable[[str], Path]:
    """Finds the artifact of a target, built if there is none yet."""

    def find(target: str) -> Path:
        folder = ROOT / "artifacts" / target
        if not (folder / "manifest.json").exists():
            subprocess.run([sys.executable, "-m", "build", "--target", target], cwd=ROOT, check=True, timeout=600)
        return folder

    return find


@pytest.fixture(scope="session")
def start(artifact: Callable[[str], Path]) -> Start:
    """Starts a server like the shared ones, with flags and environment of its own."""

    def start(target: str, folder: Path, *flags: str, **env: str) -> AbstractContextManager[Stack]:
        return serve(artifact(target), folder, *flags, **env)

    return start


@pytest.fixture(scope="session")
def scripted_stack(artifact: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A server whose engine does what the prompt says."""
    with serve(artifact("scripted"), tmp_path_factory.mktemp("scripted")) as stack:
        yield stack


@pytest.fixture(scope="session")
def cpu_stack(artifact: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A server with the real language model."""
    with serve(artifact("cpu"), tmp_path_factory.mktemp("cpu")) as stack:
        yield stack


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows the last lines of its servers' logs."""
    report = yield
    if report.when == "call" and report.failed:
        for stack in getattr(item, "funcargs", {}).values():
            if isinstance(stack, Stack):
                report.sections += stack.log_tails()
    return report
