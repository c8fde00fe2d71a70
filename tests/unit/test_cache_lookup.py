"""The lookup from a request to an outcome, and the cases that other caches got wrong.

The embedder here counts letter pairs: near for near texts, which is what lets the guards decide.
"""

from __future__ import annotations

import json
import zlib
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cache_stores import MakeStore, RedisStores, make_memory_store, run
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cache.key import Identity, Origin, identify
from orchestrator.cache.lookup import Lookup, Outcome
from orchestrator.cache.store import Entry, Vector
from orchestrator.request import ChatRequest, parse_request

MAX_WORDS = 100


def embed(text: str) -> Vector | None:
    if len(text.split()) > MAX_WORDS:
        return None
    vector = np.full(64, 0.01, np.float32)
    lowered = text.lower()
    for one, other in pairwise(lowered):
        vector[zlib.crc32((one + other).encode()) % 64] += 1
    return vector / np.linalg.norm(vector)


def identity(content: str, *, tenant: str = "default", before: tuple[str, ...] = (), system: str = "") -> Identity:
    turns: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    turns += [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(before)]
    body = json.dumps({"messages": [*turns, {"role": "user", "content": content}]}).encode()
    request = parse_request(body)
    assert isinstance(request, ChatRequest)
    return identify(request, Origin(tenant, "auto"))


class Cache:
    """A lookup with its store, and what a caller does around them."""

    def __init__(self, make_store: MakeStore, **options: Any) -> None:
        self.now_s = 0.0
        self.store = make_store(clock=lambda: self.now_s)
        self.lookup = Lookup(self.store, lambda: self.now_s, **options)

    def put(self, asked: Identity, ttl_s: float = 60.0) -> Entry:
        entry = Entry(asked, b"{}", "llm_small", embed(asked.question or ""), self.now_s, self.now_s + ttl_s)
        run(self.store.put(entry))
        return entry

    def find(self, asked: Identity) -> Outcome:
        exact = run(self.lookup.find_exact(asked))
        return exact if exact.kind == "exact" else run(self.lookup.find_near(asked, embed(asked.question or "")))


@pytest.mark.parametrize(
    ("cached", "asked", "kind"),
    [
        ("How to turn on dark mode?", "How to turn off dark mode?", "miss"),  # C01
        ("enable 2FA", "turn on 2FA", "semantic"),  # C02
        ("enable 2FA", "disable 2FA", "miss"),
        ("Did Germany beat France?", "Did France beat Germany?", "miss"),  # C04
        ("What is 15% of 80?", "What is 15% of 90?", "miss"),  # C06
        ("How to diagnose diabetes?", "What are symptoms of diabetes?", "miss"),  # C08
        ("what is the function of money", "can you explain what function of TV is?", "miss"),  # C09
        ("What is my account balance?", "What is my account balance?", "exact"),
        ("What is my account balance?", "what's my account balance", "semantic"),
    ],
)
def test_pairs(make_store: MakeStore, cached: str, asked: str, kind: str) -> None:
    cache = Cache(make_store, threshold=-1.0)  # the guards alone decide
    cache.put(identity(cached))
    assert cache.find(identity(asked)).kind == kind


def test_history_and_system_prompt_part_questions(make_store: MakeStore) -> None:  # C10, C11
    cache = Cache(make_store)
    cache.put(identity("how old is he", before=("Who is the CEO of OpenAI?", "Sam Altman.")))
    assert cache.find(identity("how old is he", before=("Who is the CEO of Apple?", "Tim Cook."))).kind == "miss"
    cache.put(identity("Summarize this", system="Answer like a pirate."))
    assert cache.find(identity("Summarize this", system="Answer like a lawyer.")).kind == "miss"


def test_tenants_never_share(make_store: MakeStore) -> None:  # C13, C15
    cache = Cache(make_store)
    cache.put(identity("What is my account balance?", tenant="a"))
    assert cache.find(identity("What is my account balance?", tenant="b")).kind == "miss"
    assert cache.find(identity("what's my account balance", tenant="a")).kind == "semantic"


NAME = st.text(st.sampled_from('ab\x00/:"'), min_size=1, max_size=4)


