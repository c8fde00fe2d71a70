"""Routing through the pipeline, over engines and an API that fail in every way: who answers, why, and what it costs."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_cloud import DONE, FakeCloud, Reply, answer, delta, fake_cloud, usage
from in_process import RecordingSink
from test_limits_pipeline import exact_cache
from tokenizers import Tokenizer

from orchestrator import timeouts
from orchestrator.cache.stage import Embed
from orchestrator.call import Call
from orchestrator.cloud.client import HttpCloudClient
from orchestrator.config import Cloud, Generation, Limits, Routing, Tier, Tiers
from orchestrator.engines import Chunk, EngineRequest
from orchestrator.errors import (
    ApiError,
    BudgetError,
    CancelledError,
    CloudError,
    CloudTimeoutError,
    DeadlineError,
    EngineError,
    EngineTimeoutError,
    InvalidRequestError,
    OverloadedError,
    RateLimitError,
    TierUnavailableError,
)
from orchestrator.limits.gate import Gate
from orchestrator.limits.keys import Keyring, digest_of
from orchestrator.limits.ledger import Amount, MemoryLedger, Quota, Standing
from orchestrator.pipeline import Pipeline
from orchestrator.routing.complexity import Complexity
from orchestrator.routing.conversation import Turn
from orchestrator.streaming.tokenizer import ChatTokenizer

EASY = Complexity((0.9, 0.06, 0.03, 0.01))
HARD = Complexity((0.01, 0.04, 0.15, 0.8))
END_ID = 2
TIMEOUT_S = 0.15


class FaultyEngines:
    """An `EngineClient` whose models do what `faults` says, one request after the other; the last word stays.

    good: tokens of "one two three four."   error: fails at once   refuse: the caller's fault
    hang: nothing comes, and it lets go only if cancelled   slow: the first token comes late
    die: fails after three tokens   stall: hangs after three
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.faults: dict[str, list[str]] = {}
        self.asked: list[str] = []
        self.requests: list[EngineRequest] = []
        self.slow_s = 0.05
        self.num_inside: Counter[str] = Counter()

    async def stream(self, model: str, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        self.asked.append(model)
        self.requests.append(request)
        faults = self.faults.get(model, ["good"])
        fault = faults.pop(0) if len(faults) > 1 else faults[0]
        self.num_inside[model] += 1
        try:
            if fault == "error":
                raise EngineError("it broke")
            if fault == "refuse":
                raise EngineError("input_ids: the prompt's script is wrong")
            if fault == "hang":
                await asyncio.sleep(60)
            if fault == "slow":
                await asyncio.sleep(self.slow_s)
            ids = self._tokenizer.encode("one two three four.", add_special_tokens=False).ids
            for number, token_id in enumerate([*ids, END_ID]):
                await asyncio.sleep(0)
                if number == 3 and fault == "die":
                    raise EngineError("it died")
                if number == 3 and fault == "stall":
                    await asyncio.sleep(60)
                yield Chunk([token_id])
        finally:
            self.num_inside[model] -= 1

    async def stop(self, model: str, request_id: str) -> None:
        pass  # whoever hangs does not hear it


class FakeClassifier:
    """Judges by a word of the last turn."""

    def __init__(self) -> None:
        self.asked: list[Sequence[Turn]] = []
        self.delay_s = 0.0

    async def __call__(self, turns: Sequence[Turn]) -> Complexity | None:
        self.asked.append(turns)
        await asyncio.sleep(self.delay_s)
        if "fail" in turns[-1].text:
            raise RuntimeError("no answer")
        return HARD if "hard" in turns[-1].text else EASY


def make_tier(name: str, model: str, price: float = 1.0, **fields: Any) -> Tier:
    return Tier(
        **{
            "name": name,
            "model": model,
            "tokenizer": "model_repository/llm_small/1/tokenizer",
            "context_window": 8192,
            "end_id": END_ID,
            "pad_id": 2,
            "tool_parser": None,
            "input_price_per_million_tokens": price,
            "output_price_per_million_tokens": price,
            "first_token_timeout_s": TIMEOUT_S,
            "token_timeout_s": TIMEOUT_S,
            "generation": Generation(max_output_tokens=50),
            **fields,
        }
    )


TWO = [make_tier("simple", "small"), make_tier("expert", "large", 100.0)]


class World:
    """A pipeline over two engines, its classifier, and keys whose secret is their id."""

    def __init__(
        self,
        root: Path,
        tokenizer: Tokenizer,
        keys: Path,
        tiers: list[Tier],
        *,
        cloud: HttpCloudClient | None = None,
        cache: Any = None,
        limits: Limits | None = None,
        embed: Embed | None = None,
        **routing: Any,
    ) -> None:
        self.engines = FaultyEngines(tokenizer)
        self.classifier = FakeClassifier()
        self.ledger = MemoryLedger()
        self._path, self._keys = keys, list[dict[str, Any]]()
        self.add("everything")
        rules = Routing(**{"failures_to_open": 3, "open_s": 0.3, **routing})
        self.pipeline = Pipeline(
            Tiers(tier=tiers, routing=rules, limits=limits or Limits()),
            root,
            self.engines,
            cloud,
            cache=cache,
            gate=Gate(Keyring(keys), self.ledger),
            classify=self.classifier,
            embed=embed,
        )
        self.dispatch = self.pipeline.dispatch

    def add(self, name: str, **rights: Any) -> None:
        self._keys.append({"id": name, "tenant": f"{name}-tenant", "digest": digest_of(name), **rights})
        self._path.write_text(json.dumps({"keys": self._keys}))

    def call(self, text: str = "easy", key: str = "everything", **fields: Any) -> tuple[Call, RecordingSink]:
        headers = {name: fields.pop(name) for name in ("x-deadline-ms",) if name in fields}
        body = {"prompt": text} if fields.pop("raw", False) else {"messages": [{"role": "user", "content": text}]}
        sink = RecordingSink()
        call = Call(json.dumps({**body, **fields}).encode(), {"authorization": f"Bearer {key}", **headers}, sink)
        return call, sink

    async def ask(self, text: str = "easy", key: str = "everything", **fields: Any) -> RecordingSink:
        call, sink = self.call(text, key, **fields)
        await asyncio.wait_for(self.pipeline.run(call), 10)
        assert sink.num_ends == 1
        return sink

    def run(self, text: str = "easy", key: str = "everything", **fields: Any) -> dict[str, Any]:
        """`rt` of a good answer."""
        return rt(asyncio.run(self.ask(text, key, **fields)))

    def failure(self, text: str = "easy", key: str = "everything", **fields: Any) -> ApiError:
        return error_of(asyncio.run(self.ask(text, key, **fields)))

    async def used(self, name: str) -> Amount:
        standing = Standing(Quota(), await self.ledger.reserve(name, Quota(), Amount()))
        return Amount(*(standing.used(kind) for kind in "rtm"))


def rt(sink: RecordingSink) -> dict[str, Any]:
    assert sink.error is None, sink.error.message
    found: dict[str, Any] = sink.events[-1]["rt"]
    return found


def error_of(sink: RecordingSink) -> ApiError:
    assert sink.error is not None, sink.events
    return sink.error


MakeWorld = Callable[..., World]


@pytest.fixture(scope="module", autouse=True)
def tokenizers_are_loaded_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatTokenizer, "load", functools.cache(ChatTokenizer.load))
        yield


