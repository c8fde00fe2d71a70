"""`python -m perf all`: what is run, kept and reported; the commands are fakes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from perf import everything as module
from perf.__main__ import main
from perf.everything import NAMES, PARTS, Part, everything, machine_name, run_part
from perf.pictures import PICTURES

LOAD = {
    "rate": 2.0,
    "requests": [[0.0, 0.2, 0.9], [0.4, 0.7, 1.6], [0.5, 1.0, 2.0]],
    "stages_ms": {"admit": 0.5, "prefill": 180.0, "decode": 700.0},
}
RESULTS: dict[str, dict[str, Any]] = {
    "simulate": {"targets": {"cpu": {"0.3": LOAD, "0.6": LOAD}}},
    "triton": {
        "models": {
            "ocr": {"concurrency": {"1": {"requests_per_s": 2.0, "ms": {"p50": 400.0}}, "4": {"failed": "no"}}},
            "vad": {"concurrency": {"1": {"failed": "no"}}},
        }
    },
}


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No command runs: each is what RESULTS says of it, or failed."""

    def run(part: Part, artifacts: Path) -> dict[str, Any]:
        if part.name == "ocr":
            raise KeyboardInterrupt
        if part.name in RESULTS:
            return {"took_s": 1.0, "result": RESULTS[part.name], "table": f"table of {part.name}"}
        return {"took_s": 1.0, "failed": "exit code 1"}

    monkeypatch.setattr(module, "run_part", run)


def test_every_command_is_in_it() -> None:
    done = subprocess.run([sys.executable, "-m", "perf", "--help"], capture_output=True, text=True, check=True)
    commands = set(done.stdout.partition("{")[2].partition("}")[0].replace("\n", "").replace(" ", "").split(","))
    assert set(NAMES) == commands - {"all", "figures"}  # the latter measures nothing


def test_the_report_has_tables_pictures_and_reasons(parts: None, tmp_path: Path) -> None:
    summary, result = everything(tmp_path, ["simulate", "triton", "safety"], tmp_path)
    (report,) = tmp_path.glob("*.md")
    text = report.read_text()
    assert "table of simulate" in text and "## safety\n\nFailed: exit code 1." in text
    pictures = tmp_path / report.stem
    assert {path.name for path in pictures.iterdir()} == {file for each in PICTURES.values() for file, _, _ in each}
    for path in pictures.iterdir():
        assert f"({report.stem}/{path.name})" in text
        assert "<svg" in path.read_text()
    assert result["failed"].startswith("safety: see ")
    assert json.loads(report.with_suffix(".json").read_text())["parts"]["simulate"]["result"] == RESULTS["simulate"]
    assert "simulate: 1 s" in summary


def test_pictures_are_the_same_again(parts: None, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        everything(tmp_path, ["simulate", "triton"], tmp_path / folder)
    first, second = (sorted((tmp_path / folder).glob("*/*.svg")) for folder in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second] and first


def test_an_interruption_keeps_what_was_measured(
    parts: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["all", f"--artifacts={tmp_path}", f"--folder={tmp_path}", "--only", "triton", "ocr", "voice"]
    assert main(arguments) == 130
    (report,) = tmp_path.glob("*.md")
    text = report.read_text()
    assert "**Interrupted**" in text and "table of triton" in text and "## voice" not in text


def test_a_result_without_figures_has_no_pictures(tmp_path: Path) -> None:
    for pictures in PICTURES.values():
        for file, _, draw in pictures:
            assert draw({}, tmp_path / file) is False
    assert not list(tmp_path.iterdir())


def test_what_needs_a_target_that_is_not_built_is_skipped(tmp_path: Path) -> None:
    assert run_part(Part(("voice",), ("cpu-voice",), 9), tmp_path) == {
        "skipped": "needs `python -m build --target cpu-voice`"
    }


def test_a_command_that_fails_is_told(tmp_path: Path) -> None:
    part = run_part(Part(("simulate", f"--service={tmp_path / 'none.json'}"), (), 1), tmp_path)
    assert part["failed"].startswith("exit code 1")


def test_an_interrupted_command_is_told_once_and_its_result_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\n"
        "import json, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "file = next(each for each in sys.argv if each.startswith('--json=')).removeprefix('--json=')\n"
        "try:\n    open(file + '.on', 'w').close(); time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    json.dump({'interrupted': True}, open(file, 'w')); print('half a table\\n\\n{}')\n"
        "    sys.exit(130)\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    wait = subprocess.Popen.wait
    seen: list[str] = []

    def interrupted(self: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if not seen:
            seen.append(str(self.args))
            file = next(each for each in self.args if str(each).startswith("--json="))  # type: ignore[union-attr]
            while not Path(f"{str(file).removeprefix('--json=')}.on").exists():
                time.sleep(0.01)
            raise KeyboardInterrupt
        return wait(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    part = run_part(PARTS[0]._replace(targets=()), tmp_path)
    assert part["interrupted"] and part["result"] == {"interrupted": True} and part["table"] == "half a table"
    assert "failed" not in part


def test_machines_have_names() -> None:
    assert machine_name({"cpu": "AMD EPYC 7B13 (Rome)", "cores": 2}) == "amd-epyc-7b13-rome-2-cores"
