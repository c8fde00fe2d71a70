"""`python -m perf router-quality` with a router that is a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from orchestrator.routing.complexity import TIERS, Complexity
from orchestrator.routing.conversation import Turn
from perf.errors import PerfError
from perf.router_quality import choose, guess_tier, router_quality


class FirstWord:
    """Sure of the tier that a conversation's last turn begins with."""

    def read(self, turns: Sequence[Turn]) -> np.ndarray:
        return np.full(len(turns) * 20, TIERS.index(turns[-1].text.split()[0]), np.int32)

    def judge(self, input_ids: np.ndarray) -> Complexity:
        shares = [0.02] * 4
        shares[input_ids[0]] = 0.94
        return Complexity((shares[0], shares[1], shares[2], shares[3]))


def write(path: Path, *rows: tuple[str, str, str]) -> Path:
    lines = [
        json.dumps({"messages": [{"role": "user", "content": text}], "tier": tier, "lang": lang})
        for text, tier, lang in rows
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_right_and_wrong_are_counted(tmp_path: Path) -> None:
    data = write(
        tmp_path / "rows.jsonl",
        ("simple a", "simple", "en"),
        ("simple b", "expert", "en"),
        ("expert c", "expert", "de"),
        ("complex d", "medium", "de"),
    )
    table, result = router_quality(data, FirstWord(), tmp_path / "errors")
    assert result["command"] == "router-quality" and result["data"] == "rows.jsonl"
    assert (result["accuracy"], result["under2_rate"], result["over_rate"]) == (0.5, 0.25, 0.25)
    rates = {"accuracy": 0.5, "under1_rate": 0.0, "under2_rate": 0.25, "over_rate": 0.25}
    assert result["thresholds"]["0.50"] == rates
    assert result["ece"] == pytest.approx(0.44, abs=0.5)
    assert result["languages"]["en"]["accuracy"] == 0.5
    assert result["heuristic"]["rows"] == 4
    assert "all, by words and length" in table and "to    32 tokens" in table
    errors = (tmp_path / "errors").read_text().splitlines()
    assert len(errors) == 2 and errors[0].startswith("expert -> simple (0.94 0.02 0.02 0.02) en: 'simple b'")


@pytest.mark.parametrize(("threshold", "tier"), [(0.3, "simple"), (0.5, "medium"), (0.7, "complex"), (0.95, "expert")])
def test_what_the_router_would_take(threshold: float, tier: str) -> None:
    assert TIERS[choose([0.4, 0.2, 0.3, 0.1], threshold)] == tier


def test_a_wrong_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(PerfError, match=r"rows\.jsonl:1: messages: Field required"):
        router_quality(tmp_path / "rows.jsonl", FirstWord())


@pytest.mark.parametrize(
    ("text", "tier"),
    [
        ("hi", "simple"),
        ("Explain inflation.", "medium"),
        ("Prove it.", "complex"),
        ("Prove and explain it.", "expert"),
        ("word " * 160, "complex"),
    ],
)
def test_the_heuristic_goes_by_words_and_length(text: str, tier: str) -> None:
    assert TIERS[guess_tier(text)] == tier