@pytest.fixture
def make_world(artifact: Callable[[str], Path], tokenizer: Tokenizer, tmp_path: Path) -> MakeWorld:
    def make(tiers: list[Tier] = TWO, **options: Any) -> World:
        return World(artifact("scripted"), tokenizer, tmp_path / "keys.json", tiers, **options)

    return make


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return make_world()


# --- who answers, and why ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_auto_goes_where_it_is_judged_to_belong(world: World, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    with caplog.at_level(logging.INFO, "orchestrator.requests"):
        easy, hard = world.run("easy", stream=stream), world.run("hard", stream=stream)
    assert (easy["tier"], easy["model"], hard["tier"], hard["model"]) == ("simple", "small", "expert", "large")
    assert easy["reason"] == "the cheapest tier that is likely to suffice (0.90)"
    assert "attempts" not in easy
    assert json.loads(caplog.messages[-1])["reason"] == hard["reason"]
    assert world.dispatch.counts.routed == {("simple", "suffices"): 1, ("expert", "suffices"): 1}


@pytest.mark.parametrize("model", ["simple", "small"])
def test_what_is_pinned_is_not_judged_and_stays(world: World, model: str) -> None:
    found = world.run("hard", model=model)
    assert (found["tier"], found["reason"]) == ("simple", "the request names it")
    assert world.classifier.asked == []


def test_where_there_is_no_choice_nothing_is_judged(world: World) -> None:
    world.add("narrow", tiers=["simple"])
    assert world.run("hard", "narrow")["reason"] == "no other may answer this"
    assert world.classifier.asked == []


def test_the_whole_conversation_is_judged(world: World) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a hard "}, {"type": "text", "text": "one"}]},
        {"role": "assistant", "content": "So?"},
        {"role": "user", "content": "easy"},
    ]
    world.run(messages=messages)
    assert world.classifier.asked == [
        [Turn("system", "Be brief."), Turn("user", "a hard one"), Turn("assistant", "So?"), Turn("user", "easy")]
    ]


def test_raw_prompts_are_judged_too_and_token_ids_go_up(world: World) -> None:
    assert world.run("easy", raw=True)["tier"] == "simple"
    sink = asyncio.run(world.ask(raw=True, prompt=[5, 6, 7]))
    assert (rt(sink)["tier"], len(world.classifier.asked)) == ("expert", 1)
    assert rt(sink)["reason"] == "there is nothing that the classifier reads; so the most capable tier"


@pytest.mark.parametrize(("text", "delay_s"), [("easy", 5.0), ("fail", 0.0)])
def test_without_a_judgement_in_time_it_goes_up(make_world: MakeWorld, text: str, delay_s: float) -> None:
    world = make_world(classifier_timeout_s=0.05)
    world.classifier.delay_s = delay_s
    started_s = time.monotonic()
    found = world.run(text)
    assert (found["tier"], time.monotonic() - started_s < 2) == ("expert", True)
    assert found["reason"] == "the classifier did not judge it in time; so the most capable tier"


def test_a_stored_answer_is_judged_by_nobody_and_says_no_reason(make_world: MakeWorld) -> None:
    world = make_world(cache=exact_cache())

    async def work() -> list[dict[str, Any]]:
        found = []
        for _ in range(2):
            found.append(rt(await world.ask("hard", temperature=0)))
            await world.pipeline.finish()
        return found

    first, second = asyncio.run(work())
    assert (first["cache"], first["tier"], second["cache"], second["tier"]) == ("miss", "expert", "exact", "expert")
    assert "reason" in first and "reason" not in second
    assert len(world.classifier.asked) == 1


