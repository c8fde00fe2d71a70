"""A store that is slow or gone: what requests see of it, what it costs them, and what comes after."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cache_stores import run
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from orchestrator.cache.guarded_store import MAX_FAILURES, STORE_TIMEOUT_S, GuardedStore
from orchestrator.cache.key import Identity
from orchestrator.cache.redis_store import MAX_CONNECTIONS, RedisStore
from orchestrator.cache.store import Entry, Invalidated, MemoryStore, Selection, StoreError
from orchestrator.cache.stores import create_store
from orchestrator.config import ConfigError
from perf.redis_server import RedisServer


def entry(name: str) -> Entry:
    now_s = time.time()
    vector = np.array([1, 0], np.float32)
    return Entry(Identity("default", "auto", "p", name, name), name.encode(), "m", vector, now_s, now_s + 60)


class Faulty(MemoryStore):
    """Does as it is told: waits, or raises."""

    delay_s = 0.0
    error: Exception | None = None
    num_calls = 0

    async def get(self, identity: Identity) -> Entry | None:
        self.num_calls += 1
        await asyncio.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        return await super().get(identity)

    async def is_blocked(self, identity: Identity, entry: Entry) -> bool:
        await self.get(identity)
        return False

    async def invalidate(self, selection: Selection, *, dry_run: bool) -> Invalidated:
        await self.get(Identity("", "", "", "", None))
        return await super().invalidate(selection, dry_run=dry_run)


@pytest.fixture
def faulty() -> Faulty:
    store = Faulty(1 << 20, clock=time.time)
    run(store.put(entry("a")))
    return store


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RedisConnectionError("gone"), "connection"),
        (ConnectionRefusedError("gone"), "connection"),
        (ResponseError("ERR unknown command 'VSIM'"), "reply"),
    ],
)
def test_a_failure_is_a_miss_and_counted(faulty: Faulty, error: Exception, kind: str) -> None:
    store = GuardedStore(faulty)
    faulty.error = error
    assert run(store.get(entry("a").identity)) is None
    assert run(store.is_blocked(entry("b").identity, entry("a"))), "nobody can say that it is not"
    assert store.errors == {kind: 2}
    faulty.error = None
    assert run(store.get(entry("a").identity)) is not None


def test_a_slow_store_is_a_miss_in_time(faulty: Faulty) -> None:
    store = GuardedStore(faulty)
    faulty.delay_s = 5.0
    started_s = time.monotonic()
    assert run(store.get(entry("a").identity)) is None
    assert STORE_TIMEOUT_S <= time.monotonic() - started_s < 2.0
    assert store.errors == {"timeout": 1}


def test_a_store_that_fails_is_left_alone_but_for_a_probe(faulty: Faulty, caplog: pytest.LogCaptureFixture) -> None:
    store = GuardedStore(faulty, probe_period_s=0.2)
    faulty.error = RedisConnectionError("redis://:secret@host")
    caplog.set_level(logging.INFO)
    for _ in range(50):
        assert run(store.get(entry("a").identity)) is None
    assert faulty.num_calls == MAX_FAILURES == store.errors["connection"]
    assert store.errors["skipped"] == 50 - MAX_FAILURES
    time.sleep(0.25)

    async def many() -> None:
        await asyncio.gather(*(store.get(entry("a").identity) for _ in range(20)))

    run(many())
    assert faulty.num_calls == MAX_FAILURES + 1
    faulty.error = None
    time.sleep(0.25)
    assert run(store.get(entry("a").identity)) is not None
    assert run(store.get(entry("a").identity)) is not None
    assert [record.getMessage() for record in caplog.records] == [
        "the cache's store fails (connection); it is left alone, but for a try every 0.2 s",
        "the cache's store answers again",
    ]


def test_a_probe_whose_caller_leaves_is_followed_by_another(faulty: Faulty) -> None:
    async def leave() -> None:
        store = GuardedStore(faulty, probe_period_s=0.05)
        faulty.error = RedisConnectionError("gone")
        for _ in range(MAX_FAILURES):
            await store.get(entry("a").identity)
        await asyncio.sleep(0.06)
        faulty.error, faulty.delay_s = None, 0.01
        probe = asyncio.ensure_future(store.get(entry("a").identity))
        await asyncio.sleep(0)
        probe.cancel()
        with pytest.raises(asyncio.CancelledError):
            await probe
        await asyncio.sleep(0.06)
        assert await store.get(entry("a").identity) is not None

    run(leave())


def test_what_an_operator_asks_for_does_not_seem_done(faulty: Faulty) -> None:
    store = GuardedStore(faulty)
    faulty.error = RedisConnectionError("redis://:secret@host")
    for _ in range(MAX_FAILURES + 1):
        with pytest.raises(StoreError, match=r"failed \(connection\), nothing or a part was done; try again"):
            run(store.invalidate(Selection(everything=True), dry_run=False))
    with pytest.raises(StoreError):
        run(store.mark_wrong(entry("a").identity, None))
    assert faulty.num_calls == MAX_FAILURES + 2
    faulty.error = None
    run(store.mark_wrong(entry("a").identity, None))
    run(store.mark_wrong(entry("a").identity, None))  # nothing is stored for it any more
    assert len(faulty) == 0


class SlowRedis:
    """Passes on what a Redis on a Unix socket says, each answer `delay_s` later. Its own address is `url`."""

    def __init__(self, url: str, folder: Path, delay_s: float) -> None:
        self._target = url.removeprefix("unix://")
        self._path = str(folder / "slow")
        self._delay_s = delay_s
        self._writers: list[asyncio.StreamWriter] = []
        self.url = f"unix://{self._path}"
        self.num_connections = 0

    async def __aenter__(self) -> SlowRedis:
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.drop()
        self._server.close()
        await self._server.wait_closed()

    def drop(self) -> None:
        """Every connection."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        from_redis, to_redis = await asyncio.open_unix_connection(self._target)
        self._writers += [writer, to_redis]
        await asyncio.gather(self._pass(reader, to_redis, 0.0), self._pass(from_redis, writer, self._delay_s))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                asyncio.get_running_loop().call_later(delay_s, self._write, writer, data)
        writer.close()

    def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if not writer.is_closing():
            writer.write(data)


