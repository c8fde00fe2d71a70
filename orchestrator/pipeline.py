"""The way of one request, top to bottom: admit, identify, reserve, cache, route and generate, settle.

What comes after the last event (safety, quality) is in `orchestrator.afterwards`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.afterwards import Afterwards
from orchestrator.answer import Answer, CacheFacts, CallerOutput
from orchestrator.cache.control import HEADER, parse_cache_control
from orchestrator.cache.key import Origin
from orchestrator.cache.operations import operate
from orchestrator.cache.policy import may_be_kept
from orchestrator.cache.stage import AnswerCache, Embed, Hit, Query
from orchestrator.cache.stored import StoredAnswer, join_pieces
from orchestrator.call import Call
from orchestrator.cloud.generation import CloudClient, max_prompt_tokens
from orchestrator.config import Tier, Tiers, split_model, with_adapter
from orchestrator.dispatch import Classify, Dispatch, Job, Sized, digest_folder
from orchestrator.errors import (
    ApiError,
    CancelledError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    NotCachedError,
    OverloadedError,
    is_our_fault,
    shorten,
)
from orchestrator.flight import Flight, Flights
from orchestrator.generation import EngineClient
from orchestrator.latencies import Latencies
from orchestrator.limits.deadline import ending, find_deadline
from orchestrator.limits.gate import Gate, Permit, counts_tokens, may_use, not_allowed, price_of
from orchestrator.limits.keys import Key
from orchestrator.limits.ledger import Amount
from orchestrator.manifest import MODEL_REPOSITORY, read_manifest
from orchestrator.money import Spending
from orchestrator.quality.sampler import Quality
from orchestrator.request import REQUEST_ID_RULE, Request, is_request_id, parse_request
from orchestrator.safety.hold import FlaggedError
from orchestrator.safety.rules import RuleFilter
from orchestrator.streaming.chunks import Choice
from orchestrator.streaming.text import Piece
from orchestrator.tracing import Traces

log = logging.getLogger("orchestrator.requests")

AUTO = "auto"
# How a request ends that pays for its prompt even if no token came.
_PAID = ("ok", CancelledError.code, DeadlineError.code)


class Pipeline:
    """Serves calls, all on one event loop; of a call it holds nothing but its flight and its place in a queue."""

    def __init__(
        self,
        tiers: Tiers,
        root: Path,
        engines: EngineClient,
        cloud: CloudClient | None = None,
        *,
        cache: AnswerCache | None = None,
        gate: Gate | None = None,
        classify: Classify | None = None,
        embed: Embed | None = None,
        quality: Quality | None = None,
        traces: Traces | None = None,
        is_instrumented: bool = True,
    ) -> None:
        """`cloud` is needed by cloud tiers alone, `embed` by those that compress prompts.

        Without `gate` nobody has a key, without `classify` nobody judges, without `quality` no answer is sampled.
        `is_instrumented` as in `orchestrator.instrumentation`. `outcomes` counts requests by how they ended.
        """
        self.outcomes: Counter[str] = Counter()
        self._is_instrumented = is_instrumented
        self.dispatch = Dispatch(tiers, root, engines, cloud, classify=classify, embed=embed, quality=quality)
        self.afterwards = Afterwards(
            RuleFilter(tiers.safety.words), tiers, quality, self.dispatch.generate_aside, self.dispatch.queues()
        )
        self._tiers = tiers.tier
        self._cache = cache
        self._gate = gate or Gate()
        self.spending = Spending()
        self.latencies = Latencies()
        self._traces = traces
        self._flights = Flights()
        # What an answer depends on beside the request.
        self._versions = {tier.name: digest_tier(tier, root) for tier in self._tiers if cache is not None}

    async def run(self, call: Call) -> None:
        """Serve one call to its only end: a final event, or an error."""
        ride = Ride(call)
        try:
            self._admit(call)
            ride.key = key = self._gate.identify(call)
            request = parse_request(call.body)
            tiers = self._find_tiers(request, key)
            ride.output = CallerOutput(call, request)
            query = self._read_query(call, request, key, tiers)
            deadline = find_deadline(call, key)
            ends_at_s = None if deadline is None else deadline.ends_at_s
            is_auto = split_model(request.model)[0] == AUTO
            job = Job(request, len(call.body), tiers, is_auto, key.priority, ends_at_s)
            with ending(call, deadline):
                call.stages.enter("reserve")
                await self._reserve(ride, job)
                hit = None
                if query is not None and self._cache is not None:
                    call.stages.enter("lookup")
                    hit = await self._cache.find_exact(query)
                flight = await self._fly(ride, job, query, hit)
            if self._cache is not None and query is not None and (flight.hit or ride.output.cache.is_shared):
                self._cache.remember(call.id or "", query, flight.hit)
        except ApiError as error:
            ride.outcome = error.code
            self._gate.count(error)
            call.sink.fail(error)
        except Exception as error:
            log.exception("a request failed inside the orchestrator")
            ride.outcome = InternalError.code
            call.sink.fail(InternalError(f"the orchestrator failed: {type(error).__name__}"))
        await self._settle(ride)

    async def operate(self, call: Call, operation: str) -> None:
        """An operator's order to the cache (`orchestrator.cache.operations`), to its only end."""
        try:
            models = {tier.name: tier.model for tier in self._tiers}
            call.sink.send(await operate(self._cache, operation, call.body, models), final=True)
        except ApiError as error:
            call.sink.fail(error)
        except Exception as error:
            log.exception("an operation on the cache failed")
            call.sink.fail(InternalError(f"the cache failed: {type(error).__name__}"))

    def refuse(self, call: Call, error: ApiError) -> None:
        """End a call that is not even begun."""
        ride = Ride(call)
        ride.outcome = error.code
        if call.request_id is not None and not is_request_id(call.request_id):
            call.request_id = None
        self._gate.count(error)
        call.sink.fail(error)
        self._note(ride, time.monotonic(), Amount())

    async def finish(self) -> None:
        """Until what goes on after a call's last event is done too."""
        await self._flights.finish()

    def _admit(self, call: Call) -> None:
        call.raise_if_cancelled()
        if call.request_id is not None and not is_request_id(call.request_id):
            name, call.request_id = call.request_id, None
            raise InvalidRequestError(
                f"x-request-id: must be {REQUEST_ID_RULE} (got {shorten(name)})", param="x-request-id"
            )

    def _tiers_of(self, name: str) -> list[Tier]:
        """Those that a request's `model` may mean, from cheap to dear; with the adapter on that it names."""
        base, adapter = split_model(name)
        return with_adapter([tier for tier in self._tiers if base in (AUTO, tier.name, tier.model)], adapter)

    def _find_tiers(self, request: Request, key: Key) -> list[Tier]:
        """Those that may answer, from cheap to dear: for "auto" all, else those that `model` names, or whose model.

        The key must allow them; raises `NotAllowedError` when it allows none.
        """
        named = self._tiers_of(request.model)
        allowed = [tier for tier in named if may_use(key, tier.name)]
        if allowed:
            return allowed
        if named:
            raise not_allowed(key, request.model)
        base, adapter = split_model(request.model)
        if adapter is not None and (bases := self._tiers_of(base)):
            known = ", ".join(dict.fromkeys(f"{base}:{each.name}" for tier in bases for each in tier.adapters))
            raise ModelNotFoundError(
                f"model: {shorten(base)} has no adapter {shorten(adapter)}; "
                + (f"one of {known}" if known else "its engine takes none"),
                param="model",
            )
        names = [AUTO, *dict.fromkeys(name for tier in self._tiers for name in (tier.name, tier.model))]
        raise ModelNotFoundError(
            f"model: {shorten(request.model)} does not exist; one of {', '.join(names)}", param="model"
        )

    async def _reserve(self, ride: Ride, job: Job) -> None:
        """Room in the key's quotas for the most that the request may take, whoever of the job's tiers answers it.

        Where there is none, the dearest is left out.
        """
        assert ride.key is not None
        amounts = [Amount(1)]
        if counts_tokens(ride.key):
            amounts = most_of(job, await self.dispatch.size(job))
        num_left_out, ride.permit = await self._gate.reserve_first(ride.key, amounts)
        job.leave_out(num_left_out)
        if ride.permit.headers:
            ride.call.sink.announce(ride.permit.headers)

    # --- cache ---

    def _read_query(self, call: Call, request: Request, key: Key, tiers: list[Tier]) -> Query | None:
        """None for a request that bypasses the cache."""
        control = parse_cache_control(call.parameters.get(HEADER, ""))
        query = None
        if self._cache is not None:
            # Where several tiers may answer, which of them do is the key's right: only its equals share its answers.
            versions = [self._versions[tier.name] for tier in tiers]
            adapter = split_model(request.model)[1] or ""
            origin = Origin(key.tenant, request.model, adapter, template="-".join(versions))
            query = self._cache.read(request, origin, control)
        if query is None and control.only_if_cached:
            raise NotCachedError(f"{HEADER}: only-if-cached, but a request like this one is not cached")
        return query

    async def _fly(self, ride: Ride, job: Job, query: Query | None, hit: Hit | None) -> Flight:
        """The whole answer to `ride.output`, and the flight that brought it."""
        assert ride.output is not None
        while True:
            ride.flight = flight = self._board(ride, job, query, hit)
            try:
                await flight.listen(ride.output)
            except (OverloadedError, DeadlineError):
                # What the deadline of the first has refused is no fault of those who came with him.
                if flight.answer is None and flight.is_timed and ride.output.cache.is_shared:
                    ride.call.raise_if_cancelled()
                    continue
                raise
            return flight

    def _board(self, ride: Ride, job: Job, query: Query | None, hit: Hit | None) -> Flight:
        """The flight that brings the answer; it is another caller's if one who asks the same is on his way."""
        assert ride.output is not None
        if hit is not None:
            return self._flights.start(None, partial(self._replay, ride, job.request, hit))
        make = partial(self._make, ride, job, query)
        if query is None or job.is_limited:  # by this key's quotas, to what others would not get
            return self._flights.start(None, make, keeps_pieces=False)
        must_hold = ride.key is not None and ride.key.hold_flagged
        # Of an API's prompt the size of the body is all that is known: whoever comes to pay has reserved by his own.
        size = len(ride.call.body) if any(tier.cloud is not None for tier in job.tiers) else 0
        control = query.control
        name, flight = None, None
        if not control.no_cache:
            # What waits as a batch request does is no answer for who asks interactively; the other way round it is.
            same = (query.identity.exact_key, control.only_if_cached, must_hold, size)
            name = (*same, job.priority)
            flight = self._flights.find((*same, "interactive")) or self._flights.find(name)
        if flight is not None and flight.oldest_s > control.oldest_s:
            flight = None  # what it finds stored might be too old for this caller
        if flight is not None:
            ride.call.stages.enter("share")
        ride.output.cache = CacheFacts("miss") if flight is None else CacheFacts("exact", 1.0, 0.0, is_shared=True)
        if flight is None:
            flight = self._flights.start(name, make)
            flight.is_timed = job.ends_at_s is not None
            flight.oldest_s = control.oldest_s
        return flight

    async def _make(self, ride: Ride, job: Job, query: Query | None, flight: Flight) -> None:
        """What nobody has at hand: another question's answer, or a new one."""
        judging = self.dispatch.start_judging(job)
        if query is not None and self._cache is not None:
            if hit := await self._cache.find_near(query):
                return await self._replay(ride, job.request, hit, flight)
            if query.control.only_if_cached:
                raise NotCachedError(f"{HEADER}: only-if-cached, and there is no stored answer to this question")
            job.vector = query.found_vector()
        assert ride.key is not None
        output = self.afterwards.hold(ride.key, flight)
        try:
            answer = await self.dispatch.answer(job, output, judging)
        except FlaggedError:  # it has ended, before what was flagged
            assert flight.answer is not None
            answer = flight.answer
        if await self.afterwards.is_flagged(output, answer, ride.call, ride.key):
            return
        self.afterwards.sample(answer, ride.call, ride.key, query, job.lifted_from)
        if query is not None and self._cache is not None and not job.is_limited and may_be_kept(answer.choices):
            await self._cache.keep(query, store_answer(answer, flight.pieces))

    async def _replay(self, ride: Ride, request: Request, hit: Hit, flight: Flight) -> None:
        """A stored answer as if it were made now; one that is flagged by now was served for the last time."""
        assert ride.key is not None and self._cache is not None
        flight.enter("replay")
        stored, tiers = hit.answer, {tier.name: tier for tier in self._tiers}
        answer = Answer(
            request,
            tiers[stored.tier],
            num_prompt_tokens=stored.num_prompt_tokens,
            num_completion_tokens=stored.num_completion_tokens,
            is_estimated=stored.is_estimated,
            first_token_s=time.monotonic(),
            cache=CacheFacts(hit.kind, hit.similarity, hit.age_s),
        )
        flight.hit = hit
        output = self.afterwards.hold(ride.key, flight)
        output.begin(answer, uuid.uuid4().hex)
        (choice,) = answer.choices
        try:
            for piece in stored.pieces:
                output.emit(choice, piece)
            output.end_choice(choice, "stop")
            output.finish()
        except FlaggedError:
            pass
        if await self.afterwards.is_flagged(output, answer, ride.call, ride.key):
            await self._cache.evict(hit.entry)

    # --- settle ---

    async def _settle(self, ride: Ride) -> None:
        """After the last event: quotas, what it cost, and what is noted of it."""
        ended_s, key = time.monotonic(), ride.key
        used = measure(ride)
        if ride.permit is not None:
            await ride.permit.settle(used)
        if key is not None and ride.flight is not None and ride.flight.answer is not None:
            self.spending.count(key.tenant, ride.flight.answer, used)
        self._note(ride, ended_s, used)

    def _note(self, ride: Ride, ended_s: float, used: Amount) -> None:
        """Metrics, the log line, and the trace: once for each request."""
        if not self._is_instrumented:
            return
        call, key, output = ride.call, ride.key, ride.output
        self.outcomes[ride.outcome] += 1
        line = {"event": "request", "outcome": ride.outcome, "id": call.id, "x_request_id": call.request_id}
        line |= {} if key is None else {"key": key.id, "tenant": key.tenant}
        facts: dict[str, Any] = {}
        if output is not None:
            facts = output.facts()
            if facts:
                facts["cost_usd"] = used.nano_usd / 1e9  # also of one that was left, or failed after tokens
            line |= facts
            if ride.outcome == "ok" and facts and key is not None:
                self.latencies.observe(facts, key.priority)
                if ride.flight is not None and ride.flight.payer is output:
                    self.latencies.observe_gaps(ride.flight.gaps, facts["tier"])
            if self._cache is not None:
                self._cache.counts.count_answer(output.cache_facts.kind)
        log.info(json.dumps(line))
        if self._traces is not None:
            self._traces.record(call, facts, ride.outcome, ended_s)


