"""The in-process store: entries by exact key, and each partition's vectors.

Bounded in bytes, the least recently used leave first; an entry's end is fixed when it comes in, and no use moves it.
Its methods await nothing; not for several threads.
"""

from __future__ import annotations

import unicodedata
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from orchestrator.cache.index import VectorIndex
from orchestrator.cache.key import Identity

Vector = npt.NDArray[np.float32]

# What an entry costs beside its texts and vector: keys, slots of dictionaries, objects, an index if it is alone in its
# partition (1.3 KB by tracemalloc; the graph of a large partition lies outside of what that sees).
_ENTRY_OVERHEAD_BYTES = 2500


@dataclass(frozen=True)
class Entry:
    """One stored answer. Times are seconds of the store's clock."""

    identity: Identity
    answer: bytes
    model: str
    vector: Vector | None = field(compare=False)  # of unit length; None: only found by its exact key
    stored_s: float
    expires_s: float

    @property
    def num_bytes(self) -> int:
        question = self.identity.question or ""
        vector_bytes = 0 if self.vector is None else self.vector.nbytes
        return len(self.answer) + 4 * len(question) + 2 * vector_bytes + _ENTRY_OVERHEAD_BYTES


# 100,000 entries take some 10 ms.
SWEEP_PERIOD_S = 60.0
# While answers are made. After more of them what was begun before is not stored.
MAX_REMEMBERED_INVALIDATIONS = 100


class Near(NamedTuple):
    """A stored question near the one that was asked."""

    entry: Entry
    similarity: float


class Size(NamedTuple):
    """What a store holds; `num_bytes` as `Entry.num_bytes` counts them."""

    num_entries: int
    num_bytes: int


class Invalidated(NamedTuple):
    """What an invalidation removed, or would remove."""

    num_entries: int
    num_bytes: int


@dataclass(frozen=True)
class Selection:
    """Which entries to invalidate; what is None does not limit. Raises `ValueError` for one that limits nothing."""

    tenant: str | None = None
    model: str | None = None
    older_than_s: float | None = None
    text: str | None = None  # part of the question, whatever its case, after NFC
    everything: bool = False

    def __post_init__(self) -> None:
        limits = (self.tenant, self.model, self.older_than_s, self.text)
        if all(limit is None for limit in limits) != self.everything:
            raise ValueError("selection: give tenant, model, older_than_s or text, or everything=True alone")

    def has(self, entry: Entry, now_s: float) -> bool:
        return (
            (self.tenant is None or entry.identity.tenant == self.tenant)
            and (self.model is None or entry.model == self.model)
            and (self.older_than_s is None or now_s - entry.stored_s > self.older_than_s)
            and (self.text is None or _comparable(self.text) in _comparable(entry.identity.question or ""))
        )


def _comparable(text: str) -> str:
    return unicodedata.normalize("NFC", text).lower()


class StoreError(Exception):
    """The store could not do what an operator asked of it; the text says why."""


class Store(Protocol):
    """What a cache keeps its entries in. `clock` gives the seconds that its entries' times are of."""

    @property
    def clock(self) -> Callable[[], float]: ...

    async def get(self, identity: Identity) -> Entry | None: ...

    async def nearest(self, identity: Identity, vector: Vector, num: int) -> Sequence[Near]:
        """The `num` nearest entries of the identity's partition, nearest first."""

    async def prepare(self) -> None:
        """Do ahead what would take the first calls longer."""

    async def put(self, entry: Entry, begun_s: float | None = None) -> None:
        """Store the entry, unless an invalidation of its like came since `begun_s`, when its making began."""

    async def touch(self, entry: Entry) -> None:
        """Note that the entry was served."""

    async def is_blocked(self, identity: Identity, entry: Entry) -> bool:
        """Whether the entry's question was said to be wrong for this one."""

    async def mark_wrong(self, asked: Identity, entry: Entry | None) -> None:
        """Evict the entry, and never serve its question's answer to `asked` again, nor to who asks in its words.

        None is what is stored for `asked` itself.
        """

    async def invalidate(self, selection: Selection, *, dry_run: bool) -> Invalidated: ...

    async def size(self) -> Size | None:
        """None if nobody can say now."""

    async def close(self) -> None: ...


