"""`python -m perf cost` on log lines worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import load_tiers
from perf.__main__ import main
from perf.cost import published_example, read_log, summarise_cost


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


def test_the_published_example_put_right() -> None:
    """0.6 · 0.0001 + 0.2 · 0.0005 + 0.15 · 0.003 + 0.05 · 0.01 = 0.00111; of 0.003, 63 % are saved, not 80."""
    assert published_example() == {"cost_usd": 0.00111, "saving": 0.63, "saving_against_expert": 0.889}


def test_the_command(artifact: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "triton.log"
    log.write_text("\n".join(LINES))
    flags = [f"--artifacts={artifact('scripted').parent}", "--target=scripted", f"--log={log}"]
    assert main(["cost", *flags]) == 0
    output = capsys.readouterr().out
    result = json.loads(output.splitlines()[-1])
    assert result["saving"] == 0.7271 and result["published_example"]["saving"] == 0.63
    assert "published example: $0.00111 a request, 63% saved" in output
    log.write_text("nothing")
    assert main(["cost", *flags]) == 1
    assert "no answered request in it; a server's triton.log has a line for each" in capsys.readouterr().err
