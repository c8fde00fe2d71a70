"""What is done with an answer once it was given, off the way of everybody who waits: the safety filter, and quality.

(For a key that asks for it, the filter comes before each sentence: `hold`.)
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from orchestrator.answer import Answer, Output
from orchestrator.cache.control import HEADER, parse_cache_control
from orchestrator.cache.policy import may_be_kept
from orchestrator.cache.stage import Query
from orchestrator.call import Call
from orchestrator.config import Tiers
from orchestrator.errors import ApiError, DeadlineError
from orchestrator.flight import Flight
from orchestrator.limits.gate import may_use, price_of
from orchestrator.limits.keys import Key
from orchestrator.limits.queue import Queue
from orchestrator.quality.sampler import Answered, Asked, Quality
from orchestrator.request import ChatRequest, Request
from orchestrator.safety.check import find_all
from orchestrator.safety.hold import Held, read_choice
from orchestrator.safety.rules import Finding, SafetyFilter

log = logging.getLogger("orchestrator.requests")

# How soon an answer that nobody waits for makes room for one that somebody does.
_LOOK_PERIOD_S = 0.05
# What a generation may take to end when told to.
_END_TIMEOUT_S = 1.0

# Generates an answer into an output, in its turn behind all others.
Generate = Callable[[Answer, Flight], Awaitable[None]]


class Afterwards:
    """`num_flagged` counts findings by kind and "held" (before they were sent) or "sent"."""

    def __init__(
        self,
        safety: SafetyFilter,
        tiers: Tiers,
        quality: Quality | None,
        generate: Generate,
        queues: Mapping[str, Queue],
    ) -> None:
        """`queues` are those of the engine models; `quality` is there where the table is."""
        self.num_flagged: Counter[tuple[str, str]] = Counter()
        self.quality = quality
        self._safety = safety
        self._tiers = {tier.name: tier for tier in tiers.tier}
        self._timeout_s = tiers.quality.timeout_s if tiers.quality is not None else 0.0
        self._generate = generate
        self._queues = queues

    # --- safety ---

    def hold(self, key: Key, flight: Flight) -> Flight | Held:
        """Where an answer goes: to the flight, for a key that asks for it by way of the filter."""
        return Held(flight, self._safety) if key.hold_flagged else flight

    async def is_flagged(self, output: Output, answer: Answer, call: Call, key: Key) -> bool:
        """Whether there is something in the answer that must not be; counted, and logged without its text."""
        if isinstance(output, Held) and output.findings:
            self._note(output.findings, "held", answer, call, key)
            return True
        findings = [each for choice in answer.choices for each in await find_all(self._safety, read_choice(choice))]
        if findings:
            self._note(findings, "sent", answer, call, key)
        return bool(findings)

    def _note(self, findings: list[Finding], when: str, answer: Answer, call: Call, key: Key) -> None:
        kinds = Counter(each.kind for each in findings)
        for kind, num in kinds.items():
            self.num_flagged[kind, when] += num
        line = {"event": "flagged", "id": call.id, "tenant": key.tenant, "tier": answer.tier.name}
        log.info(json.dumps({**line, "when": when, "kinds": dict(kinds)}))

    # --- quality ---

    def sample(self, answer: Answer, call: Call, key: Key, query: Query | None, lifted_from: str | None) -> None:
        """Perhaps have the request asked again, later; returns at once."""
        request, quality = answer.request, self.quality
        if quality is None or not isinstance(request, ChatRequest) or len(answer.choices) != 1:
            return
        if request.messages[-1].role != "user" or not may_be_kept(answer.choices):
            return
        if not quality.draw(answer.tier.name, lifted_from):
            return
        may_keep = key.keep_text and not parse_cache_control(call.parameters.get(HEADER, "")).no_store
        quality.offer(
            Answered(
                tier=answer.tier.name,
                lifted_from=lifted_from,
                tenant=key.tenant,
                question=request.messages[-1].text(),
                text=answer.choices[0].text,
                num_bytes=answer.num_request_bytes,
                allowed=partial(self._may_go_to, key),
                ask=partial(self._ask, request, answer.num_request_bytes),
                vector=None if query is None else query.vector,
                turns=[(each.role, each.text()) for each in request.messages] if may_keep else None,
            )
        )

    def _may_go_to(self, key: Key, name: str) -> bool:
        return may_use(key, name) and (self._tiers[name].cloud is None or key.allow_cloud_sampling)

    async def _ask(self, request: Request, num_bytes: int, name: str) -> Asked:
        tier = self._tiers[name]
        answer = Answer(request, tier, num_bytes)
        await generate_aside(partial(self._generate, answer), self._queues.get(tier.model), self._timeout_s)
        usage = answer.usage
        return Asked(answer.choices[0].text, price_of(tier).nano_usd(usage.prompt_tokens, usage.completion_tokens))


async def generate_aside(generate: Callable[[Flight], Awaitable[None]], queue: Queue | None, timeout_s: float) -> None:
    """An answer that nobody waits for. It is given up when it takes too long, and for interactive requests that wait.

    Raises what ended it. When this is cancelled, the generation is ended first.
    """
    flight = Flight()
    task = asyncio.ensure_future(generate(flight))
    ends_s = time.monotonic() + timeout_s
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_LOOK_PERIOD_S)
            if task.done():
                break
            if time.monotonic() > ends_s:
                raise await _end(task, flight, f"no answer within {timeout_s:g} s")
            if queue is not None and queue.num_waiting("interactive"):
                raise await _end(task, flight, "others wait")
    except asyncio.CancelledError:
        await _end(task, flight, "the server stops")
        raise
    task.result()


async def _end(task: asyncio.Future[None], flight: Flight, why: str) -> ApiError:
    """By the way that every caller's leaving takes; one that does not end by it is dropped."""
    reason = DeadlineError(why)
    try:
        await asyncio.wait_for(flight.cancel(reason), _END_TIMEOUT_S)
    except Exception as error:  # an engine that cannot be told
        log.warning("a generation that nobody waits for could not be stopped: %s", type(error).__name__)
    await asyncio.wait({task}, timeout=_END_TIMEOUT_S)
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # seen
    return reason
