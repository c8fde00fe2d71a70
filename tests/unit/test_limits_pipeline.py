"""Limits on a call's way through the pipeline, over the scripted engine in this process."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_process import InProcessEngines, RecordingSink
from tokenizers import Tokenizer

from orchestrator.cache.lookup import Lookup
from orchestrator.cache.stage import AnswerCache
from orchestrator.cache.store import MemoryStore
from orchestrator.call import Call
from orchestrator.config import CachePolicy, Limits, Tiers, load_tiers
from orchestrator.engines.scripted import ScriptedStepper, Settings
from orchestrator.errors import (
    ApiError,
    BudgetError,
    CancelledError,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    NotAllowedError,
    OverloadedError,
    RateLimitError,
    UnauthorizedError,
)
from orchestrator.limits.deadline import parse_deadline
from orchestrator.limits.gate import Gate
from orchestrator.limits.keys import Keyring, digest_of
from orchestrator.limits.ledger import Amount, MemoryLedger, Quota, Standing
from orchestrator.limits.redis_ledger import RedisLedger
from orchestrator.pipeline import Pipeline


class NoCounts:
    def count_answer(self, kind: str) -> None: ...

    def count_rejection(self, guard: str) -> None: ...

    def count_store_error(self) -> None: ...


async def no_vector(text: str) -> None:
    return None


def exact_cache() -> AnswerCache:
    store = MemoryStore(1 << 20)
    policy = CachePolicy(ttl_s=60, max_bytes=1 << 20, semantic=False, max_temperature=0.0)
    return AnswerCache(policy, Lookup(store, store.clock), no_vector, NoCounts())


class World:
    """A pipeline with keys; every caller has a secret that is his id."""

    def __init__(self, root: Path, engines: InProcessEngines, path: Path, limits: Limits, cache: Any) -> None:
        self.engines = engines
        self.ledger = MemoryLedger()
        self._path = path
        self._keys: list[dict[str, Any]] = []
        self.add("everything")
        self.gate = Gate(Keyring(path), self.ledger)
        tiers = load_tiers(root / "tiers.toml")
        self.prices = tiers.tier[0].input_price_per_million_tokens, tiers.tier[0].output_price_per_million_tokens
        self.pipeline = Pipeline(Tiers(tier=tiers.tier, limits=limits), root, engines, gate=self.gate, cache=cache)

    def add(self, name: str, **rights: Any) -> None:
        self._keys.append({"id": name, "tenant": f"{name}-tenant", "digest": digest_of(name), **rights})
        self._path.write_text(json.dumps({"keys": self._keys}))

    def call(self, name: str | None, script: dict[str, Any] | None = None, **fields: Any) -> tuple[Call, RecordingSink]:
        headers = {name: fields.pop(name) for name in ("x-deadline-ms", "x-tenant") if name in fields}
        text = "Hi" if script is None else f"#script {json.dumps(script)}"
        body = json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()
        sink = RecordingSink()
        parameters = headers if name is None else {"authorization": f"Bearer {name}", **headers}
        return Call(body, parameters, sink), sink

    async def run(self, name: str | None, script: dict[str, Any] | None = None, **fields: Any) -> RecordingSink:
        call, sink = self.call(name, script, **fields)
        await self.pipeline.run(call)
        assert sink.num_ends == 1
        return sink

    def failure(self, name: str | None, script: dict[str, Any] | None = None, **fields: Any) -> ApiError:
        sink = asyncio.run(self.run(name, script, **fields))
        assert sink.error is not None
        return sink.error

    async def used(self, name: str) -> Amount:
        standing = Standing(Quota(), await self.ledger.reserve(name, Quota(), Amount()))
        return Amount(*(standing.used(kind) for kind in "rtm"))


def request_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, caplog.messages) if line["event"] == "request"]


MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(artifact: Callable[[str], Path], tokenizer: Tokenizer, tmp_path: Path) -> MakeWorld:
    def make(cache: AnswerCache | None = None, **limits: int) -> World:
        settings = Settings(engine="scripted", max_batch_size=8, context_window=8192, vocab_size=49152)
        engines = InProcessEngines(lambda: ScriptedStepper(tokenizer, settings))
        return World(artifact("scripted"), engines, tmp_path / "keys.json", Limits(**limits), cache)

    return make


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return make_world()


def cost(world: World, num_prompt: int, num_answer: int) -> int:
    return round(1000 * (num_prompt * world.prices[0] + num_answer * world.prices[1]))


# --- whose call, and what it may ---------------------------------------------------------------------------


def test_without_a_valid_key_nothing_is_looked_at(world: World) -> None:
    assert isinstance(world.failure(None), UnauthorizedError)
    error = world.failure("of-nobody", model="not even parsed", temperature="x")
    assert isinstance(error, UnauthorizedError) and "of-nobody" not in error.to_message()
    assert world.gate.refusals == {"invalid_api_key": 2}
    assert world.engines.requests == []


def test_only_the_key_says_whose_call_it_is(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    asyncio.run(world.run("everything", **{"x-tenant": "other", "user": "other"}))
    (line,) = (json.loads(record.message) for record in caplog.records if '"request"' in record.message)
    assert (line["key"], line["tenant"]) == ("everything", "everything-tenant")


def test_tiers_that_the_key_does_not_allow(world: World) -> None:
    world.add("dear", tiers=["complex", "expert"])
    world.add("embeds", tiers=["embedding"])
    sink = asyncio.run(world.run("dear", model="auto"))
    assert sink.events[-1]["rt"]["tier"] == "complex"
    error = world.failure("dear", model="simple")
    assert isinstance(error, NotAllowedError) and error.param == "model"
    assert error.message == "model: this key may not use 'simple'; it may use complex, expert"
    assert isinstance(world.failure("embeds", model="auto"), NotAllowedError)
    assert world.failure("dear", model="nothing").code == "model_not_found"


# --- what it pays --------------------------------------------------------------------------------------------


def test_an_answer_pays_what_it_took(world: World) -> None:
    world.add("pays", tokens_per_minute=1000, usd_per_day=1.0, requests_per_minute=5)

    async def work() -> tuple[RecordingSink, Amount]:
        sink = await world.run("pays", {"text": "a b c d e"}, max_tokens=400)
        return sink, await world.used("pays")

    sink, used = asyncio.run(work())
    usage = sink.events[-1]["usage"]
    num_prompt, num_answer = usage["prompt_tokens"], usage["completion_tokens"]
    assert num_answer < 20
    assert used == Amount(1, num_prompt + num_answer, cost(world, num_prompt, num_answer))
    assert sink.headers["x-ratelimit-limit-tokens"] == "1000"
    assert sink.headers["x-ratelimit-remaining-tokens"] == str(1000 - num_prompt - 400)  # reserved by then
    assert sink.headers["x-ratelimit-remaining-requests"] == "4"


def test_every_choice_is_reserved(world: World) -> None:
    world.add("pays", tokens_per_minute=300)
    assert isinstance(world.failure("pays", max_tokens=100, n=3), RateLimitError)
    assert asyncio.run(world.run("pays", {"text": "a"}, max_tokens=100, n=2)).error is None


def test_money_is_reserved_at_the_tiers_prices(world: World) -> None:
    world.add("poor", usd_per_day=cost(world, 0, 100) / 1e9)
    error = world.failure("poor", max_tokens=100)
    assert isinstance(error, BudgetError) and world.engines.requests == []
    assert asyncio.run(world.run("poor", {"text": "a"}, max_tokens=20)).error is None


def test_one_that_was_left_pays_for_what_was_generated(world: World) -> None:
    world.add("leaves", tokens_per_minute=10_000, usd_per_day=1.0)

    async def work() -> tuple[int, int, Amount]:
        call, sink = world.call("leaves", {"text": "x " * 900, "itl_ms": 2}, max_tokens=900, stream=True)
        running = asyncio.create_task(world.pipeline.run(call))
        while len(sink.events) < 40:
            await asyncio.sleep(0.001)
        await call.cancel()
        await running
        assert isinstance(sink.error, CancelledError)
        (asked,) = world.engines.requests
        return len(asked.input_ids), len(sink.events), await world.used("leaves")

    num_prompt, num_events, used = asyncio.run(work())
    num_answer = used.tokens - num_prompt
    assert num_events - 2 <= num_answer <= num_events + 5 < 100
    assert used == Amount(1, num_prompt + num_answer, cost(world, num_prompt, num_answer))


def test_one_that_failed_pays_for_nothing_it_did_not_get(world: World) -> None:
    world.add("fails", tokens_per_minute=1000)

    async def work() -> list[Amount]:
        found = []
        for fail_from in ({"fail_after": 0}, {"text": "a b c d", "fail_after": 2}):
            before = await world.used("fails")
            sink = await world.run("fails", fail_from, max_tokens=50)
            assert isinstance(sink.error, EngineError)
            found.append((await world.used("fails")).minus(before))
        return found

    nothing, something = asyncio.run(work())
    assert nothing == Amount()
    assert something.requests == 0 and something.tokens > 2


@pytest.mark.parametrize("store", ["memory", "redis"])
def test_the_engines_failing_uses_up_no_requests(world: World, request: pytest.FixtureRequest, store: str) -> None:
    name = f"fails-{store}"
    world.add(name, requests_per_minute=2, tokens_per_minute=5000, usd_per_day=1.0)

    async def work() -> list[ApiError | None]:
        if store == "redis":
            world.ledger = world.gate._ledger = RedisLedger(request.getfixturevalue("redis_url"))  # type: ignore[assignment]
        errors = [(await world.run(name, {"fail_after": 0}, max_tokens=5)).error for _ in range(4)]
        assert await world.used(name) == Amount()
        # What the caller does wrong is a request, however late it is found.
        world.engines.refusal = "guided_decoding_guide: not this"
        refused = await world.run(name, {"text": "a"}, max_tokens=5, guided_regex="a")
        assert isinstance(refused.error, InvalidRequestError) and (await world.used(name)).requests == 1
        world.engines.refusal = None
        errors += [(await world.run(name, {"text": "a"}, max_tokens=5)).error for _ in range(2)]
        await world.ledger.close()
        return errors

    *failed, good, over = asyncio.run(work())
    assert all(isinstance(error, EngineError) for error in failed)
    assert good is None and isinstance(over, RateLimitError)


def test_who_shares_a_failing_answer_has_asked_for_nothing(make_world: MakeWorld) -> None:
    world = make_world(exact_cache())
    world.add("shares", requests_per_minute=5)

    async def work() -> Amount:
        script = {"text": "a b c", "first_token_ms": 30, "fail_after": 0}
        sinks = await asyncio.gather(*(world.run("shares", script, temperature=0) for _ in range(3)))
        assert all(isinstance(sink.error, EngineError) for sink in sinks)
        return await world.used("shares")

    assert asyncio.run(work()) == Amount()


def test_one_that_never_reached_an_engine_takes_nothing(world: World) -> None:
    world.add("asks", tokens_per_minute=1000, requests_per_minute=2)

    async def work() -> Amount:
        for _ in range(5):
            sink = await world.run("asks", tools=[{"type": "function", "function": {"name": "f"}}], max_tokens=10**6)
            assert isinstance(sink.error, InvalidRequestError)
        return await world.used("asks")

    assert asyncio.run(work()) == Amount()


def test_many_at_once_never_pass_the_limit(world: World) -> None:
    """A hundred calls side by side, each cut off somewhere else; all that was granted counts at every moment."""
    world.add("many", tokens_per_minute=2000, requests_per_minute=60, usd_per_day=0.001)

    async def work() -> tuple[list[ApiError | None], Amount]:
        most = Amount()

        async def watch() -> None:
            nonlocal most
            while True:
                most = Amount(*map(max, most, await world.used("many")))
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        sinks = await asyncio.gather(
            *(world.run("many", {"text": "a b c", "itl_ms": 1}, max_tokens=5 + index % 7) for index in range(100))
        )
        watching.cancel()
        return [sink.error for sink in sinks], most

    errors, most = asyncio.run(work())
    assert most.requests <= 60 and most.tokens <= 2000 and most.nano_usd <= 1_000_000
    assert all(error is None or isinstance(error, (RateLimitError, BudgetError)) for error in errors)
    assert 5 < errors.count(None) <= 60


# --- when it waits, and when not -----------------------------------------------------------------------------


def test_interactive_before_batch(make_world: MakeWorld) -> None:
    world = make_world(max_running_requests=1)
    world.add("slow", priority="batch")
    order: list[str] = []

    async def ask(name: str, label: str) -> None:
        await world.run(name, {"text": "a b", "itl_ms": 10})
        order.append(label)

    async def work() -> None:
        tasks = []
        for name, label in (("slow", "b1"), ("slow", "b2"), ("slow", "b3"), ("everything", "i1"), ("everything", "i2")):
            tasks.append(asyncio.create_task(ask(name, label)))
            await asyncio.sleep(0)
        await asyncio.sleep(0.005)
        assert world.pipeline.dispatch.num_waiting() == {"interactive": 2, "batch": 2, "aside": 0}
        await asyncio.gather(*tasks)

    asyncio.run(work())
    assert order == ["b1", "i1", "i2", "b2", "b3"]


def test_one_that_leaves_while_it_waits_takes_nothing(make_world: MakeWorld) -> None:
    world = make_world(max_running_requests=1)
    world.add("waits", requests_per_minute=5, tokens_per_minute=5000)

    async def work() -> Amount:
        runs = asyncio.create_task(world.run("everything", {"text": "x " * 200, "itl_ms": 5}, max_tokens=200))
        await asyncio.sleep(0.05)
        call, sink = world.call("waits")
        waits = asyncio.create_task(world.pipeline.run(call))
        await asyncio.sleep(0.02)
        await call.cancel()
        await asyncio.wait_for(waits, 1)
        assert isinstance(sink.error, CancelledError) and len(world.engines.requests) == 1
        runs_on = not runs.done()
        await runs
        assert runs_on
        return await world.used("waits")

    assert asyncio.run(work()) == Amount()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_key", [False, True])
def test_a_deadline_ends_what_runs(world: World, stream: bool, by_key: bool) -> None:
    world.add("hurried", tokens_per_minute=5000, **({"deadline_ms": 500} if by_key else {}))
    headers = {} if by_key else {"x-deadline-ms": "500"}

    async def work() -> tuple[RecordingSink, float, Amount]:
        started_s = time.monotonic()
        script = {"text": "x " * 900, "itl_ms": 10}
        sink = await world.run("hurried", script, max_tokens=900, stream=stream, **headers)
        return sink, time.monotonic() - started_s, await world.used("hurried")

    sink, took_s, used = asyncio.run(work())
    assert isinstance(sink.error, DeadlineError) and sink.error.status == 504
    assert "the deadline of 500 ms has passed" in sink.error.message
    assert 0.49 < took_s < 3
    assert bool(sink.events) == stream
    (asked,) = world.engines.requests
    assert set(world.engines.stopped) == {asked.request_id}
    assert len(asked.input_ids) <= used.tokens < len(asked.input_ids) + 200


def test_a_deadline_that_cannot_be_met_is_refused_at_once(make_world: MakeWorld) -> None:
    world = make_world(max_running_requests=1)

    async def work() -> tuple[RecordingSink, float]:
        await world.run("everything", {"text": "x " * 20, "itl_ms": 20}, max_tokens=20)
        started_s = time.monotonic()
        return await world.run("everything", max_tokens=20, **{"x-deadline-ms": "50"}), time.monotonic() - started_s

    sink, took_s = asyncio.run(work())
    assert isinstance(sink.error, OverloadedError) and sink.error.status == 503
    assert "the deadline cannot be met" in sink.error.message and sink.error.headers == {"retry-after": "30"}
    assert took_s < 0.3 and len(world.engines.requests) == 1


@pytest.mark.parametrize("text", ["", "0", "-5", "1.5", "abc", "3600001", "٣", " 5", "9" * 400])
def test_a_wrong_deadline_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="x-deadline-ms: must be whole milliseconds from 1 to 3600000") as got:
        parse_deadline(text)
    assert len(got.value.message) < 200


# --- for what does not pass the orchestrator -----------------------------------------------------------------


# --- shared answers ------------------------------------------------------------------------------------------


@pytest.fixture
def sharing_world(make_world: MakeWorld) -> World:
    return make_world(exact_cache())


SLOW = {"text": "one two three four five six", "first_token_ms": 30, "itl_ms": 20}


def test_an_answer_is_paid_once_and_a_stored_one_is_a_request_without_tokens(sharing_world: World) -> None:
    world = sharing_world

    async def run() -> list[Amount]:
        world.add("poor", tokens_per_minute=5000)
        seen = []
        await asyncio.gather(world.run("poor", SLOW, temperature=0), world.run("poor", SLOW, temperature=0))
        seen.append(await world.used("poor"))
        await world.pipeline.finish()
        await world.run("poor", SLOW, temperature=0)
        seen.append(await world.used("poor"))
        return seen

    together, stored = asyncio.run(run())
    (request,) = world.engines.requests
    num_answer = together.tokens - len(request.input_ids)
    assert together.requests == 2 and 6 <= num_answer < 20
    assert together.nano_usd == cost(world, len(request.input_ids), num_answer)
    assert stored == together._replace(requests=3)


def test_who_hears_the_end_pays_for_who_left(sharing_world: World, caplog: pytest.LogCaptureFixture) -> None:
    world = sharing_world
    caplog.set_level(logging.INFO, "orchestrator.requests")

    async def run() -> tuple[Amount, Amount, RecordingSink]:
        for name in ("leaver", "stayer"):
            world.add(name, tokens_per_minute=5000, tenant="both")
        leaver, _ = world.call("leaver", SLOW, temperature=0)
        first = asyncio.create_task(world.pipeline.run(leaver))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(world.run("stayer", SLOW, temperature=0))
        await asyncio.sleep(0.05)
        await leaver.cancel()
        await first
        return await world.used("leaver"), await world.used("stayer"), await second

    leaver, _, sink = asyncio.run(run())
    stayer = asyncio.run(world.used("stayer"))
    assert sink.text == SLOW["text"] and len(world.engines.requests) == 1
    assert leaver == Amount(1)
    assert stayer.tokens > len(world.engines.requests[0].input_ids)
    # What he is told, and what is logged, is what he pays.
    told = sink.events[-1]["rt"]
    assert told["shared"] and round(told["cost_usd"] * 1e9) == stayer.nano_usd > 0
    costs = {line["key"]: line["cost_usd"] for line in request_lines(caplog)}
    assert costs == {"leaver": 0.0, "stayer": told["cost_usd"]}


def test_one_payer_is_told_of_the_cost_and_who_shares_of_none(
    sharing_world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world = sharing_world
    caplog.set_level(logging.INFO, "orchestrator.requests")

    async def run() -> list[RecordingSink]:
        return list(await asyncio.gather(*(world.run("everything", SLOW, temperature=0) for _ in range(3))))

    told = [sink.events[-1]["rt"]["cost_usd"] for sink in asyncio.run(run())]
    assert sum(cost > 0 for cost in told) == 1
    assert sorted(line["cost_usd"] for line in request_lines(caplog)) == sorted(told)


@pytest.mark.parametrize(
    ("script", "num_paid"), [({"fail_after": 0}, 0), ({"text": "a b c d", "fail_after": 2}, 1), ({"text": "a"}, 1)]
)
def test_the_log_has_the_cost_that_somebody_was_charged(
    world: World, caplog: pytest.LogCaptureFixture, script: dict[str, Any], num_paid: int
) -> None:
    caplog.set_level(logging.INFO, "orchestrator.requests")
    asyncio.run(world.run("everything", script, max_tokens=50))
    (line,) = request_lines(caplog)
    charged = sum(world.pipeline.spending.nano_usd.values())
    assert round(line["cost_usd"] * 1e9) == charged and bool(charged) == num_paid


def test_who_asks_interactively_does_not_wait_with_a_batch_request(make_world: MakeWorld) -> None:
    world = make_world(exact_cache(), max_running_requests=1)
    world.add("slow", priority="batch", tenant="everything-tenant")
    order: list[str] = []

    async def ask(name: str, label: str, script: dict[str, Any]) -> None:
        await world.run(name, script, temperature=0)
        order.append(label)

    async def work() -> None:
        tasks = []
        for name, label in (("slow", "runs"), ("slow", "first"), ("slow", "same"), ("everything", "same, now")):
            # The first runs until all others wait.
            script = {"text": label[:4] * (20 if label == "runs" else 1), "itl_ms": 10}
            tasks.append(asyncio.create_task(ask(name, label, script)))
            await asyncio.sleep(0.002)
        tasks.append(asyncio.create_task(ask("slow", "same, batch again", {"text": "same", "itl_ms": 10})))
        await asyncio.gather(*tasks)

    asyncio.run(work())
    assert order[:2] == ["runs", "same, now"] and order[2] == "same, batch again"  # which may ride with it
    assert len(world.engines.requests) == 4


def test_a_deadline_ends_one_callers_wait_alone(sharing_world: World) -> None:
    world = sharing_world

    async def run() -> tuple[RecordingSink, RecordingSink]:
        hasty, patient = await asyncio.gather(
            world.run("everything", SLOW, temperature=0, **{"x-deadline-ms": "70"}),
            world.run("everything", SLOW, temperature=0),
        )
        return hasty, patient

    hasty, patient = asyncio.run(run())
    assert isinstance(hasty.error, DeadlineError)
    assert patient.text == SLOW["text"] and len(world.engines.requests) == 1
