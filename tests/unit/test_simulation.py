"""The model against formulas: Little's law, M/M/1, M/D/1, M/M/c; nobody is lost; the same seed gives the same."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf.errors import PerfError
from perf.simulation.events import Simulation, Users, describe
from perf.simulation.replica import Service
from perf.simulation.traffic import Ask, Tier, Tokens, poisson

TICK_S = 0.001
ENDLESS = 1_000_000
TIER = Tier("simple", 1.0, Tokens(20), Tokens(10))


def one_by_one(max_running: int = 1) -> Service:
    """So many servers, each of whose requests takes a tick a token and disturbs no other."""
    return Service(
        ((1, TICK_S),), first_token_s=TICK_S, max_running=max_running, max_live=ENDLESS, steps_together=False
    )


def arrivals(rate: float, num: int, seed: int, draw_tokens: object) -> Iterator[tuple[float, Ask]]:
    chance, at_s = random.Random(seed), 0.0
    for _ in range(num):
        at_s += chance.expovariate(rate)
        yield at_s, Ask(TIER, 1, draw_tokens(chance))  # type: ignore[operator]


def mean_total_s(simulation: Simulation) -> float:
    requests = simulation.requests
    return sum(each.ended_s - each.arrived_s for each in requests if each.ended_s is not None) / len(requests)


# --- formulas ----------------------------------------------------------------------------------------------

MEAN_TOKENS = 100
MU = 1 / (MEAN_TOKENS * TICK_S)


def exponential(chance: random.Random) -> int:
    return max(1, round(chance.expovariate(1 / MEAN_TOKENS)))


@pytest.mark.parametrize("load", [0.3, 0.5, 0.7])
def test_one_server_with_exponential_times(load: float) -> None:
    simulation = Simulation(one_by_one(), 1)
    simulation.run(arrivals(load * MU, 20_000, 1, exponential))
    assert mean_total_s(simulation) == pytest.approx(1 / (MU - load * MU), rel=0.08)


@pytest.mark.parametrize("load", [0.3, 0.5, 0.7])
def test_one_server_with_constant_times(load: float) -> None:
    simulation = Simulation(one_by_one(), 1)
    simulation.run(arrivals(load * MU, 20_000, 2, lambda _: MEAN_TOKENS))
    waits_s = load / (2 * MU * (1 - load))  # Pollaczek and Khinchine
    assert mean_total_s(simulation) == pytest.approx(waits_s + 1 / MU, rel=0.06)


def test_one_server_request_by_request() -> None:
    """Lindley's recursion: each waits for what is left of the one before."""
    asked = list(arrivals(0.9 * MU, 2_000, 5, exponential))
    simulation = Simulation(one_by_one(), 1)
    simulation.run(asked)
    wait_s = last_s = last_took_s = 0.0
    for (at_s, ask), request in zip(asked, simulation.requests):
        wait_s = max(0.0, wait_s + last_took_s - (at_s - last_s))
        last_s, last_took_s = at_s, ask.output_tokens * TICK_S
        assert request.started_s == pytest.approx(at_s + wait_s)
        assert request.ended_s == pytest.approx(at_s + wait_s + last_took_s)


def test_several_servers_with_exponential_times() -> None:
    servers, load = 4, 0.7
    rate = load * servers * MU
    simulation = Simulation(one_by_one(servers), 1)
    simulation.run(arrivals(rate, 20_000, 3, exponential))
    offered = servers * load
    last = offered**servers / math.factorial(servers) / (1 - load)
    waiting = last / (sum(offered**n / math.factorial(n) for n in range(servers)) + last)  # Erlang's C
    assert mean_total_s(simulation) == pytest.approx(waiting / (servers * MU - rate) + 1 / MU, rel=0.06)


def test_an_engine_in_steps_that_cost_nothing_more_is_like_one() -> None:
    """Without a queue, and with steps as long for many as for one, each request takes its own steps and part of one."""
    simulation = Simulation(Service(((1, TICK_S),), max_running=ENDLESS, max_live=ENDLESS), 1)
    simulation.run(arrivals(20.0, 2_000, 4, lambda _: 100))
    assert mean_total_s(simulation) == pytest.approx(100 * TICK_S, rel=0.02)


# --- invariants --------------------------------------------------------------------------------------------

