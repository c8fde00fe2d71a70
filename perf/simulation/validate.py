"""The model held against what it models: the same requests at the same times, asked and simulated.

Two served targets: `scripted`, of which eight requests run at a time, so that a queue forms at loads that two cores can
serve; and `cpu`, whose engine batches in flight. Three loads each, as shares of the most that the model says is
possible. Service times are measured before and after each load, and the model gets their mean: on most machines they
are others some minutes later.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from build.compiler import build
from build.engine_rows import OpenVINOParameters
from build.fetch import cache_folder
from build.rows import load_models, load_target
from orchestrator.config import load_tiers
from perf.processes import Others
from perf.report import say
from perf.simulation.calibrate import Gateway, calibrate, calibrate_scripted, mean_of, ttft_s
from perf.simulation.events import Simulation, describe, points
from perf.simulation.replica import Service
from perf.simulation.traffic import Ask, Tier, Tokens
from perf.stack import find_artifact, running_stack
from perf.worker import Worker

# Nearer to 1 nothing could be held against anything: of 1 % that the machine is slower in between, waiting makes 5 % at
# 0.8 and 10 % at 0.9.
LOADS = (0.3, 0.5, 0.7)
_LEAST_REQUESTS = 40  # of a load: fewer have no 95th percentile
BAR = 0.15
# Of what is compared, each within `BAR`: the model's figure by the measured one.
COMPARED = (("ttft_ms", "p50"), ("total_ms", "mean"), ("total_ms", "p50"), ("total_ms", "p95"), ("tokens_per_s", ""))
_SCRIPTED_RUNNING = 8
_FIRST_TOKEN_MS, _ITL_MS = 150.0, 20.0
_SEED = 11
_TIER = Tier("simple", 1.0, Tokens(60), Tokens(40))
_LENGTHS = (16, 24, 32, 48, 64)  # tokens of the answers
_QUESTIONS = (1, 1, 1, 6)  # in a prompt


def validate(artifacts: Path, seconds: float, keep: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Both targets, each load for at least so many seconds; `keep` gets the result after each too. Raises `PerfError`.

    `service` is target cpu's; `worst_error` the largest of all, `within` whether it is within `BAR`.
    """
    cpu = find_artifact(artifacts, "cpu")
    find_artifact(artifacts, "scripted")
    measured: dict[str, dict[str, Any]] = {}
    result: dict[str, Any] = {"command": "simulate", "bar": BAR, "seconds": seconds, "targets": measured}
    try:
        with tempfile.TemporaryDirectory(prefix="perf-simulate-") as folder:
            scripted = _build_scripted(Path(folder) / "scripted")
            with running_stack(scripted) as stack, Worker("perf.open_load", stack.gateway_url) as worker:
                gateway = Gateway(stack, worker)

                def time_scripted() -> Service:
                    return calibrate_scripted(gateway, _FIRST_TOKEN_MS, _ITL_MS, _SCRIPTED_RUNNING)

                def scripts(num_tokens: int, _: random.Random) -> str:
                    return gateway.script(num_tokens, _FIRST_TOKEN_MS, _ITL_MS)

                measured["scripted"] = {}
                _hold(gateway, time_scripted, scripts, seconds, measured["scripted"], lambda _: keep(result))
        with running_stack(cpu) as stack, Worker("perf.open_load", stack.gateway_url) as worker:
            gateway = Gateway(stack, worker)
            limits = load_tiers(cpu / "tiers.toml").limits
            measured["cpu"] = {}

            def time_cpu() -> Service:
                return calibrate(gateway, limits.max_running_requests, limits.max_live_requests, _step_tokens())

            def questions(_: int, chance: random.Random) -> str:
                return gateway.prompt(chance.choice(_QUESTIONS))

            def keep_service(service: Service) -> None:
                result["service"] = service.as_json()
                keep(result)

            _hold(gateway, time_cpu, questions, seconds, measured["cpu"], keep_service)
    except KeyboardInterrupt:
        result["interrupted"] = True
    errors = [abs(error) for loads in measured.values() for each in loads.values() for error in each["errors"].values()]
    if errors:
        result["worst_error"] = max(errors)
        result["within"] = result["worst_error"] <= BAR
    return result


