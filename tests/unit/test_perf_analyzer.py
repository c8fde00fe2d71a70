"""perf_analyzer's command line, its export and its inputs; no server and no perf_analyzer runs here."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from orchestrator.contracts import FRAME_SAMPLES
from orchestrator.vision.sizes import SIDES
from perf import analyzer_inputs
from perf.analyzer import Analyzer, Level, Subject, find_analyzer, read_export, read_summary
from perf.analyzer_inputs import write_inputs
from perf.errors import PerfError
from perf.processes import descendants
from perf.stack import triton_keys_below
from perf.triton import _measure, _table, choose_models, long_enough_ms

MS = 1_000_000
START = 1_795_879_412_738_918_264  # nanoseconds, as it writes them


def export(requests: list[tuple[float, list[float]]], bounds_ms: list[float]) -> bytes:
    """As `--profile-export-file` has it; times in ms from the first window's begin."""

    def at(time_ms: float) -> int:
        return START + round(time_ms * MS)

    told = {
        "experiments": [
            {
                "experiment": {"mode": "concurrency", "value": 1},
                "requests": [
                    {
                        "timestamp": at(sent),
                        "request_inputs": {"image": '"timestamp":1'},
                        "response_timestamps": [at(each) for each in responses],
                        "response_outputs": [{"text": "IMAGE"} for _ in responses],
                    }
                    for sent, responses in requests
                ],
                "window_boundaries": [at(each) for each in bounds_ms],
            }
        ]
    }
    return json.dumps(told, separators=(",", ":")).encode().replace(b"IMAGE", b"\x89PNG\xff")


def test_times_are_from_sent_to_the_last_response_of_requests_within_the_windows() -> None:
    requests = [(-30.0, [-10.0]), *((at, [at + 20]) for at in range(0, 300, 25)), (290.0, [310.0])]
    result = read_export(export(requests, [0, 100, 200, 300]))
    assert result["num"] == 12
    assert result["requests_per_s"] == 40
    assert result["ms"] == {"p50": 20, "p90": 20, "p95": 20, "p99": 20}
    assert result["stable"]
    assert "gap_ms" not in result


def test_several_responses_of_a_request_have_a_first_and_gaps() -> None:
    result = read_export(export([(0, [50, 60, 80]), (100, [150, 160, 180])], [0, 100, 200]))
    assert result["ms"]["p50"] == 80
    assert result["first_response_ms"]["p50"] == 50
    assert result["gap_ms"]["p50"] == 15
    assert result["responses_per_s"] == 30


@pytest.mark.parametrize(
    ("times_ms", "stable"),
    [
        ([20, 20, 20], True),
        ([20, 21, 22], True),
        ([20, 20, 23], False),
    ],
)
def test_windows_that_differ_by_more_than_a_tenth_are_unstable(times_ms: list[float], stable: bool) -> None:
    requests = [(100 * place + 10, [100 * place + 10 + took_ms]) for place, took_ms in enumerate(times_ms)]
    assert read_export(export(requests, [0, 100, 200, 300]))["stable"] is stable


def test_only_the_last_three_windows_count() -> None:
    requests = [(0.0, [90.0]), *((at, [at + 10]) for at in (110.0, 210.0, 310.0))]
    assert read_export(export(requests, [0, 100, 200, 300, 400]))["num"] == 3


def test_an_export_without_requests_says_what_to_do() -> None:
    with pytest.raises(PerfError, match=r"no request ended within its windows\nfix: longer windows"):
        read_export(export([(0, [500])], [0, 100, 200, 300]))


SUMMARY = """\
Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Client Recv,p50 latency,p90 latency,\
p95 latency,p99 latency,Avg latency
1,43.0977,16,22555,1,5,22215,23881,24589,27109,22578
"""


@pytest.mark.parametrize(("last", "stable"), [("43.2", True), ("60.1", False)])
def test_of_pixels_only_the_summary_is_read(last: str, stable: bool) -> None:
    printed = "".join(
        f"  Pass [{place}] throughput: {rate} infer/sec. Avg latency: 22578 usec (std 1153 usec). \n"
        for place, rate in enumerate(["43.0", "43.1", last], 1)
    )
    result = read_summary(SUMMARY, f"{printed}  Client: \n    Request count: 47\n")
    assert result == {
        "num": 47,
        "requests_per_s": 43.098,
        "ms": {"p50": 22.215, "p90": 23.881, "p95": 24.589, "p99": 27.109},
        "stable": stable,
    }


