"""One answer: what was made of it so far, the way it takes to its callers, and what is said about it in `rt`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from orchestrator.call import Call
from orchestrator.config import Tier
from orchestrator.request import ChatRequest, Request
from orchestrator.stages import Stage
from orchestrator.streaming.chunks import AnswerWriter, ChatWriter, Choice, CompletionWriter, Usage
from orchestrator.streaming.text import Piece


class CacheFacts(NamedTuple):
    """What the cache had to do with an answer.

    `similarity` (a cosine) and `age_s` are of hits alone. `is_shared`: it was generated for another caller, who asked
    the same at the same time.
    """

    kind: Literal["exact", "semantic", "miss", "bypass"] = "bypass"
    similarity: float | None = None
    age_s: float | None = None
    is_shared: bool = False

    @property
    def is_hit(self) -> bool:
        return self.kind in ("exact", "semantic")


@dataclass(slots=True)
class Answer:
    """What was made so far; all its callers share it.

    `num_request_bytes` is the size of the body that asked for it. `is_estimated` says that the counts of tokens are: a
    cloud tier's API tells them at the end of an answer alone. `cache` is None unless it is a stored answer. `reason`
    says in words why this tier; `num_attempts` counts those for this answer, this one included, and `has_failed` says
    that another one takes its place.
    """

    request: Request
    tier: Tier
    num_request_bytes: int = 0
    num_prompt_tokens: int = 0
    choices: list[Choice] = field(default_factory=list)
    first_token_s: float | None = None
    is_estimated: bool = False
    num_completion_tokens: int | None = None  # as an API counts them; else they are the choices' own
    cache: CacheFacts | None = None
    input_ids: list[int] | None = None  # the prompt's, if it was tokenised before
    reason: str = ""
    num_attempts: int = 1
    num_saved_tokens: int = 0  # that prompt compression left out
    has_failed: bool = False

    @property
    def usage(self) -> Usage:
        if self.num_completion_tokens is not None:
            return Usage(self.num_prompt_tokens, self.num_completion_tokens)
        return Usage(self.num_prompt_tokens, sum(choice.num_tokens for choice in self.choices))


class Output(Protocol):
    """Where an answer goes while it is made, and who says whether anybody still waits for it."""

    def enter(self, stage: Stage) -> None:
        """For all who wait."""

    def begin(self, answer: Answer, answer_id: str) -> None:
        """Makes the choices of `answer`, which is empty so far."""

    def emit(self, choice: Choice, piece: Piece) -> None:
        """Add to a choice."""

    def end_choice(self, choice: Choice, finish_reason: str) -> None:
        """A choice is whole."""

    def finish(self) -> None:
        """Every choice has ended."""

    def on_cancel(self, stop: Callable[[], Awaitable[None]] | None) -> None:
        """As `orchestrator.call.Waited.on_cancel`."""

    def raise_if_cancelled(self) -> None:
        """As `orchestrator.call.Waited.raise_if_cancelled`."""


class CallerOutput:
    """One caller's events of an answer, written as he asked for them; the answer itself is kept elsewhere.

    `cache` holds for an answer that is not a stored one. `is_payer`, known when it ends: its cost is this caller's.
    """

    def __init__(self, call: Call, request: Request) -> None:
        self.call = call
        self.cache = CacheFacts()
        self.is_payer = False
        self._request = request
        self._answer: Answer | None = None

    def begin(self, answer: Answer, answer_id: str) -> None:
        """Names the call."""
        make_writer = ChatWriter if isinstance(self._request, ChatRequest) else CompletionWriter
        self._writer: AnswerWriter = make_writer(
            answer_id, int(time.time()), answer.tier.model, include_usage=self._request.include_usage
        )
        self._answer = answer
        self._began_s = time.monotonic()
        self._num_unfinished = len(answer.choices)
        self.call.id = answer_id

    def emit(self, choice: Choice, piece: Piece) -> None:
        if not self._request.stream:
            return
        if piece.text or piece.log_probs:
            self.call.sink.send(self._writer.delta(choice.index, piece.text, piece.log_probs), final=False)
        if piece.calls:
            self.call.sink.send(self._writer.calls(choice.index, piece.calls), final=False)

    def end_choice(self, choice: Choice) -> None:
        self._num_unfinished -= 1
        # The last event of all carries the facts; it is `finish`'s.
        if self._request.stream and (self._num_unfinished or self._request.include_usage):
            self.call.sink.send(self._writer.finish(choice, None), final=False)
        self._last = choice

    def finish(self) -> None:
        """Send the final event, once every choice has ended."""
        assert self._answer is not None
        rt = self.facts()
        if not self._request.stream:
            event = self._writer.whole(self._answer.choices, self._answer.usage, rt)
        elif self._request.include_usage:
            event = self._writer.usage(self._answer.usage, rt)
        else:
            event = self._writer.finish(self._last, rt)
        self.call.sink.send(event, final=True)

    @property
    def cache_facts(self) -> CacheFacts:
        """Of the answer that this caller gets."""
        return (self._answer and self._answer.cache) or self.cache

    def facts(self) -> dict[str, Any]:
        """`rt`: what this system says of the answer so far; empty before it began.

        Times in ms from the call's arrival; `stages_ms` are the parts of `total_ms`, in order. Cost in US dollars,
        which is 0 for a stored answer, for what another caller pays for, and until it is known who does.
        `usage_estimated` is there, and true, only when the counts of tokens are estimates. Of hits there are similarity
        and age; of what was generated the reason for the tier, the number of attempts where it took several,
        and the tokens that compression left out of its prompt.
        """
        answer = self._answer
        if answer is None:
            return {}
        now_s = time.monotonic()
        total_s = now_s - self.call.received_s
        ttft_s = None
        if answer.first_token_s is not None:
            ttft_s = max(answer.first_token_s, self._began_s) - self.call.received_s
        tier, usage, cache = answer.tier, answer.usage, self.cache_facts
        cost = (
            usage.prompt_tokens * tier.input_price_per_million_tokens
            + usage.completion_tokens * tier.output_price_per_million_tokens
        ) / 1e6
        rt: dict[str, Any] = {"tier": tier.name, "model": tier.model, "cache": cache.kind}
        if answer.reason:
            rt["reason"] = answer.reason
        if answer.num_attempts > 1:
            rt["attempts"] = answer.num_attempts
        if answer.num_saved_tokens:
            rt["prompt_tokens_saved"] = answer.num_saved_tokens
        if cache.is_hit:
            rt |= {"cache_similarity": round(cache.similarity or 0.0, 4), "cache_age_s": round(cache.age_s or 0.0, 3)}
        if cache.is_shared:
            rt["shared"] = True
        rt |= {
            "ttft_ms": None if ttft_s is None else round(ttft_s * 1000, 3),
            "total_ms": round(total_s * 1000, 3),
            "stages_ms": self.call.stages.totals_ms(now_s),
            "input_tokens": usage.prompt_tokens,
            "tokens": usage.completion_tokens,
            "tps": None if cache.is_hit else tokens_per_second(usage.completion_tokens, ttft_s, total_s),
            "cost_usd": round(cost, 9) if self.is_payer and answer.cache is None else 0.0,
        }
        if answer.is_estimated:
            rt["usage_estimated"] = True
        return rt


def tokens_per_second(num_tokens: int, ttft_s: float | None, total_s: float) -> float | None:
    """Decode speed: tokens after the first, over the time after the first; None below two tokens."""
    if ttft_s is None or num_tokens < 2 or total_s <= ttft_s:
        return None
    return round((num_tokens - 1) / (total_s - ttft_s), 2)
