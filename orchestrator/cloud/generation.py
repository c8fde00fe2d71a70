"""The generate stage of a cloud tier: a request as the API takes it, the API's deltas as our events.

What is reserved for a request holds whatever the API does: an answer that goes on past its limit is cut there and
cancelled at the API, and of a usage no more is believed than was reserved, and than the text that came can be.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Literal, Protocol

from orchestrator.answer import Answer, Output
from orchestrator.cloud.events import CallDelta, ChoiceDelta, Event, Usage
from orchestrator.config import Tier
from orchestrator.errors import CloudError, InvalidRequestError
from orchestrator.request import ChatRequest, Request
from orchestrator.streaming.chunks import Choice
from orchestrator.streaming.stops import StopStrings
from orchestrator.streaming.text import Piece
from orchestrator.streaming.tool_calls import ToolCallDelta

log = logging.getLogger("orchestrator.requests")

# OpenAI's limit, and that of the APIs that follow it. Further stop strings are applied here alone, as all are.
MAX_API_STOPS = 4
# To estimate tokens, in bytes of UTF-8: English has 4 to 5 a token with the tokenizers in use.
BYTES_PER_TOKEN = 4
# APIs send a token a delta or, some of them, many; deltas longer than this on average are not single tokens.
MAX_BYTES_PER_DELTA = 12
# The longest single token of the tokenizers in use, in bytes: a run of blanks.
MAX_TOKEN_BYTES = 128
# Tokens that no text shows: the one that ends a choice, and the words around a tool call's name and arguments.
END_TOKENS = 1
CALL_TOKENS = 32

# What an API did not keep to: the answer's limit, or the truth in its usage.
Overrun = Literal["answer", "usage"]

# Fields that go out as they came in. `user` stays here: it tells a stranger about ours.
_PASSED = (
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format"),
    *("seed", "presence_penalty", "frequency_penalty"),
)
# Fields of messages that say nothing here; some APIs do not know them.
_ASK_NOTHING: dict[str, Any] = {
    **dict.fromkeys(("refusal", "audio", "function_call", "annotations", "parsed"), True),
    "tool_calls": {"__all__": {"index": True, "function": {"parsed_arguments": True}}},
}
# Our extras, and the value of each that changes nothing.
_NOT_OPENAI = {"top_k": 0, "min_tokens": 0, "ignore_eos": False, "repetition_penalty": 1.0, "guided_regex": None}


class CloudClient(Protocol):
    """The way to the APIs of the cloud tiers."""

    def stream(self, tier: Tier, body: Mapping[str, Any]) -> AsyncGenerator[Event, None]:
        """The events of one streamed chat completion, to its last or until the API closes the connection.

        Raises, also after events, the `ApiError` that says which tier failed and how. Closing it early cancels the
        request at the API.
        """

    async def close(self) -> None:
        """Close every connection."""


class CloudGeneration:
    """One answer's way out of an API. `run` sends all of it to `output`."""

    def __init__(
        self,
        output: Output,
        answer: Answer,
        client: CloudClient,
        overruns: Counter[tuple[str, Overrun]],
        hear: Callable[[], None],
    ) -> None:
        """`overruns`, by the tier's name and the kind, counts what the API was not believed. `hear` is called for each
        sign of progress, whether the caller sees anything of it or not.
        """
        self._overruns = overruns
        self._hear = hear
        self._output = output
        self._answer = answer
        self._request = answer.request
        self._tier = answer.tier
        self._max_tokens = limit_choice(answer.request, answer.tier)
        self._max_prompt_tokens = max(1, max_prompt_tokens(answer.num_request_bytes, answer.tier))
        self._client = client

    async def run(self) -> None:
        body = build_body(self._request, self._tier)
        self._answer.num_prompt_tokens = min(
            max(1, self._answer.num_request_bytes // BYTES_PER_TOKEN), self._max_prompt_tokens
        )
        self._answer.is_estimated = True
        self._output.begin(self._answer, uuid.uuid4().hex)
        stops, window = self._request.stops, self._tier.context_window
        self._texts = [_ChoiceText(choice, stops, self._max_tokens, window) for choice in self._answer.choices]
        self._output.raise_if_cancelled()
        reading = asyncio.create_task(self._read(body))

        async def stop() -> None:
            reading.cancel()

        self._output.on_cancel(stop)
        try:
            await reading
        except asyncio.CancelledError:
            self._output.raise_if_cancelled()
            raise
        self._output.on_cancel(None)
        for text in self._texts:
            self._output.emit(text.choice, text.flush())
            self._output.end_choice(text.choice, text.finish_reason or "stop")
        self._output.finish()

    async def _read(self, body: Mapping[str, Any]) -> None:
        """Every choice to its finish reason."""
        usage: Usage | None = None
        try:
            async with aclosing(self._client.stream(self._tier, body)) as events:
                async for event in events:
                    if event.is_progress:
                        self._hear()
                    if event.usage is not None:
                        usage = event.usage
                        self._answer.num_prompt_tokens = self._bound_prompt(usage)
                    deltas = event.choices or []
                    if self._are_finished and any(delta.text or delta.reasoning or delta.calls for delta in deltas):
                        return  # an API that does not end
                    for delta in deltas:
                        self._take(delta)
                    is_ours = [text.is_stopped or text.is_cut for text in self._texts]
                    if all(is_ours) or (self._are_finished and any(text.is_cut for text in self._texts)):
                        return  # no longer the API's answer, so its usage would be too late
        except CloudError:
            # The answers are whole; only their counts, or the end of the stream, are missing.
            if not self._are_finished:
                raise
            return
        if not self._are_finished:
            raise CloudError(f"tier {self._tier.name!r}: the API's stream ended before its answer")
        if usage is not None:
            self._believe(usage)

    def _believe(self, usage: Usage) -> None:
        """The API's counts take the place of our estimates, as far as they can be true."""
        most = sum(min(self._max_tokens, text.most_tokens + usage.reasoning_tokens) for text in self._texts)
        num_prompt = self._bound_prompt(usage)
        num_completion = min(usage.completion_tokens, most) or self._answer.usage.completion_tokens
        self._answer.num_prompt_tokens, self._answer.num_completion_tokens = num_prompt, num_completion
        self._answer.is_estimated = (num_prompt, num_completion) != (usage.prompt_tokens, usage.completion_tokens)
        if num_prompt < usage.prompt_tokens or num_completion < usage.completion_tokens:
            claimed = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
            self._note("usage", claimed=claimed, counted=[num_prompt, num_completion])

    def _bound_prompt(self, usage: Usage) -> int:
        # Some APIs write 0 for what they do not know.
        return min(usage.prompt_tokens, self._max_prompt_tokens) or self._answer.num_prompt_tokens

    def _note(self, kind: Overrun, **facts: Any) -> None:
        self._overruns[self._tier.name, kind] += 1
        line = {"event": "cloud_overrun", "kind": kind, "tier": self._tier.name, "max_tokens": self._max_tokens}
        log.warning(json.dumps({**line, **facts}))

    @property
    def _are_finished(self) -> bool:
        return all(text.finish_reason is not None for text in self._texts)

    def _take(self, delta: ChoiceDelta) -> None:
        if not 0 <= delta.index < len(self._texts):
            raise CloudError(
                f"tier {self._tier.name!r}: the API sent a choice {delta.index}, but {len(self._texts)} were asked for"
            )
        text = self._texts[delta.index]
        if text.finish_reason is not None:
            return
        if self._answer.first_token_s is None and (delta.text or delta.calls):
            self._answer.first_token_s = time.monotonic()
            self._output.enter("decode")
        try:
            self._output.emit(text.choice, text.push(delta))
        except ValueError as error:
            raise CloudError(f"tier {self._tier.name!r}: the API sent {error}") from error
        if text.is_cut:
            self._note("answer", choice=delta.index)


class _ChoiceText:
    """One choice as it comes: text cut at the first stop string, tool calls numbered from 0, tokens estimated.

    `finish_reason` is None until it is over. `is_cut`: it went on past its limit of `max_tokens`, surely, for it had
    more deltas, or so many bytes that tokens would have to be longer than they are; or it thought for more deltas than
    its window holds, without an end. Not every API counts thoughts among `max_tokens`.
    """

    def __init__(self, choice: Choice, stops: list[str], max_tokens: int, context_window: int) -> None:
        self.choice = choice
        self.finish_reason: str | None = None
        self.is_cut = False
        self._max_tokens = max_tokens
        self._max_hidden_deltas = context_window
        self._stops = StopStrings(stops)
        self._call_ids: list[str] = []
        self._call_of_index: dict[int, int] = {}
        self._num_deltas = 0
        self._num_bytes = 0
        self._num_hidden_deltas = self._num_hidden_bytes = 0

    @property
    def most_tokens(self) -> int:
        """That this much of an answer can be: none is shorter than a byte."""
        return self._num_bytes + self._num_hidden_bytes + END_TOKENS + CALL_TOKENS * len(self._call_ids)

    @property
    def is_stopped(self) -> bool:
        return self._stops.matched is not None

    def push(self, delta: ChoiceDelta) -> Piece:
        """What became certain; raises `ValueError` for a tool call without a name."""
        text, calls = delta.text, [self._number(call) for call in delta.calls]
        if delta.reasoning:
            self._num_hidden_bytes += len(delta.reasoning.encode())
            self._num_hidden_deltas += 1
            self.is_cut = self._num_hidden_deltas > self._max_hidden_deltas
        if text or calls:
            num_bytes = len(text.encode()) + sum(
                len((call.name or "").encode()) + len(call.arguments.encode()) for call in calls
            )
            self.is_cut = self.is_cut or (
                self._num_deltas == self._max_tokens
                or self._num_bytes + num_bytes > MAX_BYTES_PER_DELTA * self._max_tokens + MAX_TOKEN_BYTES
            )
            if self.is_cut:
                room = 0 if self._num_deltas == self._max_tokens else BYTES_PER_TOKEN * self._max_tokens
                text, calls = text.encode()[: max(0, room - self._num_bytes)].decode(errors="ignore"), []
            self._num_deltas += 1
            self._num_bytes += num_bytes
            self.choice.num_tokens = min(estimate_tokens(self._num_deltas, self._num_bytes), self._max_tokens)
        text = self._stops.push(text)
        self.finish_reason = "stop" if self.is_stopped else "length" if self.is_cut else delta.finish_reason or None
        return Piece(text, calls)

    def flush(self) -> Piece:
        """What was held, when the answer ended."""
        return Piece(self._stops.flush())

    def _number(self, call: CallDelta) -> ToolCallDelta:
        """By the order in which calls begin: some APIs send no index, or the same one for all."""
        name = None if call.function is None else call.function.name
        arguments = "" if call.function is None else call.function.arguments or ""
        number = self._call_of_index.get(call.index or 0)
        if number is not None and call.id in (None, "", self._call_ids[number]):
            return ToolCallDelta(number, None, None, arguments)
        if not name:
            raise ValueError("a tool call without a name")
        number = self._call_of_index[call.index or 0] = len(self._call_ids)
        self._call_ids.append(call.id or f"call_{uuid.uuid4().hex}")
        return ToolCallDelta(number, self._call_ids[number], name, arguments)


def build_body(request: Request, tier: Tier) -> dict[str, Any]:
    """The API's share of `request`, the tier's generation policy filled in.

    Raises `InvalidRequestError` for what an OpenAI-compatible API does not have, or cannot have here.
    """
    assert tier.cloud is not None
    where = f"on the cloud tier {tier.name!r}"
    if not isinstance(request, ChatRequest):
        raise InvalidRequestError(f"prompt: not supported {where}; send messages", param="prompt")
    for field, neutral in _NOT_OPENAI.items():
        if getattr(request, field) not in (None, neutral):
            raise InvalidRequestError(f"{field}: not supported {where}; remove it, or name another tier", param=field)
    if request.wants_log_probs:
        raise InvalidRequestError(f"logprobs: not supported {where}; remove it, or name another tier", param="logprobs")
    passed = request.model_dump(
        mode="json",
        by_alias=True,
        exclude_unset=True,
        include=set(_PASSED),
        exclude={"messages": {"__all__": _ASK_NOTHING}},
    )
    policy = tier.generation
    body: dict[str, Any] = {
        "model": tier.cloud.model,
        **{field: value for field, value in passed.items() if value is not None},
        tier.cloud.limit_field: limit_choice(request, tier),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for field, asked, usual in (
        ("temperature", request.temperature, policy.temperature),
        ("top_p", request.top_p, policy.top_p),
    ):
        if asked is not None or usual != 1.0:  # OpenAI's default, beside which some models take no other
            body[field] = usual if asked is None else asked
    if request.num_choices > 1:
        body["n"] = request.num_choices
    if request.stops:
        body["stop"] = request.stops[:MAX_API_STOPS]
    return body


def limit_choice(request: Request, tier: Tier) -> int:
    """The most tokens that each choice may have."""
    return request.output_limit or tier.generation.max_output_tokens


def max_prompt_tokens(num_request_bytes: int, tier: Tier) -> int:
    """The most that the prompt of so large a request can be: an API has a tokenizer of its own, no token is shorter
    than a byte."""
    return min(num_request_bytes, tier.context_window)


def estimate_tokens(num_deltas: int, num_bytes: int) -> int:
    """How many tokens an answer has, going by its deltas and its bytes of UTF-8."""
    if num_bytes <= MAX_BYTES_PER_DELTA * num_deltas:
        return num_deltas
    return max(num_deltas, num_bytes // BYTES_PER_TOKEN)
