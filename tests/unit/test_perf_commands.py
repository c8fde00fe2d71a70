"""Prompts, logs, workers and the command line of `python -m perf`; no server runs here."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from perf.__main__ import main
from perf.cancel import EventLog
from perf.errors import PerfError
from perf.prompts import QUESTIONS, fresh_question, script
from perf.stack import running_stack
from perf.streams import _describe
from perf.worker import Worker


def test_prompts_of_one_question_differ_in_front_and_are_equally_long() -> None:
    first, second = fresh_question(3, 9), fresh_question(3 + len(QUESTIONS), 10)
    assert first[:6] != second[:6]
    assert first[6:] == second[6:]
    assert len(set(map(fresh_question, range(100), range(100)))) == 100


def test_script_is_what_the_scripted_engine_reads() -> None:
    _, _, orders = script("one two", 40, 2, 7).partition("#script ")
    assert json.loads(orders) == {"text": "one two", "first_token_ms": 40, "itl_ms": 2}


def test_log_is_read_forward_and_only_in_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "triton.log"
    path.write_text('I1127 started\n{"event": "caller_left", "n": 1}\n{"event": "caller_left", "n"')
    log = EventLog(path)
    assert log.wait_for(lambda event: event["event"] == "caller_left", "caller_left")["n"] == 1

    def finish() -> None:
        time.sleep(0.05)
        with path.open("a") as file:
            file.write(': 2}\n{"event": "request"}\n')

    thread = threading.Thread(target=finish)
    thread.start()
    assert log.wait_for(lambda event: event["event"] == "caller_left", "caller_left")["n"] == 2
    thread.join()


def test_missing_event_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perf.cancel._LOG_TIMEOUT_S", 0.05)
    (tmp_path / "triton.log").touch()
    with pytest.raises(PerfError, match=r"triton\.log: no event engine_stopped within"):
        EventLog(tmp_path / "triton.log").wait_for(lambda event: True, "engine_stopped")


def test_ratio_is_the_median_of_the_rounds() -> None:
    def measured(bare: float, sse: float) -> dict[str, dict[str, float]]:
        return {
            "bare": {"tokens_per_s": bare},
            "sse": {"tokens_per_s": sse, "tokens": 100.0, "events": 80.0},
        }

    detail = _describe([measured(100, 90), measured(100, 20), measured(50, 48)])
    assert detail["ratio"] == 0.9
    assert detail["ratios"] == [0.9, 0.2, 0.96]
    assert detail["tokens_per_event"] == 1.25


def test_worker_that_ends_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    url = "http://127.0.0.1:9"  # nothing listens on the discard port
    message = r"perf\.sse_load: ended with exit code 1"
    with Worker("perf.sse_load", url) as worker, pytest.raises(PerfError, match=message):
        worker.ask({"prompts": ["?"], "max_tokens": 1})
    assert "ConnectionRefusedError" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["overhead", "streams", "cancel"])
def test_missing_artifact_names_the_command_that_makes_it(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, f"--artifacts={tmp_path}"]) == 1
    expected = f"error: {tmp_path / 'cpu'}: no finished artifact here\nfix: python -m build --target cpu\n"
    assert capsys.readouterr().err == expected


def test_serve_that_cannot_start_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    message = r"serve ended with exit code 1.*\n(.*\n)*.*manifest\.json"
    with pytest.raises(PerfError, match=message), running_stack(tmp_path):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["streams", "--streams=8,0"], "'0' is not allowed; a whole number from 1"),
        (["overhead", "--requests=many"], "'many' is not allowed"),
        (["latency"], "invalid choice: 'latency'"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err
