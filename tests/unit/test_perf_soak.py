"""The soak's judgement, books and memory, without a server; and the costs of instrumentation."""

from __future__ import annotations

import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from perf.instrumentation import describe as describe_costs
from perf.soak import memory
from perf.soak.accounts import Books, RequestLog, _samples, total
from perf.soak.faults import FAULTS, Fault, Strike
from perf.soak.load import Load
from perf.soak.memory import Series, name_of
from perf.soak.traffic import KINDS, Ask, Heard, Traffic, Verdict, text_of
from perf.stats import upper_bound_95


def heard(ask: Ask, body: bytes = b"", status: int = 200, **others: Any) -> Heard:
    return Heard(ask, 0.0, 1.0, status, body, **others)


def stream(*texts: str, reason: str | None = "stop", end: bytes = b"data: [DONE]\n\n") -> bytes:
    choices = [{"delta": {"content": text}, "finish_reason": None} for text in texts]
    choices += [{"delta": {}, "finish_reason": reason}] if reason else []
    return b"".join(b"data: %s\n\n" % json.dumps({"choices": [choice]}).encode() for choice in choices) + end


def error(code: str) -> bytes:
    return json.dumps({"error": {"code": code}}).encode()


# --- what is right ---


def test_the_mixture_is_as_it_says_and_no_two_requests_are_called_alike() -> None:
    traffic = iter(Traffic("key", 1))
    asks = [next(traffic) for _ in range(4000)]
    assert len({ask.request_id for ask in asks}) == 4000
    for kind, share in KINDS.items():
        assert sum(ask.kind == kind for ask in asks) / 40 == pytest.approx(share, abs=2.5)
    fresh = [ask.text for ask in asks if ask.kind in ("fresh", "auto", "whole")]
    assert len(set(fresh)) == len(fresh)
    assert len({ask.text for ask in asks if ask.kind == "repeat"}) == 40


def test_an_answer_must_be_right_to_the_character() -> None:
    traffic = Traffic("key", 1)
    ask = traffic.make("fresh")
    head, tail = ask.text[:9], ask.text[9:]
    assert traffic.judge(heard(ask, stream(head, tail))).is_right
    other = text_of(7, 5)
    for body, says in (
        (stream(head, tail[:-1]), "a wrong answer"),
        (stream(other), "another request's answer: 'Answer 7:"),
        (stream(ask.text, reason="length"), "finish_reason 'length'"),
        (stream(ask.text, end=b""), "without [DONE]"),
        (stream(ask.text) + stream(end=b""), "goes on after its end"),
        (stream(ask.text)[:-5], "ends inside of an event"),
        (b"data: {]\n\n", "no answer's shape"),
        (stream(other, reason=None, end=b"data: %s\n\n" % error("engine_error")), "another request's answer"),
    ):
        assert says in str(traffic.judge(heard(ask, body)).wrong), body
    broken = stream(head, reason=None, end=b"data: %s\n\n" % error("engine_error"))
    assert traffic.judge(heard(ask, broken)) == Verdict(code="engine_error")
    assert traffic.judge(heard(ask, error("overloaded"), 503)) == Verdict(code="overloaded")
    assert "without an error of ours" in str(traffic.judge(heard(ask, b"<html>", 502)).wrong)
    assert traffic.judge(heard(ask, status=0)) == Verdict(wrong="closed without an answer")
    assert traffic.judge(heard(ask, fault="cut after 9 bytes")) == Verdict(wrong="cut after 9 bytes")


def test_who_leaves_has_heard_the_beginning_of_his_answer() -> None:
    traffic = Traffic("key", 1)
    ask = traffic.make("leave")._replace(body=b'{"stream": true}')
    begun = stream(ask.text[:9], reason=None, end=b"data: {")
    assert traffic.judge(heard(ask, begun, has_left=True)).is_right
    assert traffic.judge(heard(ask, status=0, has_left=True)).is_right
    assert "another request's" in str(
        traffic.judge(heard(ask, stream(text_of(3, 4), reason=None), has_left=True)).wrong
    )


def test_a_deadline_must_end_the_answer_and_a_refusal_must_be_one() -> None:
    traffic = Traffic("key", 1)
    late = traffic.make("late")
    ended = stream(late.text[:20], reason=None, end=b"data: %s\n\n" % error("deadline_exceeded"))
    assert traffic.judge(heard(late, ended)).is_right
    assert traffic.judge(heard(late, error("deadline_exceeded"), 504)).is_right
    assert traffic.judge(heard(late, error("overloaded"), 503)).is_right  # it would not be in time
    assert "deadline_exceeded was wanted" in str(traffic.judge(heard(late, stream(late.text))).wrong)
    refused = traffic.make("refused")
    assert traffic.judge(heard(refused, error(refused.codes[0]), 400)).is_right
    assert traffic.judge(heard(refused, error("internal_error"), 500)) == Verdict(code="internal_error")


