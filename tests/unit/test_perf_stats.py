"""The percentile's definition, and what a measurement prints."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from perf.report import format_table, publish
from perf.stats import percentile, summarize


@pytest.mark.parametrize(
    ("percent", "expected"),
    [(0, 10.0), (25, 17.5), (50, 25.0), (99, 39.7), (100, 40.0)],
)
def test_percentile_interpolates_between_the_closest_ranks(percent: float, expected: float) -> None:
    assert percentile([40.0, 10.0, 30.0, 20.0], percent) == pytest.approx(expected)


def test_percentile_is_numpys_default() -> None:
    values = np.random.default_rng(7).exponential(size=137)
    for percent in (0, 1, 50, 90, 99, 99.9, 100):
        assert percentile(values.tolist(), percent) == pytest.approx(np.percentile(values, percent))


def test_percentile_of_one_value_is_the_value() -> None:
    assert percentile([3.0], 99) == 3.0


@pytest.mark.parametrize(
    ("values", "percent", "message"),
    [([], 50, "values: empty"), ([1.0], 101, "percent: 101 is not allowed"), ([1.0], -1, "percent: -1")],
)
def test_percentile_refuses(values: list[float], percent: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        percentile(values, percent)


def test_summary() -> None:
    assert summarize([2.0, 1.0, 3.0]) == {"num": 3, "p50": 2.0, "p90": 2.8, "p99": 2.98, "max": 3.0}


def test_table_aligns_names_left_and_numbers_right() -> None:
    assert format_table(("what", "ms"), [("a", 1.0), ("longer", 12.345)]) == (
        "what       ms\n------  -----\na        1.00\nlonger  12.35"
    )


def test_last_line_is_the_json_that_the_file_has(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    publish("a table", {"command": "overhead"}, tmp_path / "result.json")
    table, *_, line = capsys.readouterr().out.splitlines()
    assert table == "a table"
    assert (tmp_path / "result.json").read_text() == line + "\n"
    result = json.loads(line)
    assert result["command"] == "overhead"
    assert result["machine"]["cores"] >= 1
    assert result["machine"]["cpu"]
