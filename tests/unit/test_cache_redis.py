"""What only the Redis store has: clients that share, time that really passes, entries that cannot be read."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from cache_stores import RedisStores, run
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.cache.key import Identity
from orchestrator.cache.redis_store import RedisStore, connect
from orchestrator.cache.store import Entry, Invalidated, Selection, Size, Vector

EVERYTHING = Selection(everything=True)


def unit(*values: float) -> Vector:
    vector = np.array(values, np.float32)
    return vector / np.linalg.norm(vector)


def entry(
    name: str, *, ttl_s: float = 60.0, tenant: str = "default", num_dims: int = 2, answer: bytes = b"{}"
) -> Entry:
    now_s = time.time()
    identity = Identity(tenant, "auto", "p", name, name)
    vector = unit(1, *range(len(name), len(name) + num_dims - 1)) if num_dims else None
    return Entry(identity, answer, "llm_small", vector, now_s, now_s + ttl_s)


def keys(store: RedisStore) -> set[str]:
    return {key.decode().removeprefix(f"{store.prefix}:1:") for key in run(store.client.keys(f"{store.prefix}:*"))}


def near_names(store: RedisStore, asked: Entry) -> list[str]:
    assert asked.vector is not None
    return [each.entry.identity.exact_key for each in run(store.nearest(asked.identity, asked.vector, 8))]


@pytest.fixture
def store(redis_stores: RedisStores) -> RedisStore:
    return redis_stores(clock=time.time)


def test_what_is_put_comes_back_whole(store: RedisStore) -> None:
    kept = entry("a", answer=b"\x00\xff\n{}", num_dims=384)
    run(store.put(kept))
    found = run(store.get(kept.identity))
    assert found == kept and found.vector is not None and kept.vector is not None
    assert found.vector.tobytes() == kept.vector.tobytes()
    run(store.put(entry("no vector", num_dims=0)))
    without = run(store.get(entry("no vector").identity))
    assert without is not None and without.vector is None


def test_two_clients_share(redis_url: str, store: RedisStore) -> None:
    async def share() -> None:
        client = connect(redis_url)
        other = RedisStore(client, 1 << 20, prefix=store.prefix)
        kept, asked = entry("a"), entry("b")
        await store.put(kept)
        assert await other.get(kept.identity) == kept
        assert asked.vector is not None
        assert [each.entry for each in await other.nearest(asked.identity, asked.vector, 8)] == [kept]
        await other.mark_wrong(asked.identity, kept)
        assert await store.get(kept.identity) is None
        assert await store.is_blocked(asked.identity, kept)
        await other.close()

    run(share())


def test_an_invalidation_reaches_what_others_are_making(redis_stores: RedisStores, store: RedisStore) -> None:
    other = redis_stores(clock=time.time, prefix=store.prefix)
    kept, begun_s = entry("how a is done"), time.time()
    run(other.invalidate(Selection(text="another"), dry_run=False))
    run(other.invalidate(EVERYTHING, dry_run=True))
    run(store.put(kept, begun_s))
    assert run(store.get(kept.identity)) == kept
    run(other.invalidate(Selection(text="A is"), dry_run=False))
    run(store.put(kept, begun_s))
    assert run(store.get(kept.identity)) is None
    run(store.put(kept, time.time() + 2.0))  # past what clocks may differ
    assert run(store.get(kept.identity)) == kept


def test_an_invalidation_between_a_look_and_the_put_is_seen(
    redis_stores: RedisStores, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = redis_stores(clock=time.time, prefix=store.prefix)
    kept, begun_s = entry("a"), time.time()
    run(other.invalidate(Selection(text="another"), dry_run=False))
    put = store._put

    async def look(*arguments: Any) -> list[bytes]:
        found = await put(*arguments)
        if len(found) == 1:
            await other.invalidate(Selection(text="a"), dry_run=False)
        return found

    monkeypatch.setattr(store, "_put", look)
    run(store.put(kept, begun_s))
    assert run(store.get(kept.identity)) is None


def test_a_redis_without_vector_sets_keeps_exact_repetitions(
    redis_stores: RedisStores, store: RedisStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    execute = store.client.execute_command

    async def refuse(*arguments: Any, **options: Any) -> Any:
        return await execute("NOSUCH" if arguments[0] == "VSIM" else arguments[0], *arguments[1:], **options)

    with monkeypatch.context() as patch:
        patch.setattr(store.client, "execute_command", refuse)
        run(store.prepare())
    assert "only exact repetitions are found: unknown command" in caplog.text
    kept = entry("a")
    run(store.put(kept))
    found = run(store.get(kept.identity))
    assert found is not None and (found.answer, found.vector) == (kept.answer, None)
    assert near_names(store, kept) == []
    assert not [key for key in keys(store) if key.startswith("vectors")]
    run(store.prepare())
    run(store.put(kept))
    assert near_names(store, kept) == ["a"]


def test_bytes_are_bounded_over_all_clients(redis_stores: RedisStores, store: RedisStore) -> None:
    size = entry("a00").num_bytes
    stores = [redis_stores(5 * size, clock=time.time, prefix=store.prefix) for _ in range(2)]
    for number in range(40):
        run(stores[number % 2].put(entry(f"a{number:02}")))
    assert run(store.size()) == Size(5, 5 * size)
    assert len(near_names(store, entry("a00"))) == 5
    assert len([key for key in keys(store) if key.startswith("entry:")]) == 5


def test_a_hit_does_not_extend_an_end_in_real_time(store: RedisStore) -> None:  # C18
    kept = entry("a", ttl_s=2.0)
    run(store.put(kept))
    for _ in range(3):
        time.sleep(0.5)
        assert run(store.get(kept.identity)) == kept
        run(store.touch(kept))
    time.sleep(0.6)
    assert run(store.get(kept.identity)) is None
    assert near_names(store, kept) == []
    assert keys(store) == set()  # nothing of it is left


def test_an_entry_that_ended_leaves_the_vector_set_and_the_sum(store: RedisStore) -> None:
    kept, ends = entry("kept"), entry("ends", ttl_s=0.1)
    for each in (kept, ends):
        run(store.put(each))
    time.sleep(0.15)
    assert near_names(store, kept) == ["kept"]
    assert run(store.size()) == Size(1, kept.num_bytes)
    assert run(store.client.execute_command("VCARD", f"{store.prefix}:1:vectors:default:p:2")) == 1


def test_a_redis_whose_clock_is_behind_serves_nothing_that_ended(redis_stores: RedisStores) -> None:
    ahead = redis_stores(clock=time.time)
    kept = entry("a", ttl_s=5.0)
    run(ahead.put(kept))
    ahead.clock = lambda: time.time() + 10
    assert run(ahead.get(kept.identity)) is None
    assert keys(ahead) == set()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("answer", b"another"),
        ("vector", b"\x00" * 8),
        ("vector", b"\x00" * 3),
        ("head", b"{}"),
        ("head", b"\xff"),
        ("head", None),
        ("answer", None),
    ],
)
def test_a_corrupt_entry_is_a_miss_and_leaves(store: RedisStore, field: str, value: bytes | None) -> None:
    kept = entry("a")
    for look_up in ("get", "nearest"):
        run(store.put(kept))
        key = f"{store.prefix}:1:entry:default:a"
        run(store.client.hdel(key, field) if value is None else store.client.hset(key, field, value))
        assert (run(store.get(kept.identity)) if look_up == "get" else near_names(store, kept)) in (None, [])
        assert run(store.get(kept.identity)) is None
        assert keys(store) == set()
    # An entry without its head looks to the set as if it had ended.
    assert store.errors["corrupt"] == (1 if (field, value) == ("head", None) else 2)


def test_an_entry_under_another_key_is_not_served(store: RedisStore) -> None:
    run(store.put(entry("secret", tenant="a")))
    run(store.client.copy(f"{store.prefix}:1:entry:a:secret", f"{store.prefix}:1:entry:b:secret"))
    assert run(store.get(entry("secret", tenant="b").identity)) is None
    assert store.errors["corrupt"] == 1


def test_vectors_of_another_length_are_apart(store: RedisStore) -> None:
    run(store.put(entry("a", num_dims=2)))
    run(store.put(entry("b", num_dims=3)))
    assert near_names(store, entry("c", num_dims=3)) == ["b"]
    run(store.put(entry("a", num_dims=3)))  # moves
    assert near_names(store, entry("c", num_dims=2)) == []


@pytest.mark.parametrize("tenant", ["*", "a:b", "", "[a]", "a\x00b", "é%"])
def test_a_tenants_name_is_no_pattern(store: RedisStore, tenant: str) -> None:
    run(store.put(entry("a", tenant=tenant)))
    other = entry("a", tenant="a")
    run(store.put(other))
    assert run(store.invalidate(Selection(tenant=tenant), dry_run=False)).num_entries == 1
    assert run(store.get(other.identity)) == other


def test_what_is_near_is_near_by_cosine(store: RedisStore) -> None:  # C17: VSIM's own score is (1 + cos) / 2
    vectors = {"same": unit(1, 0), "right angle": unit(0, 1), "opposite": unit(-1, 0)}
    for name, vector in vectors.items():
        identity = Identity("default", "auto", "p", name, name)
        run(store.put(Entry(identity, b"{}", "m", vector, time.time(), time.time() + 60)))
    found = run(store.nearest(entry("a").identity, unit(1, 0), 8))
    assert [(each.entry.identity.exact_key, round(each.similarity, 6)) for each in found] == [
        ("same", 1.0),
        ("right angle", 0.0),
        ("opposite", -1.0),
    ]


def test_most_of_the_truly_nearest_are_found(store: RedisStore) -> None:
    rows = np.random.default_rng(3).normal(size=(500, 32)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    now_s = time.time()
    store.max_bytes = 1 << 30
    for number, row in enumerate(rows):
        identity = Identity("default", "auto", "p", str(number), "")
        run(store.put(Entry(identity, b"{}", "m", row, now_s, now_s + 60)))
    num_found = 0
    for row in rows[:50]:
        best = {str(each) for each in np.argsort(-(rows @ row))[:8]}
        num_found += len(best & {each.entry.identity.exact_key for each in run(store.nearest(identity, row, 8))})
    assert num_found >= 0.9 * 50 * 8


NAMES = st.sampled_from(["a", "b", "c"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), NAMES, st.sampled_from([0, 2, 3]), st.integers(0, 4000)),
        st.tuples(st.just("touch"), NAMES),
        st.tuples(st.just("wrong"), NAMES),
        st.tuples(st.just("lose"), NAMES),  # Redis evicts a key by its own policy
        st.tuples(st.just("invalidate"), NAMES),
    ),
    max_size=12,
)


@settings(max_examples=50)
@given(steps=STEPS)
def test_the_sum_is_of_what_is_there(redis_stores: RedisStores, steps: list[tuple[str, str, int, int]]) -> None:
    store = redis_stores(12_000, clock=time.time)
    for step, name, *more in steps:
        if step == "put":
            run(store.put(entry(name, num_dims=more[0], answer=b"x" * more[1])))
        elif step == "touch":
            run(store.touch(entry(name)))
        elif step == "wrong":
            found = run(store.get(entry(name).identity))
            if found is not None:
                run(store.mark_wrong(entry("asked").identity, found))
        elif step == "lose":
            run(store.client.delete(f"{store.prefix}:1:entry:default:{name}"))
        else:
            run(store.invalidate(Selection(text=name), dry_run=False))
    names = {key.rpartition(":")[2] for key in keys(store) if key.startswith("entry:")}
    for num_dims in (2, 3):
        assert set(near_names(store, entry("asked", num_dims=num_dims))) <= names
    size = run(store.size())
    sizes = {key: int(value) for key, value in run(store.client.hgetall(f"{store.prefix}:1:sizes")).items()}
    assert size.num_bytes == sum(sizes.values()) - sizes.get(b"", 0) <= store.max_bytes
    assert size.num_entries >= len(names)
    assert run(store.invalidate(EVERYTHING, dry_run=True)) == Invalidated(size.num_entries, size.num_bytes)
    run(store.invalidate(EVERYTHING, dry_run=False))
    assert run(store.size()) == Size(0, 0)
    assert {key.split(":")[0] for key in keys(store)} <= {"blocked", "invalidations"}
