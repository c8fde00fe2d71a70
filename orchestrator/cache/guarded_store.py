"""A store that may be slow or gone, made into one that is neither: what it does not do in time is a miss, and counted.

After some failures in a row it is left alone, but for one call now and then that finds out whether it is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeVar

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from orchestrator.cache.key import Identity
from orchestrator.cache.store import Entry, Invalidated, Near, Selection, Size, Store, StoreError, Vector

log = logging.getLogger("orchestrator.cache")

# A request waits no longer than this for one call.
STORE_TIMEOUT_S = 0.020
# To connect takes several times as long as a call. What is on its way may take as long too, though nobody waits for it
# any more: given up, it would leave a connection to be opened anew, and the next call would be late again.
CONNECT_TIMEOUT_S = 2.0
# What an operator asks for may look at every entry.
OPERATOR_TIMEOUT_S = 30.0
# So many failures in a row, and the store is left alone for `PROBE_PERIOD_S`; then one call tries it.
MAX_FAILURES = 3
PROBE_PERIOD_S = 1.0

T = TypeVar("T")


@dataclass
class GuardedStore:
    """`errors` counts what failed, by kind: "timeout", "connection", "reply" (the store refused), "corrupt" (an entry),
    and "skipped", the calls that were not made because the store was left alone.

    Lookups never raise: a failure is a miss, and a pair that nobody can say is not blocked counts as blocked. What an
    operator asks for (`mark_wrong`, `invalidate`) is always tried, and raises `StoreError` rather than seem done.
    """

    store: Store
    errors: Counter[str] = field(default_factory=Counter)
    timeout_s: float = STORE_TIMEOUT_S
    probe_period_s: float = PROBE_PERIOD_S
    _num_failures: int = 0
    _next_probe_s: float = 0.0
    _late: set[asyncio.Future[Any]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.clock: Callable[[], float] = self.store.clock

    async def get(self, identity: Identity) -> Entry | None:
        return await self._try(lambda: self.store.get(identity), None)

    async def nearest(self, identity: Identity, vector: Vector, num: int) -> Sequence[Near]:
        return await self._try(lambda: self.store.nearest(identity, vector, num), ())

    async def prepare(self) -> None:
        """Where it fails, the store is left alone until a probe does it."""
        try:
            await asyncio.wait_for(self.store.prepare(), CONNECT_TIMEOUT_S)
        except (RedisError, OSError, asyncio.TimeoutError) as error:
            self._num_failures = MAX_FAILURES - 1
            self._count(error)

    async def put(self, entry: Entry, begun_s: float | None = None) -> None:
        await self._try(lambda: self.store.put(entry, begun_s), None)

    async def touch(self, entry: Entry) -> None:
        await self._try(lambda: self.store.touch(entry), None)

    async def is_blocked(self, identity: Identity, entry: Entry) -> bool:
        return await self._try(lambda: self.store.is_blocked(identity, entry), True)

    async def mark_wrong(self, asked: Identity, entry: Entry | None) -> None:
        await self._insist(self.store.mark_wrong(asked, entry))

    async def invalidate(self, selection: Selection, *, dry_run: bool) -> Invalidated:
        return await self._insist(self.store.invalidate(selection, dry_run=dry_run))

    async def size(self) -> Size | None:
        return await self._try(self.store.size, None)

    async def close(self) -> None:
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        await self.store.close()

    @property
    def is_left_alone(self) -> bool:
        return self._num_failures >= MAX_FAILURES

    async def _try(self, call: Callable[[], Awaitable[T]], otherwise: T) -> T:
        if self.is_left_alone:
            if monotonic() < self._next_probe_s:
                self.errors["skipped"] += 1
                return otherwise
            self._next_probe_s = monotonic() + self.probe_period_s  # the others wait for what this one finds
            task = asyncio.ensure_future(self._probe(call))
        else:
            task = asyncio.ensure_future(call())
        try:
            await asyncio.wait({task}, timeout=self.timeout_s)
        finally:
            if not task.done():
                self._leave(task)
        try:
            if not task.done():
                raise asyncio.TimeoutError
            answer = task.result()
        except (RedisError, OSError, asyncio.TimeoutError) as error:
            self._count(error)
            return otherwise
        self._note_answer()
        return answer

    async def _probe(self, call: Callable[[], Awaitable[T]]) -> T:
        """Only the call itself need be in time."""
        await self.store.prepare()
        started_s = monotonic()
        answer = await call()
        if monotonic() - started_s <= self.timeout_s:
            self._note_answer()
        return answer

    def _leave(self, task: asyncio.Future[Any]) -> None:
        """To its end, which nobody waits for."""
        self._late.add(task)
        giving_up = asyncio.get_running_loop().call_later(CONNECT_TIMEOUT_S, task.cancel)

        def forget(task: asyncio.Future[Any]) -> None:
            giving_up.cancel()
            self._late.discard(task)
            if not task.cancelled():
                task.exception()  # it is counted already, and else asyncio would complain

        task.add_done_callback(forget)

    def _note_answer(self) -> None:
        if self.is_left_alone:
            log.warning("the cache's store answers again")
        self._num_failures = 0

    async def _insist(self, call: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(call, OPERATOR_TIMEOUT_S)
        except (RedisError, OSError, asyncio.TimeoutError) as error:
            kind = kind_of(error)
            self.errors[kind] += 1
            raise StoreError(f"the cache's store failed ({kind}), nothing or a part was done; try again") from error

    def _count(self, error: Exception) -> None:
        kind = kind_of(error)
        self.errors[kind] += 1
        if kind == "reply":
            log.warning("the cache's store refused a command: %s", error)
            return
        self._num_failures += 1
        if self.is_left_alone:
            self._next_probe_s = monotonic() + self.probe_period_s
        if self._num_failures == MAX_FAILURES:
            log.warning(
                "the cache's store fails (%s); it is left alone, but for a try every %g s", kind, self.probe_period_s
            )


def kind_of(error: Exception) -> str:
    # Neither's text goes anywhere: it may hold the URL.
    if isinstance(error, (asyncio.TimeoutError, RedisTimeoutError, TimeoutError)):
        return "timeout"
    return "connection" if isinstance(error, (RedisConnectionError, OSError)) else "reply"
