"""`python -m perf cancel`: how soon the engine lets go of a request whose client left.

A client closes its socket after three events. Triton's log says when the orchestrator saw it
(`caller_left`), when the engine had let go (`engine_stopped`) and when its last decode steps began. All
times are CLOCK_MONOTONIC, which is one clock for all processes of a machine. Measured alone, and with other
streams live.
"""

from __future__ import annotations

import json
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from perf.errors import PerfError
from perf.prompts import fresh_question
from perf.report import format_table, say
from perf.sse import SseConnection, chat_body
from perf.stack import find_artifact, running_stack
from perf.stats import summarize

LEAVE_BAR_MS = 150.0
STEPS_BAR = 1
_EVENTS_BEFORE_LEAVING = 3
_MAX_TOKENS = 1024
_LOG_TIMEOUT_S = 10.0
_LOG_POLL_S = 0.005
# Numbers of the other streams' questions begin here, out of the way of those that leave.
_OTHERS_NUMBER = 100_000


class Leave(NamedTuple):
    """One client that left: milliseconds from its socket's close until the engine had let go, and until the
    orchestrator saw it; and the decode steps begun after the orchestrator saw it."""

    after_leave_ms: float
    seen_ms: float
    num_steps: int


def cancel(artifacts: Path, num_leaves: int, num_others: int) -> tuple[str, dict[str, Any]]:
    """Let `num_leaves` clients leave alone, and as many beside others; returns table and result."""
    with running_stack(find_artifact(artifacts, "cpu")) as stack:
        log = EventLog(stack.triton_log)
        say("  alone")
        alone = [leave(stack.gateway_url, log, number) for number in range(num_leaves)]
        say(f"  beside {num_others} other streams")
        with other_streams(stack.gateway_url, num_others):
            beside = [leave(stack.gateway_url, log, num_leaves + number) for number in range(num_leaves)]
    both = _describe(alone + beside)
    result = {
        "command": "cancel",
        "after_leave_ms": both["after_leave_ms"],
        "steps_after_leave": both["steps_after_leave"],
        "alone": _describe(alone),
        "beside_others": {**_describe(beside), "num_others": num_others},
    }
    rows = [
        _row("alone", result["alone"]),
        _row(f"beside {num_others}", result["beside_others"]),
        _row("both", both),
    ]
    bars = ("bar", "", "", LEAVE_BAR_MS, LEAVE_BAR_MS, STEPS_BAR)
    header = ("client leaves", "times", "seen p50, ms", "let go p50, ms", "p99, ms", "steps, max")
    return format_table(header, [*rows, bars]), result


class EventLog:
    """The JSON lines of a log that is being written, read forward."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def wait_for(self, is_wanted: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """The next event that `is_wanted`, skipping others; raises `PerfError` naming `what` after 10 s."""
        deadline_s = time.monotonic() + _LOG_TIMEOUT_S
        while time.monotonic() < deadline_s:
            for event in self._new_events():
                if is_wanted(event):
                    return event
            time.sleep(_LOG_POLL_S)
        raise PerfError(f"{self._path}: no event {what} within {_LOG_TIMEOUT_S:.0f} s")

    def _new_events(self) -> Iterator[dict[str, Any]]:
        """Whole lines only; the rest is read when it is whole."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                if line.startswith(b'{"event"'):
                    yield json.loads(line)


def leave(url: str, log: EventLog, number: int) -> Leave:
    """Ask, close the socket after a few events, and look what the logs say of it."""
    with SseConnection(url) as connection:
        connection.send(chat_body(fresh_question(number, number), _MAX_TOKENS))
        while connection.num_text_events() < _EVENTS_BEFORE_LEAVING:
            if connection.receive():
                raise PerfError("the answer was over before its client could leave")
        closed_s = time.monotonic()  # before, because it can be seen before `close` returns
    seen = log.wait_for(
        lambda event: event["event"] == "caller_left" and event["monotonic_s"] >= closed_s, "caller_left"
    )
    wanted = ("engine_stopped", seen["request_id"])
    stopped = log.wait_for(lambda event: (event["event"], event.get("request_id")) == wanted, "engine_stopped")
    num_steps = sum(began_s > seen["monotonic_s"] for began_s in stopped["last_steps_began_s"])
    to_ms = 1000.0
    return Leave((stopped["monotonic_s"] - closed_s) * to_ms, (seen["monotonic_s"] - closed_s) * to_ms, num_steps)


@contextmanager
def other_streams(url: str, num_streams: int) -> Iterator[None]:
    """Keep streams live, each asked anew when it ends; the block begins when all have their first token."""
    ended = threading.Event()
    all_started = threading.Event()
    failures: list[Exception] = []
    bodies = [chat_body(fresh_question(index, _OTHERS_NUMBER + index), _MAX_TOKENS) for index in range(num_streams)]

    def read() -> None:
        try:
            with ExitStack() as opened, selectors.DefaultSelector() as selector:
                connections = [opened.enter_context(SseConnection(url)) for _ in bodies]
                for connection, body in zip(connections, bodies):
                    selector.register(connection, selectors.EVENT_READ, (connection, body))
                    connection.send(body)
                while not ended.is_set():
                    for key, _ in selector.select(timeout=0.1):
                        connection, body = key.data
                        if connection.receive():
                            connection.send(body)
                    if not all_started.is_set() and all(c.num_text_events() for c in connections):
                        all_started.set()
        except Exception as error:
            failures.append(error)
            all_started.set()

    thread = threading.Thread(target=read, name="other streams")
    thread.start()
    try:
        all_started.wait()
        yield
    finally:
        ended.set()
        thread.join()
    if failures:
        raise failures[0]


def _describe(leaves: list[Leave]) -> dict[str, Any]:
    return {
        "after_leave_ms": summarize([leave.after_leave_ms for leave in leaves]),
        "seen_ms": summarize([leave.seen_ms for leave in leaves]),
        "steps_after_leave": {"max": max(leave.num_steps for leave in leaves)},
    }


def _row(name: str, measured: dict[str, Any]) -> tuple[object, ...]:
    times = measured["after_leave_ms"]
    steps = measured["steps_after_leave"]["max"]
    return name, times["num"], measured["seen_ms"]["p50"], times["p50"], times["p99"], steps
