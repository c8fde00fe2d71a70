"""The scripts: help does nothing but help, and two set-ups of one .venv do not meet."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Nothing but the scripts, so that a set-up fails, and the trace of a server, which `stop` would look for."""
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    (tmp_path / ".run" / "8080").mkdir(parents=True)
    (tmp_path / ".run" / "8080" / "pid").write_text("1\n")
    return tmp_path


@pytest.mark.parametrize("name", ["demo", "serve", "stop", "test", "lint"])
@pytest.mark.parametrize("flags", [["--help"], ["-h"], ["--target", "cpu", "--help"]])
def test_help_is_answered_first(checkout: Path, name: str, flags: list[str]) -> None:
    done = subprocess.run([checkout / "scripts" / name, *flags], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"scripts/{name}")
    assert sorted(path.name for path in checkout.iterdir()) == [".run", "scripts"]
    assert (checkout / ".run" / "8080" / "pid").exists()


def test_stop_takes_no_arguments(checkout: Path) -> None:
    done = subprocess.run([checkout / "scripts" / "stop", "8080"], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (1, "error: scripts/stop takes no arguments (got 8080)\n")
    assert (checkout / ".run" / "8080" / "pid").exists()


def test_one_set_up_at_a_time(checkout: Path) -> None:
    command = "source scripts/lib.sh; install_extras() { echo begin >>log; sleep 0.5; echo end >>log; }; set_up cpu"
    running = [subprocess.Popen(["bash", "-c", command], cwd=checkout, stderr=subprocess.DEVNULL) for _ in range(3)]
    assert [each.wait(20) for each in running] == [0, 0, 0]
    assert (checkout / "log").read_text().split() == ["begin", "end"] * 3
