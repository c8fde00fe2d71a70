"""What follows an answer in the pipeline: the safety filter, samples for quality, what it cost."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import RecordingSink
from test_cache_stage import BagOfWords, Counts, FakeGate
from tokenizers import Tokenizer

from orchestrator.answer import Answer
from orchestrator.cache.lookup import Lookup
from orchestrator.cache.stage import AnswerCache
from orchestrator.cache.store import MemoryStore
from orchestrator.call import Call
from orchestrator.config import CachePolicy, Limits, QualityPolicy, SafetyPolicy, Tiers, load_tiers
from orchestrator.engines import Chunk, EngineRequest
from orchestrator.errors import EngineError
from orchestrator.limits.keys import EVERYBODY
from orchestrator.limits.ledger import Amount
from orchestrator.money import MAX_TENANTS, OTHERS, Spending
from orchestrator.pipeline import Pipeline
from orchestrator.quality.monitor import Monitor, Sample
from orchestrator.quality.sampler import Quality
from orchestrator.request import ChatRequest
from orchestrator.streaming.tokenizer import ChatTokenizer
from orchestrator.triton.afterwards_metrics import AfterwardsMetrics

CARD = "4111 1111 1111 1111"
# Tiers of one engine, told apart by what they limit an answer to.
TIER_OF_LIMIT = {256: "simple", 512: "medium", 1024: "complex", 2048: "expert"}
CACHE = CachePolicy(ttl_s=60, max_bytes=1 << 20, semantic=False, max_temperature=0.5)


class ByTier:
    """An `EngineClient` that answers as a test says, by tier; those in `hanging` never do."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.texts = dict.fromkeys(TIER_OF_LIMIT.values(), "Paris is the capital.")
        self.hanging: set[str] = set()
        self.asked: list[str] = []
        self.stopped: list[str] = []
        self.num_tokens = 0
        self._tokenizer = tokenizer

    async def stream(self, model: str, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        tier = TIER_OF_LIMIT[request.max_new_tokens]
        self.asked.append(tier)
        while tier in self.hanging:
            if request.request_id in self.stopped:
                return
            await asyncio.sleep(0.005)
        if not self.texts[tier]:
            raise EngineError("this one fails")
        for token_id in self._tokenizer.encode(self.texts[tier], add_special_tokens=False).ids:
            self.num_tokens += 1
            yield Chunk([token_id])
            await asyncio.sleep(0)
        yield Chunk([request.end_id or 0])

    async def stop(self, model: str, request_id: str) -> None:
        self.stopped.append(request_id)


class World:
    """A pipeline with everything that comes after an answer. `key` is every caller's."""

    def __init__(self, root: Path, engines: ByTier, limits: Limits) -> None:
        self.engines = engines
        self.key = EVERYBODY
        self.counts = Counts()
        policy = QualityPolicy(sampling=1.0, timeout_s=20.0, similarity=0.85)
        built = load_tiers(root / "tiers.toml")
        tiers = Tiers(tier=built.tier, limits=limits, quality=policy, safety=SafetyPolicy(words=["nightfall"]))
        embed = BagOfWords()
        self.monitor = Monitor(policy, dict.fromkeys(policy.tiers, ""))
        self.quality = Quality(policy, [tier.name for tier in tiers.tier], self.monitor, embed)
        self.store = MemoryStore(CACHE.max_bytes)
        cache = AnswerCache(CACHE, Lookup(self.store, self.store.clock), embed, self.counts)
        self.pipeline = Pipeline(
            tiers, root, engines, cache=cache, gate=FakeGate(lambda: self.key), quality=self.quality
        )

    async def ask(self, text: str = "What is the capital of France?", **fields: Any) -> RecordingSink:
        headers = {"cache-control": "no-cache"} if fields.pop("fresh", False) else {}
        body = json.dumps({"model": "auto", "messages": [{"role": "user", "content": text}], **fields}).encode()
        sink = RecordingSink()
        await self.pipeline.run(Call(body, headers, sink))
        return sink

    def run(self, *questions: dict[str, Any]) -> list[RecordingSink]:
        """Ask one after the other, and let what follows come to its end."""

        async def run() -> list[RecordingSink]:
            sinks = []
            for fields in questions:
                sinks.append(await self.ask(**fields))
                await self.pipeline.finish()
            return sinks

        return asyncio.run(run())

    def rt(self, sink: RecordingSink) -> dict[str, Any]:
        rt: dict[str, Any] = sink.events[-1]["rt"]
        return rt


@pytest.fixture(scope="module", autouse=True)
def tokenizers_loaded_once() -> Iterator[None]:
    loaded: dict[Path, ChatTokenizer] = {}
    load = ChatTokenizer.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatTokenizer, "load", lambda path: loaded.setdefault(path, load(path)))
        yield


