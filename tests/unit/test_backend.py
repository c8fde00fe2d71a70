"""Who makes answers: what nobody waits for may not be felt by those who wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.backend import Backend
from orchestrator.config import load_tiers
from orchestrator.errors import EngineError, TierUnavailableError
from orchestrator.flight import Flight
from orchestrator.limits.queue import Class
from orchestrator.routing.breaker import Passage


class FakeWay:
    """To an engine that fails while it `is_broken`."""

    is_broken = True

    async def generate(self, answer: Any, flight: Any, passage: Passage) -> None:
        if self.is_broken:
            raise EngineError("broken")
        passage.hear()


class Bench:
    def __init__(self, artifact: Path) -> None:
        tiers = load_tiers(artifact / "tiers.toml")
        self.num_to_open = tiers.routing.failures_to_open
        self.backend = Backend(tiers.tier[0].backend, tiers, 1)
        self.way = FakeWay()

    def ask(self, priority: Class) -> None:
        request = SimpleNamespace(output_limit=1, num_choices=1)
        tier = SimpleNamespace(name="simple")
        answer: Any = SimpleNamespace(request=request, tier=tier, first_token_s=None)
        way: Any = self.way
        asyncio.run(self.backend.generate(answer, Flight(), way, priority=priority, ends_at_s=None))

    def fail(self, priority: Class) -> None:
        for _ in range(self.num_to_open):
            with pytest.raises(EngineError):
                self.ask(priority)


@pytest.fixture
def bench(artifact: Callable[[str], Path]) -> Bench:
    return Bench(artifact("scripted"))


def test_samples_that_fail_open_no_breaker_for_callers(bench: Bench) -> None:
    bench.fail("aside")
    assert bench.backend.breaker.state == "closed"
    with pytest.raises(TierUnavailableError):
        bench.ask("aside")  # they leave the engine alone
    bench.way.is_broken = False
    bench.ask("interactive")


def test_a_sample_is_no_probe(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.fail("interactive")
    monkeypatch.setattr(bench.backend.breaker, "_open_s", 0.0)
    assert bench.backend.breaker.state == "half_open"
    bench.way.is_broken = False
    with pytest.raises(TierUnavailableError):
        bench.ask("aside")
    assert bench.backend.breaker.state == "half_open"
    bench.ask("interactive")
    assert bench.backend.breaker.state == "closed"
    bench.ask("aside")