def test_a_redis_that_is_far_is_used_from_the_first_call_on(server: RedisServer, tmp_path: Path) -> None:
    async def use() -> None:
        async with SlowRedis(server.url, tmp_path, 0.1) as slow:
            store = create_store(1 << 20, {"REDIS_URL": slow.url})
            assert isinstance(store, GuardedStore)
            store.probe_period_s = 0.05
            store.timeout_s = 0.25  # of a call, which takes 0.1 s there; to connect takes several times as long
            await store.prepare()
            await store.put(entry("a"))
            assert await store.get(entry("a").identity) is not None
            assert store.errors == {}
            before = slow.num_connections
            found = await asyncio.gather(*(store.get(entry("a").identity) for _ in range(MAX_CONNECTIONS)))
            assert None not in found and slow.num_connections == before
            slow.drop()
            give_up_s = time.monotonic() + 20
            while None in await asyncio.gather(*(store.get(entry("a").identity) for _ in range(MAX_CONNECTIONS))):
                assert time.monotonic() < give_up_s, store.errors
                await asyncio.sleep(0.01)
            await store.close()

    run(use())


def test_what_is_late_goes_on_but_not_for_ever(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use() -> None:
        store = GuardedStore(faulty)
        faulty.delay_s = 3600.0
        assert await store.get(entry("a").identity) is None
        (late,) = store._late
        assert not late.done()
        await asyncio.wait({late}, timeout=10)
        assert late.cancelled() and not store._late
        assert await store.get(entry("a").identity) is None
        (late,) = store._late
        await store.close()
        assert late.cancelled()

    monkeypatch.setattr("orchestrator.cache.guarded_store.CONNECT_TIMEOUT_S", 0.05)
    run(use())


@pytest.fixture
def server() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.stop()


def test_redis_dies_under_load_and_comes_back(server: RedisServer) -> None:
    """Answers carry their question's name, so that one given to another question is seen."""
    entries = [entry(f"question {number}") for number in range(30)]
    counts = {"hits": 0, "misses": 0}
    longest_s = 0.0

    async def ask(store: GuardedStore, stop: asyncio.Event) -> None:
        nonlocal longest_s
        number = 0
        while not stop.is_set():
            asked = entries[number % len(entries)]
            started_s = time.monotonic()
            found = await store.get(asked.identity)
            longest_s = max(longest_s, time.monotonic() - started_s)
            counts["misses" if found is None else "hits"] += 1
            assert found is None or found.answer == asked.identity.exact_key.encode()
            near = await store.nearest(asked.identity, np.array([1, 0], np.float32), 8)
            assert all(each.entry.answer == each.entry.identity.exact_key.encode() for each in near)
            if found is None:
                await store.put(asked)
            number += 1
            await asyncio.sleep(0.002)

    async def until(condition: str) -> None:
        before = counts[condition]
        give_up_s = time.monotonic() + 20
        while counts[condition] < before + 100:
            assert time.monotonic() < give_up_s, f"no {condition}: {counts}"
            await asyncio.sleep(0.01)

    async def main() -> None:
        store = create_store(1 << 24, {"REDIS_URL": server.url})
        assert isinstance(store, GuardedStore)
        store.probe_period_s, stop = 0.1, asyncio.Event()
        clients = [asyncio.ensure_future(ask(store, stop)) for _ in range(8)]
        await until("hits")
        server.kill()
        await until("misses")
        assert store.errors["connection"] > 0
        server.start()
        await until("hits")
        os.kill(server.pid, signal.SIGSTOP)  # there, but it answers nothing
        await until("misses")
        os.kill(server.pid, signal.SIGCONT)
        assert store.errors["timeout"] > 0
        await until("hits")
        stop.set()
        await asyncio.gather(*clients)  # raises what any of them raised
        await store.close()

    run(main())
    assert longest_s < 1.0  # 20 ms and what a loaded machine adds


def test_redis_need_not_be_there_at_the_start() -> None:
    async def start() -> None:
        store = create_store(1 << 20, {"REDIS_URL": "redis://:secret@127.0.0.1:9/0"})  # discard: nothing listens
        assert isinstance(store, GuardedStore)
        assert await store.get(entry("a").identity) is None
        assert await store.size() is None
        assert store.errors["connection"] + store.errors["timeout"] == 2  # the machine may be slow to refuse
        assert "secret" not in repr(store)
        await store.close()

    run(start())


def test_the_environment_chooses() -> None:
    assert isinstance(create_store(1 << 20, {}), MemoryStore)
    assert isinstance(create_store(1 << 20, {"REDIS_URL": ""}), MemoryStore)
    store = create_store(1 << 20, {"REDIS_URL": "rediss://:secret@127.0.0.1:6379/0"})
    assert isinstance(store, GuardedStore) and isinstance(store.store, RedisStore)
    assert store.errors is store.store.errors
    assert store.store.client.connection_pool.connection_class.__name__ == "SSLConnection"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://user:secret@host/", "its value is not allowed; redis://, rediss:// or unix:// and an address"),
        ("secret@host:6379", "its value is not allowed"),
        ("redis://:secret@host:port/0", "redis://host is no URL that redis-py reads"),
        ("redis://:secret@host/0?socket_timeout=secret", "redis://host is no URL that redis-py reads"),
    ],
)
def test_an_url_that_is_none_is_refused_without_its_password(url: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create_store(1 << 20, {"REDIS_URL": url})
    assert str(caught.value).startswith(f"REDIS_URL: {told}")
    assert "secret" not in str(caught.value)
    assert "secret" not in "".join(traceback.format_exception(None, caught.value, None))