@given(entries=st.lists(st.tuples(NAME, NAME), max_size=6), tenant=NAME, question=NAME)
def test_no_answer_crosses_tenants(entries: list[tuple[str, str]], tenant: str, question: str) -> None:
    check_tenants(make_memory_store, entries, tenant, question)


@given(entries=st.lists(st.tuples(NAME, NAME), max_size=6), tenant=NAME, question=NAME)
def test_no_answer_crosses_tenants_in_redis(
    redis_stores: RedisStores, entries: list[tuple[str, str]], tenant: str, question: str
) -> None:
    check_tenants(redis_stores, entries, tenant, question)


def check_tenants(make_store: MakeStore, entries: list[tuple[str, str]], tenant: str, question: str) -> None:
    cache = Cache(make_store, threshold=-1.0, guard=lambda one, other: None)
    for other_tenant, text in entries:
        cache.put(identity(text, tenant=other_tenant))
    outcome = cache.find(identity(question, tenant=tenant))
    assert outcome.entry is None or outcome.entry.identity.tenant == tenant
    assert (outcome.entry is not None) is (tenant in {each for each, _ in entries})


def test_unrelated_questions_miss(make_store: MakeStore) -> None:  # C16
    cache = Cache(make_store)
    questions = ("Hello world", "What is 1+1?", "Who wrote Hamlet?", "Boil an egg", "Define entropy")
    for question in questions:
        assert cache.find(identity(question)).kind == "miss"
        cache.put(identity(question))
    assert all(cache.find(identity(question)).kind == "exact" for question in questions)


def test_identical_is_over_the_threshold_and_unrelated_under_it(make_store: MakeStore) -> None:  # C17
    cache = Cache(make_store, threshold=0.9, guard=lambda one, other: None)
    cache.put(identity("Why is the sky blue?"))
    near = cache.find(identity("Why is the sky blue"))
    assert near.kind == "semantic" and near.similarity is not None and near.similarity > 0.9
    far = cache.find(identity("Convert 5 pounds"))
    assert (far.kind, far.guard) == ("miss", "threshold")


def test_a_hit_says_how_near_and_how_old_and_extends_nothing(make_store: MakeStore) -> None:  # C18
    cache = Cache(make_store)
    cache.put(identity("Why is the sky blue?"), ttl_s=2.0)
    for now_s in (0.5, 1.0, 1.5):
        cache.now_s = now_s
        outcome = cache.find(identity("why is the sky blue"))
        assert (outcome.kind, outcome.age_s) == ("semantic", now_s)
    cache.now_s = 2.0
    assert cache.find(identity("why is the sky blue")) == Outcome("miss")


def test_what_the_embedder_cannot_take_whole_is_not_matched(make_store: MakeStore) -> None:  # C21
    cache = Cache(make_store, threshold=-1.0)
    text = "word " * MAX_WORDS
    cache.put(identity(f"{text} What is its topic?"))
    assert cache.find(identity(f"{text} How many words has it?")) == Outcome("miss")
    assert cache.find(identity(f"{text} What is its topic?")).kind == "exact"


def test_a_wrong_hit_leaves_and_does_not_come_back(make_store: MakeStore) -> None:  # C23
    cache = Cache(make_store)
    stored, asked = identity("Why is the sky blue?"), identity("why is the sky blue")
    wrong = cache.put(stored)
    run(cache.store.mark_wrong(asked, wrong))
    assert cache.find(asked).kind == "miss"
    cache.put(stored)
    assert cache.find(asked).guard == "blocked"
    assert cache.find(stored).kind == "exact"


def test_the_next_nearest_is_tried(make_store: MakeStore) -> None:
    cache = Cache(make_store, threshold=0.5)
    cache.put(identity("How do I turn off dark mode now?"))
    right = cache.put(identity("Please, how can I turn on dark mode?"))
    assert cache.find(identity("How do I turn on dark mode?")).entry == right


def test_a_rejected_neighbour_is_reported(make_store: MakeStore) -> None:
    cache = Cache(make_store)
    cache.put(identity("What is 15% of 80?"))
    outcome = cache.find(identity("What is 15% of 90?"))
    assert (outcome.kind, outcome.guard) == ("miss", "number")
    assert outcome.similarity is not None and outcome.similarity > 0.8
