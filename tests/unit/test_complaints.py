"""docs/gpu.md answers every known complaint of TensorRT-LLM's users, by tests that exist."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
KNOWN = json.loads((TESTS / "data" / "trtllm_complaints.json").read_text(encoding="utf-8"))
PAGE = (TESTS.parent / "docs" / "gpu.md").read_text(encoding="utf-8")
ROWS = {
    int(cells[0]): cells
    for line in PAGE.partition("## What users of TensorRT-LLM")[2].splitlines()
    if (cells := [cell.strip() for cell in line.strip("|").split("|")]) and cells[0].isdigit()
}


def test_every_complaint_has_a_row() -> None:
    assert {number: cells[1] for number, cells in ROWS.items()} == {each["row"]: each["where"] for each in KNOWN}


@pytest.mark.parametrize("number", ROWS)
def test_its_tests_exist(number: int) -> None:
    *_, held_by = ROWS[number]
    named = re.findall(r"`([a-z_/0-9]+\.py)::(test_[a-z_0-9]+)`", held_by)
    assert named and len(named) == held_by.count("`") // 2
    for file, test in named:
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{test}"
