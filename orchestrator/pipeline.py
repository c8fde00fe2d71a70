"""The way of one request, top to bottom: admit, identify, route, reserve, cache, generate, settle.

What comes after the last event (safety, quality) is in `orchestrator.afterwards`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from orchestrator.afterwards import Afterwards
from orchestrator.answer import Answer, CacheFacts, CallerOutput, Output
from orchestrator.cache.control import HEADER, parse_cache_control
from orchestrator.cache.key import Origin
from orchestrator.cache.operations import operate
from orchestrator.cache.policy import may_be_kept
from orchestrator.cache.stage import AnswerCache, Hit, Query
from orchestrator.cache.stored import StoredAnswer, join_pieces
from orchestrator.call import Call
from orchestrator.cloud.generation import CloudClient, CloudGeneration
from orchestrator.config import Tier, Tiers
from orchestrator.errors import (
    ApiError,
    CancelledError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    NotCachedError,
    shorten,
)
from orchestrator.flight import Flight, Flights
from orchestrator.generation import EngineClient, Generation, limit_answer, tokenize
from orchestrator.limits.deadline import ending, find_end_s
from orchestrator.limits.gate import Gate, Permit, counts_tokens, may_use, not_allowed, price_of
from orchestrator.limits.keys import Key
from orchestrator.limits.ledger import Amount
from orchestrator.limits.queue import CLASSES, Queue
from orchestrator.money import Spending
from orchestrator.quality.sampler import Quality
from orchestrator.request import REQUEST_ID_RULE, Request, is_request_id, parse_request
from orchestrator.safety.hold import FlaggedError
from orchestrator.safety.rules import RuleFilter
from orchestrator.streaming.chunks import Choice
from orchestrator.streaming.text import Piece
from orchestrator.streaming.tokenizer import ChatTokenizer

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
        quality: Quality | None = None,
    ) -> None:
        """`cloud` is needed by cloud tiers alone; without `gate` there are no keys, without `quality` no samples."""
        self._tiers = tiers.tier
        self._engines = engines
        self._cloud = cloud
        self._cache = cache
        self._gate = gate or Gate()
        self._quality = quality
        self.spending = Spending()
        self._flights = Flights()
        # An engine that hangs holds up its own queue alone; whom an API serves first is its own matter.
        limits = tiers.limits
        self._queues = {
            tier.model: Queue(
                limits.max_running_requests,
                {"interactive": limits.max_live_requests, "batch": limits.max_batch_waiting},
            )
            for tier in self._tiers
            if tier.cloud is None
        }
        safety = RuleFilter(tiers.safety.words)
        self.afterwards = Afterwards(safety, tiers, quality, self._generate_aside, self._queues)
        # Tiers of one model share its tokenizer.
        folders = {tier.name: tier.tokenizer for tier in self._tiers if tier.tokenizer is not None}
        loaded = {folder: ChatTokenizer.load(root / folder) for folder in set(folders.values())}
        self._tokenizers = {name: loaded[folder] for name, folder in folders.items()}
        # What an answer depends on beside the request.
        self._versions = {tier.name: digest_tier(tier, root) for tier in self._tiers if cache is not None}

    async def run(self, call: Call) -> None:
        """Serve one call to its only end: a final event, or an error."""
        ride = Ride(call)
        try:
            self._admit(call)
            ride.key = key = self._gate.identify(call)
            request = parse_request(call.body)
            tier = self._lift(ride, request, self._route(request, key))
            output = ride.output = CallerOutput(call, request)
            query = self._read_query(call, request, key)
            ride.ends_at_s = find_end_s(call, key)
            with ending(call, ride.ends_at_s):
                await self._reserve(ride, request, tier)
                hit = None if query is None or self._cache is None else await self._cache.find_exact(query)
                ride.flight = flight = self._board(ride, request, tier, query, hit)
                await flight.listen(output)
            if self._cache is not None and query is not None and flight.hit is not None:
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
            call.sink.send(await operate(self._cache, operation, call.body), final=True)
        except ApiError as error:
            call.sink.fail(error)
        except Exception as error:
            log.exception("an operation on the cache failed")
            call.sink.fail(InternalError(f"the cache failed: {type(error).__name__}"))

    async def finish(self) -> None:
        """Until what goes on after a call's last event is done too."""
        await self._flights.finish()

    def num_waiting(self) -> dict[str, int]:
        """By class, in all queues together."""
        return {name: sum(queue.num_waiting(name) for queue in self._queues.values()) for name in CLASSES}

    def _admit(self, call: Call) -> None:
        call.raise_if_cancelled()
        if call.request_id is not None and not is_request_id(call.request_id):
            name, call.request_id = call.request_id, None
            raise InvalidRequestError(
                f"x-request-id: must be {REQUEST_ID_RULE} (got {shorten(name)})", param="x-request-id"
            )

    def _tiers_of(self, name: str) -> list[Tier]:
        """Those that a request's `model` may mean, from cheap to dear."""
        return [tier for tier in self._tiers if name in (AUTO, tier.name, tier.model)]

    def _route(self, request: Request, key: Key) -> Tier:
        """The tier that `model` names, or whose model it names; "auto" is the cheapest until routing exists.

        Of those that the key allows; raises `NotAllowedError` when it allows none of them.
        """
        named = self._tiers_of(request.model)
        for tier in named:
            if may_use(key, tier.name):
                return tier
        if named:
            raise not_allowed(key, request.model)
        names = [AUTO, *dict.fromkeys(name for tier in self._tiers for name in (tier.name, tier.model))]
        raise ModelNotFoundError(
            f"model: {shorten(request.model)} does not exist; one of {', '.join(names)}", param="model"
        )

    def _lift(self, ride: Ride, request: Request, tier: Tier) -> Tier:
        """For "auto", the next tier that the key allows instead of one whose answers are doubtful."""
        assert ride.key is not None
        if self._quality is None or request.model != AUTO:
            return tier
        for above in self._tiers[self._tiers.index(tier) + 1 :]:
            if not self._quality.is_doubtful(tier.name):
                break
            if may_use(ride.key, above.name):
                ride.lifted_from = ride.lifted_from or tier.name
                tier = above
        return tier

    async def _reserve(self, ride: Ride, request: Request, tier: Tier) -> None:
        """Room in the key's quotas for the most that the request may take, whoever will answer it."""
        assert ride.key is not None
        call, amount = ride.call, Amount(1)
        if counts_tokens(ride.key):
            if tier.cloud is None:
                ride.input_ids = await tokenize(request, self._tokenizers[tier.name], len(call.body))
                num_prompt = len(ride.input_ids)
                num_answer = limit_answer(request, tier, num_prompt)
            else:  # an API has a tokenizer of its own; no token is shorter than a byte
                num_prompt = min(len(call.body), tier.context_window)
                num_answer = request.output_limit or tier.generation.max_output_tokens
            num_answer *= request.num_choices
            amount = Amount(1, num_prompt + num_answer, price_of(tier).nano_usd(num_prompt, num_answer))
        ride.permit = await self._gate.reserve(ride.key, amount)
        if ride.permit.headers:
            call.sink.announce(ride.permit.headers)

    # --- cache ---

    def _read_query(self, call: Call, request: Request, key: Key) -> Query | None:
        """None for a request that bypasses the cache."""
        control = parse_cache_control(call.parameters.get(HEADER, ""))
        query = None
        if self._cache is not None:
            # Where several tiers may answer, which of them do is the key's right: only its equals share its answers.
            tiers = self._tiers_of(request.model)
            versions = [self._versions[tier.name] for tier in tiers if may_use(key, tier.name)]
            query = self._cache.read(request, Origin(key.tenant, request.model, template="-".join(versions)), control)
        if query is None and control.only_if_cached:
            raise NotCachedError(f"{HEADER}: only-if-cached, but a request like this one is not cached")
        return query

    def _board(self, ride: Ride, request: Request, tier: Tier, query: Query | None, hit: Hit | None) -> Flight:
        """The flight that brings the answer; it is another caller's if one who asks the same is on his way."""
        assert ride.output is not None
        if hit is not None:
            return self._flights.start(None, partial(self._replay, ride, request, hit))
        make = partial(self._make, ride, Answer(request, tier, len(ride.call.body), input_ids=ride.input_ids), query)
        if query is None:
            return self._flights.start(None, make)
        must_hold = ride.key is not None and ride.key.hold_flagged
        name = None if query.control.no_cache else (query.identity.exact_key, query.control, must_hold)
        flight = self._flights.find(name)
        ride.output.cache = CacheFacts("miss") if flight is None else CacheFacts("exact", 1.0, 0.0, is_shared=True)
        return flight or self._flights.start(name, make)

    async def _make(self, ride: Ride, answer: Answer, query: Query | None, flight: Flight) -> None:
        """What nobody has at hand: another question's answer, or a new one."""
        if query is not None and self._cache is not None:
            if hit := await self._cache.find_near(query):
                return await self._replay(ride, answer.request, hit, flight)
            if query.control.only_if_cached:
                raise NotCachedError(f"{HEADER}: only-if-cached, and there is no stored answer to this question")
        assert ride.key is not None
        output = self.afterwards.hold(ride.key, flight)
        try:
            await self._generate_in_turn(ride, answer, output)
        except FlaggedError:
            pass  # it has ended, before what was flagged
        if await self.afterwards.is_flagged(output, answer, ride.call, ride.key):
            return
        self.afterwards.sample(answer, ride.call, ride.key, query, ride.lifted_from)
        if query is not None and self._cache is not None and may_be_kept(answer.choices):
            await self._cache.keep(query, store_answer(answer, flight.pieces))

    async def _replay(self, ride: Ride, request: Request, hit: Hit, flight: Flight) -> None:
        """A stored answer as if it were made now; one that is flagged by now was served for the last time."""
        assert ride.key is not None and self._cache is not None
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

    # --- generate, settle ---

    async def _generate_aside(self, answer: Answer, output: Output) -> None:
        """As a batch request, for nobody."""
        queue = self._queues.get(answer.tier.model)
        if queue is None:
            await self._generate(answer, output)
            return
        ticket = queue.enter("batch")
        try:
            output.on_cancel(ticket.give_up)
            await ticket.wait()
            output.raise_if_cancelled()
            await self._generate(answer, output)
        finally:
            ticket.leave()

    async def _generate_in_turn(self, ride: Ride, answer: Answer, flight: Output) -> None:
        assert ride.key is not None
        queue = self._queues.get(answer.tier.model)
        if queue is None:
            await self._generate(answer, flight)
            return
        max_tokens = answer.request.output_limit or answer.tier.generation.max_output_tokens
        ticket = queue.enter(ride.key.priority, ride.ends_at_s, max_tokens)
        try:
            flight.on_cancel(ticket.give_up)
            await ticket.wait()
            flight.raise_if_cancelled()
            await self._generate(answer, flight)
            if answer.first_token_s is not None and ticket.started_s is not None:
                now_s = time.monotonic()
                first_token_s, total_s = answer.first_token_s - ticket.started_s, now_s - ticket.started_s
                queue.pace.observe(first_token_s, total_s, answer.usage.completion_tokens // len(answer.choices))
        finally:
            ticket.leave()

    async def _generate(self, answer: Answer, flight: Output) -> None:
        """The whole answer, its last event too."""
        name = answer.tier.name
        if answer.tier.cloud is None:
            await Generation(flight, answer, self._tokenizers[name], self._engines).run()
        elif self._cloud is not None:
            await CloudGeneration(flight, answer, self._cloud).run()
        else:
            raise InternalError(f"tier {name!r} is a cloud tier, but there is no client for it")

    async def _settle(self, ride: Ride) -> None:
        """After the last event: quotas, what it cost, and the log line."""
        call, key, output = ride.call, ride.key, ride.output
        used = measure(ride)
        if ride.permit is not None:
            await ride.permit.settle(used)
        if key is not None and ride.flight is not None and ride.flight.answer is not None:
            self.spending.count(key.tenant, ride.flight.answer, used)
        line = {"event": "request", "outcome": ride.outcome, "id": call.id, "x_request_id": call.request_id}
        line |= {} if key is None else {"key": key.id, "tenant": key.tenant}
        if output is not None:
            line |= output.facts()
            if self._cache is not None:
                self._cache.counts.count_answer(output.cache_facts.kind)
        log.info(json.dumps(line))


class Ride:
    """What the stages know of one call; each fills in its own."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.key: Key | None = None
        self.ends_at_s: float | None = None
        self.permit: Permit | None = None
        self.input_ids: list[int] | None = None  # the prompt's, if it was tokenised for the quotas
        self.output: CallerOutput | None = None
        self.flight: Flight | None = None
        self.lifted_from: str | None = None  # the tier that would have answered, were its answers not doubtful
        self.outcome = "ok"


def measure(ride: Ride) -> Amount:
    """What a request took in the end.

    A stored answer, or one that another caller pays for, is one request without tokens. Who pays, pays for the prompt
    and what was generated, also if he left or his deadline passed; but for no prompt if the generation failed before
    anything came of it. What no engine began takes nothing.
    """
    flight = ride.flight
    answer = None if flight is None else flight.answer
    if flight is None or answer is None or not answer.usage.prompt_tokens:
        return Amount()
    usage = answer.usage
    if flight.hit is not None or flight.payer is not ride.output:
        return Amount(1)
    if ride.outcome not in _PAID and not usage.completion_tokens:
        return Amount(1)
    cost = price_of(answer.tier).nano_usd(usage.prompt_tokens, usage.completion_tokens)
    return Amount(1, usage.prompt_tokens + usage.completion_tokens, cost)


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
    """Changes with whatever shapes an answer beside the request: the tier's row, its tokenizer and chat template."""
    digest = hashlib.sha256(tier.model_dump_json().encode())
    for path in sorted((root / tier.tokenizer).iterdir()) if tier.tokenizer is not None else ():
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
