"""What README says was measured is what the files of results say."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import figures
from perf.figures import FIGURES, RESULTS, Figure, in_readme, load, tables


def test_readme_has_the_figures_of_the_files() -> None:
    assert in_readme() == tables(), "python -m perf figures --write"


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


def test_tables_are_put_between_their_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = tmp_path / "README.md"
    monkeypatch.setattr(figures, "README", readme)
    places = [f"<!-- {name} -->\n{{}}<!-- /{name} -->\n" for name in tables()]
    text = "before\n" + "between\n".join(places) + "after\n"
    readme.write_text(text.format("old\n", ""))
    figures.figures(write=True)
    assert readme.read_text() == text.format(*tables().values())
    assert in_readme() == tables()
    readme.write_text(places[0])
    with pytest.raises(ValueError, match="has 0 places between <!-- gpu -->"):
        figures.figures(write=True)
    assert readme.read_text() == places[0]