def test_a_tier_that_cannot_do_it_is_no_choice(make_world: MakeWorld) -> None:
    world = make_world([TWO[0], make_tier("expert", "large", tool_parser="hermes")])
    tools = [{"type": "function", "function": {"name": "f"}}]
    found = world.run("easy", tools=tools)
    assert (found["tier"], found["reason"]) == ("expert", "no other can: simple has no tool parser")
    assert world.failure("easy", tools=tools, model="simple").param == "tools"
    many = make_world([make_tier("simple", "small", context_window=512), TWO[1]])
    assert many.run("easy", min_tokens=60, max_tokens=70)["tier"] == "simple"
    assert many.run("easy", max_tokens=600)["tier"] == "expert"
    assert isinstance(many.failure("easy", min_tokens=60), InvalidRequestError)


# --- windows -------------------------------------------------------------------------------------------------

LONG = "easy " * 300
NARROW = [
    make_tier("simple", "small", context_window=200),
    make_tier("medium", "small", context_window=250),
    make_tier("expert", "large", context_window=1000),
]


@pytest.mark.parametrize("key", ["everything", "counted"])
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2}, {"raw": True}, {"x-deadline-ms": "5000"}])
def test_a_long_prompt_goes_up_before_anybody_is_asked(make_world: MakeWorld, key: str, fields: dict[str, Any]) -> None:
    """Case R04."""
    world = make_world(NARROW)
    world.add("counted", tokens_per_minute=100_000, usd_per_day=100.0)
    found = world.run(LONG, key, **fields)
    assert (found["tier"], set(world.engines.asked)) == ("expert", {"large"})
    room = "has no room for prompt and answer"
    assert found["reason"] == f"no other can: simple {room}, medium {room}"
    assert world.dispatch.counts.routed == {("expert", "window"): 1}


@pytest.mark.parametrize("key", ["everything", "counted"])
def test_the_reason_names_the_window_of_the_tier_that_would_have_done(make_world: MakeWorld, key: str) -> None:
    world = make_world([NARROW[0], make_tier("medium", "small", context_window=900), NARROW[2]])
    world.add("counted", tokens_per_minute=100_000, usd_per_day=100.0)
    found = world.run("easy", key, max_tokens=500)
    assert (found["tier"], found["reason"]) == (
        "medium",
        "likely to suffice (0.96); simple is cheaper, but has no room for prompt and answer",
    )


def test_the_answer_needs_room_too(make_world: MakeWorld) -> None:
    world = make_world(NARROW)
    assert world.run("easy", max_tokens=20)["tier"] == "simple"
    assert world.run("easy", max_tokens=300)["tier"] == "expert"
    text = "easy " * 130  # there is room for some tokens, but not for the tier's longest answer
    assert world.run(text)["tier"] == "medium"
    assert "simple" not in world.run(text, model="medium")["tier"]
    one_model = make_world([*NARROW[:1], make_tier("wide", "small", context_window=2000)])
    assert one_model.run(LONG, model="small")["tier"] == "wide"  # also where a model is named


@pytest.mark.parametrize("key", ["everything", "counted"])
def test_a_prompt_beyond_all_windows_is_refused_with_counts_and_storms_nobody(make_world: MakeWorld, key: str) -> None:
    """Cases V03 and R09."""
    world = make_world(NARROW)
    world.add("counted", tokens_per_minute=100_000)
    for _ in range(20):
        error = world.failure("easy " * 1500, key)
        assert isinstance(error, InvalidRequestError) and error.param == "messages"
        assert "tokens and an answer of up to 1 are more than the context window of 1000 tokens" in error.message
    assert world.engines.asked == []
    assert set(world.dispatch.breaker_states().values()) == {"closed"}


# --- failures before the first token -------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("faults", "asked", "tier"),
    [
        (["error", "good"], ["small", "small"], "simple"),
        (["error"], ["small", "small", "large"], "expert"),
        (["hang"], ["small", "large"], "expert"),  # once was long enough
        (["error", "hang"], ["small", "small", "large"], "expert"),
        (["slow"], ["small"], "simple"),
    ],
)
def test_a_failure_before_the_first_token_is_nobodys_but_ours(
    world: World, faults: list[str], asked: list[str], tier: str, stream: bool
) -> None:
    world.engines.faults["small"] = list(faults)
    started_s = time.monotonic()
    sink = asyncio.run(world.ask("easy", stream=stream))
    found = rt(sink)
    assert (world.engines.asked, found["tier"]) == (asked, tier)
    assert sink.text == "one two three four."
    assert found.get("attempts", 1) == len(asked)
    assert {event["model"] for event in sink.events} == {"small" if tier == "simple" else "large"}
    assert len({event["id"] for event in sink.events}) == 1
    if tier == "expert":
        assert found["reason"] == "simple failed before its first token (engine_error); this is the next tier"
    assert time.monotonic() - started_s < 2
    counts = world.dispatch.counts
    assert counts.fallbacks["simple"] == (tier == "expert") and counts.timeouts["simple"] == ("hang" in faults)
    assert counts.retries["simple"] == (faults[0] == "error")
    assert world.engines.num_inside == {"small": 0} or world.engines.num_inside == {"small": 0, "large": 0}


def test_a_slow_first_token_is_a_failure_when_it_is_too_slow(world: World) -> None:
    world.engines.faults["small"], world.engines.slow_s = ["slow"], 5.0
    assert world.run("easy")["tier"] == "expert"


def test_all_fail(world: World) -> None:
    world.engines.faults = {"small": ["error"], "large": ["error"]}
    error = world.failure("easy")
    assert (type(error), error.message) == (EngineError, "it broke")
    assert world.engines.asked == ["small", "small", "large", "large"]