def _build_scripted(artifact: Path) -> Path:
    target = load_target("scripted")
    limits = target.limits.model_copy(update={"max_running_requests": _SCRIPTED_RUNNING})
    target = target.model_copy(update={"limits": limits})
    build(target, load_models(target), artifact, cache=cache_folder(), progress=lambda _: nullcontext())
    return artifact


def _step_tokens() -> int:
    """Of target cpu's row: the most tokens in one step."""
    parameters = load_target("cpu").models["llm_small"].parameters
    assert isinstance(parameters, OpenVINOParameters)
    return parameters.max_num_tokens


Make = Callable[[int, random.Random], str]


def _hold(
    gateway: Gateway,
    time: Callable[[], Service],
    make: Make,
    seconds: float,
    loads: dict[str, Any],
    keep: Callable[[Service], object],
) -> None:
    """Fill `loads`; `make` makes a prompt whose answer has so many tokens. `keep` gets the mean of what `time` told."""
    services = [time()]
    for load in LOADS:
        rate = load * _most_per_s(services[-1], gateway, make)
        lasts_s = max(seconds, _LEAST_REQUESTS / rate)
        say(f"load {load:g}: {rate:.2f} requests a second for {lasts_s:.0f} s")
        chance, at_s = random.Random(_SEED), 0.0
        asks: list[tuple[float, str, int]] = []
        while (at_s := at_s + chance.expovariate(rate)) < lasts_s:
            num_tokens = chance.choice(_LENGTHS)
            asks.append((at_s, make(num_tokens, chance), num_tokens))
        others = Others()
        answers = gateway.ask(asks)
        others_cores = round(others.cores(), 3)
        services.append(time())
        service = mean_of(services[-2:])
        simulation = Simulation(service, 1)
        simulation.run((at_s, Ask(_TIER, gateway.count(text), tokens)) for at_s, text, tokens in asks)
        loads[f"{load:g}"] = compare(_describe(answers), describe(simulation)) | {
            "rate": round(rate, 3),
            "others_cores": others_cores,
            "service": service.as_json(),
            "requests": _timeline(answers),
            "stages_ms": _stages(answers),
        }
        keep(mean_of(services))


def _most_per_s(service: Service, gateway: Gateway, make: Make) -> float:
    """Requests a second of an engine that always has enough to do, by the model."""
    chance = random.Random(_SEED)
    lengths = [(chance.choice(_LENGTHS), chance) for _ in range(400)]
    asks = [(0.0, Ask(_TIER, gateway.count(make(tokens, chance)), tokens)) for tokens, chance in lengths]
    simulation = Simulation(Service(**{**service.as_json(), "steps": service.steps, "max_live": len(asks)}), 1)
    simulation.run(asks)
    return len(asks) / simulation.now_s


def _describe(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    end_s = max(answer["times_s"][-1] for answer in answers)
    return {
        "num": len(answers),
        "tokens_per_s": round(sum(answer["tokens"] for answer in answers) / end_s, 2),
        "ttft_ms": points([ttft_s(dict(answer)) * 1000 for answer in answers]),
        "total_ms": points([(answer["times_s"][-1] - answer["sent_s"]) * 1000 for answer in answers]),
    }


def compare(measured: Mapping[str, Any], simulated: Mapping[str, Any]) -> dict[str, Any]:
    """Both, and the errors of what is `COMPARED`: simulated ÷ measured − 1."""
    errors = {}
    for name, point in COMPARED:
        real, model = (each[name][point] if point else each[name] for each in (measured, simulated))
        errors[f"{name}.{point}".rstrip(".")] = round(model / real - 1, 4)
    return {"measured": dict(measured), "simulated": dict(simulated), "errors": errors}


def _timeline(answers: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Of each request: sent, first token, last token, in seconds."""
    return [
        [round(time_s, 3) for time_s in (answer["sent_s"], answer["times_s"][0], answer["times_s"][-1])]
        for answer in answers
    ]


def _stages(answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each of the server's stages, in ms."""
    totals: dict[str, float] = {}
    for answer in answers:
        for stage, took_ms in answer["rt"].get("stages_ms", {}).items():
            totals[stage] = totals.get(stage, 0.0) + took_ms / len(answers)
    return {stage: round(total, 3) for stage, total in totals.items()}
