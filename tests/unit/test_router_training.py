"""Training on a tiny encoder, where the extra `router` is installed."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

pytest.importorskip("jax", reason="training needs the extra `router`")
pytest.importorskip("optax", reason="training needs the extra `router`")

from test_complexity_onnx import NUMBERS, random_encoder

from build.complexity_onnx import make_complexity_onnx
from build.e5_file import WordBlocks
from build.router_adapter import Adapter, merge
from build.router_training import Encoder, Settings, Trainer, soften

SETTINGS = Settings(num_layers=2, rank=2, head_size=16, num_epochs=12, batch_size=16, learning_rate=5e-3)


def test_labels_lean_on_their_neighbours() -> None:
    expected = [[0.9, 0.1, 0, 0], [0.05, 0.9, 0.05, 0], [0, 0, 0.1, 0.9]]
    np.testing.assert_allclose(soften([0, 1, 3], 0.1), expected, atol=1e-6)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")  # JAX's own
def test_it_learns_and_the_graph_says_the_same() -> None:
    randomness = np.random.default_rng(0)
    packed = randomness.integers(0, 256, (30, 1, 16)).astype(np.uint8)
    words = WordBlocks(packed, randomness.normal(0, 0.2, (30, 1)).astype(np.float16))
    weights = random_encoder(randomness)
    encoder = Encoder(words.rows(np.arange(30)), weights, NUMBERS.num_attention_heads, NUMBERS.layer_norm_eps)
    labels = randomness.integers(0, 4, 160).tolist()
    # The tier is told by which of four words is among others.
    sequences = [np.append(randomness.integers(4, 30, 5), label).astype(np.int32) for label in labels]
    # The encoder's positions end at 12; batches are padded to 16.
    weights["embeddings.position_embeddings.weight"] = randomness.normal(0, 0.1, (16, 32)).astype(np.float32)
    losses: list[float] = []
    trainer = Trainer(encoder, SETTINGS)
    tensors = trainer.train(sequences, labels, lambda epoch, loss: losses.append(loss))
    assert losses[-1] < losses[0] - 0.2
    logits = trainer.predict(tensors, sequences, batch_size=32)
    assert (logits.argmax(axis=1) == labels).mean() > 0.5
    numbers = NUMBERS.model_copy(update={"max_position_embeddings": 16})
    adapter = Adapter(tensors, {"temperature": 1.0})
    session = onnxruntime.InferenceSession(
        make_complexity_onnx(words, merge(weights, adapter), numbers, 1.0).SerializeToString()
    )
    for row in range(10):
        ids = sequences[row][None]
        (found,) = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
        powers = np.exp(logits[row] - logits[row].max())
        np.testing.assert_allclose(found[0], powers / powers.sum(), atol=1e-4)
