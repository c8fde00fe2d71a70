"""Quotas: what is used never passes the limit, whatever comes in whatever order, in this process and in Redis."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import BudgetError, LimitsUnavailableError, RateLimitError
from orchestrator.limits.gate import Gate, Permit, Price
from orchestrator.limits.guarded_ledger import PAUSE_S, SETTLE_WITHIN_S, GuardedLedger
from orchestrator.limits.keys import EVERYBODY, Key
from orchestrator.limits.ledger import Amount, Ledger, MemoryLedger, Quota, Reserved, Standing
from orchestrator.limits.redis_ledger import RedisLedger
from perf.redis_server import RedisServer

NOON = 1_800_000_000.25


class Clock:
    def __init__(self, now_s: float = NOON) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def key(**limits: object) -> Key:
    return Key.model_validate({"id": uuid.uuid4().hex, "tenant": "acme", "digest": "0" * 64, **limits})


def used(reserved: Reserved) -> tuple[int, int, int]:
    standing = Standing(Quota(), reserved)
    return standing.used("r"), standing.used("t"), standing.used("m")


MakeLedgers = Callable[[], list[Ledger]]


@pytest.fixture(params=["memory", "redis"])
def make_ledgers(request: pytest.FixtureRequest) -> MakeLedgers:
    """Makes the ledgers of two orchestrators, which in Redis are one."""
    if request.param == "memory":
        ledger = MemoryLedger()
        return lambda: [ledger, ledger]
    url = request.getfixturevalue("redis_url")
    return lambda: [RedisLedger(url), RedisLedger(url)]


@asynccontextmanager
async def open_gates(make_ledgers: MakeLedgers) -> AsyncIterator[list[Gate]]:
    gates = [Gate(None, ledger) for ledger in make_ledgers()]
    yield gates
    for gate in gates:
        await gate.close()


async def attempt(gate: Gate, caller: Key, amount: Amount) -> Permit | None:
    try:
        return await gate.reserve(caller, amount)
    except (RateLimitError, BudgetError):
        return None


# --- both stores ---------------------------------------------------------------------------------------------


def test_five_at_once_of_a_hundred_tokens_a_minute(make_ledgers: MakeLedgers) -> None:
    """Case R05."""

    async def work() -> list[int]:
        caller = key(tokens_per_minute=100)
        asked = [58, 81, 40, 175, 60]
        async with open_gates(make_ledgers) as gates:
            permits = await asyncio.gather(
                *(attempt(gates[index % 2], caller, Amount(1, tokens)) for index, tokens in enumerate(asked))
            )
        return [tokens for tokens, permit in zip(asked, permits) if permit is not None]

    granted = asyncio.run(work())
    assert granted and sum(granted) <= 100
    assert sum(granted) >= 58  # the first to come is not refused


def test_first_requests_at_once_of_a_tiny_budget(make_ledgers: MakeLedgers) -> None:
    """Case R06: of a key that nobody knew before, no reservation passes the sum."""

    async def work() -> int:
        caller = key(usd_per_day=0.000_001)
        async with open_gates(make_ledgers) as gates:
            permits = await asyncio.gather(
                *(attempt(gates[index % 2], caller, Amount(1, 9, 900)) for index in range(8))
            )
        return sum(permit is not None for permit in permits)

    assert asyncio.run(work()) == 1


@pytest.mark.parametrize(
    ("limits", "amount", "fit"),
    [
        ({"requests_per_minute": 37}, Amount(1, 5, 5), 37),
        ({"tokens_per_minute": 1000}, Amount(1, 30, 5), 33),
        ({"usd_per_day": 0.001}, Amount(1, 30, 30_000), 33),
        ({"requests_per_minute": 50, "tokens_per_minute": 900, "usd_per_day": 1.0}, Amount(1, 30, 30_000), 30),
    ],
)
def test_a_hundred_at_once_from_two_orchestrators(
    make_ledgers: MakeLedgers, limits: dict[str, object], amount: Amount, fit: int
) -> None:
    """Exactly as many as fit; and what the ones that end give back, others may have."""

    async def work() -> tuple[int, int, int]:
        caller = key(**limits)
        async with open_gates(make_ledgers) as gates:
            permits = await asyncio.gather(*(attempt(gates[index % 2], caller, amount) for index in range(100)))
            granted = [permit for permit in permits if permit is not None]
            await asyncio.gather(*(permit.settle(Amount()) for permit in granted[:10]))
            again = await asyncio.gather(*(attempt(gates[index % 2], caller, amount) for index in range(100)))
            for permit in granted[:10]:
                await permit.settle(Amount())  # once is enough
            last = await attempt(gates[0], caller, amount)
        return len(granted), sum(permit is not None for permit in again), int(last is not None)

    assert asyncio.run(work()) == (fit, 10, 0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "settle", "refund"]),
        st.integers(0, 1),  # which orchestrator
        st.integers(0, 60),  # tokens
        st.integers(0, 7),  # which of the open ones
    ),
    max_size=40,
)


@given(STEPS)
def test_no_order_of_things_passes_the_limit(redis_url: str, steps: list[tuple[str, int, int, int]]) -> None:
    """Against a model, on both stores: what is granted and held never passes the quota, and nothing fitting is refused.

    Within a second of time, so that nothing leaves the window.
    """
    limit = 100

    async def work(ledgers: list[Ledger]) -> None:
        caller, held = key(tokens_per_minute=limit, requests_per_minute=30), list[tuple[Permit, int]]()
        gates = [Gate(None, ledger) for ledger in ledgers]
        total = num_requests = 0
        for action, which, tokens, index in steps:
            if action == "reserve":
                permit = await attempt(gates[which], caller, Amount(1, tokens))
                assert (permit is not None) == (total + tokens <= limit and num_requests < 30)
                if permit is not None:
                    total, num_requests = total + tokens, num_requests + 1
                    held.append((permit, tokens))
            elif held:
                permit, reserved = held.pop(index % len(held))
                kept = 0 if action == "refund" else min(tokens, reserved)
                await permit.settle(Amount(int(action != "refund"), kept))
                total, num_requests = total - reserved + kept, num_requests - (action == "refund")
            assert total <= limit
        for gate in gates:
            await gate.close()

    memory = MemoryLedger(Clock())
    asyncio.run(work([memory, memory]))
    asyncio.run(work([RedisLedger(redis_url), RedisLedger(redis_url)]))


def test_keys_do_not_share(make_ledgers: MakeLedgers) -> None:
    async def work() -> list[bool]:
        async with open_gates(make_ledgers) as gates:
            callers = [key(requests_per_minute=1), key(requests_per_minute=1)]
            return [await attempt(gates[0], caller, Amount(1)) is not None for caller in (*callers, *callers)]

    assert asyncio.run(work()) == [True, True, False, False]


def test_redis_lets_go_of_what_is_over(redis_url: str) -> None:
    async def work() -> tuple[list[bytes], list[bytes], int]:
        ledger = RedisLedger(redis_url)
        account, name = "old", "triton-realtime:limits:1:old"
        now_s = int(time.time())
        live = {f"t:{now_s - 50}": 7, f"m:{now_s // 86400}": 3}
        over = {f"t:{now_s - 62}": 90, f"r:{now_s - 3000}": 5, f"m:{now_s // 86400 - 1}": 8}
        await ledger._redis.hset(name, mapping={**live, **over})
        reserved = await ledger.reserve(account, Quota(tokens=100), Amount(1, 93))
        assert reserved.granted and used(reserved) == (1, 100, 3)
        fields = await ledger._redis.hkeys(name)
        await ledger.settle(account, reserved._replace(now_s=now_s - 3000), Amount(0, -93))  # its slot is gone
        after, ttl_s = await ledger._redis.hkeys(name), await ledger._redis.ttl(name)
        await ledger.close()
        return fields, after, ttl_s

    fields, after, ttl_s = asyncio.run(work())
    assert len(fields) == 4 and fields == after
    assert 86400 < ttl_s <= 86460


# --- windows, with a clock of ours ---------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 60)), max_size=60))
def test_no_sixty_seconds_hold_more_than_the_limit(arrivals: list[tuple[float, int]]) -> None:
    clock, limit = Clock(), 100
    gate, caller = Gate(None, MemoryLedger(clock)), key(tokens_per_minute=limit)
    granted = []
    for pause_s, tokens in arrivals:
        clock.now_s += pause_s
        recent = sum(count for at_s, count in granted if clock.now_s - at_s < 61)
        if asyncio.run(attempt(gate, caller, Amount(1, tokens))) is not None:
            granted.append((clock.now_s, tokens))
        else:
            assert recent + tokens > limit, "refused although there was room"
        assert sum(count for at_s, count in granted if clock.now_s - at_s <= 60) <= limit


def test_what_was_refused_fits_when_it_was_told_to_come_again() -> None:
    clock = Clock()
    gate, caller = Gate(None, MemoryLedger(clock)), key(tokens_per_minute=100)

    async def work() -> None:
        await gate.reserve(caller, Amount(1, 30))
        clock.now_s += 10
        await gate.reserve(caller, Amount(1, 60))
        clock.now_s += 5.5
        with pytest.raises(RateLimitError) as caught:
            await gate.reserve(caller, Amount(1, 40))
        assert caught.value.headers == {
            "retry-after": "46",  # the 30 leave at 61 s from their second's begin
            "x-ratelimit-limit-tokens": "100",
            "x-ratelimit-remaining-tokens": "10",
            "x-ratelimit-reset-tokens": "56s",
        }
        clock.now_s += 44
        assert await attempt(gate, caller, Amount(1, 40)) is None
        clock.now_s += 2
        await gate.reserve(caller, Amount(1, 40))

    asyncio.run(work())


def test_what_can_never_fit_is_not_to_be_tried_again() -> None:
    gate = Gate(None, MemoryLedger(Clock()))
    with pytest.raises(RateLimitError, match="may take 175 tokens, and this key has 100 in a minute") as caught:
        asyncio.run(gate.reserve(key(tokens_per_minute=100), Amount(1, 175)))
    assert caught.value.headers["retry-after"] == "60"
    assert caught.value.headers["x-should-retry"] == "false"


def test_money_is_the_days_own() -> None:
    clock = Clock(86400 * 20000 + 86390.0)
    gate, caller = Gate(None, MemoryLedger(clock)), key(usd_per_day=0.01)

    async def work() -> None:
        spent = await gate.reserve(caller, Amount(1, 10, 6_000_000))
        with pytest.raises(BudgetError, match="may spend 0.01 USD a day; 0.006000 are spent") as caught:
            await gate.reserve(caller, Amount(1, 10, 5_000_000))
        assert caught.value.headers == {"retry-after": "10", "x-should-retry": "false"}
        await spent.settle(Amount(1, 4, 5_000_000))
        await gate.reserve(caller, Amount(1, 10, 5_000_000))
        clock.now_s += 10
        await gate.reserve(caller, Amount(1, 10, 10_000_000))

    asyncio.run(work())


def test_a_late_settlement_corrects_its_own_day() -> None:
    clock = Clock(86400 * 20000 + 86399.0)
    ledger, quota = MemoryLedger(clock), Quota(None, None, 100)

    async def work() -> tuple[int, int, int]:
        reserved = await ledger.reserve("a", quota, Amount(1, 0, 80))
        clock.now_s += 2
        await ledger.reserve("a", quota, Amount(1, 0, 50))
        await ledger.settle("a", reserved, Amount(0, 0, -70))
        return used(await ledger.reserve("a", quota, Amount(1, 0, 10)))

    assert asyncio.run(work())[2] == 60


def test_prices_are_exact() -> None:
    assert Price(0.15, 0.6).nano_usd(1_000_000, 1_000_000) == 750_000_000
    assert Price(0.05, 0.1).nano_usd(1, 1) == 150


def test_without_limits_nothing_is_counted() -> None:
    permit = asyncio.run(Gate().reserve(EVERYBODY, Amount(1, 10**9, 10**9)))
    assert permit.headers == {}
    asyncio.run(permit.settle(Amount()))


# --- a store that is gone ------------------------------------------------------------------------------------


def test_a_store_that_dies_and_comes_back() -> None:
    """Rates go on in this process, money does not; and no request hears of it otherwise."""
    server = RedisServer()
    server.start()
    clock = Clock(0.0)
    rates, money = key(requests_per_minute=3), key(requests_per_minute=3, usd_per_day=1.0)

    async def work() -> int:
        ledger = GuardedLedger(RedisLedger(server.url), timeout_s=2.0, clock=clock)
        gate = Gate(None, ledger)
        before = await gate.reserve(money, Amount(1, 0, 100))
        await gate.reserve(rates, Amount(1))
        server.kill()
        clock.now_s = 10.0
        granted = [await attempt(gate, rates, Amount(1)) is not None for _ in range(5)]
        assert granted == [True, True, False, False, False]  # one was told to the store
        with pytest.raises(LimitsUnavailableError) as caught:
            await gate.reserve(money, Amount(1, 0, 100))
        assert caught.value.headers == {"retry-after": "1"}
        await before.settle(Amount(1, 0, 50))  # later
        assert ledger.num_errors == 1  # the others did not even ask
        clock.now_s += PAUSE_S
        with pytest.raises(LimitsUnavailableError):
            await gate.reserve(money, Amount(1, 0, 100))
        server.start()
        clock.now_s += PAUSE_S
        await gate.reserve(money, Amount(1, 0, 100))
        await gate.close()
        return ledger.num_errors

    try:
        assert asyncio.run(work()) == 2
    finally:
        server.stop()


def test_what_could_not_be_settled_is_refunded_when_the_store_is_back(redis_url: str) -> None:
    """Once, also where the store did as it was told and its answer was lost."""

    class Stalls(RedisLedger):
        mode = ""

        async def settle(self, account: str, reserved: Reserved, change: Amount) -> None:
            if self.mode == "gone":
                raise OSError("gone")
            await super().settle(account, reserved, change)
            if self.mode == "lost":
                raise OSError("the answer was lost")

    async def work(mode: str) -> None:
        clock, store = Clock(0.0), Stalls(redis_url)
        ledger, asker = GuardedLedger(store, clock=clock), RedisLedger(redis_url)
        account = f"stalls-{mode}-{os.getpid()}"
        quota = Quota(nano_usd=1000)
        store.mode = mode
        for _ in range(2):
            reserved = await ledger.reserve(account, quota, Amount(1, 0, 500))
            await ledger.settle(account, reserved, Amount(0, 0, -450))
            clock.now_s += PAUSE_S
        assert not (await asker.reserve(account, quota, Amount(1, 0, 950))).granted
        store.mode = ""
        while ledger._unsettled or not (ledger._settling and ledger._settling.done()):
            clock.now_s += PAUSE_S
            await asyncio.sleep(0.02)
        held = await asker.reserve(account, Quota(), Amount())
        assert sum(used for field, used in held.fields.items() if field.startswith("m")) == 100
        await ledger.close()
        await asker.close()

    for mode in ("gone", "lost"):
        asyncio.run(work(mode))


def test_what_cannot_be_settled_for_long_stays_as_it_was_reserved() -> None:
    class Gone(MemoryLedger):
        num_asked = 0

        async def settle(self, account: str, reserved: Reserved, change: Amount) -> None:
            self.num_asked += 1
            raise OSError("gone")

    async def work() -> int:
        clock, store = Clock(0.0), Gone()
        ledger = GuardedLedger(store, clock=clock)
        reserved = await ledger.reserve("k", Quota(), Amount(1, 0, 500))
        await ledger.settle("k", reserved, Amount(0, 0, -450))
        clock.now_s += SETTLE_WITHIN_S + 1
        assert ledger._settling is not None
        await ledger._settling
        await ledger.close()
        return store.num_asked

    assert asyncio.run(work()) == 1


def test_a_store_that_hangs_costs_its_timeout_once() -> None:
    class Hanging(MemoryLedger):
        async def reserve(self, account: str, quota: Quota, amount: Amount) -> Reserved:
            await asyncio.sleep(60)
            raise AssertionError

    async def work() -> float:
        gate = Gate(None, GuardedLedger(Hanging(), timeout_s=0.05))
        started_s = time.monotonic()
        for _ in range(50):
            await gate.reserve(key(requests_per_minute=3), Amount(1))
        return time.monotonic() - started_s

    assert asyncio.run(work()) < 0.9


def test_the_address_of_the_store_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    url = f"redis://:hunter2@127.0.0.1:1/{os.getpid() % 9}"
    gate = Gate(None, GuardedLedger(RedisLedger(url)))
    asyncio.run(attempt(gate, key(requests_per_minute=1), Amount(1)))
    assert "the store of limits failed" in caplog.text
    assert "hunter2" not in caplog.text
