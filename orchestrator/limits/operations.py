"""What is asked about a key on behalf of a caller whom the orchestrator does not serve itself.

Embeddings, images and sound go past the orchestrator, from the gateway and the gRPC front to their own models;
`/v1/models` and `/metrics` go nowhere. These ask here, with the caller's headers, in the place of OpenAI's JSON:

* ``check``    ``{"right": "models" | "metrics"}``                  → ``{}``
* ``reserve``  ``{"model": "embedding", "lengths": [the most tokens of each input]}``, or ``{"model": "ocr"}``, which
  takes no tokens                                                   → ``{"reservation": "…"}``
* ``settle``   ``{"reservation": "…", "tokens": 12}``               → ``{}``

A reservation that nobody settles stays as it is, which is never too little.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from orchestrator.call import Call
from orchestrator.config import Row
from orchestrator.contracts import LIMITS_OPERATION_PARAMETER
from orchestrator.errors import ApiError, InternalError, InvalidRequestError, NotAllowedError
from orchestrator.limits.gate import Gate, Permit, may_use, not_allowed
from orchestrator.limits.ledger import Amount

log = logging.getLogger("orchestrator.limits")

# What the gateway and the front run at once is far less.
MAX_OPEN = 10_000


class Check(Row):
    right: Literal["models", "metrics"]


class Reserve(Row):
    model: Literal["embedding", "ocr", "stt", "tts"]
    lengths: tuple[Annotated[int, Field(ge=0)], ...] = ()


class Settle(Row):
    reservation: str
    tokens: Annotated[int, Field(ge=0)]


class Operations:
    """For one event loop."""

    def __init__(self, gate: Gate, max_input_tokens: int) -> None:
        """`max_input_tokens` is the embedder's: an input that is longer is refused by it."""
        self._gate = gate
        self._max_input_tokens = max_input_tokens
        self._open: OrderedDict[str, Permit] = OrderedDict()  # the oldest first
        self._operations: dict[str, Callable[[Call], Any]] = {
            "check": self._check,
            "reserve": self._reserve,
            "settle": self._settle,
        }

    async def run(self, call: Call) -> None:
        """To its only end: one event, or an error."""
        name = call.parameters.get(LIMITS_OPERATION_PARAMETER, "")
        try:
            if name not in self._operations:
                raise InvalidRequestError(
                    f"{LIMITS_OPERATION_PARAMETER}: one of {', '.join(self._operations)} (got {name[:40]!r})",
                    param=LIMITS_OPERATION_PARAMETER,
                )
            answer = await self._operations[name](call)
        except ApiError as error:
            self._gate.count(error)
            call.sink.fail(error)
        except Exception as error:  # a wrong field too: the gateway and the front are ours
            log.exception("an operation on limits failed")
            call.sink.fail(InternalError(f"{LIMITS_OPERATION_PARAMETER} {name[:40]!r} failed: {type(error).__name__}"))
        else:
            call.sink.send(json.dumps(answer), final=True)

    async def _check(self, call: Call) -> dict[str, str]:
        right = Check.model_validate_json(call.body).right
        key = self._gate.identify(call)
        if right == "metrics" and not key.may_read_metrics:
            raise NotAllowedError("this key may not read /metrics; fix: `keys add --metrics` makes one that may")
        return {}

    async def _reserve(self, call: Call) -> dict[str, str]:
        asked = Reserve.model_validate_json(call.body)
        key = self._gate.identify(call)
        if not may_use(key, asked.model):
            raise not_allowed(key, asked.model)
        num_tokens = sum(min(length, self._max_input_tokens) for length in asked.lengths)
        permit = await self._gate.reserve(key, Amount(1, num_tokens))
        reservation = secrets.token_hex(16)
        self._open[reservation] = permit
        if len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)
        call.sink.announce(permit.headers)
        return {"reservation": reservation}

    async def _settle(self, call: Call) -> dict[str, str]:
        """Needs no key: nobody else knows the reservation."""
        asked = Settle.model_validate_json(call.body)
        if permit := self._open.pop(asked.reservation, None):
            await permit.settle(Amount(1, asked.tokens))
        return {}
