"""The way of one request, top to bottom: admit, identify, cache, route, generate, settle."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from orchestrator.config import Tier, Tiers
from orchestrator.engines import EngineRequest
from orchestrator.errors import ApiError, CancelledError, InternalError, InvalidRequestError, ModelNotFoundError
from orchestrator.request import ChatRequest, parse_request
from orchestrator.streaming.chunks import ChunkWriter, Usage
from orchestrator.streaming.stops import StopStrings
from orchestrator.streaming.tokenizer import ChatTokenizer

log = logging.getLogger("orchestrator.requests")

AUTO = "auto"
# Below it sampling is greedy in all but name, and logits divided by it overflow.
MIN_TEMPERATURE = 1e-3
# Up to this size a prompt is tokenised on the event loop (1 ms for 1,000 characters, measured on the README's machine);
# beyond it in a thread, so that no other call's tokens wait.
MAX_INLINE_BYTES = 4096


class EngineClient(Protocol):
    """The way to the engine models."""

    def stream(self, model: str, request: EngineRequest) -> AsyncGenerator[list[int], None]:
        """New token ids as the engine makes them; raises `EngineError` when it fails, also after tokens.

        Closing it early ends the generation; it returns when the engine has let go of the request.
        """

    async def stop(self, model: str, request_id: str) -> None:
        """End a generation; an unknown or finished id is not an error."""


class Sink(Protocol):
    """Where the events of one call go."""

    def send(self, event: str, *, final: bool) -> None:
        """Send one event; the final one ends the call."""

    def fail(self, error: ApiError) -> None:
        """End the call with `error`."""


class Call:
    """One call from its arrival to its only end.

    `body` is the request as it came, `parameters` are the request parameters (forwarded headers among them).
    """

    def __init__(self, body: bytes, parameters: Mapping[str, str], sink: Sink) -> None:
        self.body = body
        self.parameters = parameters
        self.sink = sink
        self.received_s = time.monotonic()
        self.is_cancelled = False
        self.engine_request_id: str | None = None
        self._stop_engine: Callable[[], Awaitable[None]] | None = None

    async def cancel(self) -> None:
        """The caller left: end the generation, wherever the call is. Safe to repeat."""
        if self.is_cancelled:
            return
        self.is_cancelled = True
        line = {"event": "caller_left", "request_id": self.engine_request_id, "monotonic_s": time.monotonic()}
        log.info(json.dumps(line))
        if self._stop_engine is not None:
            await self._stop_engine()

    def on_cancel(self, stop_engine: Callable[[], Awaitable[None]] | None) -> None:
        """From now on `cancel` calls `stop_engine`; raises `CancelledError` when the caller has already left."""
        self._stop_engine = stop_engine
        self.raise_if_cancelled()

    def raise_if_cancelled(self) -> None:
        if self.is_cancelled:
            raise CancelledError("the caller left")


@dataclass(slots=True)
class Answer:
    """What the generate stage has made so far, as the settle stage and the log need it."""

    request: ChatRequest
    tier: Tier
    usage: Usage = Usage(0, 0)
    finish_reason: str = ""
    text: list[str] = field(default_factory=list)
    first_token_s: float | None = None


class Pipeline:
    """Serves calls, all on one event loop; holds no state of a call."""

    def __init__(self, tiers: Tiers, root: Path, engines: EngineClient) -> None:
        self._tiers = tiers.tier
        self._engines = engines
        # Tiers of one model share its tokenizer.
        loaded = {tier.tokenizer: ChatTokenizer.load(root / tier.tokenizer) for tier in self._tiers}
        self._tokenizers = {tier.name: loaded[tier.tokenizer] for tier in self._tiers}

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

    def _admit(self, call: Call) -> ChatRequest:
        call.raise_if_cancelled()
        return parse_request(call.body)

    def _route(self, request: ChatRequest) -> Tier:
        """The tier that `model` names, or whose model it names; "auto" is the cheapest until routing exists."""
        if request.model == AUTO:
            return self._tiers[0]
        for tier in self._tiers:
            if request.model == tier.name or request.model == tier.model:
                return tier
        names = [AUTO, *dict.fromkeys(name for tier in self._tiers for name in (tier.name, tier.model))]
        raise ModelNotFoundError(f"model: {request.model!r} does not exist; one of {', '.join(names)}", param="model")

    async def _generate(self, call: Call, answer: Answer) -> None:
        """Stream the engine's tokens into events until the answer ends; the last event is final."""
        request, tier = answer.request, answer.tier
        tokenizer = self._tokenizers[tier.name]
        messages = [{"role": message.role, "content": message.text()} for message in request.messages]
        if len(call.body) > MAX_INLINE_BYTES:
            input_ids = await asyncio.to_thread(tokenizer.encode_chat, messages)
        else:
            input_ids = tokenizer.encode_chat(messages)
        engine_request = build_engine_request(request, tier, input_ids)
        answer_id = f"chatcmpl-{engine_request.request_id}"
        writer = ChunkWriter(answer_id, int(time.time()), tier.model, include_usage=request.include_usage)
        detokenizer, stops = tokenizer.decode_stream(), StopStrings(request.stops)
        num_tokens, ended_by_id = 0, False

        def emit(text: str) -> None:
            answer.text.append(text)
            if text and request.stream:
                call.sink.send(writer.delta(text), final=False)

        async def stop_engine() -> None:
            await self._engines.stop(tier.model, engine_request.request_id)

        call.engine_request_id = engine_request.request_id
        call.on_cancel(stop_engine)
        async with aclosing(self._engines.stream(tier.model, engine_request)) as stream:
            async for token_ids in stream:
                call.raise_if_cancelled()
                if token_ids and token_ids[-1] == engine_request.end_id:
                    ended_by_id, token_ids = True, token_ids[:-1]
                if answer.first_token_s is None and token_ids:
                    answer.first_token_s = time.monotonic()
                num_tokens += len(token_ids)
                answer.usage = Usage(len(engine_request.input_ids), num_tokens)
                emit(stops.push(detokenizer.push(token_ids)))
                if stops.matched is not None:
                    break
            call.on_cancel(None)
            emit(stops.flush())
            at_limit = num_tokens >= engine_request.max_new_tokens and not ended_by_id and stops.matched is None
            answer.finish_reason = "length" if at_limit else "stop"
            self._finish(call, answer, writer)

    def _finish(self, call: Call, answer: Answer, writer: ChunkWriter) -> None:
        rt = facts(call, answer)
        if answer.request.stream:
            events = writer.ending(answer.finish_reason, answer.usage, rt)
        else:
            events = [writer.completion("".join(answer.text), answer.finish_reason, answer.usage, rt)]
        for event in events:
            call.sink.send(event, final=event is events[-1])

    def _settle(self, call: Call, answer: Answer | None, outcome: str) -> None:
        """After the last event: the log line. Limits, cache and quality sampling settle here."""
        line = {"event": "request", "outcome": outcome} | (facts(call, answer) if answer else {})
        log.info(json.dumps(line))


