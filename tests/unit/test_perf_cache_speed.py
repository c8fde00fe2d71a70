"""`python -m perf cache-speed`: what a store has before its server starts, and what is said of the runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_stores import MakeStore, run

from build.compiler import SOURCES
from orchestrator.cache.key import Origin, identify
from orchestrator.cache.lookup import Lookup
from orchestrator.cache.store import Vector
from orchestrator.cache.stored import StoredAnswer
from orchestrator.config import load_tiers
from orchestrator.pipeline import digest_tier
from orchestrator.request import ChatRequest
from perf import cache_speed as module
from perf.cache_fillers import fill, fillable_sources, write_fillers
from perf.cache_lookup_speed import Question
from perf.cache_speed import cache_speed
from perf.errors import PerfError
from perf.prompts import PARAPHRASES


def question(text: str, place: int) -> Question:
    return Question(text, np.eye(1, 384, place, dtype=np.float32)[0])


QUESTIONS = [question("What is the capital of Peru?", 0), question("Who wrote Hamlet?\nIn one line.", 1)]


def test_fillers_are_where_a_request_looks(
    artifact: Callable[[str], Path], make_store: MakeStore, tmp_path: Path
) -> None:
    scripted = artifact("scripted")
    write_fillers(tmp_path / "fillers", scripted, QUESTIONS)
    store = make_store(clock=lambda: 1000.0)
    run(fill(store, tmp_path / "fillers"))
    size = run(store.size())
    assert size is not None and size.num_entries == 2
    tier = load_tiers(scripted / "tiers.toml").tier[0]
    body = {"model": tier.name, "messages": [{"role": "user", "content": "what is the capital of Peru"}]}
    origin = Origin("default", tier.name, template=digest_tier(tier, scripted))
    outcome = run(
        Lookup(store, store.clock).find_near(identify(ChatRequest.model_validate(body), origin), QUESTIONS[0].vector)
    )
    assert outcome.kind == "semantic" and outcome.entry is not None
    assert outcome.entry.identity.question == QUESTIONS[0].text
    assert StoredAnswer.from_json(outcome.entry.answer).model == tier.model


def test_the_orchestrators_model_is_replaced_and_no_other(tmp_path: Path) -> None:
    sources = fillable_sources(SOURCES, tmp_path / "sources")
    changed = {
        path.relative_to(sources)
        for path in sources.rglob("*")
        if path.is_file() and path.read_bytes() != (SOURCES / path.relative_to(sources)).read_bytes()
    }
    assert changed == {Path("orchestrator", "1", "model.py")}
    assert "class TritonPythonModel" in (sources / "orchestrator" / "1" / "model.py").read_text()


def test_what_the_guards_let_pass_fills_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {text: vector for vector, pair in zip(np.eye(5, dtype=np.float32), PARAPHRASES) for text in pair}

    class Embedder:
        def embed(self, text: str) -> Vector:
            return asked[text]

    def near(text: str, similarity: float) -> Question:  # to the question about the password
        return Question(text, np.array([0, 0, 0, similarity, np.sqrt(1 - similarity**2)], np.float32))

    served, rejected = near("hwo do i rset my passwrod", 0.41), near("How do I reset my router?", 0.41)
    far, nearest = near("hwo do i rset my passwrod", 0.19), near("How do I reset my phone?", 0.51)
    monkeypatch.setattr(
        module, "make_questions", lambda pairs, embedder, num: [served, rejected, nearest, far, *QUESTIONS]
    )
    assert module._make_fillers(Embedder(), 2) == [rejected, far]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[BaseException | None]:
    """No server runs. What each number of entries ends in; None: it is measured."""
    ends: list[BaseException | None] = []

    def measure(_: None, clients: list[int], __: int) -> list[dict[str, Any]]:
        if (end := ends.pop(0)) is not None:
            raise end
        points = {"p50": 1.0, "p95": 2.0, "p99": 3.0}
        times = {f"{kind}_ms": points for kind in ("exact", "semantic", "miss", "bypass")}
        return [{"clients": num, **times, "miss_added_ms": 0.0} for num in clients]

    monkeypatch.setattr(module, "_build", lambda folder: folder)
    monkeypatch.setattr(module, "ArtifactEmbedder", lambda artifact: None)
    monkeypatch.setattr(module, "_make_fillers", lambda embedder, num: QUESTIONS)
    monkeypatch.setattr(module, "write_fillers", lambda file, artifact, questions: None)
    monkeypatch.setattr(module, "_serving", lambda artifact, store, file: nullcontext())
    monkeypatch.setattr(module, "_measure_clients", measure)
    return ends


def test_the_figures_are_of_one_client_and_most_entries_in_process(ends: list[BaseException | None]) -> None:
    ends += [None] * 4
    kept: list[int] = []
    table, result = cache_speed([4, 2], [1, 16], 10, keep=lambda result: kept.append(len(result["runs"])))
    assert [(run["store"], run["entries"], run["clients"]) for run in result["runs"]] == [
        *(("memory", 2, 1), ("memory", 2, 16), ("memory", 4, 1), ("memory", 4, 16)),
        *(("redis", 2, 1), ("redis", 2, 16), ("redis", 4, 1), ("redis", 4, 16)),
    ]
    assert (result["store"], result["entries"], result["clients"]) == ("memory", 4, 1)
    assert kept == [2, 4, 6, 8]
    assert "redis, 4 entries, 16 clients: miss - bypass" in table


@pytest.mark.parametrize(
    ("end", "said"),
    [(KeyboardInterrupt(), {"interrupted": True}), (PerfError("no answer"), {"failed": "no answer"})],
)
def test_what_was_measured_is_kept(
    ends: list[BaseException | None], end: BaseException, said: dict[str, object]
) -> None:
    ends += [None, end]
    table, result = cache_speed([1, 3], [1], 10, ["memory"])
    assert len(result["runs"]) == 1 and result["exact_ms"]["p50"] == 1.0
    assert said.items() <= result.items()
    assert "memory, 1 entries" in table and "3 entries" not in table