class Ride:
    """What the stages know of one call; each fills in its own."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.key: Key | None = None
        self.permit: Permit | None = None
        self.output: CallerOutput | None = None
        self.flight: Flight | None = None
        self.outcome = "ok"


def measure(ride: Ride) -> Amount:
    """What a request took in the end.

    A stored answer, or one that another caller pays for, is one request without tokens. Who pays, pays for the prompt
    and what was generated, also if he left or his deadline passed; but for no prompt if the generation failed before
    anything came of it. What fails by the engine's fault, or ours, is no request. What no engine began takes nothing.
    """
    flight = ride.flight
    answer = None if flight is None else flight.answer
    if flight is None or answer is None or not answer.usage.prompt_tokens:
        return Amount()
    usage, num_requests = answer.usage, int(not is_our_fault(ride.outcome))
    if flight.hit is not None or flight.payer is not ride.output:
        return Amount(num_requests)
    if not usage.completion_tokens and (ride.outcome not in _PAID or answer.has_failed):
        return Amount(num_requests)
    cost = price_of(answer.tier).nano_usd(usage.prompt_tokens, usage.completion_tokens)
    return Amount(num_requests, usage.prompt_tokens + usage.completion_tokens, cost)


def most_of(job: Job, sized: Sequence[Sized]) -> list[Amount]:
    """The most that the request may take of all tiers, then without the dearest, and so on to the cheapest alone."""
    amounts: list[Amount] = []
    for tier, num_prompt, num_answer, input_ids, _ in sized:
        if input_ids is None:
            num_prompt = max_prompt_tokens(job.num_bytes, tier)
        else:
            num_answer = min(num_answer, tier.context_window - num_prompt)
        num_answer *= job.request.num_choices
        most = Amount(1, num_prompt + num_answer, price_of(tier).nano_usd(num_prompt, num_answer))
        amounts.append(Amount(*map(max, most, amounts[-1])) if amounts else most)
    return amounts[::-1]


def store_answer(answer: Answer, pieces: Sequence[tuple[Choice, Piece | None]]) -> StoredAnswer:
    """What the store keeps of an answer of one choice."""
    return StoredAnswer(
        tier=answer.tier.name,
        model=answer.tier.model,
        pieces=join_pieces([piece for _, piece in pieces if piece is not None]),
        num_prompt_tokens=answer.num_prompt_tokens,
        num_completion_tokens=answer.usage.completion_tokens,
        is_estimated=answer.is_estimated,
    )


def digest_tier(tier: Tier, root: Path) -> str:
    """Changes with whatever shapes an answer beside the request.

    That is the tier's row, and of an engine's model its tokenizer, chat template, weights and settings: all its files,
    as the artifact's manifest knows them. Raises `ConfigError` where there is none.
    """
    digest = hashlib.sha256(tier.model_dump_json().encode())
    if tier.tokenizer is not None:
        digest.update(digest_folder(root / tier.tokenizer).encode())
        folder = f"{MODEL_REPOSITORY}/{tier.model}/"
        for name, file in sorted(read_manifest(root).files.items()):
            if name.startswith(folder):
                digest.update(f"{name} {file.sha256}\n".encode())
    return digest.hexdigest()
