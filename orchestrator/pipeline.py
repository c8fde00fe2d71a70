"""The way of one request, top to bottom: admit, identify, cache, route, generate, settle."""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from orchestrator.answer import Answer, CacheFacts, CallerOutput
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
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    NotCachedError,
    shorten,
)
from orchestrator.flight import Flight, Flights
from orchestrator.generation import EngineClient, Generation
from orchestrator.identity import Caller, Identify, identify
from orchestrator.request import REQUEST_ID_RULE, Request, is_request_id, parse_request
from orchestrator.streaming.chunks import Choice
from orchestrator.streaming.text import Piece
from orchestrator.streaming.tokenizer import ChatTokenizer

log = logging.getLogger("orchestrator.requests")

AUTO = "auto"


class Pipeline:
    """Serves calls, all on one event loop; of a call it holds nothing but the flight it is on."""

    def __init__(
        self,
        tiers: Tiers,
        root: Path,
        engines: EngineClient,
        cloud: CloudClient | None = None,
        *,
        cache: AnswerCache | None = None,
        identify: Identify = identify,
    ) -> None:
        """`cloud` is needed by cloud tiers alone."""
        self._tiers = tiers.tier
        self._engines = engines
        self._cloud = cloud
        self._cache = cache
        self._identify = identify
        self._flights = Flights()
        # Tiers of one model share its tokenizer.
        folders = {tier.name: tier.tokenizer for tier in self._tiers if tier.tokenizer is not None}
        loaded = {folder: ChatTokenizer.load(root / folder) for folder in set(folders.values())}
        self._tokenizers = {name: loaded[folder] for name, folder in folders.items()}
        # What `model` may be, and what its answers depend on beside the request.
        digests = {tier.name: digest_tier(tier, root) for tier in self._tiers if cache is not None}
        names = [AUTO, *(name for tier in self._tiers for name in (tier.name, tier.model))]
        self._versions = {name: "-".join(digests.get(tier.name, "") for tier in self._tiers_of(name)) for name in names}

    async def run(self, call: Call) -> None:
        """Serve one call to its only end: a final event, or an error."""
        output: CallerOutput | None = None
        outcome = "ok"
        try:
            request = self._admit(call)
            output = CallerOutput(call, request)
            query = self._read_query(call, request, self._identify(call))
            hit = None if query is None else await self._find_exact(query)
            flight = self._board(output, request, query, hit)
            await flight.listen(output)
            if self._cache is not None and query is not None and flight.hit is not None:
                self._cache.remember(call.id or "", query, flight.hit)
        except ApiError as error:
            outcome = error.code
            call.sink.fail(error)
        except Exception as error:
            log.exception("a request failed inside the orchestrator")
            outcome = InternalError.code
            call.sink.fail(InternalError(f"the orchestrator failed: {type(error).__name__}"))
        self._settle(call, output, outcome)

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

    def _admit(self, call: Call) -> Request:
        call.raise_if_cancelled()
        if call.request_id is not None and not is_request_id(call.request_id):
            name, call.request_id = call.request_id, None
            raise InvalidRequestError(
                f"x-request-id: must be {REQUEST_ID_RULE} (got {shorten(name)})", param="x-request-id"
            )
        request = parse_request(call.body)
        if request.model not in self._versions:
            raise ModelNotFoundError(
                f"model: {shorten(request.model)} does not exist; one of {', '.join(self._versions)}", param="model"
            )
        return request

    # --- cache ---

    def _read_query(self, call: Call, request: Request, caller: Caller) -> Query | None:
        """None for a request that bypasses the cache."""
        control = parse_cache_control(call.parameters.get(HEADER, ""))
        query = None
        if self._cache is not None and caller.may_cache:
            origin = Origin(caller.tenant, request.model, template=self._versions[request.model])
            query = self._cache.read(request, origin, control)
        if query is None and control.only_if_cached:
            raise NotCachedError(f"{HEADER}: only-if-cached, but a request like this one is not cached")
        return query

    async def _find_exact(self, query: Query) -> Hit | None:
        assert self._cache is not None
        return await self._cache.find_exact(query)

    def _board(self, output: CallerOutput, request: Request, query: Query | None, hit: Hit | None) -> Flight:
        """The flight that brings the answer; it is another caller's if one who asks the same is on his way."""
        if hit is not None:
            return self._flights.start(None, partial(self._replay, request, hit))
        make = partial(self._make, request, query, len(output.call.body))
        if query is None:
            return self._flights.start(None, make)
        key = None if query.control.no_cache else (query.identity.exact_key, query.control)
        flight = self._flights.find(key)
        output.cache = CacheFacts("miss") if flight is None else CacheFacts("exact", 1.0, 0.0, is_shared=True)
        return flight or self._flights.start(key, make)

    async def _make(self, request: Request, query: Query | None, num_bytes: int, flight: Flight) -> None:
        """What nobody has at hand: another question's answer, or a new one."""
        if query is not None and self._cache is not None:
            if hit := await self._cache.find_near(query):
                return await self._replay(request, hit, flight)
            if query.control.only_if_cached:
                raise NotCachedError(f"{HEADER}: only-if-cached, and there is no stored answer to this question")
        answer = Answer(request, self._route(request), num_bytes)
        await self._generate(answer, flight)
        if query is not None and self._cache is not None and may_be_kept(answer.choices):
            await self._cache.keep(query, store_answer(answer, flight.pieces))

    async def _replay(self, request: Request, hit: Hit, flight: Flight) -> None:
        """A stored answer as if it were made now."""
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
        flight.begin(answer, uuid.uuid4().hex)
        (choice,) = answer.choices
        for piece in stored.pieces:
            flight.emit(choice, piece)
        flight.end_choice(choice, "stop")
        flight.finish()

    # --- route, generate, settle ---

    def _tiers_of(self, name: str) -> list[Tier]:
        """Those that `model` names, or whose model it names; all of them may serve "auto"."""
        return [tier for tier in self._tiers if name in (AUTO, tier.name, tier.model)]

    def _route(self, request: Request) -> Tier:
        """The cheapest of those that may serve it, until routing exists."""
        return self._tiers_of(request.model)[0]

    async def _generate(self, answer: Answer, flight: Flight) -> None:
        """The whole answer, its last event too."""
        name = answer.tier.name
        if answer.tier.cloud is None:
            await Generation(flight, answer, self._tokenizers[name], self._engines).run()
        elif self._cloud is not None:
            await CloudGeneration(flight, answer, self._cloud).run()
        else:
            raise InternalError(f"tier {name!r} is a cloud tier, but there is no client for it")

    def _settle(self, call: Call, output: CallerOutput | None, outcome: str) -> None:
        """After the last event: the log line. Limits and quality sampling settle here."""
        line = {"event": "request", "outcome": outcome, "id": call.id, "x_request_id": call.request_id}
        if output is not None:
            line |= output.facts()
            if self._cache is not None:
                self._cache.counts.count_answer(output.cache_facts.kind)
        log.info(json.dumps(line))


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
