"""The way of one request, top to bottom: admit, identify, cache, route, generate, settle."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

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
)
from orchestrator.generation import Answer, EngineClient, Generation, facts, limit_answer, tokenize
from orchestrator.limits.deadline import ending, find_end_s
from orchestrator.limits.gate import Gate, Permit, counts_tokens, may_use, not_allowed, price_of
from orchestrator.limits.keys import Key
from orchestrator.limits.ledger import Amount
from orchestrator.limits.queue import CLASSES, Queue
from orchestrator.request import REQUEST_ID_RULE, Request, is_request_id, parse_request
from orchestrator.streaming.tokenizer import ChatTokenizer

log = logging.getLogger("orchestrator.requests")

AUTO = "auto"
# Outcomes of which the caller pays for the prompt too, whatever came of it.
_PAID = ("ok", CancelledError.code, DeadlineError.code)


class Pipeline:
    """Serves calls, all on one event loop; of a call it holds nothing but its place in a queue."""

    def __init__(
        self,
        tiers: Tiers,
        root: Path,
        engines: EngineClient,
        cloud: CloudClient | None = None,
        *,
        gate: Gate | None = None,
    ) -> None:
        """`cloud` is needed by cloud tiers alone; without `gate` there are no keys."""
        self._tiers = tiers.tier
        self._engines = engines
        self._cloud = cloud
        self._gate = gate or Gate()
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
        # Tiers of one model share its tokenizer.
        folders = {tier.name: tier.tokenizer for tier in self._tiers if tier.tokenizer is not None}
        loaded = {folder: ChatTokenizer.load(root / folder) for folder in set(folders.values())}
        self._tokenizers = {name: loaded[folder] for name, folder in folders.items()}

    async def run(self, call: Call) -> None:
        """Serve one call to its only end: a final event, or an error."""
        key: Key | None = None
        answer: Answer | None = None
        permit: Permit | None = None
        outcome = "ok"
        try:
            self._admit(call)
            key = self._gate.identify(call)
            request = parse_request(call.body)
            ends_at_s = find_end_s(call, key)
            # The cache look-up goes here.
            answer = Answer(request, self._route(request, key))
            with ending(call, ends_at_s):
                permit = await self._reserve(call, key, answer)
                await self._generate_in_turn(call, key, answer, ends_at_s)
        except ApiError as error:
            outcome = error.code
            self._gate.count(error)
            call.sink.fail(error)
        except Exception as error:
            log.exception("a request failed inside the orchestrator")
            outcome = InternalError.code
            call.sink.fail(InternalError(f"the orchestrator failed: {type(error).__name__}"))
        await self._settle(call, key, answer, permit, outcome)

    def num_waiting(self) -> dict[str, int]:
        """By class, in all queues together."""
        return {name: sum(queue.num_waiting(name) for queue in self._queues.values()) for name in CLASSES}

    def _admit(self, call: Call) -> None:
        call.raise_if_cancelled()
        if call.request_id is not None and not is_request_id(call.request_id):
            name, call.request_id = call.request_id, None
            raise InvalidRequestError(
                f"x-request-id: must be {REQUEST_ID_RULE} (got {name[:80]!r})", param="x-request-id"
            )

    def _route(self, request: Request, key: Key) -> Tier:
        """The tier that `model` names, or whose model it names; "auto" is the cheapest until routing exists.

        Of those that the key allows; raises `NotAllowedError` when it allows none of them.
        """
        named = [tier for tier in self._tiers if request.model in (AUTO, tier.name, tier.model)]
        for tier in named:
            if may_use(key, tier.name):
                return tier
        if named:
            raise not_allowed(key, request.model)
        names = [AUTO, *dict.fromkeys(name for tier in self._tiers for name in (tier.name, tier.model))]
        raise ModelNotFoundError(f"model: {request.model!r} does not exist; one of {', '.join(names)}", param="model")

    async def _reserve(self, call: Call, key: Key, answer: Answer) -> Permit:
        """Room in the key's quotas for the most that the request may take."""
        request, tier = answer.request, answer.tier
        amount = Amount(1)
        if counts_tokens(key):
            if tier.cloud is None:
                answer.input_ids = await tokenize(request, self._tokenizers[tier.name], len(call.body))
                num_prompt = len(answer.input_ids)
                num_answer = limit_answer(request, tier, num_prompt)
            else:  # an API has a tokenizer of its own; no token is shorter than a byte
                num_prompt = min(len(call.body), tier.context_window)
                num_answer = request.output_limit or tier.generation.max_output_tokens
            num_answer *= request.num_choices
            amount = Amount(1, num_prompt + num_answer, price_of(tier).nano_usd(num_prompt, num_answer))
        permit = await self._gate.reserve(key, amount)
        if permit.headers:
            call.sink.announce(permit.headers)
        return permit

    async def _generate_in_turn(self, call: Call, key: Key, answer: Answer, ends_at_s: float | None) -> None:
        queue = self._queues.get(answer.tier.model)
        if queue is None:
            await self._generate(call, answer)
            return
        max_tokens = answer.request.output_limit or answer.tier.generation.max_output_tokens
        ticket = queue.enter(key.priority, ends_at_s, max_tokens)
        try:
            call.on_cancel(ticket.give_up)
            await ticket.wait()
            call.raise_if_cancelled()
            await self._generate(call, answer)
            if answer.first_token_s is not None and ticket.started_s is not None:
                now_s = time.monotonic()
                first_token_s, total_s = answer.first_token_s - ticket.started_s, now_s - ticket.started_s
                queue.pace.observe(first_token_s, total_s, answer.usage.completion_tokens // len(answer.choices))
        finally:
            ticket.leave()

    async def _generate(self, call: Call, answer: Answer) -> None:
        """The whole answer, its last event too."""
        name = answer.tier.name
        if answer.tier.cloud is None:
            await Generation(call, answer, self._tokenizers[name], self._engines).run()
        elif self._cloud is not None:
            await CloudGeneration(call, answer, self._cloud).run()
        else:
            raise InternalError(f"tier {name!r} is a cloud tier, but there is no client for it")

    async def _settle(
        self, call: Call, key: Key | None, answer: Answer | None, permit: Permit | None, outcome: str
    ) -> None:
        """After the last event: quotas, and the log line. Cache and quality sampling settle here."""
        if permit is not None and answer is not None:
            await permit.settle(measure(answer, outcome))
        line = {"event": "request", "outcome": outcome, "id": call.id, "x_request_id": call.request_id}
        line |= {} if key is None else {"key": key.id, "tenant": key.tenant}
        line |= facts(call, answer) if answer else {}
        log.info(json.dumps(line))


def measure(answer: Answer, outcome: str) -> Amount:
    """What a request took in the end.

    One that no engine began takes nothing; one that was left or ended by its deadline pays for the prompt and what was
    generated; one that failed pays for no prompt if nothing came of it.
    """
    usage = answer.usage
    if not usage.prompt_tokens:
        return Amount()
    if outcome not in _PAID and not usage.completion_tokens:
        return Amount(1)
    cost = price_of(answer.tier).nano_usd(usage.prompt_tokens, usage.completion_tokens)
    return Amount(1, usage.prompt_tokens + usage.completion_tokens, cost)
