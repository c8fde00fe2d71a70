"""The watcher: who left is told again and again, until the call is over."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from orchestrator.triton.cancellation import SELDOM, CancellationWatcher

PERIOD_S = 0.002


class Watched:
    """One call, as the watcher sees it."""

    def __init__(self) -> None:
        self.left = False
        self.num_polls = 0
        self.num_cancels = 0

    def is_cancelled(self) -> bool:
        self.num_polls += 1
        return self.left

    def cancel(self) -> None:
        self.num_cancels += 1


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.001)


@pytest.fixture
def counts() -> list[int]:
    return []


@pytest.fixture
def watcher(counts: list[int]) -> Iterator[CancellationWatcher]:
    watcher = CancellationWatcher(PERIOD_S, counts.append)
    yield watcher
    watcher.close()


def watch(watcher: CancellationWatcher, watched: Watched, *, seldom: bool = False) -> int:
    return watcher.watch(watched.is_cancelled, watched.cancel, seldom=seldom)


def test_who_says_himself_is_asked_seldom_but_found(watcher: CancellationWatcher) -> None:
    often, seldom = Watched(), Watched()
    watch(watcher, often)
    watch(watcher, seldom, seldom=True)
    until(lambda: seldom.num_polls == 3)
    assert often.num_polls >= 3 * SELDOM - SELDOM
    seldom.left = True
    until(lambda: seldom.num_cancels > 1)


def test_only_who_left_is_cancelled_and_repeatedly(watcher: CancellationWatcher) -> None:
    stays, leaves = Watched(), Watched()
    watch(watcher, stays)
    watch(watcher, leaves)
    until(lambda: leaves.num_polls > 2)
    leaves.left = True
    until(lambda: leaves.num_cancels > 2)
    assert stays.num_cancels == 0


def test_after_unwatch_nobody_is_asked(watcher: CancellationWatcher) -> None:
    over, other = Watched(), Watched()
    key = watch(watcher, over)
    watch(watcher, other)
    until(lambda: over.num_polls > 0)
    watcher.unwatch(key)
    polls_then = other.num_polls
    until(lambda: other.num_polls > polls_then + 1)  # a round that had begun is over
    num_polls, polls_then = over.num_polls, other.num_polls
    until(lambda: other.num_polls > polls_then + 3)
    assert over.num_polls == num_polls


def test_a_call_that_is_over_is_let_go(watcher: CancellationWatcher, counts: list[int]) -> None:
    """Triton unloads no model while one of its requests lives."""
    calls = [Watched()]
    key = watch(watcher, calls[0])
    until(lambda: calls[0].num_polls > 0)
    watcher.unwatch(key)
    until(lambda: counts[-1] == 0)
    gone = weakref.ref(calls.pop())
    until(lambda: gone() is None)


def test_unwatching_twice_or_an_unknown_key_is_nothing(watcher: CancellationWatcher) -> None:
    key = watch(watcher, Watched())
    watcher.unwatch(key)
    watcher.unwatch(key)
    watcher.unwatch(99)


def test_the_number_of_live_calls_is_told(watcher: CancellationWatcher, counts: list[int]) -> None:
    until(lambda: counts[-1:] == [0])
    keys = [watch(watcher, Watched())]
    until(lambda: counts[-1] == 1)
    keys += [watch(watcher, Watched()), watch(watcher, Watched())]
    until(lambda: counts[-1] == 3)
    for key in keys:
        watcher.unwatch(key)
    until(lambda: counts[-1] == 0)


def test_many_are_polled_less_often_but_within_the_longest_period(watcher: CancellationWatcher) -> None:
    many = [Watched() for _ in range(200)]
    for watched in many:
        watch(watcher, watched)
    until(lambda: many[-1].num_polls > 0)
    many[-1].left = True
    asked_s = time.monotonic()
    until(lambda: many[-1].num_cancels > 0)
    assert time.monotonic() - asked_s < 1.0
    assert many[0].num_polls < 50


def test_closing_ends_the_thread(counts: list[int]) -> None:
    watcher = CancellationWatcher(PERIOD_S, counts.append)
    watch(watcher, Watched())
    watcher.close()
    assert not any(thread.name == "cancellation" and thread.is_alive() for thread in threading.enumerate())