def test_output_of_another_version_is_quoted() -> None:
    with pytest.raises(PerfError, match="its output is not as expected: nothing"):
        read_summary(SUMMARY, "nothing")


KEYS = {"name": "key", "other": "lock"}


def test_command_lines() -> None:
    analyzer = Analyzer(Path("/bin/perf_analyzer"), None, "")
    vad = Subject("vad", Path("in.json"), "127.0.0.1:1", KEYS, is_sequence=True)
    engine = Subject("llm_small", Path("in.json"), "127.0.0.1:1", KEYS, is_decoupled=True)
    plain = Subject("ocr", Path("in.json"), "127.0.0.1:1", KEYS)
    bulky = Subject("ocr_detector", Path("in.json"), "127.0.0.1:1", KEYS, is_bulky=True)

    def flags(subject: Subject, level: Level) -> list[str]:
        return subject.command(analyzer, level, 500, Path("out"), 16)

    assert {"--streaming", "--request-rate-range=2.5", "--num-of-sequences=16"} <= set(flags(vad, Level(rate=2.5)))
    assert {"--streaming", "--concurrency-range=4"} <= set(flags(engine, Level(concurrency=4)))
    assert "--num-of-sequences=16" not in flags(engine, Level(rate=2.5))
    assert "--streaming" not in flags(plain, Level(concurrency=1))
    assert "--profile-export-file=out/export.json" in flags(plain, Level(concurrency=1))
    assert "--profile-export-file=out/export.json" not in flags(bulky, Level(concurrency=1))
    assert "--request-distribution=poisson" in flags(plain, Level(rate=1.0))
    assert " ".join(flags(plain, Level(rate=1.0))).count("-H name:key -H other:lock") == 1


def test_a_load_is_a_share_of_the_most() -> None:
    assert Level(load=0.8).of(41.4789) == Level(rate=33.2)
    assert Level(concurrency=4).of(41.0) == Level(concurrency=4)
    assert (str(Level(concurrency=4)), str(Level(rate=33.2))) == ("4 at once", "33.2 a second")


def test_one_in_the_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "perf_analyzer"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert find_analyzer() == Analyzer(program, None, "PATH")


