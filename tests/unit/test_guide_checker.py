"""A guide's verdict comes from another process, which may say no, hang, crash or not start."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import pytest

from orchestrator.engines import EngineRefusal, guide_checker
from orchestrator.engines.guide_checker import Guide, GuideChecker

TIMEOUT_S = 20.0
# Stands in for engines.guides: the guide's text says what happens.
PROCESS = """
import json, os, signal, sys, time
from orchestrator.engines.guide_checker import Guide
def say(answer):
    os.write(1, json.dumps(answer).encode() + b"\\n")
say({"ready": True})
for line in sys.stdin.buffer:
    text = Guide.from_line(line).text or ""
    if text == "hang":
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(60)
    if text == "spin":
        signal.setitimer(signal.ITIMER_PROF, 0.05)
        while True:
            pass
    if text == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    refusal = f"no: {text}" if text.startswith("bad") else f"pid {os.getpid()}" if text == "pid" else None
    say({"refusal": refusal, "num_bytes": 100 * len(text)})
"""


def schema(text: str) -> Guide:
    return Guide("json_schema", text)


@pytest.fixture
def make() -> Iterator[Callable[[str], GuideChecker]]:
    checkers = []

    def make(program: str = PROCESS) -> GuideChecker:
        checkers.append(GuideChecker([sys.executable, "-c", program]))
        return checkers[-1]

    yield make
    for checker in checkers:
        checker.close()


def verdict(checker: GuideChecker, guide: Guide) -> str | None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            if checker.check(guide):
                return None
        except EngineRefusal as refusal:
            return str(refusal)
        time.sleep(0.001)
    raise AssertionError("no verdict")


@pytest.mark.parametrize(
    "guide", [Guide("json", None), Guide("regex", "a b\n\x00é深\U0001f600"), Guide("regex", "x" * 20_000)]
)
def test_a_guide_on_a_line(guide: Guide) -> None:
    line = guide.to_line()
    assert line.count(b"\n") == 1
    assert Guide.from_line(line) == guide


def test_yes_and_no(make: Callable[..., GuideChecker]) -> None:
    checker = make()
    assert checker.num_bytes(schema("good")) == 0
    assert not checker.check(schema("good"))  # never waits
    assert verdict(checker, schema("good")) is None
    assert verdict(checker, schema("bad")) == "no: bad"


def test_a_verdict_is_remembered(make: Callable[..., GuideChecker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guide_checker, "MAX_VERDICTS", 2)
    checker = make()
    assert verdict(checker, schema("bad 1")) == "no: bad 1"
    assert verdict(checker, schema("bad 2")) == "no: bad 2"
    with pytest.raises(EngineRefusal):
        checker.check(schema("bad 1"))  # at once, and so it is the younger one now
    assert verdict(checker, schema("bad 3")) == "no: bad 3"
    with pytest.raises(EngineRefusal):
        checker.check(schema("bad 1"))
    assert not checker.check(schema("bad 2"))  # the oldest was forgotten


def test_others_ask_while_one_is_tried(make: Callable[..., GuideChecker]) -> None:
    checker = make()
    texts = [f"bad {n}" for n in range(5)]
    waiting = list(texts)
    deadline_s = time.monotonic() + TIMEOUT_S
    order = []
    while waiting and time.monotonic() < deadline_s:
        for text in list(waiting):
            try:
                assert not checker.check(schema(text))
            except EngineRefusal:
                order.append(text)
                waiting.remove(text)
    assert sorted(order) == texts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spin", "guided_decoding_guide: takes more than 4 s of processor time to compile; make it simpler"),
        ("crash", "guided_decoding_guide: cannot be compiled (its compiler ended with status -11)"),
    ],
)
def test_a_guide_that_ends_the_process(make: Callable[..., GuideChecker], text: str, message: str) -> None:
    checker = make()
    assert verdict(checker, schema(text)) == message
    assert verdict(checker, schema("good")) is None
    with pytest.raises(EngineRefusal):
        checker.check(schema(text))  # not tried a second time


def test_a_machine_too_busy_to_compile_is_no_fault_of_the_guide(
    make: Callable[..., GuideChecker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guide_checker, "CLOCK_VERDICT_S", 0.2)
    checker = make()
    assert str(verdict(checker, schema("hang"))).endswith("; try again later")
    assert checker.knows(schema("hang"))  # for all who waited with it
    with pytest.raises(EngineRefusal, match="try again later"):
        checker.check(schema("hang"))
    time.sleep(0.2)
    assert not checker.knows(schema("hang"))
    assert not checker.check(schema("hang"))  # tried a second time


def test_the_process_is_renewed(make: Callable[..., GuideChecker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guide_checker, "GUIDES_PER_PROCESS", 2)
    checker = make()
    pids = [verdict(checker, Guide(guide_type, "pid")) for guide_type in ("json_schema", "regex", "ebnf_grammar")]
    assert pids[0] == pids[1] != pids[2]


def test_a_process_that_does_not_start(make: Callable[..., GuideChecker]) -> None:
    checker = make("raise SystemExit(3)")
    message = "guided_decoding_guide: the process that compiles guides does not start; its log says why"
    assert [verdict(checker, schema("good")) for _ in range(2)] == [message] * 2


def test_what_is_decided_elsewhere(make: Callable[..., GuideChecker]) -> None:
    checker = make()
    checker.decide(schema("good"), "no memory")
    assert verdict(checker, schema("good")) == "no memory"