def test_what_is_pinned_is_tried_twice_and_goes_nowhere(world: World) -> None:
    world.engines.faults["small"] = ["error"]
    assert type(world.failure("easy", model="simple")) is EngineError
    assert world.engines.asked == ["small", "small"]
    world.engines.faults["small"] = ["good", "error", "good"]
    assert "attempts" not in world.run("easy", model="small")
    assert world.run("easy", model="small")["attempts"] == 2
    world.engines.faults["large"] = ["hang"]
    error = world.failure("easy", model="expert")
    assert isinstance(error, EngineTimeoutError) and error.status == 502
    assert error.message == "tier 'expert': no first token within 0.15 s"


def test_tiers_of_the_failed_engine_are_no_way_out(make_world: MakeWorld) -> None:
    world = make_world([TWO[0], make_tier("medium", "small"), TWO[1]])
    world.engines.faults["small"] = ["error"]
    assert world.run("easy")["tier"] == "expert"
    assert world.engines.asked == ["small", "small", "large"]


@pytest.mark.parametrize("fault", ["die", "stall"])
@pytest.mark.parametrize("stream", [True, False])
def test_after_the_first_token_there_is_no_way_back(world: World, fault: str, stream: bool) -> None:
    """Case S20."""
    world.engines.faults["small"] = [fault]
    sink = asyncio.run(world.ask("easy", stream=stream))
    assert isinstance(error_of(sink), EngineError)
    assert (world.engines.asked, sink.finish_reasons) == (["small"], [])
    assert sink.text == ("one two three" if stream else "")
    if fault == "stall":
        assert error_of(sink).message == "tier 'simple': no further token within 0.15 s"


def test_of_several_choices_one_that_failed_fails_all_and_all_are_made_anew(world: World) -> None:
    world.engines.faults["small"] = ["hang"]
    sink = asyncio.run(world.ask("easy", n=3))
    assert rt(sink)["tier"] == "expert"
    assert [choice["message"]["content"] for choice in sink.events[0]["choices"]] == ["one two three four."] * 3
    assert Counter(world.engines.asked) == {"small": 3, "large": 3}


def test_the_callers_fault_is_tried_nowhere_else_and_opens_nothing(world: World) -> None:
    """Case R09."""
    world.engines.faults["small"] = ["refuse"]
    for _ in range(20):
        assert "input_ids: " in world.failure("easy").message
    assert world.engines.asked == ["small"] * 20
    assert world.dispatch.breaker_states() == {"small": "closed", "large": "closed"}


def test_who_shares_an_answer_shares_its_second_try(make_world: MakeWorld) -> None:
    world = make_world(cache=exact_cache())
    world.engines.faults["small"] = ["error", "slow"]

    async def work() -> list[RecordingSink]:
        first = asyncio.create_task(world.ask("easy", temperature=0, stream=True))
        await asyncio.sleep(0.03)  # it waits to try again
        assert world.engines.asked == ["small"]
        second = asyncio.create_task(world.ask("easy", temperature=0, stream=True))
        return [await first, await second]

    sinks = asyncio.run(work())
    assert [sink.text for sink in sinks] == ["one two three four."] * 2
    assert [rt(sink)["attempts"] for sink in sinks] == [2, 2]
    assert sinks[0].events[0]["id"] != sinks[1].events[0]["id"]
    assert world.engines.asked == ["small", "small"]


# --- an engine that is out -----------------------------------------------------------------------------------


def test_a_hung_tier_is_out_after_its_timeout_and_back_by_a_probe(world: World) -> None:
    """Case R10."""
    world.engines.faults["small"] = ["hang"]

    async def work() -> None:
        assert rt(await world.ask("easy"))["attempts"] == 2
        assert world.dispatch.breaker_states() == {"small": "open", "large": "closed"}
        started_s = time.monotonic()
        found = rt(await world.ask("easy"))
        assert time.monotonic() - started_s < TIMEOUT_S
        assert found["tier"] == "expert" and "attempts" not in found
        assert found["reason"] == "likely to suffice (1.00); simple is cheaper, but out"
        refused = error_of(await world.ask("easy", model="simple"))
        assert isinstance(refused, TierUnavailableError) and refused.headers == {"retry-after": "1"}
        assert world.engines.asked == ["small", "large", "large"]
        await asyncio.sleep(0.35)
        assert world.dispatch.breaker_states()["small"] == "half_open"
        world.engines.faults["small"] = ["good"]
        assert rt(await world.ask("easy"))["tier"] == "simple"
        assert world.dispatch.breaker_states()["small"] == "closed"

    asyncio.run(work())


def test_when_all_are_out_it_says_so(world: World) -> None:
    world.engines.faults = {"small": ["hang"], "large": ["hang"]}

    async def work() -> None:
        assert isinstance(error_of(await world.ask("easy")), EngineTimeoutError)
        error = error_of(await world.ask("easy"))
        assert isinstance(error, TierUnavailableError)
        assert "left alone; try again in 1 s" in error.message

    asyncio.run(work())


def test_others_do_not_wait_for_a_hung_one(make_world: MakeWorld) -> None:
    """Case R10."""
    world = make_world(limits=Limits(max_live_requests=8, max_running_requests=2))
    world.engines.faults["small"] = ["hang"]

    async def work() -> list[float]:
        hung = [asyncio.create_task(world.ask("easy", model="simple")) for _ in range(12)]
        await asyncio.sleep(0.01)
        took = []
        for _ in range(5):
            started_s = time.monotonic()
            assert rt(await world.ask("hard"))["tier"] == "expert"
            took.append(time.monotonic() - started_s)
        errors = [error_of(await task) for task in hung]
        kinds = Counter(type(error) for error in errors)
        # Two were inside; who waited behind them heard when it opened, and who found no place at once.
        assert kinds == {EngineTimeoutError: 2, TierUnavailableError: 4, OverloadedError: 6}
        return took

    started_s = time.monotonic()
    assert max(asyncio.run(work())) < 0.1
    assert time.monotonic() - started_s < 10 * TIMEOUT_S