@pytest.fixture
def make_world(artifact: Callable[[str], Path], tokenizer: Tokenizer) -> Callable[..., World]:
    return lambda **limits: World(artifact("scripted"), ByTier(tokenizer), Limits(**limits))


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


# --- safety --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_flagged_answer_is_served_counted_and_not_kept(
    world: World, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world.engines.texts["simple"] = f"Pay with {CARD}, codename Nightfall."
    with caplog.at_level(logging.INFO):
        first, second = world.run({"stream": stream}, {"stream": stream})
    assert CARD in first.text and first.finish_reasons == ["stop"]
    assert world.rt(second)["cache"] == "miss"
    assert dict(world.pipeline.afterwards.num_flagged) == {("card_number", "sent"): 2, ("word", "sent"): 2}
    lines = [json.loads(record.message) for record in caplog.records if '"flagged"' in record.message]
    assert [line["kinds"] for line in lines] == [{"card_number": 1, "word": 1}] * 2
    assert lines[0]["id"] and lines[0]["tier"] == "simple" and lines[0]["when"] == "sent"
    assert CARD not in caplog.text and "Nightfall" not in caplog.text
    assert world.engines.asked == ["simple"] * 2  # nor does anybody else get to see it


def test_a_stored_answer_that_is_flagged_by_now_goes(world: World) -> None:
    world.engines.texts["simple"] = "The codename is dawn."
    world.run({})
    world.pipeline.afterwards._safety = type(world.pipeline.afterwards._safety)(["dawn"])
    hit, miss = world.run({}, {})
    assert (world.rt(hit)["cache"], world.rt(miss)["cache"]) == ("exact", "miss")


@pytest.mark.parametrize("stream", [True, False])
def test_for_a_key_that_asks_for_it_nothing_flagged_is_sent(world: World, stream: bool) -> None:
    world.key = EVERYBODY.model_copy(update={"hold_flagged": True})
    world.engines.texts["simple"] = f"Here you are. Pay with {CARD}. Good bye. " + "And more. " * 50
    (sink,) = world.run({"stream": stream})
    assert sink.text == "Here you are." + (" " if sink.text.endswith(" ") else "")
    assert sink.finish_reasons == ["content_filter"] and sink.error is None and sink.num_ends == 1
    assert dict(world.pipeline.afterwards.num_flagged) == {("card_number", "held"): 1}
    assert world.engines.num_tokens < 40  # the rest was not generated
    spent = world.pipeline.spending
    assert spent.requests["default", "simple"] == 1 and spent.nano_usd["default", "simple"] > 0


def test_held_and_fine_is_the_same_answer_and_is_kept(world: World) -> None:
    world.key = EVERYBODY.model_copy(update={"hold_flagged": True})
    world.engines.texts["simple"] = "One. Two! Three?\nFour"
    first, second = world.run({"stream": True}, {"stream": True})
    assert first.text == second.text == "One. Two! Three?\nFour"
    assert world.rt(second)["cache"] == "exact"
    contents = [event["choices"][0]["delta"].get("content") for event in first.events]
    assert len(contents) > 3  # it streams


def test_who_holds_shares_no_flight_with_who_does_not(world: World) -> None:
    world.engines.texts["simple"] = f"Pay with {CARD}. Bye."

    async def run() -> list[RecordingSink]:
        first = asyncio.create_task(world.ask())
        await asyncio.sleep(0.01)
        world.key = EVERYBODY.model_copy(update={"hold_flagged": True})
        return list(await asyncio.gather(first, world.ask()))

    plain, held = asyncio.run(run())
    assert CARD in plain.text and CARD not in held.text


# --- quality -------------------------------------------------------------------------------------------------


def sampled(world: World, num: int, *questions: dict[str, Any]) -> list[RecordingSink]:
    """As `World.run`, with the sampler at work until it took in `num` samples or dropped so many."""

    async def run() -> list[RecordingSink]:
        running = asyncio.create_task(world.quality.run())
        sinks = [await world.ask(**fields) for fields in questions]
        deadline_s = time.monotonic() + 10
        while sum(world.monitor.samples.values()) + sum(world.quality.dropped.values()) < num:
            assert time.monotonic() < deadline_s, (world.monitor.samples, world.quality.dropped)
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait({running})
        await world.pipeline.finish()
        return sinks

    return asyncio.run(run())


