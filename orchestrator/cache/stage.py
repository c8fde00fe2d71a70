"""The cache as the pipeline uses it: look up, keep what was answered, and the operator's ways in.

A store or an embedder that fails is a miss and is counted; it never fails a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from orchestrator.cache.control import CacheControl
from orchestrator.cache.key import Identity, Origin, identify
from orchestrator.cache.lexicon import load_lexicon
from orchestrator.cache.lookup import Lookup, Outcome
from orchestrator.cache.policy import is_cacheable, may_be_near
from orchestrator.cache.store import Entry, Invalidated, Selection, Vector
from orchestrator.cache.stored import StoredAnswer
from orchestrator.config import CachePolicy
from orchestrator.request import ChatRequest, Request

log = logging.getLogger("orchestrator.cache")

LANGUAGES = ("en", "de", "es", "fr", "zh")
# A question whose vector takes longer (others' long texts are in the queue) is answered without a look-up.
EMBED_TIMEOUT_S = 0.2
# When the embedder has got the question, and this process has nothing to do until its vector comes.
PREPARE_AFTER_S = 0.001
# Of how many answers the operator can say that they were wrong.
MAX_REMEMBERED_ANSWERS = 1000

# The unit vector of a question, or None when it is longer than the embedder's window, or the embedder failed.
Embed = Callable[[str], Coroutine[Any, Any, Vector | None]]


class Counts(Protocol):
    """What happens here, for the metrics."""

    def count_answer(self, kind: str) -> None:
        """A request that got its answer by `kind`, as `rt.cache` says it."""

    def count_rejection(self, guard: str) -> None:
        """The nearest stored question was not served because of `guard`."""

    def count_store_error(self) -> None:
        """The store did not do as it was asked."""


@dataclass
class Query:
    """One request as the cache sees it. `vector` is its question's, once begun, for whoever else needs it.

    `begun_s` is when it came, by the store's clock.
    """

    identity: Identity
    control: CacheControl
    may_be_near: bool
    begun_s: float
    vector: asyncio.Task[Vector | None] | None = None

    def found_vector(self) -> Vector | None:
        """The question's, if it is there by now."""
        task = self.vector
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()


class Hit(NamedTuple):
    """What is served, and how near its question lies (a cosine)."""

    kind: Literal["exact", "semantic"]
    answer: StoredAnswer
    entry: Entry
    similarity: float
    age_s: float


class AnswerCache:
    """For one event loop. `lookup` brings the store, whose clock it knows.

    With a semantic tier it reads the guards' lexicons at once, which takes a second that no caller should wait.
    """

    def __init__(self, policy: CachePolicy, lookup: Lookup, embed: Embed, counts: Counts) -> None:
        self._policy = policy
        self._lookup = lookup
        self._embed = embed
        self.counts = counts
        if policy.semantic:
            for language in LANGUAGES:
                load_lexicon(language)
        self._answers: OrderedDict[str, tuple[Identity, Entry | None]] = OrderedDict()  # by id

    def read(self, request: Request, origin: Origin, control: CacheControl) -> Query | None:
        """The request as the cache sees it; None if it bypasses the cache."""
        if control.no_store or not isinstance(request, ChatRequest) or not is_cacheable(request, self._policy):
            return None
        identity = identify(request, origin)
        may_be = may_be_near(request, identity.question, self._policy)
        return Query(identity, control, may_be, self._lookup.clock())

    async def find_exact(self, query: Query) -> Hit | None:
        if query.control.no_cache:
            return None
        try:
            return self._read_outcome(query, await self._lookup.find_exact(query.identity))
        except Exception:
            self._note_store_error()
            return None

    async def find_near(self, query: Query) -> Hit | None:
        """Embeds the question."""
        if query.control.no_cache or not query.may_be_near:
            return None
        query.vector = asyncio.create_task(self._embed(query.identity.question or ""))
        asyncio.get_running_loop().call_later(PREPARE_AFTER_S, self._lookup.prepare, query.identity)
        try:
            # Shielded: who waits no longer leaves it to `keep`, or it would be embedded twice when there is most to do.
            vector = await asyncio.wait_for(asyncio.shield(query.vector), EMBED_TIMEOUT_S)
        except asyncio.TimeoutError:
            return None
        if vector is None:
            return None
        try:
            outcome = await self._lookup.find_near(query.identity, vector, query.control.oldest_s)
            if outcome.guard not in (None, "threshold"):
                self.counts.count_rejection(str(outcome.guard))
            return self._read_outcome(query, outcome)
        except Exception:
            self._note_store_error()
            return None

    async def keep(self, query: Query, answer: StoredAnswer) -> None:
        """Store what the caller of this knows to be whole, unless it was invalidated while it was made."""
        vector = None
        if query.may_be_near:
            vector = await (query.vector or self._embed(query.identity.question or ""))
        now_s = self._lookup.clock()
        entry = Entry(query.identity, answer.to_json(), answer.model, vector, now_s, now_s + self._policy.ttl_s)
        try:
            await self._lookup.store.put(entry, query.begun_s)
        except Exception:
            self._note_store_error()

    async def evict(self, entry: Entry) -> None:
        """It is served no more; the next answer to its question may be."""
        try:
            await self._lookup.store.mark_wrong(entry.identity, entry)
        except Exception:
            self._note_store_error()

    def remember(self, answer_id: str, query: Query, hit: Hit | None) -> None:
        """So that the operator can name it; without a hit it is what is stored of the query now."""
        self._answers[answer_id] = (query.identity, None if hit is None else hit.entry)
        while len(self._answers) > MAX_REMEMBERED_ANSWERS:
            self._answers.popitem(last=False)

    async def mark_wrong(self, answer_id: str) -> bool:
        """Evict what was served under `answer_id`, and block the pair; False for an id that is not remembered.

        Raises `StoreError` when the store fails: the id is remembered then.
        """
        if answer_id not in self._answers:
            return False
        await self._lookup.store.mark_wrong(*self._answers[answer_id])
        self._answers.pop(answer_id, None)
        return True

    async def invalidate(self, selection: Selection, *, dry_run: bool) -> Invalidated:
        return await self._lookup.store.invalidate(selection, dry_run=dry_run)

    def _read_outcome(self, query: Query, outcome: Outcome) -> Hit | None:
        entry = outcome.entry
        if outcome.kind == "miss" or entry is None or outcome.age_s is None:
            return None
        if outcome.age_s > query.control.oldest_s:
            return None
        answer = StoredAnswer.from_json(entry.answer)
        return Hit(outcome.kind, answer, entry, outcome.similarity or 0.0, outcome.age_s)

    def _note_store_error(self) -> None:
        log.exception("the cache's store failed; a miss")
        self.counts.count_store_error()
