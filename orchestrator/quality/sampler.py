"""Has a share of the answers asked again, after they were given, and has the monitor take in what comes of it.

One question at a time, beside everything else: what is offered while too much waits is dropped and counted, and nothing
here raises into a request or holds one up.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from orchestrator.config import QualityPolicy
from orchestrator.quality.cases import Cases, make_case
from orchestrator.quality.clusters import Vector
from orchestrator.quality.monitor import Change, Monitor, Sample
from orchestrator.quality.store import FileStore, Store
from orchestrator.quality.vectors import Embed, embed_whole

log = logging.getLogger("orchestrator.quality")

# What waits to be asked again: at most so many, each of a request of at most so many bytes.
MAX_PENDING = 16
MAX_REQUEST_BYTES = 64 << 10
# What a request waits for its question's vector, as long as for the cache's.
_EMBED_TIMEOUT_S = 0.2
# How often samples of others are looked for, and how soon a new state is kept.
_SYNC_PERIOD_S = 1.0
_SAVE_PERIOD_S = 5.0
# Why a sample that was drawn came to nothing.
REASONS = ("not_allowed", "too_long", "full", "failed", "no_vector")


class Asked(NamedTuple):
    """Another tier's answer, and what it took, in billionths of a dollar."""

    text: str
    nano_usd: int


class Ask(Protocol):
    def __call__(self, tier: str) -> Awaitable[Asked]:
        """The same request's answer by `tier`, in its own time; raises when there is none."""


@dataclass(frozen=True)
class Answered:
    """A request that was served. `lifted_from` is the doubtful tier that would have answered it.

    `vector` is its question's, if the cache has it made. `turns` are role and text, and given only where they may be
    kept. `allowed` are the tiers that its text may go to.
    """

    tier: str
    lifted_from: str | None
    tenant: str
    question: str
    text: str
    num_bytes: int
    allowed: Callable[[str], bool]
    ask: Ask
    vector: asyncio.Task[Vector | None] | None = None
    turns: Sequence[tuple[str, str]] | None = None


