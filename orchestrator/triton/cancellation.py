"""One thread that asks all live requests whether their caller left."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

SELDOM = 10


class CancellationWatcher:
    """Polls what was given to `watch` and calls its `on_cancel` on every poll that finds the caller gone.

    Triton has no callback for it, and a poll is a round trip to the server's process (75 µs of CPU, and a hole in the
    engine's step, measured on two cores); hence the period, and every tenth poll only for who is watched `seldom`:
    he says himself that he leaves, unless his process died. A cancel repeats until `unwatch`, so a stop that came
    before the engine knew the request is sent again. `on_poll` hears the number of watched calls at every poll.
    """

    def __init__(self, period_s: float, on_poll: Callable[[int], None]) -> None:
        self._period_s = period_s
        self._on_poll = on_poll
        self._watched: dict[int, tuple[Callable[[], bool], Callable[[], None], bool]] = {}
        self._polls = itertools.count(1)
        self._keys = itertools.count()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cancellation", daemon=True)
        self._thread.start()

    def watch(self, is_cancelled: Callable[[], bool], on_cancel: Callable[[], None], *, seldom: bool = False) -> int:
        """Start polling `is_cancelled`; returns the key for `unwatch`."""
        key = next(self._keys)
        with self._lock:
            self._watched[key] = (is_cancelled, on_cancel, seldom)
        return key

    def unwatch(self, key: int) -> None:
        with self._lock:
            self._watched.pop(key, None)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        # No wake-up from `watch`: it would get in the way of the request's first token.
        while not self._closed.wait(self._period_s):
            self._poll()

    def _poll(self) -> None:
        # A function, so that nothing of a call is kept while the thread waits: Triton unloads no model while one lives.
        with self._lock:
            watched = list(self._watched.values())
        self._on_poll(len(watched))
        all_of_them = next(self._polls) % SELDOM == 0
        for is_cancelled, on_cancel, seldom in watched:
            if (all_of_them or not seldom) and is_cancelled():
                on_cancel()
