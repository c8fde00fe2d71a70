"""`python -m perf techniques` over a server that is there already: it asks what it says that it asks."""

from __future__ import annotations

from pathlib import Path

from serving import Stack

from perf.stack import Stack as Served
from perf.techniques.ground import Ground
from perf.techniques.serving import NUM_CONNECTIONS, NUM_TEXTS, connection_reuse, dynamic_batching


def test_two_of_them(scripted_stack: Stack, tmp_path: Path) -> None:
    """Both sides of the embedder's are this one server here, so their ratio says nothing."""
    facts = scripted_stack.facts
    num_embedded = scripted_stack.model_metric("nv_inference_count", "embedding_encoder")
    with Ground(tmp_path, 2) as ground:
        ground.scripted = ground.unbatched = Served(
            tmp_path,
            scripted_stack.url,
            scripted_stack.front_url,
            facts["triton_grpc_url"],
            facts["triton_metrics_url"],
            Path(facts["logs"]["triton"]),
            0,
        )
        connections = connection_reuse(ground).describe()
        texts = dynamic_batching(ground).describe()
    assert connections["unit"] == "ms to first token" and len(connections["ratios"]) == NUM_CONNECTIONS
    assert 0 < connections["on"] < 1000 and connections["off"] > 0
    assert texts["unit"] == "texts/s" and len(texts["ratios"]) == 2 and texts["on"] > 0
    embedded = scripted_stack.model_metric("nv_inference_count", "embedding_encoder") - num_embedded
    assert embedded == 6 * NUM_TEXTS  # two rounds of both sides, and their warming up
