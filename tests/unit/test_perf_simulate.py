"""`python -m perf simulate`: plans, the second replica, and what is compared with the real stack; nothing is served."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from perf.__main__ import main
from perf.errors import PerfError
from perf.simulate import fewest, idle_share, read_tiers, simulate, two_replicas
from perf.simulation.calibrate import _step_s, _with_joins, mean_of
from perf.simulation.events import Simulation
from perf.simulation.replica import Service
from perf.simulation.traffic import Ask, Tier, Tokens
from perf.simulation.validate import compare

SERVICE = Service(
    ((1, 0.016), (16, 0.033), (32, 0.06)), prefill_s_per_token=0.001, before_s=0.02, hit_s=0.005, cores=2.0
)


@pytest.fixture
def service_file(tmp_path: Path) -> Path:
    path = tmp_path / "simulate.json"
    path.write_text(json.dumps({"command": "simulate", "service": SERVICE.as_json()}))
    return path


def test_what_was_written_is_read_back(service_file: Path) -> None:
    assert Service.read(service_file) == SERVICE


def test_more_users_need_more_replicas(service_file: Path) -> None:
    _, result = simulate(service_file, None, [20, 120], 30.0, None, 30.0, 0)
    few, many = result["plans"]
    assert 1 <= few["replicas"] < many["replicas"]
    assert min(each["goodput"]["share"] for each in result["plans"]) >= 0.95 * result["idle_good_share"] > 0.9
    assert many["arrived"] == many["finished"] + many["refused"] + many["late"] + many["under_way"]
    again = simulate(service_file, None, [20, 120], 30.0, None, 30.0, 0)[1]
    assert again == result


def test_the_command_prints_a_table_and_a_line(service_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"--service={service_file}", "--users=10", "--replicas=1,2", "--seconds=20", "--think-s=5"]
    assert main(["simulate", *arguments]) == 0
    out = capsys.readouterr().out
    assert "10 users, 2 replicas" in out and "two replicas ÷ one" in out
    assert [plan["replicas"] for plan in json.loads(out.splitlines()[-1])["plans"]] == [1, 2]


def test_two_replicas_are_two_where_there_are_cores() -> None:
    told = two_replicas(SERVICE, cores=2)
    assert told["own_cores"] >= 1.8
    assert told["this_machine"] == pytest.approx(1.0, abs=0.2)
    assert two_replicas(SERVICE, cores=4)["this_machine"] >= 1.8


@pytest.mark.parametrize("enough", [1, 2, 3, 7, 64, 100])
def test_the_fewest_are_found(enough: int) -> None:
    assert fewest(lambda count: {"goodput": {"share": 1.0 if count >= enough else 0.5}}, 0.95) == enough


def test_replicas_that_are_never_enough_end_the_search() -> None:
    with pytest.raises(PerfError, match=r"4096 replicas are not enough for 95\.0% good requests"):
        fewest(lambda count: {}, 0.95)


def test_what_an_engine_cannot_do_alone_is_not_asked_of_many(tmp_path: Path) -> None:
    slow = dataclasses.replace(SERVICE, prefill_s_per_token=0.004)
    tiers = [Tier("a", 0.5, Tokens(50), Tokens(10)), Tier("b", 0.5, Tokens(500), Tokens(10))]
    assert idle_share(slow, tiers, 0) == pytest.approx(0.5, abs=0.05)
    path = tmp_path / "simulate.json"
    hopeless = dataclasses.replace(SERVICE, prefill_s_per_token=5.0, hit_s=5.0)
    path.write_text(json.dumps({"service": hopeless.as_json()}))
    with pytest.raises(PerfError, match="not even alone"):
        simulate(path, None, [1], 10.0, None, 10.0, 0)


def test_tiers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "tiers.json"
    path.write_text('[{"name": "a", "share": 1, "input_tokens": {"median": 60}, "output_tokens": {"median": 40}}]')
    assert read_tiers(path) == [Tier("a", 1.0, Tokens(60.0), Tokens(40.0))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", r"tiers\.json: the file: "),
        ("[]", r"tiers\.json: share: each tier needs one"),
        ('[{"name": "a", "share": 1, "input_tokens": {"median": 60}}]', r"tiers\.json: 0\.output_tokens: "),
        (
            '[{"name": "a", "share": 0, "input_tokens": {"median": 6}, "output_tokens": {"median": 4}}]',
            r"tiers\.json: share: each tier needs one above 0",
        ),
    ],
)
def test_tiers_that_are_wrong_are_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tiers.json"
    path.write_text(text)
    with pytest.raises(PerfError, match=message):
        read_tiers(path)


def test_no_service_times_name_the_command_that_makes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", f"--service={tmp_path / 'none.json'}"]) == 1
    assert "fix: python -m perf simulate --validate --json" in capsys.readouterr().err


# --- against the real stack --------------------------------------------------------------------------------


def test_errors_are_the_models_figures_by_the_measured_ones() -> None:
    def figures(ttft: float, total: float, rate: float) -> dict[str, Any]:
        totals = {"mean": total, "p50": total, "p95": 2 * total}
        return {"ttft_ms": {"p50": ttft}, "total_ms": totals, "tokens_per_s": rate}

    errors = compare(figures(100, 1000, 50), figures(110, 900, 50))["errors"]
    assert errors == {
        "ttft_ms.p50": 0.1,
        "total_ms.mean": -0.1,
        "total_ms.p50": -0.1,
        "total_ms.p95": -0.1,
        "tokens_per_s": 0.0,
    }


def test_a_step_is_timed_while_all_decode() -> None:
    def answer(first_s: float, step_s: float, num: int, per_event: int = 1) -> dict[str, Any]:
        return {"times_s": [first_s + step_s * place for place in range(num)], "tokens": num * per_event}

    assert _step_s([answer(0, 0.02, 100), answer(0.5, 0.02, 100)]) == pytest.approx(0.02)
    assert _step_s([answer(0, 0.04, 50, per_event=2)]) == pytest.approx(0.02)
    with pytest.raises(PerfError, match="did not overlap"):
        _step_s([answer(0, 0.02, 3), answer(5, 0.02, 3)])


class SimulatedGateway:
    """Answers as a model says, in the place of a server."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def prompt(self) -> str:
        return "one two"

    def count(self, prompt: str) -> int:
        return 50

    def ask(self, asks: Sequence[tuple[float, str, int]]) -> list[dict[str, Any]]:
        simulation = Simulation(self._service, 1)
        simulation.run((at_s, Ask(Tier("simple", 1.0, Tokens(50), Tokens(num)), 50, num)) for at_s, _, num in asks)
        return [{"times_s": [request.ended_s]} for request in simulation.requests]


@pytest.mark.parametrize("join_s", [0.0, 0.004, 0.015])
def test_what_requests_that_join_cost_is_found_by_when_they_end(join_s: float) -> None:
    service = dataclasses.replace(SERVICE, prefill_s_per_token=0.0003, before_s=0.0)
    gateway: Any = SimulatedGateway(dataclasses.replace(service, join_s=join_s))
    assert _with_joins(gateway, service).join_s == pytest.approx(join_s, abs=0.0005)


def test_the_mean_of_what_was_measured_twice() -> None:
    slower = dataclasses.replace(SERVICE, steps=tuple((size, 2 * s) for size, s in SERVICE.steps), before_s=0.04)
    mean = mean_of([SERVICE, slower])
    assert [took_s for _, took_s in mean.steps] == pytest.approx([1.5 * took_s for _, took_s in SERVICE.steps])
    assert mean.before_s == pytest.approx(0.03)
    assert dataclasses.replace(mean, steps=SERVICE.steps, before_s=SERVICE.before_s) == SERVICE