def test_a_probe_waits_less_long(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "PROBE_TIMEOUT_S", 0.05)
    world = make_world([make_tier("simple", "small", first_token_timeout_s=0.2), TWO[1]], open_s=0.05)
    world.engines.faults["small"] = ["hang"]

    async def work() -> float:
        await world.ask("easy")
        await asyncio.sleep(0.06)
        started_s = time.monotonic()
        assert rt(await world.ask("easy"))["attempts"] == 2
        return time.monotonic() - started_s

    assert asyncio.run(work()) < 0.15


@pytest.mark.parametrize("how", ["leaves", "deadline"])
def test_what_callers_end_opens_nothing(world: World, how: str) -> None:
    world.engines.faults["small"], world.engines.slow_s = ["slow"], 0.1

    async def work() -> None:
        for _ in range(6):
            fields = {"x-deadline-ms": "30"} if how == "deadline" else {}
            call, sink = world.call("easy", model="simple", **fields)
            running = asyncio.create_task(world.pipeline.run(call))
            await asyncio.sleep(0.03)
            if how == "leaves":
                await call.cancel()
            await asyncio.wait_for(running, 5)
            assert isinstance(sink.error, DeadlineError if how == "deadline" else CancelledError)

    asyncio.run(work())
    assert world.dispatch.breaker_states()["small"] == "closed"
    assert world.engines.num_inside["small"] == 0


def test_who_leaves_a_hung_engine_does_not_wait_for_it(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "STOP_TIMEOUT_S", 0.1)
    world = make_world([make_tier("simple", "small", first_token_timeout_s=60.0), TWO[1]])
    world.engines.faults["small"] = ["hang"]

    async def work() -> None:
        started_s = time.monotonic()
        sink = await world.ask("easy", **{"x-deadline-ms": "100"})
        assert isinstance(sink.error, DeadlineError)
        assert time.monotonic() - started_s < 1
        # It does not let go, which is its own failure: deadlines shorter than its timeout do not hide it for ever.
        await asyncio.gather(*(world.ask("easy", **{"x-deadline-ms": "100"}) for _ in range(12)))
        assert world.dispatch.breaker_states()["small"] == "closed"
        await world.ask("easy", **{"x-deadline-ms": "100"})
        assert world.dispatch.breaker_states()["small"] == "open"
        assert rt(await world.ask("easy", **{"x-deadline-ms": "1000"}))["tier"] == "expert"

    asyncio.run(work())


def test_who_leaves_between_two_tries_pays_for_none(world: World) -> None:
    world.add("leaves", tokens_per_minute=1000)
    world.engines.faults["small"] = ["error", "good"]

    async def work() -> Amount:
        call, sink = world.call("easy", "leaves")
        running = asyncio.create_task(world.pipeline.run(call))
        while not world.engines.asked:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        await call.cancel()
        await asyncio.wait_for(running, 1)
        assert isinstance(sink.error, CancelledError) and len(world.engines.asked) == 1
        return await world.used("leaves")

    assert asyncio.run(work()) == Amount(1)


def test_no_second_try_that_would_be_late(world: World) -> None:
    world.engines.faults = {"small": ["error"], "large": ["error"]}
    error = world.failure("easy", model="simple", **{"x-deadline-ms": "60"})
    assert isinstance(error, EngineError) and world.engines.asked == ["small"]


# --- deadlines -----------------------------------------------------------------------------------------------


def test_a_tier_known_to_be_slow_is_passed_over_by_who_is_in_a_hurry(world: World) -> None:
    async def work() -> None:
        world.dispatch._backends["small"].paces["simple"].observe(1.0, 2.0, 10)
        hurried = rt(await world.ask("easy", max_tokens=10, **{"x-deadline-ms": "1500"}))
        assert hurried["tier"] == "expert"
        assert hurried["reason"] == "likely to suffice (1.00); simple is cheaper, but not expected to be in time"
        assert rt(await world.ask("easy"))["tier"] == "simple"
        world.dispatch._backends["large"].paces["expert"].observe(9.0, 9.5, 10)
        world.dispatch._backends["small"].paces["simple"].observe(9.0, 9.5, 10)
        late = error_of(await world.ask("easy", **{"x-deadline-ms": "200"}))
        assert isinstance(late, OverloadedError) and "the deadline cannot be met" in late.message

    asyncio.run(work())


def test_who_has_no_time_to_be_judged_is_not(world: World) -> None:
    world.classifier.delay_s = 0.2

    async def work() -> None:
        for model, tier in (("small", "simple"), ("large", "expert")):
            for _ in range(10):
                world.dispatch._backends[model].paces[tier].observe(0.1, 0.12, 5)
        found = rt(await world.ask("easy", **{"x-deadline-ms": "250"}))
        assert "did not judge it in time" in found["reason"]
        started_s = time.monotonic()
        late = error_of(await world.ask("easy", **{"x-deadline-ms": "80"}))
        assert isinstance(late, OverloadedError) and time.monotonic() - started_s < 0.08  # at once, not when it is late

    asyncio.run(work())