def test_vectors_are_compared_with_what_came_first() -> None:
    traffic = Traffic("key", 1)
    ask, other = traffic.make("embedding")._replace(text="a"), traffic.make("embedding")._replace(text="b")

    def judge(ask: Ask, *vector: float) -> Verdict:
        return traffic.judge(heard(ask, json.dumps({"data": [{"embedding": vector}]}).encode()))

    assert judge(ask, 1.0, 0.0).is_right
    assert judge(ask, 1.0, 1e-6).is_right
    assert judge(ask, 0.9, 0.4) == Verdict(wrong="another vector for 'a'")
    assert judge(other, 1.0, 0.0) == Verdict(wrong="the vector of 'a' for 'b'")


# --- faults ---


def test_a_fault_explains_its_own_errors_while_it_lasts_and_a_little_longer() -> None:
    fault = Fault("engine", (0.5,), lambda _: None, frozenset({"engine_error"}))
    strike = Strike(fault, began_s=100.0)
    assert strike.explains("engine_error", 99.0, 100.5)
    assert not strike.explains("engine_error", 98.0, 99.5)  # it was over before
    assert not strike.explains("internal_error", 99.0, 100.5)
    strike.back_s = 103.0
    assert strike.explains("engine_error", 112.0, 113.0)
    assert not strike.explains("engine_error", 114.0, 114.5)
    strike.note("engine_error", 104.0)
    strike.note("engine_error", 105.0)
    assert (strike.errors, strike.last_error_s) == ({"engine_error": 2}, 105.0)


def test_what_runs_at_a_kill_may_lose_its_line() -> None:
    strike = Strike(Fault("kill", (0.5,), lambda _: None, loses_lines=True), began_s=100.0)
    assert strike.may_lose(99.0, 105.0) and strike.may_lose(90.0, 99.5)
    assert not strike.may_lose(90.0, 98.0) and not strike.may_lose(102.0, 103.0)
    assert not Strike(FAULTS[0], began_s=100.0).may_lose(99.0, 105.0)


def test_every_fault_strikes_within_the_soak() -> None:
    assert all(0 < share < 1 for fault in FAULTS for share in fault.at)


# --- books ---


def line(request_id: str, outcome: str = "ok", event: str = "request") -> bytes:
    model = {"model": "embedding"} if event == "request_beside" else {}
    return json.dumps({"event": event, "outcome": outcome, "x_request_id": request_id, **model}).encode() + b"\n"


def test_the_log_is_read_on_when_it_was_rotated(tmp_path: Path) -> None:
    path = tmp_path / "triton.log"
    path.write_bytes(line("before"))
    log = RequestLog(path)
    with path.open("ab") as file:
        file.write(line("a") + b'{"event": "caller_left", "request_id": "x"}\nI1127 started\n' + line("b")[:20])
    log.read()
    assert log.outcomes == {"a": ["ok"]}
    with path.open("ab") as file:
        file.write(line("b")[20:])
    (tmp_path / "triton.log.1").write_bytes(path.read_bytes())
    os.truncate(path, 0)
    with path.open("ab") as file:
        file.write(line("c", "cancelled") + line("a"))
    log.read()
    assert log.outcomes == {"a": ["ok", "ok"], "b": ["ok"], "c": ["cancelled"]}
    assert (log.num_rotations, log.num_starts) == (1, 0)
    assert log.since_start == {("orchestrator", "ok"): 3, ("orchestrator", "cancelled"): 1}


def test_another_process_has_a_log_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "triton-1.log"
    path.touch()
    log = RequestLog(path, "triton-1")
    path.write_bytes(line("a"))
    log.read()
    with path.open("ab") as file:
        file.write(line("b"))
    path.rename(tmp_path / "triton-1.log.1")
    log.read()  # between two processes there is none
    path.write_bytes(line("c", event="request_beside") * 3)  # longer than what was read of the one before
    log.read()
    assert log.outcomes == {"a": ["ok"], "b": ["ok"], "c": ["ok"] * 3}
    assert (log.num_rotations, log.num_starts) == (0, 1)
    assert log.since_start == {("embedding", "ok"): 3}


