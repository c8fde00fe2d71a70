"""The queue before an engine: who goes first, who is not let in, and the estimate behind it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import OverloadedError
from orchestrator.limits.queue import INTERACTIVE_TURNS, Class, Pace, Queue, Ticket


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_queue(max_running: int = 1, batch: int = 2, clock: Clock | None = None) -> Queue:
    return Queue(max_running, {"interactive": 3, "batch": batch, "aside": 1}, clock or Clock())


def has_turn(*tickets: Ticket) -> list[bool]:
    return [ticket.turn.is_set() for ticket in tickets]


def test_interactive_ones_go_first_and_each_class_in_its_order() -> None:
    queue = make_queue()
    runs = queue.enter("batch")
    batch = [queue.enter("batch") for _ in range(2)]
    interactive = [queue.enter("interactive") for _ in range(2)]
    assert runs.turn.is_set() and not any(has_turn(*batch, *interactive))
    order = [*interactive, *batch]
    for before, ticket in zip([runs, *order], order):
        before.leave()
        assert has_turn(*order) == [each in order[: order.index(ticket) + 1] for each in order]


def test_a_full_class_is_refused_and_the_other_is_not() -> None:
    queue = make_queue()
    queue.enter("batch")
    for _ in range(2):
        queue.enter("batch")
    with pytest.raises(OverloadedError, match="2 batch requests wait already") as caught:
        queue.enter("batch")
    assert caught.value.headers == {"retry-after": "1"}
    for _ in range(3):
        queue.enter("interactive")
    with pytest.raises(OverloadedError, match="3 interactive requests wait"):
        queue.enter("interactive")


def test_one_that_gives_up_makes_room() -> None:
    async def work() -> None:
        queue = make_queue()
        runs, leaves, stays = (queue.enter("interactive") for _ in range(3))
        waiting = asyncio.create_task(leaves.wait())
        await asyncio.sleep(0)
        await leaves.give_up()
        await waiting
        leaves.leave()
        assert queue.num_waiting("interactive") == 1
        runs.leave()
        assert stays.turn.is_set()
        stays.leave()
        assert queue.enter("interactive").turn.is_set()

    asyncio.run(work())


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    clock = Clock()
    queue = make_queue(clock=clock)
    first = queue.enter("interactive", ends_at_s=100.001, max_tokens=21)  # nothing is known yet
    queue.pace.observe(0.5, 2.5, 21)  # 0.1 s a token
    first.leave()
    queue.enter("interactive", ends_at_s=102.6, max_tokens=21)
    with pytest.raises(OverloadedError, match=r"2\.600 s are left, a place is expected in 2\.500 s and the") as caught:
        queue.enter("interactive", ends_at_s=102.6, max_tokens=21)
    assert caught.value.headers == {"retry-after": "3"}
    queue.enter("interactive", ends_at_s=105.1, max_tokens=21)
    queue.enter("interactive", ends_at_s=None)
    with pytest.raises(OverloadedError):
        queue.enter("batch", ends_at_s=109.9, max_tokens=21)  # behind both
    queue.enter("batch", ends_at_s=110.1, max_tokens=21)


def test_one_whose_answer_alone_takes_too_long_hears_when_that_is_forgotten() -> None:
    clock = Clock()
    queue = make_queue(clock=clock)
    queue.pace.observe(2.0, 2.0, 1)
    clock.now_s += 10
    with pytest.raises(
        OverloadedError, match=r"1\.500 s are left, and the answer alone is expected to take 2\.000"
    ) as caught:
        queue.enter("interactive", ends_at_s=111.5)
    assert caught.value.headers == {"retry-after": "20"}
    clock.now_s += 20
    queue.enter("interactive", ends_at_s=131.5)


def test_one_long_answer_does_not_make_all_long() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.observe(0.02, 3.02, 301)
    assert pace.predict_s() < 0.7 and pace.average_s == pace.predict_s(400) == pytest.approx(3.02)
    pace.observe(0.02, 0.09, 8)
    assert pace.predict_s() < 0.6 and pace.average_s == pytest.approx(3.11 / 2)
    for _ in range(30):
        pace.observe(0.02, 3.02, 301)
    assert pace.predict_s() > 2.5


def test_an_engine_knows_each_tiers_length_by_itself() -> None:
    clock = Clock()
    queue, short, long = make_queue(clock=clock), Pace(clock), Pace(clock)
    for pace in (queue.pace, long):
        for _ in range(30):
            pace.observe(0.02, 3.02, 301)
    first = queue.enter("interactive", ends_at_s=101.5, pace=short)
    with pytest.raises(OverloadedError, match="the answer alone"):
        queue.enter("interactive", ends_at_s=101.5, pace=long)
    with pytest.raises(OverloadedError, match="a place is expected in 3.020 s"):  # behind whatever runs
        queue.enter("interactive", ends_at_s=101.5, pace=short)
    first.leave()


def test_a_tier_of_which_nothing_is_known_is_as_fast_as_its_engine_but_not_as_wordy() -> None:
    clock = Clock()
    engine = Pace(clock)
    tier = Pace(clock, engine)
    assert tier.predict_s() == tier.known_s == 0.0
    for _ in range(30):
        engine.observe(0.02, 3.02, 301)
    assert tier.predict_s() == pytest.approx(0.02) and tier.predict_s(101) == pytest.approx(1.02)
    assert tier.known_s == 30.0
    tier.observe(0.5, 0.5, 1)
    assert tier.predict_s(101) == 0.5


def test_a_short_answer_is_expected_sooner() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert pace.predict_s() == 0.0
    pace.observe(0.5, 2.5, 21)
    assert pace.predict_s(21) == pace.predict_s(1000) == pytest.approx(2.5)
    assert pace.predict_s(6) == pytest.approx(1.0)
    assert pace.predict_s(1) == pytest.approx(0.5)
    for _ in range(60):
        pace.observe(0.1, 0.2, 2)
    assert pace.predict_s() == pytest.approx(0.2, abs=0.02)
    clock.now_s += 31
    assert pace.predict_s() == 0.0  # else a tier that was slow would never be tried again
    pace.observe(1.0, 1.0, 1)
    assert pace.predict_s() == pytest.approx(1.0)


class Line:
    """A queue with one place, which is taken: so many batch and interactive requests wait."""

    def __init__(self, num_batch: int, num_interactive: int) -> None:
        self.queue = Queue(1, {"interactive": 300, "batch": 300, "aside": 1}, Clock())
        self.runs = self.queue.enter("interactive")
        self.waiting: list[Ticket] = []
        self.batch = [self.enter("batch") for _ in range(num_batch)]
        for _ in range(num_interactive):
            self.enter("interactive")

    def enter(self, priority: Class) -> Ticket:
        self.waiting.append(self.queue.enter(priority))
        return self.waiting[-1]

    def turn(self) -> Ticket:
        """The one that runs ends; returns whose turn it is then."""
        self.runs.leave()
        (self.runs,) = (ticket for ticket in self.waiting if ticket.turn.is_set())
        self.waiting.remove(self.runs)
        return self.runs


@given(st.integers(1, 8), st.integers(0, 40), st.integers(1, 3))
def test_no_batch_request_starves(num_batch: int, num_interactive: int, num_coming: int) -> None:
    """However many interactive ones come: the Nth batch one has its turn within 10 * N, and takes no more than that."""
    line = Line(num_batch, num_interactive)
    turns = []
    while not all(has_turn(*line.batch)):
        for _ in range(min(num_coming, 300 - line.queue.num_waiting("interactive"))):
            line.enter("interactive")  # there is always one
        turns.append(line.turn())
    each = INTERACTIVE_TURNS + 1
    assert [turns.index(ticket) + 1 for ticket in line.batch] == [each * (n + 1) for n in range(num_batch)]


@given(st.integers(0, 5), st.integers(0, 60), st.integers(0, 30), st.sampled_from(["interactive", "batch", "aside"]))
def test_the_place_that_is_expected_is_the_one_that_is_given(
    num_batch: int, num_interactive: int, num_before: int, priority: Class
) -> None:
    line = Line(num_batch, num_interactive)
    line.queue.pace.observe(1.0, 1.0, 1)  # a second each
    for _ in range(min(num_before, len(line.waiting))):
        line.turn()
    expected_s = line.queue.expect_s(priority) - 1.0
    ticket = line.enter(priority)
    num_turns = 1
    while line.turn() is not ticket:
        num_turns += 1
    assert expected_s == pytest.approx(num_turns)


def test_what_nobody_waits_for_comes_last_of_all() -> None:
    line = Line(1, 15)
    aside = line.enter("aside")
    line.enter("batch")
    assert [line.turn() is aside for _ in range(18)] == [False] * 17 + [True]


@given(
    st.lists(st.tuples(st.sampled_from(["enter", "leave", "give up"]), st.booleans(), st.integers(0, 9)), max_size=60)
)
def test_no_place_is_lost_or_given_twice(steps: list[tuple[str, bool, int]]) -> None:
    async def work() -> None:
        queue, tickets = make_queue(max_running=2), list[Any]()
        for action, is_batch, index in steps:
            if action == "enter":
                try:
                    tickets.append(queue.enter("batch" if is_batch else "interactive"))
                except OverloadedError:
                    assert sum(ticket.started_s is not None for ticket in tickets) == 2
            elif tickets:
                ticket = tickets.pop(index % len(tickets))
                if action == "give up":
                    await ticket.give_up()
                ticket.leave()
            running = sum(ticket.started_s is not None for ticket in tickets)
            num_waiting = queue.num_waiting("batch") + queue.num_waiting("interactive")
            assert running == min(2, len(tickets)) and num_waiting == len(tickets) - running

    asyncio.run(work())
