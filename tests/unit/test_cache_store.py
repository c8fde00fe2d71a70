"""Both stores: what stays, for how long, and what leaves first; and the in-process index."""

from __future__ import annotations

import numpy as np
import pytest
from cache_stores import MakeStore, run

from orchestrator.cache.index import GRAPH_FROM, VectorIndex, _Graph
from orchestrator.cache.key import Identity
from orchestrator.cache.store import (
    MAX_REMEMBERED_INVALIDATIONS,
    SWEEP_PERIOD_S,
    Entry,
    Invalidated,
    MemoryStore,
    Selection,
    Size,
    Store,
    Vector,
)


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def unit(*values: float) -> Vector:
    vector = np.array(values, np.float32)
    return vector / np.linalg.norm(vector)


def entry(name: str, *, ttl_s: float = 10.0, stored_s: float = 0.0, answer: bytes = b"{}", **fields: str) -> Entry:
    identity = Identity(
        fields.get("tenant", "default"), "auto", fields.get("partition", "p"), name, fields.get("question", name)
    )
    return Entry(identity, answer, fields.get("model", "llm_small"), unit(1, len(name)), stored_s, stored_s + ttl_s)


def count(store: Store) -> int:
    size = run(store.size())
    assert size is not None
    return size.num_entries


def test_a_hit_does_not_extend_an_end(make_store: MakeStore) -> None:
    clock = Clock()
    store = make_store(clock=clock)
    kept = entry("a", ttl_s=2.0)
    run(store.put(kept))
    for now_s in (0.5, 1.0, 1.5, 1.99):  # a hit every half second does not keep it
        clock.now_s = now_s
        assert run(store.get(kept.identity)) == kept
        run(store.touch(kept))
    clock.now_s = 2.0
    assert run(store.get(kept.identity)) is None
    assert run(store.size()) == Size(0, 0)


def test_what_has_ended_takes_no_place_of_what_lives_on() -> None:
    clock = Clock()
    store = MemoryStore(1 << 20, clock=clock)
    for number in range(12):
        run(store.put(entry(f"a{number:02}", ttl_s=2.0)))
    lives = entry("lives on", ttl_s=100.0)
    run(store.put(lives))
    clock.now_s = 3.0
    assert [each.entry for each in run(store.nearest(lives.identity, unit(1, 3), 8))] == [lives]


def test_what_nobody_asks_for_goes_when_it_has_ended() -> None:
    clock = Clock()
    store = MemoryStore(1 << 20, clock=clock)
    run(store.put(entry("a", ttl_s=2.0)))
    clock.now_s = SWEEP_PERIOD_S
    assert run(store.size()) == Size(0, 0)


def test_what_has_ended_is_not_near(make_store: MakeStore) -> None:
    clock = Clock()
    store = make_store(clock=clock)
    kept = entry("a", ttl_s=2.0)
    run(store.put(kept))
    assert kept.vector is not None
    assert run(store.nearest(kept.identity, kept.vector, 1))[0].similarity == pytest.approx(1.0)
    clock.now_s = 3.0
    assert run(store.nearest(kept.identity, kept.vector, 1)) == []


def test_least_recently_used_leaves_first(make_store: MakeStore) -> None:
    entries = [entry(name, answer=b"x" * 1000) for name in ("a", "b", "c", "d")]
    store = make_store(3 * entries[0].num_bytes, clock=Clock())
    for each in entries[:3]:
        run(store.put(each))
    run(store.touch(entries[0]))
    run(store.put(entries[3]))
    assert [run(store.get(each.identity)) is not None for each in entries] == [True, False, True, True]
    assert run(store.size()) == Size(3, 3 * entries[0].num_bytes)


def test_what_is_too_large_is_not_stored_and_nothing_leaves_for_it(make_store: MakeStore) -> None:
    small = entry("a")
    store = make_store(2 * small.num_bytes, clock=Clock())
    run(store.put(small))
    run(store.put(entry("b", answer=b"x" * 10_000)))
    assert count(store) == 1


