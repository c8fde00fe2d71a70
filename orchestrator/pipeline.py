"""The way of one request, top to bottom: admit, identify, cache, route, generate, settle."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from orchestrator.call import Call
from orchestrator.cloud.generation import CloudClient, CloudGeneration
from orchestrator.config import Tier, Tiers
from orchestrator.errors import ApiError, InternalError, InvalidRequestError, ModelNotFoundError
from orchestrator.generation import Answer, EngineClient, Generation, facts
from orchestrator.request import REQUEST_ID_RULE, Request, is_request_id, parse_request
from orchestrator.streaming.tokenizer import ChatTokenizer

log = logging.getLogger("orchestrator.requests")

AUTO = "auto"


class Pipeline:
    """Serves calls, all on one event loop; holds no state of a call."""

    def __init__(self, tiers: Tiers, root: Path, engines: EngineClient, cloud: CloudClient | None = None) -> None:
        """`cloud` is needed by cloud tiers alone."""
        self._tiers = tiers.tier
        self._engines = engines
        self._cloud = cloud
        # Tiers of one model share its tokenizer.
        folders = {tier.name: tier.tokenizer for tier in self._tiers if tier.tokenizer is not None}
        loaded = {folder: ChatTokenizer.load(root / folder) for folder in set(folders.values())}
        self._tokenizers = {name: loaded[folder] for name, folder in folders.items()}

    async def run(self, call: Call) -> None:
        """Serve one call to its only end: a final event, or an error."""
        answer: Answer | None = None
        outcome = "ok"
        try:
            request = self._admit(call)
            # Identity (keys, quotas) and the cache look-up go here.
            tier = self._route(request)
            answer = Answer(request, tier)
            await self._generate(call, answer)
        except ApiError as error:
            outcome = error.code
            call.sink.fail(error)
        except Exception as error:
            log.exception("a request failed inside the orchestrator")
            outcome = InternalError.code
            call.sink.fail(InternalError(f"the orchestrator failed: {type(error).__name__}"))
        self._settle(call, answer, outcome)

    def _admit(self, call: Call) -> Request:
        call.raise_if_cancelled()
        if call.request_id is not None and not is_request_id(call.request_id):
            name, call.request_id = call.request_id, None
            raise InvalidRequestError(
                f"x-request-id: must be {REQUEST_ID_RULE} (got {name[:80]!r})", param="x-request-id"
            )
        return parse_request(call.body)

    def _route(self, request: Request) -> Tier:
        """The tier that `model` names, or whose model it names; "auto" is the cheapest until routing exists."""
        if request.model == AUTO:
            return self._tiers[0]
        for tier in self._tiers:
            if request.model == tier.name or request.model == tier.model:
                return tier
        names = [AUTO, *dict.fromkeys(name for tier in self._tiers for name in (tier.name, tier.model))]
        raise ModelNotFoundError(f"model: {request.model!r} does not exist; one of {', '.join(names)}", param="model")

    async def _generate(self, call: Call, answer: Answer) -> None:
        """The whole answer, its last event too."""
        name = answer.tier.name
        if answer.tier.cloud is None:
            await Generation(call, answer, self._tokenizers[name], self._engines).run()
        elif self._cloud is not None:
            await CloudGeneration(call, answer, self._cloud).run()
        else:
            raise InternalError(f"tier {name!r} is a cloud tier, but there is no client for it")

    def _settle(self, call: Call, answer: Answer | None, outcome: str) -> None:
        """After the last event: the log line. Limits, cache and quality sampling settle here."""
        line = {"event": "request", "outcome": outcome, "id": call.id, "x_request_id": call.request_id}
        line |= facts(call, answer) if answer else {}
        log.info(json.dumps(line))
