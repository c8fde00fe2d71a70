"""What README says was measured is what the files of results say."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import figures
from perf.figures import FIGURES, RESULTS, Figure, in_readme, load, table


def test_readme_has_the_figures_of_the_files() -> None:
    assert in_readme() == table(), "python -m perf figures --write"


def test_every_figure_is_of_its_own_command() -> None:
    for name in FIGURES:
        assert load(name)["command"] == name
        assert load(name)["machine"]["cores"] > 0
    assert {path.stem for path in RESULTS.glob("*.json")} >= set(FIGURES)


def test_a_missed_bar_is_said() -> None:
    assert Figure("first token", "5.0 ms", 5.0, "≤", 4, " ms").row() == "| first token | 5.0 ms: missed | ≤ 4 ms |"
    assert Figure("ratio", "0.95", 0.95, "≥", 0.9).row() == "| ratio | 0.95 | ≥ 0.9 |"
    assert Figure("ratio", "0.89", 0.89, "≥", 0.9).row() == "| ratio | 0.89: missed | ≥ 0.9 |"
    assert Figure("cost", "12 µs").row() == "| cost | 12 µs |  |"


def test_the_table_is_put_between_the_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = tmp_path / "README.md"
    monkeypatch.setattr(figures, "README", readme)
    readme.write_text("before\n<!-- figures -->\nold\n<!-- /figures -->\nafter\n")
    text = figures.figures(write=True)
    assert readme.read_text() == f"before\n<!-- figures -->\n{text}<!-- /figures -->\nafter\n"
    assert in_readme() == text
    readme.write_text("no place")
    with pytest.raises(ValueError, match="needs one"):
        figures.figures(write=True)
    assert readme.read_text() == "no place"