def test_a_long_answer_of_one_tier_refuses_nobody_at_another(make_world: MakeWorld) -> None:
    tiers = [make_tier("simple", "small"), make_tier("complex", "small"), TWO[1]]
    world = make_world(tiers)

    async def work() -> None:
        await world.ask("easy", model="complex")
        backend = world.dispatch._backends["small"]
        assert backend.queue is not None
        for pace in (backend.paces["complex"], backend.queue.pace):
            for _ in range(30):
                pace.observe(0.02, 3.02, 301)
        late = error_of(await world.ask("easy", model="complex", **{"x-deadline-ms": "1500"}))
        assert "the answer alone is expected to take" in late.message and late.headers["retry-after"] == "30"
        assert rt(await world.ask("easy", model="simple", **{"x-deadline-ms": "1500"}))["tier"] == "simple"
        assert rt(await world.ask("easy", **{"x-deadline-ms": "1500"}))["tier"] == "simple"

    asyncio.run(work())


# --- money ---------------------------------------------------------------------------------------------------


def test_the_budget_restricts_the_route(world: World) -> None:
    world.add("poor", usd_per_day=0.001)  # the dear tier's 50 tokens alone may cost five times as much
    world.add("rich", usd_per_day=1.0)
    assert world.run("hard", "rich")["tier"] == "expert"
    found = world.run("hard", "poor")
    assert (found["tier"], found["reason"]) == ("simple", "the key's quotas leave no other")
    world.add("broke", usd_per_day=0.000001)
    assert isinstance(world.failure("hard", "broke"), BudgetError)
    world.add("few", tokens_per_minute=40)
    assert isinstance(world.failure("hard", "few"), RateLimitError)


def test_of_three_the_middle_one_is_what_the_budget_leaves(make_world: MakeWorld) -> None:
    world = make_world([TWO[0], make_tier("medium", "middle", 10.0), TWO[1]])
    world.add("thrifty", usd_per_day=0.002)
    found = world.run("hard", "thrifty")
    assert (found["tier"], found["reason"]) == (
        "medium",
        "may not suffice (0.05); the key's quotas leave no dearer tier",
    )
    assert world.run("easy", "thrifty")["tier"] == "simple"


def test_paid_is_the_tier_that_answered(world: World) -> None:
    world.add("pays", usd_per_day=1.0, tokens_per_minute=10_000)

    async def work() -> list[Amount]:
        found = []
        for text, fault in (("hard", "good"), ("easy", "good"), ("easy", "error")):
            world.engines.faults["small"] = [fault]
            before = await world.used("pays")
            assert (await world.ask(text, "pays")).error is None
            found.append((await world.used("pays")).minus(before))
        return found

    hard, easy, fallen = asyncio.run(work())
    assert hard.nano_usd == hard.tokens * 100_000
    assert easy.nano_usd == easy.tokens * 1000
    assert fallen == easy._replace(nano_usd=easy.tokens * 100_000)


def test_the_reservation_covers_every_tier_it_may_fall_to(make_world: MakeWorld) -> None:
    """The cheap tier's answers are longer, the dear one's tokens dearer."""
    longer = make_tier("simple", "small", generation=Generation(max_output_tokens=400))
    world = make_world([longer, TWO[1]])
    world.add("pays", usd_per_day=1.0, tokens_per_minute=10_000)

    async def work() -> Amount:
        world.engines.faults["small"] = ["slow"]
        call, _ = world.call("easy", "pays")
        running = asyncio.create_task(world.pipeline.run(call))
        await asyncio.sleep(0.02)
        reserved = await world.used("pays")
        await running
        return reserved

    reserved = asyncio.run(work())
    num_prompt = len(world.engines.requests[0].input_ids)
    assert reserved == Amount(1, num_prompt + 400, (num_prompt + 50) * 100_000)


def test_a_hundred_at_once_over_all_tiers_never_pass_the_budget(world: World) -> None:
    world.add("many", usd_per_day=0.03, tokens_per_minute=4000)
    chance = random.Random(7)
    world.engines.faults["small"] = [chance.choice(["good", "good", "error", "die", "slow"]) for _ in range(200)]
    most = Amount()

    async def watch() -> None:
        nonlocal most
        while True:
            most = Amount(*map(max, most, await world.used("many")))
            await asyncio.sleep(0)

    async def work() -> list[ApiError | None]:
        watching = asyncio.create_task(watch())
        texts = itertools.cycle(["easy", "hard"])
        sinks = await asyncio.gather(
            *(world.ask(next(texts), "many", max_tokens=5 + index % 7) for index in range(100))
        )
        watching.cancel()
        return [sink.error for sink in sinks]

    errors = asyncio.run(work())
    assert most.nano_usd <= 30_000_000 and most.tokens <= 4000
    assert errors.count(None) > 10
    assert any(isinstance(error, (BudgetError, RateLimitError)) for error in errors)


# --- a cloud tier among them ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[FakeCloud]:
    with fake_cloud() as cloud:
        yield cloud


