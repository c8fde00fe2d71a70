"""AIPerf's command line and its records; AIPerf itself does not run here.

tests/data/aiperf_records.jsonl is of a real run: ten requests to target cpu, of which AIPerf cancelled some.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perf import aiperf, environment
from perf.aiperf import Limits, read_records
from perf.environment import install, size_mib
from perf.errors import PerfError
from perf.openai import KINDS, _table, traffic

DATA = Path(__file__).parents[1] / "data" / "aiperf_records.jsonl"
LOOSE = Limits(1e6, 1e6)


def records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]


def record(ttft: float, tpot: float, end_s: float, **more: Any) -> dict[str, Any]:
    values = {
        "time_to_first_token": ttft,
        "inter_token_latency": tpot,
        "request_latency": ttft + 9 * tpot,
        "output_sequence_length": 10,
        "input_sequence_length": 50,
    }
    return {
        "metadata": {"request_start_ns": 0, "request_end_ns": int(end_s * 1e9), "was_cancelled": False},
        "metrics": {name: {"value": value, "unit": "ms"} for name, value in values.items()},
        "error": None,
        **more,
    }


# --- records -----------------------------------------------------------------------------------------------


def test_a_real_runs_records_are_read() -> None:
    result = read_records(records(), LOOSE)
    assert result["num"] + result["cancelled"] == len(records()) and result["failed"] == 0
    assert result["num"] > 0 and result["cancelled"] > 0
    assert result["output_tokens_p50"] == 24
    assert 0 < result["ttft_ms"]["p50"] < result["total_ms"]["p50"]
    assert result["goodput"] == {"requests_per_s": result["requests_per_s"], "share": 1.0}


def test_whoever_failed_or_was_cancelled_is_counted_and_not_timed() -> None:
    failed = record(9999, 9999, 1.0, error={"code": 503, "message": "overloaded"}, metrics={})
    cancelled = record(9999, 9999, 1.0, error={"code": 499}, metrics={})
    cancelled["metadata"]["was_cancelled"] = True
    warm_up = record(9999, 9999, 50.0)
    warm_up["metadata"]["benchmark_phase"] = "warmup"
    result = read_records([record(100, 20, 2.0), failed, cancelled, warm_up], LOOSE)
    assert (result["num"], result["failed"], result["cancelled"]) == (1, 1, 1)
    assert result["ttft_ms"]["p99"] == 100 and result["tpot_ms"]["p50"] == 20
    assert result["requests_per_s"] == 0.5 and result["tokens_per_s"] == 5
    assert "overloaded" in result["first_failure"]


def test_a_good_request_keeps_both_limits() -> None:
    each = [record(100, 20, 4.0), record(600, 20, 4.0), record(100, 80, 4.0), record(500, 66, 4.0)]
    failed = record(1, 1, 4.0, error={"code": 500}, metrics={})
    result = read_records([*each, failed], Limits(500, 66))
    assert result["goodput"] == {"requests_per_s": 0.5, "share": 0.4}


def test_answers_of_another_length_are_told() -> None:
    assert read_records([record(100, 20, 4.0), record(100, 20, 4.0)], LOOSE, 10)["other_length"] == 0
    assert read_records([record(100, 20, 4.0), record(100, 20, 4.0)], LOOSE, 11)["other_length"] == 2


def test_nothing_that_ended_well_has_no_times() -> None:
    failed = record(1, 1, 4.0, error={"code": 500}, metrics={})
    result = read_records([failed], LOOSE)
    assert result == {"num": 0, "failed": 1, "cancelled": 0, "first_failure": "{'code': 500}"}
    assert "nothing ended well" in _table({"poisson": result})


# --- runs --------------------------------------------------------------------------------------------------


def test_each_kind_is_what_its_name_says() -> None:
    kinds = traffic(2.0, 30)
    assert tuple(kinds) == KINDS == ("poisson", "shared-prefix", "multi-turn", "cancellation")
    assert all("poisson" in flags for flags in kinds.values())
    assert "--shared-system-prompt-length" in kinds["shared-prefix"]
    assert kinds["multi-turn"][kinds["multi-turn"].index("--conversation-num") + 1] == "10"
    assert "--request-cancellation-rate" in kinds["cancellation"]


def test_the_tokenizer_is_given_by_its_absolute_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    shape = {"input_tokens": 96, "output_tokens": 24}
    arguments = aiperf.command(tmp_path, "http://127.0.0.1:1", Path("tokenizer"), tmp_path, shape, ["--more"], 7)
    assert arguments[arguments.index("--tokenizer") + 1] == str(tmp_path / "tokenizer")
    assert {"ignore_eos:true", "min_tokens:24", "--more"} <= set(arguments)


def program(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "aiperf.py"
    path.write_text(text)
    return [sys.executable, str(path), str(tmp_path / aiperf.RECORDS)]


def test_its_records_are_returned(tmp_path: Path) -> None:
    arguments = program(tmp_path, "import sys; open(sys.argv[1], 'w').write('{\"a\": 1}\\n{\"a\": 2}\\n')")
    assert aiperf.run(arguments, tmp_path) == [{"a": 1}, {"a": 2}]


def test_a_run_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(PerfError, match=r"exit code 3; its last words:\nno tokenizer"):
        aiperf.run(program(tmp_path, "print('no tokenizer', flush=True); raise SystemExit(3)"), tmp_path)


def test_all_that_it_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiperf, "_RUN_TIMEOUT_S", 1.0)
    monkeypatch.setattr(aiperf, "_LEAVING_S", 0.2)
    child = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    arguments = program(
        tmp_path,
        f"import subprocess, sys\nprocess = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "open(sys.argv[1] + '.pid', 'w').write(str(process.pid))\nprocess.wait()",
    )
    with pytest.raises(PerfError, match="aiperf: not done after 1 s"):
        aiperf.run(arguments, tmp_path)
    pid = int((tmp_path / f"{aiperf.RECORDS}.pid").read_text())
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


# --- environments ------------------------------------------------------------------------------------------


def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        runs.append(command)
        (tmp_path / "tool-1").mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(environment, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(environment.subprocess, "run", run)
    assert install("tool-1", ["tool==1"], "--constraint", "c.txt") == tmp_path / "tool-1"
    assert install("tool-1", ["tool==1"]) == tmp_path / "tool-1"
    assert [command[-3:] for command in runs[1:]] == [["--constraint", "c.txt", "tool==1"]]


def test_an_installation_that_fails_is_quoted_and_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "no such version")

    monkeypatch.setattr(environment, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(environment.subprocess, "run", run)
    for _ in range(2):
        with pytest.raises(PerfError, match="no such version"):
            install("tool-1", ["tool==1"])


def test_sizes_count_files_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(3 << 20))
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert size_mib(tmp_path) == 3


def test_an_older_python_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiperf.sys, "version_info", (3, 10, 1))
    with pytest.raises(PerfError, match=r"needs Python 3\.11 or newer.*\nfix: make \.venv with python3\.11"):
        aiperf.install_aiperf()
