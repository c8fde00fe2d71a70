"""`python -m perf soak` and `python -m perf instrumentation` over real servers, with tiny numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from perf.instrumentation import instrumentation
from perf.soak import soak
from perf.soak.traffic import KINDS


@pytest.mark.alone
@pytest.mark.own_target("the command starts a server of its own, of target scripted")
def test_a_soak_in_which_the_engine_dies_and_clients_leave() -> None:
    table, result = soak(minutes=12 / 60, num_replicas=1, capacity_s=2.0, memory_period_s=1.0, only=["engine-restart"])
    assert result["failures"] == [], result
    assert "failed" not in result and "interrupted" not in result
    requests, accounts = result["requests"], result["accounts"]
    assert all(requests[kind].get("right", 0) > 0 for kind in KINDS), requests
    assert all(requests[kind].get("failed", 0) == 0 for kind in KINDS), requests
    assert accounts["sent"] == sum(sum(ends.values()) for ends in requests.values())
    assert accounts["lines_in_log"] == accounts["sent"] - accounts["refused_by_gateway"]
    assert accounts["outcomes"]["cancelled"] > 0 and accounts["outcomes"]["deadline_exceeded"] > 0
    first, second = result["faults"]
    assert first["fault"] == second["fault"] == "engine-restart"
    assert first["back_after_s"] > 0 and second["back_after_s"] > 0
    names = [row["process"] for row in result["memory"]]
    assert names.count("engine's process") == 3  # the first one, and those after it
    assert {"gateway", "gRPC front", "triton", "redis", "serve", "model orchestrator"} <= set(names)
    assert "0 failures" in table


@pytest.mark.own_target("the command starts servers of its own, of target scripted")
def test_instrumentation_is_on_in_one_server_and_off_in_the_other(artifact: Callable[[str], Path]) -> None:
    """It raises when a request of the one is not logged and traced, or one of the other is."""
    table, result = instrumentation(artifact("scripted").parent, "scripted", 2, 4, 8)
    assert len(result["pairs"]) == 2
    assert result["requests"] == {"on": 48, "off": 48}
    assert result["spans"] >= 48 * 4
    assert "95 % upper bound" in table
