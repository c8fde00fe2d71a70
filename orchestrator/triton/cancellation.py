"""One thread that asks all live requests whether their caller left."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

# One poll costs about 75 µs of CPU (a round trip to the server's process; measured on two cores). Polls are spaced so
# that watching many calls costs under 5 % of a core, and no call waits longer for its turn than the longest period.
POLL_SPACING_S = 0.002
LONGEST_PERIOD_S = 0.100


class CancellationWatcher:
    """Polls what was given to `watch` and calls its `on_cancel` on every poll that finds the caller gone.

    Each call is polled every `shortest_period_s`, or less often when many are watched. `on_change` hears the number of
    watched calls when it has changed. A cancel repeats until `unwatch`, so a stop that came before the engine knew the
    request is sent again. We poll because Triton has no callback for it.
    """

    def __init__(self, shortest_period_s: float, on_change: Callable[[int], None]) -> None:
        self._shortest_period_s = shortest_period_s
        self._on_change = on_change
        self._watched: dict[int, tuple[Callable[[], bool], Callable[[], None]]] = {}
        self._keys = itertools.count()
        self._num_told = -1  # what `on_change` heard last; nothing yet
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="cancellation", daemon=True)
        self._thread.start()

    def watch(self, is_cancelled: Callable[[], bool], on_cancel: Callable[[], None]) -> int:
        """Start polling `is_cancelled`; returns the key for `unwatch`."""
        key = next(self._keys)
        with self._changed:
            self._watched[key] = (is_cancelled, on_cancel)
            self._changed.notify()
        return key

    def unwatch(self, key: int) -> None:
        with self._changed:
            self._watched.pop(key, None)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._watched or self._closed or self._num_told != 0)
                # Wait before the poll, so that a call's first poll does not get in the way of its first token.
                self._changed.wait_for(lambda: self._closed, timeout=self._period_s(len(self._watched)))
                if self._closed:
                    return
                watched = list(self._watched.values())
            if len(watched) != self._num_told:
                self._num_told = len(watched)
                self._on_change(self._num_told)
            _poll(watched)
            del watched  # nothing of a call is kept while the thread waits: Triton unloads no model while one lives

    def _period_s(self, num_watched: int) -> float:
        return max(self._shortest_period_s, min(num_watched * POLL_SPACING_S, LONGEST_PERIOD_S))


def _poll(watched: list[tuple[Callable[[], bool], Callable[[], None]]]) -> None:
    for is_cancelled, on_cancel in watched:
        if is_cancelled():
            on_cancel()
