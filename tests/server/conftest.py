"""Every server test is bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

TIMEOUT_S = 60
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