SERVICES = st.builds(
    Service,
    steps=st.sampled_from([((1, 0.01),), ((1, 0.01), (8, 0.02)), ((1, 0.002), (4, 0.002), (64, 0.05))]),
    prefill_s_per_token=st.sampled_from([0.0, 0.0005]),
    join_s=st.sampled_from([0.0, 0.01]),
    before_s=st.sampled_from([0.0, 0.005]),
    hit_s=st.just(0.003),
    first_token_s=st.sampled_from([0.0, 0.04]),
    step_tokens=st.sampled_from([16, 512]),
    max_running=st.integers(1, 12),
    max_live=st.sampled_from([3, 20, ENDLESS]),
    steps_together=st.booleans(),
)
TIERS = st.lists(
    st.builds(
        Tier,
        name=st.sampled_from(["simple", "expert"]),
        share=st.floats(0.1, 1),
        input_tokens=st.builds(Tokens, st.integers(1, 100), st.sampled_from([0.0, 0.7])),
        output_tokens=st.builds(Tokens, st.integers(1, 30), st.sampled_from([0.0, 0.7])),
        hit_rate=st.sampled_from([0.0, 0.3, 1.0]),
        deadline_s=st.sampled_from([None, 0.05, 0.5]),
        priority=st.sampled_from(["interactive", "batch"]),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=60, deadline=None)
@given(SERVICES, TIERS, st.integers(1, 3), st.floats(1, 60), st.integers(0, 10**6))
def test_nobody_is_lost_and_littles_law_holds(
    service: Service, tiers: list[Tier], num_replicas: int, rate: float, seed: int
) -> None:
    simulation = Simulation(service, num_replicas, machine_cores=1.5, per_machine=2)
    simulation.run(poisson(tiers, rate, 4.0, seed))
    requests = simulation.requests
    assert all(each.outcome for each in requests)
    assert all(replica.num_live == 0 for replica in simulation.replicas)
    for each in requests:
        assert each.ended_s is not None and each.ended_s >= each.arrived_s
        if each.outcome == "finished":
            assert each.first_s is not None and each.arrived_s <= each.first_s <= each.ended_s
        if each.outcome == "late":
            assert each.ends_at_s is not None and each.ended_s == each.ends_at_s
    # L = λW over the whole run, which begins and ends empty.
    spent_s = sum(each.ended_s - each.arrived_s for each in requests if each.ended_s is not None)
    assert simulation.mean_live * simulation.now_s == pytest.approx(spent_s, rel=1e-9, abs=1e-9)
    if requests:
        summary = describe(simulation)
        assert summary["arrived"] == len(requests) == sum(summary[name] for name in ("finished", "refused", "late"))


@settings(max_examples=20, deadline=None)
@given(SERVICES, TIERS, st.integers(0, 10**6))
def test_the_same_seed_gives_the_same(service: Service, tiers: list[Tier], seed: int) -> None:
    def once() -> object:
        simulation = Simulation(service, 2)
        simulation.run_users(Users(20, 0.5, tiers), 3.0, seed)
        return describe(simulation)

    assert once() == once()


def test_users_under_way_at_the_end_are_counted_apart() -> None:
    simulation = Simulation(one_by_one(), 1)
    simulation.run_users(Users(5, 0.01, [TIER]), 1.0, 0)
    summary = describe(simulation)
    assert summary["arrived"] == summary["finished"] + summary["under_way"]
    assert 0 < summary["under_way"] <= 5


# --- what it is for ----------------------------------------------------------------------------------------


def test_a_second_replica_doubles_what_is_served_if_it_has_cores_of_its_own() -> None:
    service = Service(((1, 0.02), (8, 0.03)), prefill_s_per_token=0.001, cores=2.0)

    def most(num_replicas: int, **machine: float) -> float:
        simulation = Simulation(service, num_replicas, **machine)  # type: ignore[arg-type]
        simulation.run((0.0, Ask(TIER, 20, 40)) for _ in range(240))
        return describe(simulation)["tokens_per_s"]

    alone = most(1)
    assert most(2) / alone >= 1.8
    assert most(2, machine_cores=2.0, per_machine=2) / alone == pytest.approx(1.0, abs=0.2)


def test_a_long_prompt_is_taken_in_chunks() -> None:
    """Who decodes beside it gets a token each chunk, and not one when the prompt is through."""
    service = Service(((1, 0.01),), prefill_s_per_token=0.001, step_tokens=100)
    simulation = Simulation(service, 1)
    simulation.run([(0.0, Ask(TIER, 1, 50)), (0.05, Ask(TIER, 1000, 1))])
    assert max(took_s for took_s, _ in simulation.replicas[0].step_gaps) == pytest.approx(0.11)


def test_who_joins_holds_up_the_others_once_however_long_his_prompt() -> None:
    service = Service(((1, 0.01),), prefill_s_per_token=0.001, join_s=0.03, step_tokens=100)
    simulation = Simulation(service, 1)
    simulation.run([(0.0, Ask(TIER, 1, 50)), (0.05, Ask(TIER, 150, 1))])
    gaps = [took_s for took_s, _ in simulation.replicas[0].step_gaps]
    assert [took_s for took_s in gaps if took_s > 0.0101] == pytest.approx([0.11, 0.09])


def test_a_deadline_that_cannot_be_met_is_refused_by_the_products_queue() -> None:
    tier = Tier("simple", 1.0, Tokens(1), Tokens(100), deadline_s=0.15)
    simulation = Simulation(one_by_one(), 1)
    simulation.run([(0.0, Ask(TIER, 1, 100)), *((0.2 + number / 1000, Ask(tier, 1, 100)) for number in range(4))])
    assert [each.outcome for each in simulation.requests] == ["finished", "finished", "refused", "refused", "refused"]


def test_step_times_between_and_beyond_what_was_measured() -> None:
    service = Service(((1, 0.01), (4, 0.016), (16, 0.04)))
    assert [service.step_s(size) for size in (0, 1, 2, 4, 10, 16, 28)] == pytest.approx(
        [0.01, 0.01, 0.012, 0.016, 0.028, 0.04, 0.064]
    )


def test_a_file_without_service_times_is_named(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"command": "ocr"}')
    with pytest.raises(PerfError, match=r"result\.json: no measured service times .*\nfix: python -m perf simulate"):
        Service.read(tmp_path / "result.json")
