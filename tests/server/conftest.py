"""Every server test is bounded; what some of them share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

# Behind stand-ins every engine of a GPU target is the real model: more of them start, and share the cores.
TIMEOUT_S = 120 if "TRITON_REALTIME_TEST_TARGET" not in os.environ else 240
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def cpu_tokenizer(artifact: Callable[[str], Path]) -> Tokenizer:
    """The real model's tokenizer."""
    folder = artifact("cpu") / "model_repository" / "llm_small" / "1" / "tokenizer"
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
