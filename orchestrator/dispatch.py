"""From a request to the tier that answers it: judged, decided, tried, and tried again or elsewhere while it may be.

It may be as long as no token came: what an engine or API fails at then is tried once more on it, shortly after, and
then, for "auto" alone, on the next tier of the decision. A token that a caller may have seen is never made again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.answer import Answer, Output
from orchestrator.backend import Backend, Way, judge, may_go_elsewhere, out
from orchestrator.cache.stage import Embed
from orchestrator.cache.store import Vector
from orchestrator.cloud.generation import BYTES_PER_TOKEN, CloudClient, Overrun, build_body, limit_choice
from orchestrator.compression import compress
from orchestrator.config import Tier, Tiers
from orchestrator.errors import ApiError, CloudRefusalError, ContextWindowError, InvalidRequestError, NoToolParserError
from orchestrator.generation import EngineClient, build_engine_request, check_tools, tokenize
from orchestrator.limits.keys import Priority
from orchestrator.limits.queue import CLASSES, Queue
from orchestrator.quality.sampler import Quality
from orchestrator.request import ChatRequest, Message, Request
from orchestrator.routing.breaker import State
from orchestrator.routing.complexity import Complexity
from orchestrator.routing.conversation import Turn
from orchestrator.routing.counts import RoutingCounts
from orchestrator.routing.policy import Candidate, Decision, Lack, Unfit, decide, levels
from orchestrator.streaming.tokenizer import ChatTokenizer

log = logging.getLogger("orchestrator.routing")

# Before a second try on the same engine, on average; half to one and a half of it, so that not all come at once.
RETRY_DELAY_S = 0.1

# What the model `complexity` says of a conversation; None when it fails.
Classify = Callable[[Sequence[Turn]], Coroutine[Any, Any, Complexity | None]]


class Shorter(NamedTuple):
    """What compression has made of a request. Without `input_ids` the tokens saved are an estimate."""

    request: ChatRequest
    input_ids: list[int] | None
    num_saved_tokens: int


class Sized(NamedTuple):
    """A tier that can do what is asked: the tokens of the prompt, and of the longest answer each choice may get.

    Without `input_ids` the prompt's are an estimate: only an engine's tokenizer is known. A prompt that fits the tier's
    window only when compressed is `shorter` already, and its tokens and ids are those.
    """

    tier: Tier
    num_prompt_tokens: int
    num_answer_tokens: int
    input_ids: list[int] | None
    shorter: Shorter | None = None


@dataclass
class Job:
    """An answer that is wanted: of what, by which tiers (from cheap to dear), and until when.

    `is_auto`: the tiers are to choose from, the caller named none. `is_limited`: his quotas have left dearer ones out.
    `vector` is the question's, if the cache has made it. `lifted_from` is the tier that would have answered, were its
    answers not in doubt. `unfit` are the tiers that cannot do what is asked.
    """

    request: Request
    num_bytes: int
    tiers: list[Tier]
    is_auto: bool
    priority: Priority = "interactive"
    ends_at_s: float | None = None
    is_limited: bool = False
    sized: list[Sized] | None = None
    prompts: dict[ChatTokenizer, list[int]] = field(default_factory=dict)
    vector: Vector | None = None
    lifted_from: str | None = None
    unfit: list[Unfit] = field(default_factory=list)

    def leave_out(self, num_dearest: int) -> None:
        """The quotas do not pay for the last of `sized`."""
        if num_dearest:
            assert self.sized is not None
            self.sized, self.is_limited = self.sized[:-num_dearest], True

    @property
    def left_s(self) -> float | None:
        return None if self.ends_at_s is None else self.ends_at_s - time.monotonic()


class Dispatch:
    """For one event loop."""

    def __init__(
        self,
        tiers: Tiers,
        root: Path,
        engines: EngineClient,
        cloud: CloudClient | None = None,
        *,
        classify: Classify | None = None,
        embed: Embed | None = None,
        quality: Quality | None = None,
    ) -> None:
        """`root` has the tokenizers. `cloud` is needed by cloud tiers alone, `embed` by those that compress prompts.

        Without `classify` nobody judges, without `quality` no tier is in doubt.
        """
        self.counts = RoutingCounts()
        self._rules = tiers.routing
        self._classify = classify
        self._embed = embed
        self._quality = quality
        self._levels = dict(zip((tier.name for tier in tiers.tier), levels(tier.name for tier in tiers.tier)))
        names = list(dict.fromkeys(tier.backend for tier in tiers.tier))
        self._backends = {name: Backend(name, tiers, len(names)) for name in names}
        self._way = Way(engines, cloud, load_tokenizers(tiers.tier, root))
        self._judging: set[asyncio.Task[Complexity | None]] = set()

    def num_waiting(self) -> dict[str, int]:
        """By class, in all queues together."""
        queues = self.queues().values()
        return {name: sum(queue.num_waiting(name) for queue in queues) for name in CLASSES}

    def breaker_states(self) -> dict[str, State]:
        """By engine model or, for a cloud tier, by its name."""
        return {name: backend.breaker.state for name, backend in self._backends.items()}

    @property
    def overruns(self) -> Counter[tuple[str, Overrun]]:
        """What the APIs of cloud tiers were not believed, by tier and kind."""
        return self._way.overruns

    # --- before it is decided ---

    async def size(self, job: Job) -> list[Sized]:
        """Those of the job's tiers that can do what is asked, counted once.

        Raises `InvalidRequestError` when none can: of the tier with the widest window, the counts in it.
        """
        if job.sized is None:
            sized: list[Sized] = []
            errors: list[tuple[int, InvalidRequestError]] = []
            for tier in job.tiers:
                try:
                    sized.append(await self._size(job, tier))
                except InvalidRequestError as error:
                    errors.append((tier.context_window, error))
                    job.unfit.append(Unfit(tier.name, self._levels[tier.name], len(sized), lack_of(error), error.param))
            if not sized:
                raise max(errors, key=lambda each: each[0])[1]
            job.sized = sized
        return job.sized

    async def _size(self, job: Job, tier: Tier) -> Sized:
        request = job.request
        num_answer = limit_choice(request, tier)
        if tier.cloud is not None:
            build_body(request, tier)
            return Sized(tier, max(1, job.num_bytes // BYTES_PER_TOKEN), num_answer, None)
        check_tools(request, tier)
        tokenizer = self._way.tokenizers[tier.name]
        input_ids = job.prompts.get(tokenizer)
        if input_ids is None:
            input_ids = job.prompts[tokenizer] = await tokenize(request, tokenizer, job.num_bytes)
        try:
            build_engine_request(request, tier, input_ids, None)  # raises what the engine would be spared
        except ContextWindowError as error:
            shorter = await self._shorten(job, tier, len(input_ids))
            if shorter is None or shorter.input_ids is None:
                raise
            try:
                build_engine_request(shorter.request, tier, shorter.input_ids, None)
            except InvalidRequestError:
                raise error from None  # of what the caller sent
            return Sized(tier, len(shorter.input_ids), num_answer, shorter.input_ids, shorter)
        return Sized(tier, len(input_ids), num_answer, input_ids)

    def start_judging(self, job: Job) -> asyncio.Task[Complexity | None] | None:
        """Ask the classifier, which takes as long as the cache's embedding, beside it; None if there is no need."""
        if self._classify is None or not job.is_auto or len(job.tiers if job.sized is None else job.sized) < 2:
            return None
        turns = read_turns(job.request)
        if not turns:
            return None
        task = asyncio.get_running_loop().create_task(self._judge(self._classify, turns))
        self._judging.add(task)
        task.add_done_callback(self._judging.discard)
        return task

    async def _judge(self, classify: Classify, turns: Sequence[Turn]) -> Complexity | None:
        try:
            return await asyncio.wait_for(classify(turns), self._rules.classifier_timeout_s)
        except asyncio.TimeoutError:
            return None
        except Exception:
            log.exception("the classifier failed; the router goes without")
            return None

    async def _await_judgement(
        self, job: Job, sized: Sequence[Sized], judging: asyncio.Task[Complexity | None]
    ) -> Complexity | None:
        """None also where it takes more than half of the time that the soonest tier can spare."""
        spare_s = None
        if job.left_s is not None:
            spare_s = job.left_s - min(
                self._backends[each.tier.backend].expect_s(each.tier.name, job.priority, job.request.output_limit)
                for each in sized
            )
        if not judging.done() and (spare_s is None or spare_s > 0):
            await asyncio.wait({judging}, timeout=None if spare_s is None else spare_s / 2)
        return judging.result() if judging.done() else None

    # --- the answer ---

    async def answer(self, job: Job, flight: Output, judging: asyncio.Task[Complexity | None] | None) -> Answer:
        """The whole answer into `flight`, its last event too. Raises what the last attempt failed with."""
        flight.enter("route")
        sized = await self.size(job)
        if job.vector is None and job.is_auto and self._quality is not None:
            job.vector = await self._quality.find_vector(read_question(job.request), job.left_s)
        complexity = None if judging is None else await self._await_judgement(job, sized, judging)
        decision = self._decide(job, sized, complexity, is_asked=judging is not None)
        if decision.lifted_from is not None:
            job.lifted_from = sized[decision.lifted_from].tier.name
        if not decision.order:
            soonest = min(sized, key=lambda each: self._backends[each.tier.backend].breaker.wait_s).tier
            raise out(self._backends[soonest.backend], soonest.name)
        self.counts.routed[sized[decision.order[0]].tier.name, decision.kind] += 1
        reason, num_attempts = decision.reason, 0
        for number, place in enumerate(decision.order, 1):
            tier = sized[place].tier
            is_last = number == len(decision.order)
            empty = await self._begin(job, sized[place])
            flight.raise_if_cancelled()
            for is_retry in (False, True):
                num_attempts += 1
                answer = replace(empty, reason=reason, num_attempts=num_attempts)
                try:
                    await self._backends[tier.backend].generate(
                        answer, flight, self._way, priority=job.priority, ends_at_s=job.ends_at_s
                    )
                    return answer
                except ApiError as error:
                    flight.raise_if_cancelled()
                    self.counts.timeouts[tier.name] += judge(error) == "hang"
                    if answer.first_token_s is not None or not may_go_elsewhere(error):
                        raise
                    may_retry = not is_retry and self._may_retry(job, tier, error)
                    if is_last and not may_retry:
                        raise
                    answer.has_failed = True
                    code = error.code
                if not may_retry:
                    break
                self.counts.retries[tier.name] += 1
                await pause(flight)
            self.counts.fallbacks[tier.name] += 1
            reason = f"{tier.name} failed before its first token ({code}); this is the next tier"
        raise AssertionError("the last attempt returns or raises")

    async def generate_aside(self, answer: Answer, output: Output) -> None:
        """For nobody: behind all who wait, one attempt."""
        backend = self._backends[answer.tier.backend]
        await backend.generate(answer, output, self._way, priority="aside", ends_at_s=None)

    def queues(self) -> dict[str, Queue]:
        """Those of the engine models."""
        return {name: backend.queue for name, backend in self._backends.items() if backend.queue is not None}

    async def _begin(self, job: Job, sized: Sized) -> Answer:
        """The empty answer, of a shorter prompt where the tier has them compressed."""
        answer = Answer(job.request, sized.tier, job.num_bytes, input_ids=sized.input_ids)
        shorter = sized.shorter or await self._shorten(job, sized.tier, sized.num_prompt_tokens)
        if shorter is not None:
            answer.request, answer.input_ids, answer.num_saved_tokens = shorter
            self.counts.saved[sized.tier.name] += answer.num_saved_tokens
        return answer

    async def _shorten(self, job: Job, tier: Tier, num_prompt_tokens: int) -> Shorter | None:
        """The request with a compressed prompt; None where the tier's are not, or there is nothing to leave out."""
        rules, request = tier.compression, job.request
        if rules is None or self._embed is None or num_prompt_tokens <= rules.min_tokens:
            return None
        if not isinstance(request, ChatRequest):
            return None
        tokenizer = self._way.tokenizers.get(tier.name)

        def count(text: str) -> int:
            return len(tokenizer.encode(text)) if tokenizer else -(-len(text.encode()) // BYTES_PER_TOKEN)

        messages = await compress(request.messages, rules, self._embed, count)
        if messages is None:
            return None
        shorter = request.model_copy(update={"messages": messages})
        if tokenizer is None:
            before, after = (sum(map(count, map(Message.text, each.messages))) for each in (request, shorter))
            return Shorter(shorter, None, before - after)
        input_ids = await tokenize(shorter, tokenizer, job.num_bytes)
        return Shorter(shorter, input_ids, num_prompt_tokens - len(input_ids))

    def _decide(self, job: Job, sized: Sequence[Sized], complexity: Complexity | None, *, is_asked: bool) -> Decision:
        candidates = []
        for tier, num_prompt, num_answer, *_ in sized:
            backend = self._backends[tier.backend]
            candidates.append(
                Candidate(
                    tier.name,
                    tier.backend,
                    self._levels[tier.name],
                    tier.context_window,
                    num_prompt,
                    num_answer,
                    backend.expect_s(tier.name, job.priority, job.request.output_limit),
                    backend.breaker.is_out,
                    self._quality is not None and job.is_auto and self._quality.is_doubtful(tier.name, job.vector),
                )
            )
        return decide(
            candidates,
            complexity,
            threshold=self._rules.threshold,
            left_s=job.left_s,
            mode="pinned" if not job.is_auto else "unclassified" if self._classify is None else "auto",
            is_limited=job.is_limited,
            is_asked=is_asked,
            unfit=job.unfit,
        )

    def _may_retry(self, job: Job, tier: Tier, error: ApiError) -> bool:
        """On the same engine: only what failed at once, and if a second try can be in time."""
        backend = self._backends[tier.backend]
        if judge(error) != "failure" or isinstance(error, CloudRefusalError) or backend.breaker.is_out:
            return False
        return job.left_s is None or RETRY_DELAY_S + backend.paces[tier.name].predict_s(1) < job.left_s


async def pause(flight: Output) -> None:
    """Before a second try; shorter if nobody waits for it any more, and then raises that."""
    left = asyncio.Event()

    async def leave() -> None:
        left.set()

    flight.on_cancel(leave)
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(left.wait(), RETRY_DELAY_S * random.uniform(0.5, 1.5))
    flight.on_cancel(None)


def lack_of(error: InvalidRequestError) -> Lack:
    """What a tier lacks that refuses a request so."""
    if isinstance(error, ContextWindowError):
        return "window"
    return "tools" if isinstance(error, NoToolParserError) else "unable"


def read_turns(request: Request) -> list[Turn]:
    """The conversation as the classifier reads it; empty where there is nothing to read, as in token ids."""
    if not isinstance(request, ChatRequest):
        return [Turn("user", request.prompt)] if isinstance(request.prompt, str) else []
    roles = {"developer": "system"}
    turns = [Turn(roles.get(message.role, message.role), message.text()) for message in request.messages]
    return [turn for turn in turns if turn.text]


def read_question(request: Request) -> str:
    """What the user asks last; empty where that is no text."""
    if not isinstance(request, ChatRequest):
        return request.prompt if isinstance(request.prompt, str) else ""
    return next((each.text() for each in reversed(request.messages) if each.role == "user"), "")


def load_tokenizers(tiers: Sequence[Tier], root: Path) -> dict[str, ChatTokenizer]:
    """By tier. Folders with the same content share one, so that a prompt is tokenised once for all of them."""
    folders = {tier.name: root / tier.tokenizer for tier in tiers if tier.tokenizer is not None}
    loaded: dict[str, ChatTokenizer] = {}
    for folder in set(folders.values()):
        digest = digest_folder(folder)
        if digest not in loaded:
            loaded[digest] = ChatTokenizer.load(folder)
    return {name: loaded[digest_folder(folder)] for name, folder in folders.items()}


def digest_folder(folder: Path) -> str:
    """Of all files in it."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
