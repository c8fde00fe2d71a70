"""The circuit breaker: when it opens, who is let through, and how it closes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.routing.breaker import MAX_OPEN_S, Breaker, Passage, Verdict


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    def __init__(self, failures_to_open: int = 3) -> None:
        self.clock = Clock()
        self.breaker = Breaker(failures_to_open, 5.0, self.clock)

    def enter(self) -> Passage:
        passage = self.breaker.enter()
        assert passage is not None
        return passage

    def end(self, *verdicts: Verdict) -> None:
        for verdict in verdicts:
            self.enter().end(verdict)

    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_failures_in_a_row_open_it(bench: Bench) -> None:
    bench.end("failure", "failure", "success", "failure", "failure")
    assert bench.breaker.state == "closed"
    bench.end("failure")
    assert (bench.breaker.state, bench.breaker.is_out, bench.breaker.wait_s) == ("open", True, 5.0)
    assert bench.breaker.enter() is None


def test_what_callers_do_opens_nothing(bench: Bench) -> None:  # R09
    bench.end(*["neutral"] * 20)
    assert bench.breaker.state == "closed"
    bench.end("failure", "neutral", "failure", "neutral", "failure")  # nor does it hide failures
    assert bench.breaker.state == "open"


def leave(bench: Bench, num: int) -> None:
    """So many leave at once, and the engine lets go of none in time."""
    passages = [bench.enter() for _ in range(num)]
    for passage in passages:
        bench.wait(2)
        passage.end("unstopped")


def test_many_who_leave_a_slow_engine_open_nothing(bench: Bench) -> None:
    for _ in range(10):
        first, *others = [bench.enter() for _ in range(12)]
        bench.wait(2)
        first.show_life()  # it let go of one
        first.end("neutral")
        for passage in others:
            passage.end("unstopped")
        assert bench.breaker.state == "closed"


def test_others_hear_tokens_while_one_is_not_let_go(bench: Bench) -> None:
    staying = bench.enter()
    for _ in range(10):
        passage = bench.enter()
        bench.wait(2)
        staying.hear()
        passage.end("unstopped")
    assert bench.breaker.state == "closed"


def test_an_engine_that_lets_nobody_go_and_says_nothing_hangs(bench: Bench) -> None:
    leave(bench, 12)
    leave(bench, 12)
    assert bench.breaker.state == "closed"  # two failures, however many there were each time
    leave(bench, 1)
    assert bench.breaker.state == "open"


def test_streams_that_begin_and_die_are_failures(bench: Bench) -> None:
    for _ in range(3):
        passage = bench.enter()
        passage.hear()
        passage.end("failure")
    assert bench.breaker.state == "open"


def test_silence_for_everybody_opens_it_at_once(bench: Bench) -> None:
    bench.end("success")
    first, second = bench.enter(), bench.enter()
    bench.wait(1.0)
    second.hear()
    bench.wait(9.0)
    first.end("hang")  # the other one heard something meanwhile: slow
    assert bench.breaker.state == "closed"
    second.end("hang")  # since its last token nobody did
    assert bench.breaker.state == "open"


def test_one_probe_at_a_time_closes_it(bench: Bench) -> None:
    bench.end(*["failure"] * 3)
    bench.wait(4.9)
    assert bench.breaker.enter() is None
    bench.wait(0.1)
    assert (bench.breaker.state, bench.breaker.is_out) == ("half_open", False)
    probe = bench.enter()
    assert probe.is_probe and bench.breaker.enter() is None and bench.breaker.state == "half_open"
    probe.hear()
    assert bench.breaker.state == "closed" and not bench.enter().is_probe
    probe.end("success")


def test_a_probe_that_fails_doubles_the_wait_up_to_a_minute(bench: Bench) -> None:
    bench.end(*["failure"] * 3)
    for seconds in (5.0, 10.0, 20.0, 40.0, MAX_OPEN_S, MAX_OPEN_S):
        assert bench.breaker.wait_s == seconds
        bench.wait(seconds)
        bench.end("hang")
    bench.wait(MAX_OPEN_S)
    bench.end("success", "failure", "failure", "failure")
    assert bench.breaker.wait_s == 5.0


def test_a_probe_that_was_left_says_nothing_and_the_next_one_goes(bench: Bench) -> None:
    bench.end(*["failure"] * 3)
    bench.wait(5.0)
    bench.end("neutral")
    assert bench.enter().is_probe


def test_what_was_sent_before_it_opened_changes_nothing(bench: Bench) -> None:
    early, other = bench.enter(), bench.enter()
    bench.end(*["failure"] * 3)
    bench.wait(1.0)
    early.hear()
    early.end("success")
    other.end("failure")
    assert (bench.breaker.state, bench.breaker.wait_s) == ("open", 4.0)


STEPS = st.lists(
    st.one_of(
        st.just("enter"),
        st.floats(0, 20),
        st.tuples(st.integers(0, 20), st.sampled_from(["success", "failure", "hang", "neutral"])),
    ),
    max_size=60,
)


@given(STEPS)
def test_it_never_locks_itself_out(steps: list[object]) -> None:
    bench, inside = Bench(), list[Passage]()
    for step in steps:
        if step == "enter":
            if passage := bench.breaker.enter():
                inside.append(passage)
                assert sum(each.is_probe for each in inside) <= 1
        elif isinstance(step, float):
            bench.wait(step)
        elif isinstance(step, tuple) and inside:
            inside.pop(step[0] % len(inside)).end(step[1])
        assert bench.breaker.is_out <= (bench.breaker.state != "closed")
        assert bench.breaker.wait_s <= MAX_OPEN_S
    for passage in inside:
        passage.end("neutral")
    bench.wait(MAX_OPEN_S)
    bench.end("success")
    assert bench.breaker.state == "closed"