def test_answers_are_asked_again_of_the_expert(world: World) -> None:
    world.engines.texts["medium"] = "Bananas are yellow."
    sampled(world, 2, {}, {"model": "medium", "text": "Where?"})
    assert world.monitor.samples == {("simple", "good"): 1, ("medium", "poor"): 1}
    assert sorted(world.engines.asked) == ["expert", "expert", "medium", "simple"]
    assert world.quality.nano_usd > 0
    assert ("default", "expert") not in world.pipeline.spending.requests  # the tenant does not pay for it


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "expert"},
        {"model": "complex"},
        {"n": 2},
        {"max_tokens": 2048, "stop": ["capital"], "model": "complex"},
    ],
)
def test_what_is_not_sampled(world: World, fields: dict[str, Any]) -> None:
    world.engines.texts = dict.fromkeys(world.engines.texts, "Paris is the capital.")
    sampled(world, 0, fields)
    assert not world.quality._pending and not any(world.quality.dropped.values())


def test_a_stored_answer_is_not_sampled(world: World) -> None:
    sampled(world, 1, {}, {})
    assert world.engines.asked.count("expert") == 1 and sum(world.monitor.samples.values()) == 1


def test_a_key_without_the_right_is_not_sampled(world: World) -> None:
    world.key = EVERYBODY.model_copy(update={"tiers": ("simple", "medium")})
    sampled(world, 1, {})
    assert world.quality.dropped["not_allowed"] == 1 and world.engines.asked == ["simple"]


def test_an_expert_that_hangs_or_fails_is_nobodys_concern(world: World) -> None:
    world.pipeline.afterwards._timeout_s = 0.3
    world.engines.hanging.add("expert")
    started_s = time.monotonic()
    sinks = sampled(world, 1, *({"text": f"Where is {number}?"} for number in range(12)))
    assert time.monotonic() - started_s < 5
    assert all(sink.error is None and sink.finish_reasons == ["stop"] for sink in sinks)
    assert world.quality.dropped["failed"] == 1 and len(world.engines.stopped) >= 1
    world.engines.hanging.clear()
    world.engines.texts["expert"] = ""
    (sink,) = sampled(world, 2, {"text": "And now?"})
    assert sink.error is None


def test_it_makes_room_for_requests_that_somebody_waits_for(make_world: Callable[..., World]) -> None:
    """With room for one at a time, an expert who hangs must not keep a caller for longer than a look."""
    world = make_world(max_running_requests=1)
    world.engines.hanging.add("expert")

    async def run() -> float:
        running = asyncio.create_task(world.quality.run())
        await world.ask()
        while "expert" not in world.engines.asked:
            await asyncio.sleep(0.01)
        started_s = time.monotonic()
        sink = await world.ask("Another question?")
        took_s = time.monotonic() - started_s
        assert sink.error is None
        running.cancel()
        await asyncio.wait({running})
        await world.pipeline.finish()
        return took_s

    assert asyncio.run(run()) < 1


def test_auto_goes_a_tier_up_while_a_tier_is_doubtful_and_comes_back(world: World) -> None:
    for _ in range(60):
        world.monitor.add(Sample("simple", None, False, time.time()))
    (sink,) = world.run({"fresh": True})
    assert world.rt(sink)["tier"] == "medium"
    (sink,) = world.run({"fresh": True, "model": "simple"})
    assert world.rt(sink)["tier"] == "simple"  # asked for by name
    world.quality._pending.clear()

    async def recover() -> None:
        running = asyncio.create_task(world.quality.run())
        for number in range(1, 61):
            await world.ask(fresh=True)
            while sum(world.monitor.samples.values()) < 60 + 2 * number and world.quality.is_doubtful("simple"):
                await asyncio.sleep(0.005)  # each lifted answer gives a sample of both tiers
        running.cancel()
        await asyncio.wait({running})
        await world.pipeline.finish()

    asyncio.run(recover())
    assert world.monitor.samples["simple", "good"] >= 50
    assert not world.quality.is_doubtful("simple")
    (sink,) = world.run({"fresh": True})
    assert world.rt(sink)["tier"] == "simple"