def build_engine_request(request: ChatRequest, tier: Tier, input_ids: list[int]) -> EngineRequest:
    """The engine's share of `request`, the tier's generation policy filled in.

    Raises `InvalidRequestError` with both counts when prompt and answer do not fit the tier's context window.
    """
    policy = tier.generation
    room = tier.context_window - len(input_ids)
    wanted = request.output_limit
    if room < (wanted or 1):
        raise InvalidRequestError(
            f"messages: the prompt's {len(input_ids)} tokens and an answer of up to {wanted or 1} are more than the "
            f"context window of {tier.context_window} tokens; shorten the messages or lower max_tokens",
            param="messages" if wanted is None or room < 1 else "max_tokens",
        )
    max_new_tokens = wanted or min(policy.max_output_tokens, room)
    if (request.min_tokens or 0) > max_new_tokens:
        raise InvalidRequestError(
            f"min_tokens: {request.min_tokens} is more than the answer's limit of {max_new_tokens} tokens",
            param="min_tokens",
        )
    temperature = policy.temperature if request.temperature is None else request.temperature
    return EngineRequest(
        request_id=uuid.uuid4().hex,  # never the caller's: one client could stop another's
        input_ids=input_ids,
        max_new_tokens=max_new_tokens,
        end_id=None if request.ignore_eos else tier.end_id,
        min_tokens=request.min_tokens or 0,
        sample=temperature >= MIN_TEMPERATURE,
        temperature=max(temperature, MIN_TEMPERATURE),
        top_k=request.top_k or 0,
        top_p=policy.top_p if request.top_p is None else request.top_p,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        seed=request.seed,
    )


def facts(call: Call, answer: Answer) -> dict[str, Any]:
    """`rt`: what this system says of one answer. Times in ms from the call's arrival; cost in US dollars."""
    total_s = time.monotonic() - call.received_s
    ttft_s = None if answer.first_token_s is None else answer.first_token_s - call.received_s
    tier, usage = answer.tier, answer.usage
    cost = (
        usage.prompt_tokens * tier.input_price_per_million_tokens
        + usage.completion_tokens * tier.output_price_per_million_tokens
    ) / 1e6
    return {
        "tier": tier.name,
        "model": tier.model,
        "cache": "bypass",
        "ttft_ms": None if ttft_s is None else round(ttft_s * 1000, 3),
        "total_ms": round(total_s * 1000, 3),
        "input_tokens": usage.prompt_tokens,
        "tokens": usage.completion_tokens,
        "tps": tokens_per_second(usage.completion_tokens, ttft_s, total_s),
        "cost_usd": round(cost, 9),
    }


def tokens_per_second(num_tokens: int, ttft_s: float | None, total_s: float) -> float | None:
    """Decode speed: tokens after the first, over the time after the first; None below two tokens."""
    if ttft_s is None or num_tokens < 2 or total_s <= ttft_s:
        return None
    return round((num_tokens - 1) / (total_s - ttft_s), 2)