def test_one_that_does_not_run_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "perf_analyzer"
    program.write_text("#!/bin/sh\necho 'libb64.so.0d: cannot open' >&2\nexit 127\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(PerfError, match=r"does not run here: libb64\.so\.0d: cannot open"):
        find_analyzer()


def test_the_keys_come_from_the_command_line_of_the_server_below() -> None:
    server = "import time; print(flush=True); time.sleep(60)"
    flags = [f"--grpc-restricted-protocol={apis}" for apis in ("trace,logging:x-name=secret", "inference:x-more==-_")]
    serve = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {server!r}, *{flags!r}])"
    with subprocess.Popen([sys.executable, "-c", serve], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"\n"
            keys = {"triton-grpc-protocol-x-name": "secret", "triton-grpc-protocol-x-more": "=-_"}
            assert triton_keys_below(process.pid) == keys
        finally:
            for pid in (*descendants(process.pid), process.pid):
                os.kill(pid, signal.SIGKILL)


def test_a_process_without_a_server_is_named() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            with pytest.raises(PerfError, match=f"process {process.pid}: no Triton"):
                triton_keys_below(process.pid)
        finally:
            process.kill()


# --- inputs ------------------------------------------------------------------------------------------------


def test_tensors_are_the_bytes_on_the_wire() -> None:
    text = analyzer_inputs._tensor("ü".encode())
    assert base64.b64decode(text["content"]["b64"]) == b"\x02\0\0\0\xc3\xbc" and text["shape"] == [1]
    array = analyzer_inputs._tensor(np.array([[1, -1]], np.int32))
    assert base64.b64decode(array["content"]["b64"]) == b"\x01\0\0\0\xff\xff\xff\xff" and array["shape"] == [1, 2]


def test_people_are_sequences_of_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speech = np.arange(16_000 * 5, dtype=np.float32)
    monkeypatch.setattr(analyzer_inputs, "_speech", lambda: speech)
    write_inputs("vad", tmp_path, tmp_path / "inputs.json")
    sequences = json.loads((tmp_path / "inputs.json").read_text())["data"]
    assert len(sequences) == 2 and all(len(sequence) == 62 for sequence in sequences)
    second = np.frombuffer(base64.b64decode(sequences[0][1]["frame"]["content"]["b64"]), np.float32)
    assert (second == speech[FRAME_SAMPLES : 2 * FRAME_SAMPLES]).all()


@pytest.mark.parametrize("model", ["ocr", "image_preprocess", "ocr_detector", "ocr_recognizer", "embedding"])
def test_inputs_are_what_the_model_declares(model: str, tmp_path: Path) -> None:
    write_inputs(model, tmp_path, tmp_path / "inputs.json", first_number=7)
    first = json.loads((tmp_path / "inputs.json").read_text())["data"][0]
    ((name, tensor),) = first.items()
    raw, shape = base64.b64decode(tensor["content"]["b64"]), tensor["shape"]
    if name in ("image", "text"):
        assert int.from_bytes(raw[:4], "little") == len(raw) - 4
        assert raw[4:].startswith(b"\x89PNG" if name == "image" else b"000007. ")
    else:
        assert len(raw) == np.prod(shape) and shape[2] == 3
        assert shape[0] == 48 if name == "crop" else all(side in SIDES for side in shape[:2])


def test_a_model_that_is_not_known_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analyzer_inputs, "load_tiers", lambda path: SimpleNamespace(tier=[]))
    with pytest.raises(PerfError, match="model 'mystery': no inputs are made for it"):
        write_inputs("mystery", tmp_path, tmp_path / "inputs.json")


# --- the command -------------------------------------------------------------------------------------------


def test_models_are_chosen_by_name(tmp_path: Path) -> None:
    for name in ("vad", "ocr"):
        (tmp_path / "model_repository" / name).mkdir(parents=True)
        (tmp_path / "model_repository" / name / "config.pbtxt").touch()
    assert choose_models(tmp_path, None) == ["ocr", "vad"]
    assert choose_models(tmp_path, ["vad"]) == ["vad"]
    with pytest.raises(PerfError, match=r"--only: 'tts' is no model of .*; it has ocr, vad"):
        choose_models(tmp_path, ["vad", "tts"])


def test_a_model_slower_than_its_windows_is_measured_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    windows: list[int] = []

    def measure(self: Subject, analyzer: Analyzer, level: Level, window_ms: int, num_sequences: int) -> dict[str, int]:
        windows.append(window_ms)
        if window_ms < 15_000:
            raise PerfError("No valid requests recorded within time interval. Please use a larger time window.")
        return {"num": 3}

    monkeypatch.setattr(Subject, "measure", measure)
    subject = Subject("ocr", Path("in.json"), "127.0.0.1:1", KEYS)
    assert _measure(subject, Analyzer(Path("p"), None, ""), Level(concurrency=1), 500, [1]) == {"num": 3}
    assert windows == [500, 15_000]


@pytest.mark.parametrize(("rate", "window_ms"), [(0.0, 500), (100.0, 500), (10.0, 1000), (0.1, 15_000)])
def test_windows_are_long_enough_for_slow_models(rate: float, window_ms: int) -> None:
    assert long_enough_ms(rate, 500) == window_ms


def test_a_failed_level_is_in_the_table() -> None:
    measured = {"requests_per_s": 5.0, "ms": {"p50": 1.0, "p99": 2.0}, "stable": True}
    table = _table({"ocr": {"concurrency": {"1": measured, "4": {"failed": "no"}}, "rate": {"2.5": measured}}})
    assert [line.split("  ")[0] for line in table.splitlines()[2:]] == [
        "ocr, 1 at once",
        "ocr, 4 at once",
        "ocr, 2.5 a second",
    ]
    assert "failed" in table