PAGE = """\
# TYPE rt_requests_total counter
rt_requests_total{model="orchestrator",outcome="ok"} 3
rt_requests_total{model="orchestrator",outcome="cancelled"} 1.0
rt_gateway_requests_total{route="/v1/chat/completions",status="200"} 4.0
rt_live 2
"""


def test_counters_are_added_up_by_their_labels() -> None:
    samples = list(_samples(PAGE))
    assert total(samples, "rt_requests_total") == 4
    assert total(samples, "rt_requests_total", outcome="ok") == 3
    assert total(samples, "rt_live") == 2
    assert total(samples, "rt_requests") == 0


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the metrics page says; the last one stays."""
    pages = [""]
    monkeypatch.setattr("perf.soak.accounts.read_metrics", lambda *_: list(_samples(pages[-1])))
    monkeypatch.setattr("perf.soak.accounts._SETTLE_S", 0.0)
    return pages


def test_every_difference_is_said(page: list[str], tmp_path: Path) -> None:
    path = tmp_path / "triton.log"
    path.touch()
    books, traffic = Books("", "", [RequestLog(path)]), Traffic("key", 1)
    asks = [traffic.make("fresh") for _ in range(4)]
    at_gateway = traffic.make("refused")._replace(codes=("unsupported_media_type",))
    for ask in (*asks, at_gateway):
        books.enter(heard(ask), None)
    names = [ask.request_id for ask in asks]
    path.write_bytes(line(names[0]) + line(names[1]) * 2 + line(names[2]) + line("nobody"))
    page.append('rt_gateway_requests_total{route="/v1/chat/completions",status="200"} 5\nrt_request_seconds_count 5\n')
    accounts, differences = books.close(lambda *_: False)
    assert differences == [
        f"log: no line of fresh {names[3]}",
        f"log: 2 lines of {names[1]}: ok, ok",
        "log: a line of nobody, which nobody sent",
        "metrics: rt_requests_total, orchestrator, ok: 0 are counted, 5 are known",
        "metrics: rt_requests_total: 0 are counted, 5 are known",
    ]
    assert accounts["sent"] == 5 and accounts["refused_by_gateway"] == 1 and accounts["lines_in_log"] == 5


def test_books_that_agree(page: list[str], tmp_path: Path) -> None:
    path = tmp_path / "triton.log"
    path.touch()
    books, ask = Books("", "", [RequestLog(path)]), Traffic("key", 1).make("whole")
    books.enter(heard(ask), None)
    path.write_bytes(line(ask.request_id))
    page.append(
        'rt_gateway_requests_total{route="/v1/chat/completions",status="200"} 1\n'
        'rt_requests_total{model="orchestrator",outcome="ok"} 1\nrt_request_seconds_count{tier="simple"} 1\n'
    )
    accounts, differences = books.close(lambda *_: False)
    assert differences == []
    assert accounts["gateway_statuses"] == {"200": 1}


def test_the_books_of_a_replica_begin_anew_with_it(page: list[str], tmp_path: Path) -> None:
    """What ran when it was killed is excused: who would have written its line is dead."""
    paths = [tmp_path / "triton-0.log", tmp_path / "triton-1.log"]
    for path in paths:
        path.touch()
    page.append(
        'rt_requests_total{replica="triton-0",model="orchestrator",outcome="ok"} 7\n'
        'rt_requests_total{replica="triton-1",model="orchestrator",outcome="ok"} 9\n'
    )
    books, traffic = Books("", "", [RequestLog(path, path.stem) for path in paths]), Traffic("key", 1)
    first, before, killed, after = (traffic.make("fresh") for _ in range(4))
    for ask in (first, before, killed, after):
        books.enter(heard(ask)._replace(ended_s=2.0 if ask is killed else 1.0), None)
    paths[0].write_bytes(line(first.request_id))
    paths[1].write_bytes(line(before.request_id))
    books.read()
    paths[1].rename(tmp_path / "triton-1.log.1")
    paths[1].write_bytes(line(after.request_id))
    page.append(
        'rt_gateway_requests_total{route="/v1/chat/completions",status="200"} 4\n'
        'rt_requests_total{replica="triton-0",model="orchestrator",outcome="ok"} 8\n'
        'rt_requests_total{replica="triton-1",model="orchestrator",outcome="ok"} 1\n'
        'rt_request_seconds_count{replica="triton-0"} 1\nrt_request_seconds_count{replica="triton-1"} 1\n'
    )
    accounts, differences = books.close(lambda _, ended_s: ended_s == 2.0)
    assert differences == []
    assert (accounts["lines_in_log"], accounts["excused"]) == (3, 1)


# --- memory ---


def test_growth_is_seen_after_the_warm_up_alone() -> None:
    flat = Series("flat", 1, [(10.0 * step, 50.0 if step < 20 else 100.0 + step % 3) for step in range(60)])
    grows = Series("grows", 2, [(10.0 * step, 100.0 + step) for step in range(60)])
    restarted = Series("restarted", 3, [(100.0 + 10 * step, 10.0 * min(step, 25)) for step in range(50)])
    rows, faults = memory.describe([flat, grows, restarted], 600.0)
    assert [row["growth"] for row in rows] == [pytest.approx(0, abs=0.02), 0.1811, pytest.approx(0, abs=0.02)]
    assert [row["started_late"] for row in rows] == [False, False, True]
    assert faults == ["memory: grows (2) grew by 18.1 %, 132.5 to 156.5 MiB"]


def test_of_a_short_soak_nothing_is_said_of_growth() -> None:
    rows, faults = memory.describe([Series("any", 1, [(float(step), float(step)) for step in range(30)])], 30.0)
    assert (rows[0]["growth"], faults) == (None, [])


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/usr/bin/python3 -m orchestrator.engines.worker", "engine's process"),
        ("/x/triton_python_backend_stub /x/model_repository/llm_small/1/model.py p 1", "model llm_small"),
        ("/x/tritonserver --model-repository=/x/model_repository", "triton"),
        ("/usr/bin/sleep 5", "sleep"),
    ],
)
def test_processes_have_names(command: str, name: str) -> None:
    assert name_of(command) == name


# --- load ---


@contextmanager
def serving(answer: Callable[[bytes], bytes]) -> Iterator[str]:
    """A server of one answer a connection; b"" closes without one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(answer(connection.recv(1 << 16)))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_both_loads_hear_of_every_request() -> None:
    def answer(request: bytes) -> bytes:
        assert b"x-request-id: soak-" in request and b"connection: close" in request
        return b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

    ended: list[Heard] = []
    with serving(answer) as url:
        load = Load(url, (Traffic("key", 1).make("whole") for _ in range(1 << 30)), ended.append)
        rate = load.run_closed(4, 0.3)
        assert rate > 10 and len(ended) > 3
        ended.clear()
        began_s = time.monotonic()
        load.run_poisson(100.0, 0.5, 1)
        assert time.monotonic() - began_s == pytest.approx(0.5, abs=0.3)
        load.finish()
        load.close()
    assert 20 <= len(ended) <= 90
    assert {(each.status, each.body, each.fault) for each in ended} == {(200, b"ok", None)}