def test_a_key_is_stored_once(make_store: MakeStore) -> None:
    store = make_store(clock=Clock())
    run(store.put(entry("a", answer=b"old")))
    run(store.put(entry("a", answer=b"newer")))
    found = run(store.get(entry("a").identity))
    assert found is not None and found.answer == b"newer"
    assert run(store.size()) == Size(1, found.num_bytes)


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        (Selection(tenant="t2"), {"b"}),
        (Selection(model="large"), {"c"}),
        (Selection(older_than_s=5.0), {"a"}),
        (Selection(text="BALANCE"), {"d"}),
        (Selection(tenant="default", model="llm_small"), {"a", "d"}),
        (Selection(everything=True), {"a", "b", "c", "d"}),
    ],
)
def test_invalidation(make_store: MakeStore, selection: Selection, names: set[str]) -> None:
    clock = Clock()
    store = make_store(clock=clock)
    clock.now_s = 6.0
    entries = [
        entry("a", stored_s=0.0),
        entry("b", stored_s=5.0, tenant="t2"),
        entry("c", stored_s=5.0, model="large"),
        entry("d", stored_s=5.0, question="What is my balance?"),
    ]
    for each in entries:
        run(store.put(each))
    chosen = [each for each in entries if each.identity.exact_key in names]
    expected = Invalidated(len(names), sum(each.num_bytes for each in chosen))
    assert run(store.invalidate(selection, dry_run=True)) == expected
    assert count(store) == 4
    assert run(store.invalidate(selection, dry_run=False)) == expected
    assert {each.identity.exact_key for each in entries if run(store.get(each.identity))} == set("abcd") - names


def test_what_was_invalidated_since_it_was_begun_is_not_stored(make_store: MakeStore) -> None:
    clock = Clock()
    clock.now_s = 1000.0
    store = make_store(clock=clock)
    run(store.invalidate(Selection(text="hello"), dry_run=False))
    run(store.invalidate(Selection(older_than_s=0.0), dry_run=False))
    clock.now_s = 1010.0
    for name, begun_s, num_stored in [
        ("say hello", 990.0, 0),
        ("say hello", 1005.0, 1),
        ("another", 990.0, 2),
        ("hello", None, 3),
    ]:
        run(store.put(entry(name, stored_s=1010.0), begun_s))
        assert count(store) == num_stored


def test_after_many_invalidations_nothing_begun_before_is_stored(make_store: MakeStore) -> None:
    clock = Clock()
    store = make_store(clock=clock)
    for number in range(MAX_REMEMBERED_INVALIDATIONS + 1):
        clock.now_s = 100.0 + number
        run(store.invalidate(Selection(text="hello"), dry_run=False))
    clock.now_s += 10.0
    run(store.put(entry("another", stored_s=clock.now_s), 50.0))
    assert count(store) == 0
    run(store.put(entry("another", stored_s=clock.now_s), clock.now_s - 2.0))
    assert count(store) == 1


@pytest.mark.parametrize("fields", [{}, {"tenant": "t", "everything": True}])
def test_a_selection_says_what_it_selects(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="give tenant, model, older_than_s or text, or everything=True alone"):
        Selection(**fields)  # type: ignore[arg-type]


def test_a_wrong_answer_is_evicted_and_the_pair_blocked(make_store: MakeStore) -> None:
    store = make_store(clock=Clock())
    stored, asked, other = entry("a"), entry("b").identity, entry("c").identity
    run(store.put(stored))
    run(store.mark_wrong(asked, stored))
    assert run(store.get(stored.identity)) is None
    run(store.put(stored))
    assert run(store.is_blocked(asked, stored))
    assert not run(store.is_blocked(other, stored))


def test_the_same_words_are_blocked_too(make_store: MakeStore) -> None:
    store = make_store(clock=Clock())
    stored = entry("a", question="Who directed Alien?")
    run(store.put(stored))
    run(store.mark_wrong(entry("b", question="Who directed Aliens?").identity, stored))
    assert run(store.is_blocked(entry("c", question="who  directed aliens").identity, stored))
    assert not run(store.is_blocked(entry("c", question="who directed Jaws").identity, stored))
    assert not run(store.is_blocked(entry("c", question="Who directed Aliens?", partition="q").identity, stored))


def test_what_is_stored_for_a_question_is_wrong_for_it(make_store: MakeStore) -> None:
    store = make_store(clock=Clock())
    stored = entry("a")
    for _ in range(2):
        run(store.put(stored))
        run(store.mark_wrong(stored.identity, None))
        assert count(store) == 0
    run(store.mark_wrong(stored.identity, None))
    assert not run(store.is_blocked(stored.identity, stored))


