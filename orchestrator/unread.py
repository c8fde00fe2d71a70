"""Answers that callers have not taken yet, of all connections of a process: bounded together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

MAX_UNREAD_BYTES = 256 << 20

T = TypeVar("T")


class Unread(Generic[T]):
    """How many bytes each holder keeps for its caller, in order of age; together at most `MAX_UNREAD_BYTES`.

    Above that the oldest holder of the address with most is ended. For one event loop.
    """

    def __init__(self, address_of: Callable[[T], str], end: Callable[[T], None]) -> None:
        self._address_of = address_of
        self._end = end
        self._num_bytes: dict[T, int] = {}
        self._total = 0

    def add(self, holder: T, num_bytes: int) -> None:
        self._num_bytes[holder] = self._num_bytes.get(holder, 0) + num_bytes
        self._total += num_bytes
        while self._total > MAX_UNREAD_BYTES:
            held: Counter[str] = Counter()
            for each, size in self._num_bytes.items():
                held[self._address_of(each)] += size
            ((address, _),) = held.most_common(1)
            oldest = next(each for each in self._num_bytes if self._address_of(each) == address)
            self.forget(oldest)
            self._end(oldest)

    def remove(self, holder: T, num_bytes: int) -> None:
        """They were taken, or thrown away; of a holder that was ended they no longer count."""
        num_left = self._num_bytes.get(holder, 0) - num_bytes
        if num_left <= 0:
            self.forget(holder)
        else:
            self._num_bytes[holder] = num_left
            self._total -= num_bytes

    def forget(self, holder: T) -> None:
        """It is over."""
        self._total -= self._num_bytes.pop(holder, 0)