@pytest.fixture
def cloud(server: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCloud:
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    server.reply = Reply(answer("from", " afar"))
    server.got.clear()
    return server


def cloud_tier(url: str) -> Tier:
    return Tier(
        name="expert",
        model="far",
        context_window=100_000,
        input_price_per_million_tokens=10.0,
        output_price_per_million_tokens=10.0,
        generation=Generation(max_output_tokens=40),
        cloud=Cloud(base_url=url, model="m", first_token_timeout_s=0.3, token_timeout_s=0.3),
    )


def ask_cloud(make_world: MakeWorld, cloud: FakeCloud, times: int = 1, **fields: Any) -> tuple[World, RecordingSink]:
    tier = cloud_tier(cloud.url)

    async def work() -> tuple[World, RecordingSink]:
        client = HttpCloudClient([tier], {})
        world = make_world([TWO[0], tier], cloud=client)
        for _ in range(times):
            sink = await world.ask("hard", **fields)
        await client.close()
        return world, sink

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("reply", "num_asked", "state"),
    [
        (Reply([b"{}"], "429 Slow", "application/json"), 1, "closed"),  # no failure, and not to be asked again at once
        (Reply([b"{}"], "500 Oops", "application/json"), 2, "closed"),
        (Reply([b"{}"], "401 Who", "application/json"), 1, "closed"),
        (Reply([b"<html>"], content_type="text/html"), 2, "closed"),
        (Reply([b"data: {nonsense\n\n"]), 2, "closed"),
        (Reply([], end="cut"), 2, "closed"),
        (Reply([], end="hang"), 1, "open"),
    ],
)
def test_an_api_that_fails_before_its_first_token(
    make_world: MakeWorld, cloud: FakeCloud, reply: Reply, num_asked: int, state: str
) -> None:
    cloud.reply = reply
    world, sink = ask_cloud(make_world, cloud, stream=True)
    found = rt(sink)
    assert (found["tier"], sink.text, len(cloud.got)) == ("simple", "one two three four.", num_asked)
    assert found["attempts"] == num_asked + 1 and "usage_estimated" not in found
    assert found["reason"].startswith("expert failed before its first token (")
    assert world.dispatch.breaker_states()["expert"] == state


@pytest.mark.parametrize(
    "reply",
    [
        Reply([*(delta(f"w{number} ") for number in range(100)), delta(finish="stop"), usage(11, 100), DONE]),
        Reply([delta("word " * 6000), delta(finish="stop"), usage(11, 6000), DONE]),
        Reply([delta("Hi"), delta(finish="stop"), usage(200_000, 200_000), DONE]),
        Reply([delta("word " * 6000, finish="stop"), usage(10**9, 10**9), DONE], end="cut"),
    ],
)
def test_an_api_that_heeds_no_limit_passes_no_quota(make_world: MakeWorld, cloud: FakeCloud, reply: Reply) -> None:
    cloud.reply = reply
    tier = cloud_tier(cloud.url)

    async def work() -> tuple[Amount, int, dict[str, Any], Counter[tuple[str, Any]]]:
        client = HttpCloudClient([tier], {})
        world = make_world([TWO[0], tier], cloud=client)
        num_bytes = len(world.call("hard", "cares", model="expert", max_tokens=5)[0].body)
        most = num_bytes + 5
        world.add("cares", tokens_per_minute=most, usd_per_day=most * 10 / 1e6)  # just what it may take
        found = rt(await world.ask("hard", "cares", model="expert", max_tokens=5))
        await client.close()
        return await world.used("cares"), most, found, world.dispatch.overruns

    used, most, found, overruns = asyncio.run(work())
    assert used.requests == 1 and used.tokens <= most and used.nano_usd <= most * 10_000
    assert found["tokens"] <= 5 and used.nano_usd == round(found["cost_usd"] * 1e9)
    assert sum(overruns.values()) == 1 and {name for name, _ in overruns} == {"expert"}


def test_who_comes_to_pay_for_an_apis_answer_has_reserved_as_much(make_world: MakeWorld, cloud: FakeCloud) -> None:
    """The first caller's body is as long as he likes, and he leaves."""
    cloud.reply = Reply([delta("from"), 1.0, delta(" afar", finish="stop"), usage(10**9, 2), DONE])
    patient = Cloud(base_url=cloud.url, model="m", first_token_timeout_s=10.0, token_timeout_s=10.0)
    tier = cloud_tier(cloud.url).model_copy(update={"cloud": patient})

    async def work() -> tuple[Amount, int, RecordingSink]:
        client = HttpCloudClient([tier], {})
        world = make_world([TWO[0], tier], cloud=client, cache=exact_cache())
        fields = {"model": "expert", "temperature": 0, "max_tokens": 5}
        first, sink = world.call("hard", **fields, stream=False)
        first.body += b" " * 5000
        most = len(first.body) - 5000 + 5
        world.add("cares", tenant="everything-tenant", tokens_per_minute=most)
        leaves = asyncio.create_task(world.pipeline.run(first))
        while not cloud.got:
            await asyncio.sleep(0.001)
        stays = asyncio.create_task(world.ask("hard", "cares", **fields, stream=False))
        while len(cloud.got) < 2 and not stays.done():  # each is asked for apart
            await asyncio.sleep(0.001)
        await first.cancel()
        await leaves
        sink = await stays
        await client.close()
        return await world.used("cares"), most, sink

    used, most, sink = asyncio.run(work())
    assert sink.text == "from afar" and used.requests == 1 and 0 < used.tokens <= most


def test_an_api_known_to_be_too_slow_is_not_asked(make_world: MakeWorld, cloud: FakeCloud) -> None:
    cloud.reply = Reply([0.2, *answer("from", " afar")])
    tier = cloud_tier(cloud.url)

    async def work() -> tuple[ApiError, dict[str, Any], dict[str, Any]]:
        client = HttpCloudClient([tier], {})
        world = make_world([TWO[0], tier], cloud=client)
        await world.ask("hard", model="expert")
        pinned = error_of(await world.ask("hard", model="expert", **{"x-deadline-ms": "100"}))
        patient = rt(await world.ask("hard", model="expert", **{"x-deadline-ms": "5000"}))
        elsewhere = rt(await world.ask("hard", **{"x-deadline-ms": "100"}))
        await client.close()
        return pinned, patient, elsewhere

    pinned, patient, elsewhere = asyncio.run(work())
    assert isinstance(pinned, OverloadedError) and pinned.status == 503
    assert "the deadline cannot be met" in pinned.message and pinned.headers == {"retry-after": "30"}
    assert (patient["tier"], elsewhere["tier"], len(cloud.got)) == ("expert", "simple", 2)


