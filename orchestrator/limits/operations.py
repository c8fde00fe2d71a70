"""What is asked about a key on behalf of a caller whom the orchestrator does not serve itself.

Embeddings, images and sound go past the orchestrator, from the gateway and the gRPC front to their own models;
`/v1/models` and `/metrics` go nowhere. These ask here, with the caller's headers, in the place of OpenAI's JSON. The
queues before those models are here because all gateways and fronts have them in common.

* ``check``    ``{"right": "models" | "metrics" | "cache" | a model}``           → ``{}``
* ``admit``    ``{"model": "embedding", "lengths": [the most tokens of each input]}``, or ``{"model": "ocr"}``, which
  takes no tokens → when it is the request's turn, ``{"reservation": "…", "deadline": [ms, seconds left] | null}``; and
  when that is settled, ``{}``. Who cancels in between, or vanishes, gives the place up, and what was reserved stays as
  it is, which is never too little.
* ``settle``   ``{"reservation": "…", "tokens": 12 | null, "outcome": "ok" | an error's code}`` → ``{}``. Without tokens
  what was reserved stays as it is. What failed by our own fault is no request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from orchestrator.call import Call
from orchestrator.config import Limits, Row
from orchestrator.contracts import LIMITS_OPERATION_PARAMETER
from orchestrator.errors import (
    ApiError,
    CancelledError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    NotAllowedError,
    is_our_fault,
)
from orchestrator.limits.deadline import Deadline, ending, find_deadline
from orchestrator.limits.gate import Gate, Permit, may_use, not_allowed
from orchestrator.limits.keys import Key
from orchestrator.limits.ledger import Amount
from orchestrator.limits.queue import CLASSES, Class, Queue

log = logging.getLogger("orchestrator.limits")
request_log = logging.getLogger("orchestrator.requests")

Model = Literal["embedding", "ocr", "stt", "tts"]


class Check(Row):
    right: Literal["models", "metrics", "cache"] | Model


class Admit(Row):
    model: Model
    lengths: tuple[Annotated[int, Field(ge=0)], ...] = ()


class Settle(Row):
    reservation: str
    tokens: Annotated[int, Field(ge=0)] | None
    outcome: str


@dataclass
class Ended:
    """What is said of a request when it has ended; `num_tokens` is None where it is not known."""

    key: Key | None = None
    outcome: str = InternalError.code
    num_tokens: int | None = None


class Operations:
    """For one event loop. `outcomes` counts the requests that asked for a place, by model and how they ended."""

    def __init__(self, gate: Gate, max_input_tokens: int, limits: Limits, *, is_instrumented: bool = True) -> None:
        """`max_input_tokens` is the embedder's: an input that is longer is refused by it.

        `is_instrumented` as in `orchestrator.instrumentation`.
        """
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self._is_instrumented = is_instrumented
        self._gate = gate
        self._max_input_tokens = max_input_tokens
        waiting: dict[Class, int] = {"interactive": limits.max_live_requests, "batch": limits.max_batch_waiting}
        self._queues = {model: Queue(num_running, {**waiting, "aside": 0}) for model, num_running in limits.beside}
        self._settled: dict[str, asyncio.Future[Settle]] = {}  # by reservation
        self._operations: dict[str, Callable[[Call], Any]] = {
            "check": self._check,
            "admit": self._admit,
            "settle": self._settle,
        }

    def num_waiting(self) -> dict[str, int]:
        """By class, for all models together."""
        return {name: sum(queue.num_waiting(name) for queue in self._queues.values()) for name in CLASSES}

    async def run(self, call: Call) -> None:
        """To its only end: one event, or an error."""
        name = call.parameters.get(LIMITS_OPERATION_PARAMETER, "")
        try:
            if name not in self._operations:
                raise InvalidRequestError(
                    f"{LIMITS_OPERATION_PARAMETER}: one of {', '.join(self._operations)} (got {name[:40]!r})",
                    param=LIMITS_OPERATION_PARAMETER,
                )
            await self._operations[name](call)
        except ApiError as error:
            self._gate.count(error)
            call.sink.fail(error)
        except Exception as error:  # a wrong field too: the gateway and the front are ours
            log.exception("an operation on limits failed")
            call.sink.fail(InternalError(f"{LIMITS_OPERATION_PARAMETER} {name[:40]!r} failed: {type(error).__name__}"))
        else:
            call.sink.send("{}", final=True)

    async def _check(self, call: Call) -> None:
        self._identify(call, Check.model_validate_json(call.body).right)

    def _identify(self, call: Call, right: str) -> Key:
        key = self._gate.identify(call)
        if right == "metrics" and not key.may_read_metrics:
            raise NotAllowedError("this key may not read /metrics; fix: `keys add --metrics` makes one that may")
        if right == "cache" and not key.may_order_cache:
            raise NotAllowedError("this key may not order the cache; fix: `keys add --cache` makes one that may")
        if right not in ("models", "metrics", "cache") and not may_use(key, right):
            raise not_allowed(key, right)
        return key

    async def _admit(self, call: Call) -> None:
        asked = Admit.model_validate_json(call.body)
        ended = Ended()
        try:
            await self._serve(call, asked, ended)
        except ApiError as error:
            ended.outcome = error.code
            raise
        finally:
            self._note(call, asked.model, ended)

    def _note(self, call: Call, model: str, ended: Ended) -> None:
        """The log line and the count: once for each request."""
        if not self._is_instrumented:
            return
        self.outcomes[model, ended.outcome] += 1
        line = {"event": "request_beside", "model": model, "outcome": ended.outcome, "x_request_id": call.request_id}
        line |= {} if ended.key is None else {"key": ended.key.id, "tenant": ended.key.tenant}
        total_ms = round((time.monotonic() - call.received_s) * 1000, 3)
        request_log.info(json.dumps({**line, "total_ms": total_ms, "input_tokens": ended.num_tokens}))

    async def _serve(self, call: Call, asked: Admit, ended: Ended) -> None:
        ended.key = key = self._identify(call, asked.model)
        deadline = find_deadline(call, key)
        most = Amount(1, sum(min(length, self._max_input_tokens) for length in asked.lengths))
        permit = await self._gate.reserve(key, most)
        used = Amount()
        try:
            queue, size = self._queues[asked.model], max(1, most.tokens)
            ticket = queue.enter(key.priority, deadline and deadline.ends_at_s, size)
            try:
                with ending(call, deadline):
                    call.on_cancel(ticket.give_up)
                    await ticket.wait()
                    call.raise_if_cancelled()
                used = most
                begun_s = time.monotonic()
                settled = await self._hold(call, permit, deadline)
                used = most if settled.tokens is None else Amount(1, settled.tokens)
                if is_our_fault(settled.outcome):
                    used = Amount(0, settled.tokens or 0)
                ended.outcome, ended.num_tokens = settled.outcome, settled.tokens
                if settled.outcome == "ok":
                    total_s = time.monotonic() - begun_s
                    queue.pace.observe(total_s / size, total_s, size)
                elif settled.outcome == DeadlineError.code:
                    self._gate.count(DeadlineError(""))
            finally:
                ticket.leave()
        finally:
            await permit.settle(used)

    async def _hold(self, call: Call, permit: Permit, deadline: Deadline | None) -> Settle:
        """Say that the turn has come, and wait until the request has ended; raises `CancelledError` without a word."""
        reservation = secrets.token_hex(16)
        ended: asyncio.Future[Settle] = asyncio.get_running_loop().create_future()

        async def give_up() -> None:
            if not ended.done():
                ended.set_exception(CancelledError("whoever had the place is gone"))

        call.on_cancel(give_up)
        self._settled[reservation] = ended
        try:
            call.sink.announce(permit.headers)
            left = deadline and (deadline.ms, deadline.ends_at_s - time.monotonic())
            call.sink.send(json.dumps({"reservation": reservation, "deadline": left}), final=False)
            return await ended
        finally:
            del self._settled[reservation]

    async def _settle(self, call: Call) -> None:
        """Needs no key: nobody else knows the reservation."""
        asked = Settle.model_validate_json(call.body)
        ended = self._settled.get(asked.reservation)
        if ended is not None and not ended.done():
            ended.set_result(asked)
