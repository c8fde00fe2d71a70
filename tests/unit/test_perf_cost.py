"""`python -m perf cost` on log lines worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import load_tiers
from perf.__main__ import main
from perf.cost import Beside, published_example, read_beside, read_log, summarise_cost


def line(tier: str, cost_usd: float, cache: str = "miss", **fields: Any) -> str:
    row = {"event": "request", "outcome": "ok", "tier": tier, "cache": cache, "input_tokens": 1000, "tokens": 500}
    return json.dumps({**row, "cost_usd": cost_usd, **fields})


# At target scripted's prices a thousand tokens in and five hundred out cost:
SIMPLE, MEDIUM, EXPERT = 0.0001, 0.00045, 0.006
LINES = [
    "I1127 triton started",
    line("simple", SIMPLE),
    line("simple", 0.0, cache="exact"),
    line("medium", MEDIUM, cache="bypass"),
    line("expert", EXPERT),
    json.dumps({"event": "request", "outcome": "invalid_request"}),  # refused: it had no answer
    json.dumps({"event": "flagged", "tier": "simple"}),
    line("simple", SIMPLE)[:-9],
    line("simple", SIMPLE, tokens=None),
    "[]",
]


def test_the_saving_is_worked_out_from_the_log(artifact: Callable[[str], Path]) -> None:
    found = summarise_cost(read_log(LINES), load_tiers(artifact("scripted") / "tiers.toml").tier)
    assert (found["requests"], found["hits"], found["expert"]) == (4, 1, "expert")
    assert found["cost_usd"] == pytest.approx(SIMPLE + MEDIUM + EXPERT)
    assert found["all_expert_usd"] == pytest.approx(4 * EXPERT)
    assert found["saving"] == pytest.approx(1 - (SIMPLE + MEDIUM + EXPERT) / (4 * EXPERT), abs=1e-4)
    assert found["saving_by_routing"] == pytest.approx(1 - (SIMPLE + MEDIUM + EXPERT) / (3 * EXPERT), abs=1e-4)
    assert found["tiers"] == {"simple": 2, "medium": 1, "complex": 0, "expert": 1}


FAILED = [
    line("expert", 0.0, outcome="engine_error", tokens=0),
    line("expert", 0.002, outcome="cloud_error", tokens=100),  # after tokens, which were charged
    line("expert", 0.0, outcome="invalid_value", tokens=0),
    line("expert", 0.0, outcome="cancelled"),  # another caller paid
]


def test_what_failed_was_not_answered(artifact: Callable[[str], Path]) -> None:
    tiers = load_tiers(artifact("scripted") / "tiers.toml").tier
    plain, found = (summarise_cost(read_log(lines), tiers) for lines in (LINES, [*LINES, *FAILED]))
    assert found == plain
    assert read_beside([*LINES, *FAILED]) == Beside(3, 0.002, 0.0)
    left = line("expert", EXPERT, outcome="cancelled")  # and paid for it
    assert summarise_cost(read_log([*LINES, left]), tiers)["requests"] == 5


def test_who_pays_for_another_had_no_stored_answer(artifact: Callable[[str], Path]) -> None:
    tiers = load_tiers(artifact("scripted") / "tiers.toml").tier
    found = summarise_cost(read_log([line("expert", EXPERT, cache="exact", shared=True)]), tiers)
    assert (found["hits"], found["cost_usd"], found["saving_by_routing"]) == (0, EXPERT, 0.0)


def test_what_the_quality_monitor_spends_is_spent(artifact: Callable[[str], Path]) -> None:
    asked = [json.dumps({"event": "quality_asked", "tier": "expert", "cost_usd": EXPERT})] * 2
    tiers, lines = load_tiers(artifact("scripted") / "tiers.toml").tier, [line("simple", SIMPLE)] * 4
    found = summarise_cost(read_log(lines), tiers, read_beside([*lines, *asked]))
    assert (found["cost_usd"], found["quality_usd"]) == (pytest.approx(4 * SIMPLE), pytest.approx(2 * EXPERT))
    assert found["saving"] == found["saving_by_routing"]
    assert found["saving"] == pytest.approx(1 - (4 * SIMPLE + 2 * EXPERT) / (4 * EXPERT), abs=1e-4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            line("simple", SIMPLE * 2),
            "tier 'simple' took 0.000200000 USD for 1000 tokens in and 500 out, which cost 0.00010",
        ),
        (line("large", SIMPLE), "tier 'large' is none of simple, medium, complex, expert"),
        (line("large", 0.0, cache="exact"), "tier 'large' is none of"),
    ],
)
def test_a_log_of_other_tiers_is_refused(
    artifact: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str, message: str
) -> None:
    log = tmp_path / "triton.log"
    log.write_text("\n".join([*LINES, wrong]))
    assert main(["cost", f"--artifacts={artifact('scripted').parent}", "--target=scripted", f"--log={log}"]) == 1
    error = capsys.readouterr().err
    assert f"{log}: {message}" in error
    assert "fix: name by --target what was served; target scripted was not" in error


def test_the_published_example_put_right() -> None:
    """0.6 · 0.0001 + 0.2 · 0.0005 + 0.15 · 0.003 + 0.05 · 0.01 = 0.00111; of 0.003, 63 % are saved, not 80."""
    assert published_example() == {"cost_usd": 0.00111, "saving": 0.63, "saving_against_expert": 0.889}


def test_the_command(artifact: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "triton.log"
    log.write_text("\n".join([*LINES, *FAILED, json.dumps({"event": "quality_asked", "cost_usd": 0.0})]))
    flags = [f"--artifacts={artifact('scripted').parent}", "--target=scripted", f"--log={log}"]
    assert main(["cost", *flags]) == 0
    output = capsys.readouterr().out
    result = json.loads(output.splitlines()[-1])
    assert "3 failed, not counted; 0.002000 USD charged for what came of them" in output
    assert result["saving"] == 0.7271 and result["published_example"]["saving"] == 0.63
    assert "published example: $0.00111 a request, 63% saved" in output
    log.write_text("nothing")
    assert main(["cost", *flags]) == 1
    assert "no answered request in it; a server's triton.log has a line for each" in capsys.readouterr().err
