"""The tally over pairs of questions; the encoder here finds everything near."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.cache.store import Vector
from orchestrator.quality.wilson import wilson_interval
from perf.cache_quality import cache_quality
from perf.errors import PerfError


class Constant:
    def embed(self, text: str) -> Vector | None:
        return np.array([1.0, 0.0], np.float32)


def pair(cached: str, asked: str, expect: str, kind: str = "polarity", **fields: Any) -> dict[str, Any]:
    one, other = ({"messages": [{"role": "user", "content": text}]} for text in (cached, asked))
    return {"cached": one, "asked": other, "expect": expect, "kind": kind, **fields}


def write(path: Path, *pairs: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in pairs))
    return path


def test_rates(tmp_path: Path) -> None:
    path = write(
        tmp_path / "pairs.jsonl",
        pair("Turn on the light", "Turn off the light", "miss"),
        pair("Turn on the light", "switch the light on", "hit", "paraphrase"),
        pair("Turn on the light", "Let there be light", "hit", "paraphrase"),
        # A pair that says the wrong thing shows as a false hit.
        pair("Wie alt ist er?", "wie alt ist er", "miss", lang="de"),
    )
    table, result = cache_quality(path, Constant(), tmp_path / "errors.txt")
    assert (result["false_hit_rate"], result["recall"]) == (0.5, 0.5)
    assert result["threshold_alone"]["false_hit_rate"] == 1.0
    assert result["languages"]["de"]["num_false_hits"] == 1
    assert table.splitlines()[2].split()[:5] == ["de", "1", "1", "100.0", "20.7-100.0"]
    errors = (tmp_path / "errors.txt").read_text()
    assert "FALSE HIT de polarity" in errors
    assert "Let there be light" in errors


def test_system_and_history_are_part_of_a_pair(tmp_path: Path) -> None:
    one = pair("Hello", "Hello", "miss", "system")
    one["cached"]["system"] = "Be kind."
    _, result = cache_quality(write(tmp_path / "pairs.jsonl", one), Constant())
    assert result["num_false_hits"] == 0
    assert result["guards"] == {"identity": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no pairs"),
        ("{}\n", r"pairs\.jsonl:1: not a pair: cached: Field required"),
        ('{"cached": {}, "asked": {}, "expect": "hit", "kind": "a"}\n', "not a pair"),
        (json.dumps(pair("", "b", "hit")).replace('"user"', '"nobody"') + "\n", "holds no request"),
    ],
)
def test_what_is_no_pair(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(text)
    with pytest.raises(PerfError, match=message):
        cache_quality(path, Constant())


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(pair("a", "b", "miss")) + "\n", encoding="utf-8-sig")
    assert cache_quality(path, Constant())[1]["num_misses_due"] == 1


@pytest.mark.parametrize(
    ("num_hits", "num", "low", "high"),
    [(0, 100, 0.0, 0.0370), (5, 10, 0.2366, 0.7634), (100, 100, 0.9630, 1.0), (0, 0, 0.0, 1.0)],
)
def test_wilson(num_hits: int, num: int, low: float, high: float) -> None:
    assert wilson_interval(num_hits, num) == pytest.approx((low, high), abs=1e-4)


def test_wilson_refuses_more_hits_than_tries() -> None:
    with pytest.raises(ValueError, match="num_hits: 3 of 2; 0 to 2 are allowed"):
        wilson_interval(3, 2)


def test_the_shipped_pairs_are_pairs() -> None:
    from perf.cache_quality import read_pairs

    for name in ("cache_pairs.jsonl", "cache_pairs_unseen.jsonl"):
        assert len(read_pairs(Path(__file__).parents[1] / "data" / name)) >= 500