@dataclass
class MemoryStore:
    """`max_bytes` bounds the entries; `max_blocked` the pairs said to be wrong, the oldest are forgotten first."""

    max_bytes: int
    max_blocked: int = 10_000
    clock: Callable[[], float] = monotonic
    num_bytes: int = 0
    _entries: OrderedDict[str, Entry] = field(default_factory=OrderedDict)
    _partitions: dict[str, VectorIndex] = field(default_factory=dict)
    _blocked: OrderedDict[tuple[str, str], None] = field(default_factory=OrderedDict)
    _invalidations: deque[tuple[float, Selection]] = field(
        default_factory=lambda: deque(maxlen=MAX_REMEMBERED_INVALIDATIONS)
    )
    _swept_s: float = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    async def get(self, identity: Identity) -> Entry | None:
        entry = self._entries.get(identity.exact_key)
        return None if entry is None else self._if_live(entry)

    async def nearest(self, identity: Identity, vector: Vector, num: int) -> list[Near]:
        index = self._partitions.get(identity.partition)
        if index is None:
            return []
        while True:
            near = [Near(self._entries[key], similarity) for key, similarity in index.nearest(vector, num)]
            live = [each for each in near if self._if_live(each.entry) is not None]
            if len(live) == len(near):  # else those behind the expired ones have not been seen
                return live

    async def prepare(self) -> None:
        pass

    async def put(self, entry: Entry, begun_s: float | None = None) -> None:
        """Store it in place of an entry of the same key; one that is larger than `max_bytes` is not stored."""
        if begun_s is not None and self._was_invalidated(entry, begun_s):
            return
        if entry.identity.exact_key in self._entries:
            self._remove(self._entries[entry.identity.exact_key])
        if entry.num_bytes > self.max_bytes:
            return
        self._entries[entry.identity.exact_key] = entry
        self.num_bytes += entry.num_bytes
        if entry.vector is not None:
            index = self._partitions.setdefault(entry.identity.partition, VectorIndex(len(entry.vector)))
            index.add(entry.identity.exact_key, entry.vector)
        while self.num_bytes > self.max_bytes:
            self._remove(next(iter(self._entries.values())))

    async def touch(self, entry: Entry) -> None:
        if entry.identity.exact_key in self._entries:
            self._entries.move_to_end(entry.identity.exact_key)

    async def is_blocked(self, identity: Identity, entry: Entry) -> bool:
        return _pair(identity, entry) in self._blocked

    async def mark_wrong(self, asked: Identity, entry: Entry | None) -> None:
        entry = entry or await self.get(asked)
        if entry is None:
            return
        if self._entries.get(entry.identity.exact_key) is entry:
            self._remove(entry)
        # An answer that is wrong for its own question is evicted; the next one may be right.
        if asked.exact_key != entry.identity.exact_key:
            self._blocked[_pair(asked, entry)] = None
            while len(self._blocked) > self.max_blocked:
                self._blocked.popitem(last=False)

    async def invalidate(self, selection: Selection, *, dry_run: bool) -> Invalidated:
        now_s = self.clock()
        chosen = [entry for entry in self._entries.values() if selection.has(entry, now_s)]
        if not dry_run:
            self._invalidations.append((now_s, selection))
            for entry in chosen:
                self._remove(entry)
        return Invalidated(len(chosen), sum(entry.num_bytes for entry in chosen))

    async def size(self) -> Size:
        self._sweep()
        return Size(len(self._entries), self.num_bytes)

    async def close(self) -> None:
        pass

    def _was_invalidated(self, entry: Entry, begun_s: float) -> bool:
        since = [selection for at_s, selection in self._invalidations if at_s >= begun_s]
        return len(since) == MAX_REMEMBERED_INVALIDATIONS or any(
            selection.has(entry, self.clock()) for selection in since
        )

    def _sweep(self) -> None:
        """Remove what has expired and nobody has asked for since; now and then, for it looks at all."""
        now_s = self.clock()
        if now_s < self._swept_s + SWEEP_PERIOD_S:
            return
        self._swept_s = now_s
        for entry in list(self._entries.values()):
            self._if_live(entry)

    def _if_live(self, entry: Entry) -> Entry | None:
        if self.clock() < entry.expires_s:
            return entry
        self._remove(entry)
        return None

    def _remove(self, entry: Entry) -> None:
        key = entry.identity.exact_key
        del self._entries[key]
        self.num_bytes -= entry.num_bytes
        if entry.vector is not None:
            index = self._partitions[entry.identity.partition]
            index.remove(key)
            if not len(index):
                del self._partitions[entry.identity.partition]


def _pair(identity: Identity, entry: Entry) -> tuple[str, str]:
    """The same for both directions: what is wrong for one is wrong for the other."""
    first, second = sorted((identity.words_key, entry.identity.words_key))
    return first, second
