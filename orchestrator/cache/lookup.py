"""The lookup: the exact key, then the nearest questions of the partition, each past the guards.

Whether a request may be looked up or stored at all (`Cache-Control`, temperature, how the answer ended) is decided by
whoever calls this.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from orchestrator.cache.guards import prepare, rejecting_guard
from orchestrator.cache.key import Identity
from orchestrator.cache.store import Entry, Store, Vector

# Low, because the guards carry the precision and typing errors move a vector far: of 89 typos that the guards accept in
# the seen pairs of tests/data, 0.40 lost 15 and 0.20 loses two, with no false hit (`python -m perf cache-quality`).
THRESHOLD = 0.20
# How many near questions the guards look at.
NUM_CANDIDATES = 8

Guard = Callable[[str, str], str | None]


class Embedder(Protocol):
    """Turns questions into vectors."""

    def embed(self, text: str) -> Vector | None:
        """The unit vector of `text`, or None if it is longer than the embedder's window: it must not be cut."""


class Outcome(NamedTuple):
    """What the cache has for a question.

    `similarity` and `guard` tell of the nearest stored question also for a miss: `guard` is "threshold", "blocked" or
    the guard that rejected it, None if there was none to compare with.
    """

    kind: Literal["exact", "semantic", "miss"]
    entry: Entry | None = None
    similarity: float | None = None
    age_s: float | None = None
    guard: str | None = None


@dataclass(frozen=True)
class Lookup:
    """`guard` names what rejects a pair of questions; one that never does leaves the threshold alone to decide."""

    store: Store
    clock: Callable[[], float]
    threshold: float = THRESHOLD
    guard: Guard = rejecting_guard

    async def find_exact(self, identity: Identity) -> Outcome:
        """Needs no vector, so that it comes before the embedding."""
        entry = await self.store.get(identity)
        return Outcome("miss") if entry is None else await self._hit("exact", entry, 1.0)

    def prepare(self, identity: Identity) -> None:
        """Read the question while its vector is being made; `find_near` alone would do it afterwards."""
        if self.guard is rejecting_guard and identity.question is not None:
            prepare(identity.question)

    async def find_near(self, identity: Identity, vector: Vector | None, max_age_s: float = math.inf) -> Outcome:
        """The nearest question that is near enough, not too old, and that no guard rejects. "exact" if it is the same.

        Without a vector always a miss.
        """
        if vector is None or identity.question is None:
            return Outcome("miss")
        miss = Outcome("miss")
        for entry, similarity in await self.store.nearest(identity, vector, NUM_CANDIDATES):
            if self.clock() - entry.stored_s > max_age_s:
                continue
            if entry.identity.exact_key == identity.exact_key:  # its look-up failed, or it was stored since
                return await self._hit("exact", entry, 1.0)
            guard = await self._rejection(identity, entry, similarity)
            if guard is None:
                return await self._hit("semantic", entry, similarity)
            if miss.guard is None:
                miss = Outcome("miss", similarity=similarity, guard=guard)
            if similarity < self.threshold:
                break
        return miss

    async def _rejection(self, identity: Identity, entry: Entry, similarity: float) -> str | None:
        if similarity < self.threshold:
            return "threshold"
        guard = self.guard(entry.identity.question or "", identity.question or "")
        if guard is not None:
            return guard
        # Last, because a remote store is asked: few pairs come this far.
        return "blocked" if await self.store.is_blocked(identity, entry) else None

    async def _hit(self, kind: Literal["exact", "semantic"], entry: Entry, similarity: float) -> Outcome:
        await self.store.touch(entry)
        return Outcome(kind, entry, similarity, self.clock() - entry.stored_s)
