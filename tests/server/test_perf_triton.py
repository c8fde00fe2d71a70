"""`python -m perf triton` over a server that is there already, with a perf_analyzer that it finds or fetches."""

from __future__ import annotations

from pathlib import Path

from serving import Stack

from perf.analyzer import find_analyzer
from perf.stack import Stack as Served
from perf.triton import sweep

ROOT = Path(__file__).parents[2]


def test_an_ensemble_and_a_decoupled_model(scripted_stack: Stack) -> None:
    facts = scripted_stack.facts
    served = Served(
        ROOT / "artifacts" / "scripted",
        scripted_stack.url,
        scripted_stack.front_url,
        facts["triton_grpc_url"],
        facts["triton_metrics_url"],
        Path(facts["logs"]["triton"]),
        scripted_stack.process.pid,
    )
    asked = scripted_stack.model_metric("nv_inference_request_success", "embedding_encoder")
    kept: list[int] = []
    table, result = sweep(
        served,
        find_analyzer(),
        ["embedding", "llm_small"],
        [2],
        [0.5],
        300,
        lambda result: kept.append(sum(len(each["rate"]) for each in result["models"].values())),
    )
    assert "failed" not in result, result
    embedding, engine = result["models"]["embedding"], result["models"]["llm_small"]
    assert (embedding["kind"], engine["kind"]) == ("ensemble", "decoupled")
    (closed,), (opened,) = embedding["concurrency"].values(), embedding["rate"].values()
    assert closed["num"] > opened["num"] > 0 and closed["ms"]["p50"] <= closed["ms"]["p99"]
    answered = scripted_stack.model_metric("nv_inference_request_success", "embedding_encoder") - asked
    assert answered >= closed["num"] + opened["num"]
    # The scripted engine's own text has several tokens, a response each.
    assert engine["concurrency"]["2"]["responses_per_s"] > 2 * engine["concurrency"]["2"]["requests_per_s"]
    assert kept == [0, 1, 1, 2]
    assert "embedding, 2 at once" in table