class Quality:
    """For one event loop. `tiers` are the names of all, from cheap to dear. Nothing goes on before `run`."""

    def __init__(
        self,
        policy: QualityPolicy,
        tiers: Sequence[str],
        monitor: Monitor,
        embed: Embed,
        *,
        store: Store | None = None,
        cases: Cases | None = None,
        clock: Callable[[], float] = time.time,
        may_keep: Callable[[str], bool] = lambda tenant: True,
    ) -> None:
        """`may_keep` says whether a tenant's text may be kept, as it is now."""
        self.monitor = monitor
        self.dropped: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self.nano_usd = 0  # what asking again has cost
        self.num_store_errors = 0
        self._policy = policy
        self._tiers = tiers
        self._embed = embed
        self._store = store or FileStore(None)
        self._cases = Cases(None, policy.keep_days) if cases is None else cases
        self._clock = clock
        self._may_keep = may_keep
        self._random = random.Random(policy.seed)
        self._pending: deque[Answered] = deque()
        self._has_pending = asyncio.Event()
        self._is_changed = False

    # --- the live side ---

    def is_doubtful(self, tier: str, vector: Vector | None = None) -> bool:
        """Whether a question had better go to a tier above; `vector` is its unit vector, if it is at hand."""
        return self.monitor.is_doubtful(tier, vector)

    async def find_vector(self, question: str, within_s: float | None = None) -> Vector | None:
        """A question's unit vector; None at once where no cluster is in doubt, and where it takes too long."""
        if not self.monitor.has_doubtful_clusters:
            return None
        timeout_s = _EMBED_TIMEOUT_S if within_s is None else min(_EMBED_TIMEOUT_S, within_s)
        try:
            return await asyncio.wait_for(embed_whole(self._embed, question), timeout_s)
        except asyncio.TimeoutError:
            return None

    def draw(self, tier: str, lifted_from: str | None) -> bool:
        """Whether this answer is one of the sample; each is asked about once."""
        is_watched = tier in self._policy.tiers or lifted_from is not None
        return is_watched and self._random.random() < self._policy.sampling

    def offer(self, answered: Answered) -> None:
        """Have it asked again, if there is room; returns at once."""
        if not all(map(answered.allowed, self._tiers_to_ask(answered))):
            self.dropped["not_allowed"] += 1
        elif answered.num_bytes > MAX_REQUEST_BYTES:
            self.dropped["too_long"] += 1
        elif len(self._pending) >= MAX_PENDING:
            self.dropped["full"] += 1
        else:
            self._pending.append(answered)
            self._has_pending.set()

    # --- beside it ---

    async def run(self) -> None:
        """Go on from what was kept, and work until cancelled; then keep what is known."""
        try:
            await self._restore()
            await asyncio.gather(self._check_all(), self._sync_all())
        finally:
            await self._sync(must_save=True)
            await self._guard(self._store.close())

    async def check(self, answered: Answered) -> None:
        """Ask again, compare, and hand in what comes of it."""
        for sample in await self._compare(answered):
            if not sample.is_good:
                self._keep_case(answered, sample)
            if not await self._guard(self._store.share(sample)):
                self._take(sample)  # what cannot be shared is at least known here

    async def _check_all(self) -> None:
        while True:
            await self._has_pending.wait()
            self._has_pending.clear()
            while self._pending:
                try:
                    await self.check(self._pending.popleft())
                except Exception as error:
                    # Its text may be a tenant's.
                    log.info(json.dumps({"event": "quality_failed", "error": type(error).__name__}))
                    self.dropped["failed"] += 1
                await self._receive()

    async def _sync_all(self) -> None:
        saved_s = self._clock()
        while True:
            await asyncio.sleep(_SYNC_PERIOD_S)
            must_save = self._clock() - saved_s >= _SAVE_PERIOD_S
            await self._sync(must_save=must_save)
            saved_s = self._clock() if must_save else saved_s

    async def _restore(self) -> None:
        async def restore() -> None:
            if (state := await self._store.load()) is not None:
                self.monitor.restore(state)

        await self._guard(restore())

    async def _sync(self, *, must_save: bool) -> None:
        await self._receive()
        if must_save and self._is_changed:
            self._is_changed = not await self._guard(self._store.save(self.monitor.state()))
        if must_save:
            self._cases.forget_old(self._clock())
            self._cases.forget_others(self._may_keep)
            if (file := self._cases.take_changes()) is not None:
                await self._guard(asyncio.to_thread(self._cases.write, file))

    async def _receive(self) -> None:
        async def receive() -> None:
            for sample in await self._store.receive():
                self._take(sample)

        await self._guard(receive())

    async def _guard(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether the store did as it was asked."""
        try:
            await work
        except Exception as error:
            self.num_store_errors += 1
            log.warning("the store of quality failed: %s", type(error).__name__)  # its text may hold the address
            return False
        return True

    # --- one sample ---

    def _tiers_to_ask(self, answered: Answered) -> list[str]:
        asked = [] if answered.lifted_from is None else [answered.lifted_from]
        return asked if answered.tier == self._policy.expert else [*asked, self._policy.expert]

    async def _compare(self, answered: Answered) -> list[Sample]:
        texts = {answered.tier: answered.text}
        for tier in self._tiers_to_ask(answered):
            asked = await answered.ask(tier)
            texts[tier] = asked.text
            self.nano_usd += asked.nano_usd
            log.info(json.dumps({"event": "quality_asked", "tier": tier, "cost_usd": asked.nano_usd / 1e9}))
        compared = {*self._policy.tiers, self._policy.expert}
        vectors = {tier: await embed_whole(self._embed, text) for tier, text in texts.items() if tier in compared}
        expert, question = vectors.pop(self._policy.expert), await self._question_vector(answered)
        samples = []
        for tier, vector in vectors.items():
            if expert is None or (vector is None and texts[tier].strip()):
                self.dropped["no_vector"] += 1
                continue
            is_good = vector is not None and float(vector @ expert) >= self._policy.similarity
            samples.append(Sample(tier, question, is_good, self._clock()))
        return samples

    async def _question_vector(self, answered: Answered) -> Vector | None:
        vector = None if answered.vector is None else await answered.vector
        return await embed_whole(self._embed, answered.question) if vector is None else vector

    def _keep_case(self, answered: Answered, sample: Sample) -> None:
        if answered.turns is None:
            return
        cluster = self.monitor.cluster_of(sample.vector)
        case = make_case(answered.tenant, sample.tier, cluster, self._tiers, answered.turns, sample.at_s)
        if case is not None:
            is_doubtful = self.monitor.is_doubtful(sample.tier, sample.vector)
            self._cases.add(case.model_copy(update={"counts": is_doubtful}))

    def _take(self, sample: Sample) -> None:
        self._is_changed = True
        for change in self.monitor.add(sample):
            self._tell(change)
            if change.kind == "doubtful":
                self._cases.count(change.tier, change.cluster)

    def _tell(self, change: Change) -> None:
        line = {"event": f"quality_{change.kind}", **change._asdict()}
        line.pop("kind")
        line["bar"] = round(self._bar(change), 3)
        log.info(json.dumps(line))

    def _bar(self, change: Change) -> float:
        return max(self._policy.min_quality, (1 - self._policy.max_drop) * (change.usual or 0.0))
