"""One thread that asks all live requests whether their caller left."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable


class CancellationWatcher:
    """Polls what was given to `watch` and calls its `on_cancel` on every poll that finds the caller gone.

    It repeats until `unwatch`, so a stop that came before the engine knew the request is sent again. Triton offers
    no callback; a poll is a round trip to the server's process (about 50 µs), which sets the period.
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._watched: dict[int, tuple[Callable[[], bool], Callable[[], None]]] = {}
        self._keys = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="cancellation", daemon=True)
        self._thread.start()

    @property
    def num_watched(self) -> int:
        return len(self._watched)

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
                self._changed.wait_for(lambda: self._watched or self._closed)
                if self._closed:
                    return
                watched = list(self._watched.values())
            for is_cancelled, on_cancel in watched:
                if is_cancelled():
                    on_cancel()
            with self._changed:
                self._changed.wait_for(lambda: self._closed, timeout=self._period_s)
