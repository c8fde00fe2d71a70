"""`python -m perf simulate`: how many replicas so many users need, and what a second replica brings.

The model is `perf.simulation`, fed with the service times that `--validate` measured, which also holds it against the
real stack. Seeded: the same options and service times give the same figures.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from perf.errors import PerfError
from perf.report import format_table, say
from perf.simulation.events import Simulation, Users, describe
from perf.simulation.replica import Service
from perf.simulation.traffic import Ask, Tier, Tokens, draw
from perf.simulation.validate import BAR, validate

# The published split of requests over four tiers, 60, 20, 15 and 5 %, as chat: short questions, longer answers above.
TIERS = (
    Tier("simple", 0.60, Tokens(60, 0.6, 1024), Tokens(40, 0.6, 256), hit_rate=0.25),
    Tier("medium", 0.20, Tokens(120, 0.6, 2048), Tokens(80, 0.6, 512), hit_rate=0.15),
    Tier("complex", 0.15, Tokens(300, 0.6, 4096), Tokens(120, 0.6, 1024), hit_rate=0.05, ttft_limit_s=1.0),
    Tier("expert", 0.05, Tokens(400, 0.6, 4096), Tokens(160, 0.6, 1024), ttft_limit_s=2.0),
)
GOOD_SHARE = 0.95  # of those that are good when each is alone: what "enough replicas" means
TWO_BAR = 1.8
_WARM_UP_SHARE = 0.25  # of the simulated time, which does not count
_MOST_REPLICAS = 4096
_IDLE_REQUESTS = 2000


def simulate(
    service_file: Path,
    tiers_file: Path | None,
    users: Sequence[int],
    think_s: float,
    replicas: Sequence[int] | None,
    seconds: float,
    seed: int,
) -> tuple[str, dict[str, Any]]:
    """Simulate each number of users with `replicas`, or with the fewest that are enough; returns table and result.

    Raises `PerfError` for a file that says no service times or no tiers.
    """
    service = Service.read(service_file)
    tiers = TIERS if tiers_file is None else read_tiers(tiers_file)
    plans: list[dict[str, Any]] = []
    idle = idle_share(service, tiers, seed)
    if not idle:
        raise PerfError(
            "no request is good, not even alone: the engine is too slow\nfix: longer ttft_limit_s (--tiers)"
        )
    result: dict[str, Any] = {
        "command": "simulate",
        "service": service.as_json(),
        "two_replicas": two_replicas(service),
        "idle_good_share": idle,
        "think_s": think_s,
        "seed": seed,
        "plans": plans,
    }

    def plan(num_users: int, num_replicas: int) -> dict[str, Any]:
        say(f"{num_users} users, {num_replicas} replicas")
        simulation = Simulation(service, num_replicas)
        simulation.run_users(Users(num_users, think_s, tiers), seconds, seed)
        return describe(simulation, seconds * _WARM_UP_SHARE)

    try:
        for num_users in users:
            for num_replicas in replicas or [fewest(partial(plan, num_users), GOOD_SHARE * idle)]:
                plans.append({"users": num_users, "replicas": num_replicas, **plan(num_users, num_replicas)})
    except KeyboardInterrupt:
        result["interrupted"] = True
    return _table(result), result


def read_tiers(path: Path) -> list[Tier]:
    """A JSON list of `perf.simulation.traffic.Tier`; raises `PerfError` naming the field that is wrong."""
    try:
        tiers = TypeAdapter(list[Tier]).validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        raise PerfError(f"{path}: {'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}") from error
    if not tiers or any(tier.share <= 0 for tier in tiers):
        raise PerfError(f"{path}: share: each tier needs one above 0, and there must be a tier")
    return tiers


def idle_share(service: Service, tiers: Sequence[Tier], seed: int) -> float:
    """The share of good requests when each is alone: what an engine cannot do, no number of replicas does."""
    chance = random.Random(seed)
    simulation = Simulation(service, 1)
    simulation.run((number * 1000.0, draw(tiers, chance)) for number in range(_IDLE_REQUESTS))
    share: float = describe(simulation).get("goodput", {"share": 0.0})["share"]
    return share


def fewest(plan: Callable[[int], dict[str, Any]], goal: float) -> int:
    """The fewest replicas with which the share `goal` of all requests is good: doubled, then halved in between.

    Raises `PerfError` when `_MOST_REPLICAS` are not enough.
    """

    def are_enough(count: int) -> bool:
        return bool(plan(count).get("goodput", {"share": 0.0})["share"] >= goal)

    high = 1
    while not are_enough(high):
        high *= 2
        if high > _MOST_REPLICAS:
            raise PerfError(
                f"{_MOST_REPLICAS} replicas are not enough for {goal:.1%} good requests\nfix: fewer --users"
            )
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if are_enough(middle) else (middle, high)
    return high


def two_replicas(service: Service, cores: int | None = None) -> dict[str, Any]:
    """Tokens a second of two replicas ÷ of one, both with always enough to do.

    `own_cores`: each has the cores that it uses. `this_machine`: both share `cores`, by default this machine's.
    """
    cores = len(os.sched_getaffinity(0)) if cores is None else cores

    def most(num_replicas: int, machine_cores: float | None) -> float:
        num = 16 * service.max_running * num_replicas
        endless = dataclasses.replace(service, max_live=num)
        simulation = Simulation(endless, num_replicas, machine_cores=machine_cores, per_machine=num_replicas)
        simulation.run((0.0, Ask(TIERS[0], 60, 40)) for _ in range(num))
        return num / simulation.now_s

    own = most(2, None) / most(1, None)
    shared = most(2, cores) / most(1, cores)
    return {
        "own_cores": round(own, 3),
        "this_machine": round(shared, 3),
        "cores": cores,
        "cores_per_replica": service.cores,
        "bar": TWO_BAR,
    }


def validated(artifacts: Path, seconds: float, keep: Callable[[dict[str, Any]], object]) -> tuple[str, dict[str, Any]]:
    """`perf.simulation.validate`, with its table."""
    result = validate(artifacts, seconds, keep)
    rows: list[tuple[object, ...]] = []
    for target, loads in result["targets"].items():
        for load, each in loads.items():
            errors = (f"{error:+.1%}" for error in each["errors"].values())
            rows.append((f"{target}, load {load}", f"{each['rate']:.2f}/s", *errors, each["others_cores"]))
    header = ("simulated ÷ measured − 1", "rate", "TTFT p50", "total mean", "p50", "p95", "tokens/s", "others' cores")
    table = format_table(header, rows)
    if "service" in result:
        result["two_replicas"] = two_replicas(
            Service(**{**result["service"], "steps": tuple(map(tuple, result["service"]["steps"]))})
        )
    return f"{table}\n\nworst: {result.get('worst_error', 'nothing measured')} (bar {BAR})", result


def _table(result: dict[str, Any]) -> str:
    rows = []
    for each in result["plans"]:
        nothing: dict[str, Any] = {"p50": "", "p99": "", "p95": "", "share": 0.0}
        ttft, total = each.get("ttft_ms", nothing), each.get("total_ms", nothing)
        rows.append(
            (
                f"{each['users']} users, {each['replicas']} replicas",
                *(each["requests_per_s"], ttft["p50"], ttft["p99"], total["p95"]),
                *(each.get("goodput", nothing)["share"], each["refused"], each["busy"]),
            )
        )
    header = ("simulated", "requests/s", "TTFT p50 ms", "p99", "total p95 ms", "good", "refused", "busy")
    two = result["two_replicas"]
    return (
        f"{format_table(header, rows)}\n\ngood when each is alone: {result['idle_good_share']}\n"
        f"two replicas ÷ one: {two['own_cores']} with cores of their own (bar {TWO_BAR}), "
        f"{two['this_machine']} on this machine's {two['cores']} cores, of which one uses {two['cores_per_replica']}"
    )
