"""Who makes answers: an engine model, or the API of a cloud tier, with what all requests to it share."""

from __future__ import annotations

import math
import re
import time
from collections import Counter

from orchestrator import contracts
from orchestrator.answer import Answer, Output
from orchestrator.cloud.generation import CloudClient, CloudGeneration, Overrun
from orchestrator.config import Tiers
from orchestrator.errors import (
    ApiError,
    CloudError,
    CloudRequestError,
    CloudTimeoutError,
    EngineError,
    EngineStopError,
    EngineTimeoutError,
    InternalError,
    OverloadedError,
    TierUnavailableError,
)
from orchestrator.generation import EngineClient, Generation
from orchestrator.limits.queue import Class, Pace, Queue, check_in_time
from orchestrator.routing.breaker import Breaker, Passage, Verdict
from orchestrator.streaming.tokenizer import ChatTokenizer
from orchestrator.timeouts import TimedEngines

# With several backends none may hold more of the live requests: one that hangs would lock the others' callers out.
MAX_SHARE = 0.75

# An engine names the tensors when it refuses what it was asked: the caller's fault, or ours, but not the engine's.
_TENSOR = f"({'|'.join(spec.name for spec in contracts.ENGINE_INPUTS)})"
_REFUSAL = re.compile(rf"{_TENSOR}(, {_TENSOR})*: ")


class Backend:
    """For one event loop. An engine that hangs holds up its own queue alone; whom an API serves first is its matter."""

    def __init__(self, name: str, tiers: Tiers, num_backends: int) -> None:
        limits, rules = tiers.limits, tiers.routing
        self.name = name
        self.breaker = Breaker(rules.failures_to_open, rules.open_s)
        # What nobody waits for neither probes for those who wait nor fails them.
        self._aside_breaker = Breaker(rules.failures_to_open, rules.open_s)
        self.queue: Queue | None = None
        if any(tier.backend == name and tier.cloud is None for tier in tiers.tier):
            num = limits.max_batch_waiting
            classes: dict[Class, int] = {"interactive": limits.max_live_requests, "batch": num, "aside": num}
            self.queue = Queue(limits.max_running_requests, classes)
        engine = None if self.queue is None else self.queue.pace
        self.paces = {tier.name: Pace(engine=engine) for tier in tiers.tier if tier.backend == name}
        share = MAX_SHARE if num_backends > 1 else 1.0
        self._max_live = math.ceil(share * limits.max_live_requests)
        self._num_live = 0

    def expect_s(self, tier: str, priority: Class, max_tokens: float | None) -> float:
        """Seconds until the answer is whole, of at most so many tokens if its request says it: 0 if nothing is known,
        infinite if it is full."""
        pace = self.paces[tier]
        if self._num_live >= self._max_live:
            return math.inf
        return pace.predict_s(max_tokens) if self.queue is None else self.queue.expect_s(priority, max_tokens, pace)

    async def generate(
        self, answer: Answer, flight: Output, way: Way, *, priority: Class, ends_at_s: float | None
    ) -> None:
        """One attempt, when its turn has come: the whole answer, its last event too."""
        if self._num_live >= self._max_live:
            raise OverloadedError(
                f"{self._max_live} requests for {self.name!r} are running or wait, which is the limit; try again later",
                headers={"retry-after": "1"},
            )
        self._num_live += 1
        flight.enter("queue")
        try:
            max_tokens, pace = answer.request.output_limit, self.paces[answer.tier.name]
            if self.queue is None:
                if ends_at_s is not None:
                    check_in_time(ends_at_s - time.monotonic(), 0.0, max_tokens, pace)
                await self._pass(answer, flight, way, priority)
                return
            ticket = self.queue.enter(priority, ends_at_s, max_tokens, pace)
            try:
                flight.on_cancel(ticket.give_up)
                await ticket.wait()
                flight.raise_if_cancelled()
                await self._pass(answer, flight, way, priority)
            finally:
                ticket.leave()
        finally:
            self._num_live -= 1

    async def _pass(self, answer: Answer, flight: Output, way: Way, priority: Class) -> None:
        """Past the breaker, which hears how it ended before the next in the queue has its turn."""
        passage = None
        if priority != "aside":
            passage = self.breaker.enter()
        elif self.breaker.state == "closed":
            passage = self._aside_breaker.enter()
        if passage is None:
            raise out(self, answer.tier.name)
        flight.enter("prefill")
        verdict: Verdict = "neutral"
        started_s = time.monotonic()
        try:
            await way.generate(answer, flight, passage)
            verdict = "success"
        except ApiError as error:
            verdict = judge(error)
            raise
        finally:
            passage.end(verdict)
        if answer.first_token_s is not None:
            num_tokens = answer.usage.completion_tokens // len(answer.choices)
            for pace in (self.paces[answer.tier.name], *([self.queue.pace] if self.queue else [])):
                pace.observe(answer.first_token_s - started_s, time.monotonic() - started_s, num_tokens)


class Way:
    """To the engines and APIs themselves."""

    def __init__(self, engines: EngineClient, cloud: CloudClient | None, tokenizers: dict[str, ChatTokenizer]) -> None:
        """`tokenizers` by the name of the tier. `overruns`: see `CloudGeneration`."""
        self._engines = engines
        self._cloud = cloud
        self.tokenizers = tokenizers
        self.overruns: Counter[tuple[str, Overrun]] = Counter()

    async def generate(self, answer: Answer, flight: Output, passage: Passage) -> None:
        tier = answer.tier
        if tier.cloud is None:
            engines = TimedEngines(self._engines, tier, passage)
            await Generation(flight, answer, self.tokenizers[tier.name], engines).run()
        elif self._cloud is not None:
            await CloudGeneration(flight, answer, self._cloud, self.overruns, passage.hear).run()
        else:
            raise InternalError(f"tier {tier.name!r} is a cloud tier, but there is no client for it")


def out(backend: Backend, tier: str) -> TierUnavailableError:
    """The error of a request to a tier that is out."""
    after_s = max(1, math.ceil(backend.breaker.wait_s))
    return TierUnavailableError(
        f"tier {tier!r} has failed too often and is left alone; try again in {after_s} s, or name another tier",
        headers={"retry-after": str(after_s)},
    )


def judge(error: ApiError) -> Verdict:
    """What an error says of who made it: nothing, if the caller is to blame, left, or came too late or too often."""
    if isinstance(error, (EngineTimeoutError, CloudTimeoutError)):
        return "hang"
    if isinstance(error, EngineStopError):
        return "unstopped"
    if isinstance(error, CloudError):
        return "failure"
    if isinstance(error, EngineError) and not _REFUSAL.match(error.message):
        return "failure"
    return "neutral"


def may_go_elsewhere(error: ApiError) -> bool:
    """Whether another tier might do better: what a caller did wrong is wrong everywhere, but APIs have rules of their
    own."""
    return judge(error) != "neutral" or isinstance(error, (OverloadedError, TierUnavailableError, CloudRequestError))