def test_blocked_pairs_are_bounded(make_store: MakeStore) -> None:
    store = make_store(max_blocked=2, clock=Clock())
    stored = entry("a")
    for name in ("b", "c", "d"):
        run(store.mark_wrong(entry(name).identity, stored))
    assert [run(store.is_blocked(entry(name).identity, stored)) for name in ("b", "c", "d")] == [False, True, True]


def test_partitions_do_not_see_each_other(make_store: MakeStore) -> None:
    store = make_store(clock=Clock())
    stored = entry("a", partition="p1")
    run(store.put(stored))
    assert run(store.nearest(entry("a", partition="p2").identity, unit(1, 1), 8)) == []


def test_graph_finds_what_comparing_all_finds() -> None:
    rows = np.random.default_rng(3).normal(size=(GRAPH_FROM + 200, 16)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    index = VectorIndex(16)
    for number, row in enumerate(rows):
        index.add(str(number), row)
    assert isinstance(index._all, _Graph)
    removed = {str(number) for number in range(0, len(rows), 7)}
    for key in sorted(removed):
        index.remove(key)
    assert len(index) == len(rows) - len(removed)
    num_found = 0
    for row in rows[:200]:
        similarities = rows @ row
        best = next(str(each) for each in np.argsort(-similarities) if str(each) not in removed)
        found = index.nearest(row, 5)
        assert not {key for key, _ in found} & removed
        num_found += found[0][0] == best
    assert num_found >= 190  # it is approximate


def test_removing_keeps_the_other_rows() -> None:
    index = VectorIndex(2)
    for number in range(40):
        index.add(str(number), unit(1, number))
    for number in (0, 39, 20):
        index.remove(str(number))
    assert {index.nearest(unit(1, number), 1)[0][0] for number in (1, 38, 21)} == {"1", "38", "21"}
    with pytest.raises(ValueError, match="key: '1' is in the index"):
        index.add("1", unit(1, 1))
    assert VectorIndex(2).nearest(unit(1, 1), 3) == []


def test_what_comes_and_goes_while_the_graph_is_built_is_found() -> None:
    rows = np.random.default_rng(5).normal(size=(GRAPH_FROM + 400, 16)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    index = VectorIndex(16)
    left: set[int] = set()
    for number, row in enumerate(rows):
        index.add(str(number), row)
        left.add(number)
        if number > GRAPH_FROM and number % 3 == 0:
            for gone in (number - 1, number - GRAPH_FROM):  # not in the graph yet, and in it
                index.remove(str(gone))
                left.remove(gone)
            assert index.nearest(row, 1)[0][0] == str(number)
            assert len(index) == len(left)
    assert isinstance(index._all, _Graph)
    found = [int(key) for row in rows for key, _ in index.nearest(row, 1)]
    assert set(found) <= left
    assert sum(number in left and found[number] == number for number in range(len(rows))) >= 0.97 * len(left)
    with pytest.raises(KeyError):
        index.remove("never")


def clustered(num: int, seed: int) -> Vector:
    """[num, 32], of length 1, in 100 groups, as questions about the same things are."""
    random = np.random.default_rng(seed)
    rows = np.random.default_rng(0).normal(size=(100, 32))[random.integers(100, size=num)]
    rows += 0.5 * random.normal(size=rows.shape)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize(("num_replaced", "num_left"), [(0, 2_400), (0, 1_000), (0, 100), (9_000, 3_000), (9_000, 20)])
def test_what_was_removed_takes_no_place_of_what_is_left(num_replaced: int, num_left: int) -> None:
    rows = clustered(3_000 + num_replaced, 7)
    index = VectorIndex(32)
    for number, row in enumerate(rows):
        if number >= 3_000:
            index.remove(str(number - 3_000))
        index.add(str(number), row)
    for number in range(num_replaced, len(rows) - num_left):
        index.remove(str(number))
    left = range(len(rows) - num_left, len(rows))
    assert len(index) == num_left
    num_found = 0
    for asked in clustered(50, 8):
        nearest = {str(left[place]) for place in np.argsort(-(rows[left.start :] @ asked))[:8]}
        found = [key for key, _ in index.nearest(asked, 8)]
        assert len(found) == 8
        num_found += len(nearest & set(found))
    assert num_found >= 0.95 * 50 * 8