def test_a_doubtful_cluster_is_known_without_the_caches_vector(world: World) -> None:
    embed = BagOfWords()

    async def drift() -> None:
        for number in range(220):
            for text in ("What is the capital of France?", "Bake bread"):
                is_good = text == "Bake bread" or number < 150
                world.monitor.add(Sample("simple", await embed(text), is_good, time.time()))

    asyncio.run(drift())
    assert world.monitor.has_doubtful_clusters and not world.monitor.is_doubtful("simple", None)
    for fields in ({}, {"temperature": 1.0}, {"n": 2}, {"seed": 1}, {"fresh": True}):
        asked = {"model": "auto", **fields}
        (doubtful,) = world.run(asked)
        assert (doubtful.error, world.rt(doubtful)["tier"]) == (None, "medium"), fields
        (other,) = world.run({"text": "Bake bread", **asked})
        assert world.rt(other)["tier"] == "simple", fields


def test_a_key_that_may_use_no_higher_tier_stays_where_it_is(world: World) -> None:
    for _ in range(60):
        world.monitor.add(Sample("simple", None, False, time.time()))
    world.key = EVERYBODY.model_copy(update={"tiers": ("simple",)})
    (sink,) = world.run({})
    assert world.rt(sink)["tier"] == "simple"


def test_nothing_of_a_request_under_no_store_is_kept(world: World) -> None:
    offered = []
    world.quality.offer = offered.append  # type: ignore[method-assign,assignment]
    world.key = EVERYBODY.model_copy(update={"keep_text": True})

    async def run() -> None:
        body = json.dumps({"messages": [{"role": "user", "content": "Where?"}]}).encode()
        for headers in ({}, {"cache-control": "no-store"}):
            await world.pipeline.run(Call(body, headers, RecordingSink()))
        world.key = EVERYBODY
        await world.pipeline.run(Call(body.replace(b"Where", b"When"), {}, RecordingSink()))
        await world.pipeline.finish()

    asyncio.run(run())
    assert [each.turns for each in offered] == [[("user", "Where?")], None, None]


# --- money and metrics ---------------------------------------------------------------------------------------


def test_what_requests_cost_by_tenant_and_tier(world: World) -> None:
    first, second = world.run({"model": "medium"}, {"model": "medium"})
    spent, rt = world.pipeline.spending, world.rt(first)
    assert spent.requests == {("default", "medium"): 2} and world.rt(second)["cache"] == "exact"
    assert spent.tokens["default", "medium", "input"] == rt["input_tokens"]
    assert spent.tokens["default", "medium", "output"] == rt["tokens"]
    assert spent.nano_usd["default", "medium"] == round(rt["cost_usd"] * 1e9)


def test_tenants_are_bounded(world: World) -> None:
    answer = Answer(
        ChatRequest.model_validate({"messages": [{"role": "user", "content": "q"}]}), world.pipeline._tiers[0]
    )
    spending = Spending()
    for number in range(MAX_TENANTS + 20):
        spending.count(f"tenant-{number}", answer, Amount(1, 10, 5))
    spending.count("tenant-0", answer, Amount(1, 10, 5))
    assert len(spending.requests) == MAX_TENANTS + 1
    assert spending.requests[OTHERS, "simple"] == 20 and spending.requests["tenant-0", "simple"] == 2


def test_metrics_tell_what_changed(world: World) -> None:
    metrics = AfterwardsMetrics(world.pipeline.spending, world.pipeline.afterwards)
    world.engines.texts["simple"] = f"Pay with {CARD}."
    world.run({})
    for _ in range(160):
        world.monitor.add(Sample("simple", None, len(world.engines.asked) < 1, time.time()))
    for _ in range(2):
        metrics.publish()
    assert metrics._requests._family.metrics["defaultsimple"].value == 1
    assert metrics._cost._family.metrics["defaultsimple"].value > 0
    assert metrics._flagged._family.metrics["card_numbersent"].value == 1
    assert metrics._samples._family.metrics["simplepoor"].value == 160
    assert metrics._doubtful._family.metrics["simple"].value == 1
    assert metrics._clusters._family.metrics["simple"].value == 0
    assert metrics._calls._family.metrics["simple"].value >= 1
    assert set(metrics._dropped._family.metrics) == {"not_allowed", "too_long", "full", "failed", "no_vector"}


def test_is_doubtful_costs_a_request_next_to_nothing() -> None:
    policy = QualityPolicy()
    monitor = Monitor(policy, dict.fromkeys(policy.tiers, ""))
    randomness = np.random.default_rng(0)
    vectors = randomness.normal(size=(400, 384)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for vector in vectors:
        monitor.add(Sample("simple", vector, True, 1.0))
    monitor.is_doubtful("simple", vectors[0])
    started_s = time.thread_time()
    for vector in vectors:
        monitor.is_doubtful("simple", vector)
    assert (time.thread_time() - started_s) / len(vectors) < 0.0005