def test_an_api_that_dies_after_its_first_token(make_world: MakeWorld, cloud: FakeCloud) -> None:
    """Case S20."""
    cloud.reply = Reply([delta("a"), delta("b"), delta("c")], end="cut")
    world, sink = ask_cloud(make_world, cloud, stream=True)
    assert isinstance(sink.error, CloudError) and sink.text == "abc"
    assert (world.engines.asked, len(cloud.got)) == ([], 1)


def test_an_api_that_refuses_the_request_is_not_asked_again(make_world: MakeWorld, cloud: FakeCloud) -> None:
    """Cases V03 and R09."""
    cloud.reply = Reply([b"too long"], "400 Bad", "text/plain")
    world, sink = ask_cloud(make_world, cloud, times=5, model="expert")
    assert isinstance(sink.error, InvalidRequestError)
    assert (world.engines.asked, len(cloud.got)) == ([], 5)
    assert world.dispatch.breaker_states()["expert"] == "closed"
    cloud.got.clear()
    world, sink = ask_cloud(make_world, cloud)  # whoever names no tier is not to suffer from one's rules
    assert (rt(sink)["tier"], world.engines.asked, len(cloud.got)) == ("simple", ["small"], 1)
    assert world.dispatch.breaker_states()["expert"] == "closed"


def test_an_api_that_is_busy_is_no_failure_but_one_that_fails_is_left_alone(
    make_world: MakeWorld, cloud: FakeCloud
) -> None:
    cloud.reply = Reply([b"{}"], "429 Slow", "application/json")
    world, _ = ask_cloud(make_world, cloud, times=5)
    assert (world.dispatch.breaker_states()["expert"], len(cloud.got)) == ("closed", 5)
    cloud.got.clear()
    cloud.reply = Reply([b"{}"], "500 Oops", "application/json")
    world, sink = ask_cloud(make_world, cloud, times=5)
    assert (world.dispatch.breaker_states()["expert"], len(cloud.got)) == ("open", 3)
    assert rt(sink)["tier"] == "simple" and "attempts" not in rt(sink)


def test_an_engine_that_fails_falls_to_the_api(make_world: MakeWorld, cloud: FakeCloud) -> None:
    tier = cloud_tier(cloud.url)

    async def work() -> RecordingSink:
        client = HttpCloudClient([tier], {})
        world = make_world([TWO[0], tier], cloud=client)
        world.engines.faults["small"] = ["hang"]
        sink = await world.ask("easy", stream=True)
        await client.close()
        return sink

    sink = asyncio.run(work())
    assert (sink.text, rt(sink)["tier"], rt(sink)["input_tokens"]) == ("from afar", "expert", 11)


def test_an_api_that_is_silent_for_one_and_streams_for_another_is_not_out(
    make_world: MakeWorld, cloud: FakeCloud
) -> None:
    tier = cloud_tier(cloud.url)

    async def work() -> tuple[RecordingSink, ApiError, str]:
        client = HttpCloudClient([tier], {})
        world = make_world([TWO[0], tier], cloud=client)
        cloud.reply = Reply([*itertools.chain.from_iterable((delta("a"), 0.1) for _ in range(8)), *answer("b")])
        streaming = asyncio.create_task(world.ask("hard", model="expert", stream=True))
        while not cloud.got:
            await asyncio.sleep(0.001)
        cloud.reply = Reply([], end="hang")
        error = error_of(await world.ask("hard too", model="expert"))
        state = world.dispatch.breaker_states()["expert"]
        sink = await streaming
        await client.close()
        return sink, error, state

    sink, error, state = asyncio.run(work())
    assert isinstance(error, CloudTimeoutError) and (state, sink.text) == ("closed", "a" * 8 + "b")


@pytest.mark.parametrize("channel", ["content", "reasoning_content"])
def test_the_first_token_of_a_probe_brings_an_api_back(make_world: MakeWorld, cloud: FakeCloud, channel: str) -> None:
    tier = cloud_tier(cloud.url)

    async def work() -> tuple[str, str, RecordingSink]:
        client = HttpCloudClient([tier], {})
        world = make_world([TWO[0], tier], cloud=client, open_s=0.05)
        cloud.reply = Reply([], end="hang")
        await world.ask("hard", model="expert")
        before = world.dispatch.breaker_states()["expert"]
        while world.dispatch.breaker_states()["expert"] == "open":
            await asyncio.sleep(0.01)
        cloud.reply = Reply([delta(**{channel: "a"}), 30.0])  # the probe is never done
        call, _ = world.call("hard", model="expert", stream=True)
        probing = asyncio.create_task(world.pipeline.run(call))
        while world.dispatch.breaker_states()["expert"] != "closed":
            await asyncio.sleep(0.001)
        cloud.reply = Reply(answer("from", " afar"))
        other = await world.ask("hard", model="expert")
        is_probing = not probing.done()
        await call.cancel()
        await probing
        await client.close()
        return before, "probing" if is_probing else "done", other

    before, probe, other = asyncio.run(asyncio.wait_for(work(), 10))
    assert (before, probe, other.text) == ("open", "probing", "from afar")
