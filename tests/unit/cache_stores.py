"""Both stores for the same tests, and one event loop for all of them: Redis's connections belong to theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, Protocol, TypeVar

from orchestrator.cache.redis_store import RedisStore, connect
from orchestrator.cache.store import MemoryStore, Store

T = TypeVar("T")
LOOP = asyncio.new_event_loop()
_numbers = count()


def run(work: Coroutine[Any, Any, T]) -> T:
    return LOOP.run_until_complete(work)


class MakeStore(Protocol):
    def __call__(self, max_bytes: int = 1 << 20, *, clock: Callable[[], float], max_blocked: int = 10_000) -> Store: ...


class RedisStores:
    """Makes stores in one Redis, each alone under its prefix, over one connection pool."""

    def __init__(self, url: str) -> None:
        self.client = connect(url)

    def __call__(
        self, max_bytes: int = 1 << 20, *, clock: Callable[[], float], max_blocked: int = 10_000, prefix: str = ""
    ) -> RedisStore:
        return RedisStore(self.client, max_bytes, max_blocked, prefix or f"test-{next(_numbers)}", clock)


def make_memory_store(
    max_bytes: int = 1 << 20, *, clock: Callable[[], float], max_blocked: int = 10_000
) -> MemoryStore:
    return MemoryStore(max_bytes, max_blocked, clock)