def test_what_broke_is_said() -> None:
    answers = iter((b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", b"HTTP"))
    ended: list[Heard] = []
    with serving(lambda _: next(answers, b"")) as url:
        load = Load(url, iter([Traffic("key", 1).make("whole") for _ in range(3)]), ended.append)
        with pytest.raises(StopIteration):
            load.run_closed(1, 5.0)
        load.close()
    url_of_nobody = url
    gone = Load(url_of_nobody, iter([Traffic("key", 1).make("whole")]), ended.append)
    with pytest.raises(StopIteration):
        gone.run_closed(1, 5.0)
    gone.close()
    assert [each.status for each in ended] == [0, 200, 0, 0]
    assert (ended[0].fault, ended[1].fault) == (None, "cut after 40 bytes")
    assert "no HTTP" in str(ended[2].fault) and "cannot be sent" in str(ended[3].fault)


# --- the cost of instrumentation ---


def test_the_bound_is_students() -> None:
    values = [0.01, 0.03, 0.02, 0.00, 0.04, 0.02, 0.01, 0.03, 0.02, 0.02]
    error_of_mean = statistics.stdev(values) / 10**0.5
    assert upper_bound_95(values) == pytest.approx(0.02 + 1.833 * error_of_mean)
    assert upper_bound_95([1.0, 1.0]) == 1.0
    assert upper_bound_95(values * 10) > 0.02
    with pytest.raises(ValueError, match="at least two"):
        upper_bound_95([1.0])


def test_costs_are_of_the_pairs() -> None:
    described = describe_costs([{"on": 95.0, "off": 100.0}, {"on": 99.0, "off": 100.0}])
    assert described["cost"]["mean"] == 0.03
    assert described["cost"]["upper_95"] == pytest.approx(0.03 + 6.314 * 0.02, abs=1e-4)
    assert described["pairs"][1] == {"on": 99.0, "off": 100.0, "cost": 0.01}
