"""The switch that turns logs, metrics and traces off."""

from __future__ import annotations

import pytest

from orchestrator.config import ConfigError
from orchestrator.gateway import metrics
from orchestrator.instrumentation import VARIABLE, is_instrumented


def test_it_is_on_unless_it_is_told_off() -> None:
    assert is_instrumented({})
    assert is_instrumented({VARIABLE: ""})
    assert is_instrumented({VARIABLE: "on"})
    assert not is_instrumented({VARIABLE: "off"})
    with pytest.raises(ConfigError, match=f"^{VARIABLE}: 'false' is not allowed; on or off$"):
        is_instrumented({VARIABLE: "false"})


def test_the_gateway_counts_nothing_when_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def page() -> bytes:
        return metrics.generate_latest(metrics._registry())

    monkeypatch.setattr(metrics, "_is_counting", True)
    metrics.count_requests(False)
    before = page()
    metrics.count_answer("/v1/chat/completions", 200)
    metrics.count_stream_begun()
    metrics.count_stream_ended(0.1, 3)
    assert page() == before
    metrics.count_requests(True)
    metrics.count_answer("/v1/chat/completions", 200)
    assert page() != before
