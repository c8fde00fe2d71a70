"""The ONNX graph against plain numpy, on small random weights; the real ones are in tests/server/test_embeddings.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from bert_reference import embed
from safetensors.numpy import save_file

from build.bert_onnx import Weights, make_bert_onnx, weight_shapes, write_bert_onnx
from build.errors import BuildError
from build.model_rows import EmbedderRow
from build.rows import HERE
from orchestrator.config import read_toml

REAL = read_toml(HERE / "models" / "all-minilm-l6-v2.toml", EmbedderRow)
SMALL = REAL.model_copy(
    update={
        "max_input_tokens": 12,
        "architecture": REAL.architecture.model_copy(
            update={
                "num_layers": 2,
                "hidden_size": 12,
                "intermediate_size": 20,
                "num_attention_heads": 3,
                "vocab_size": 30,
                "max_position_embeddings": 12,
                "layer_norm_eps": 1e-6,
            }
        ),
    }
)


def random_weights(seed: int) -> Weights:
    randomness = np.random.default_rng(seed)
    return {name: randomness.normal(0, 0.5, shape).astype(np.float32) for name, shape in weight_shapes(SMALL).items()}


@pytest.mark.parametrize("seed", range(5))
def test_the_graph_is_bert(seed: int) -> None:
    weights = random_weights(seed)
    session = onnxruntime.InferenceSession(make_bert_onnx(weights, SMALL).SerializeToString())
    randomness = np.random.default_rng(seed)
    sentences = [randomness.integers(0, 30, length).tolist() for length in (1, 2, 7, 12)]
    input_ids = np.full((len(sentences), 12), 29, np.int32)  # padding that would show
    mask = np.zeros_like(input_ids)
    for row, ids in enumerate(sentences):
        input_ids[row, : len(ids)], mask[row, : len(ids)] = ids, 1
    (found,) = session.run(None, {"input_ids": input_ids, "attention_mask": mask})
    assert found.dtype == np.float32 and found.shape == (4, 12)
    for row, ids in enumerate(sentences):
        np.testing.assert_allclose(found[row], embed(weights, ids, num_heads=3, eps=1e-6), atol=2e-5)


def test_nothing_but_padding_is_no_nan() -> None:
    session = onnxruntime.InferenceSession(make_bert_onnx(random_weights(0), SMALL).SerializeToString())
    zeros = np.zeros((1, 4), np.int32)
    (found,) = session.run(None, {"input_ids": zeros, "attention_mask": zeros})
    assert not found.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder.layer.1.output.dense.bias": np.zeros(13, np.float32)}, r"has shape \(13,\), .* makes it \(12,\)"),
        ({"embeddings.LayerNorm.bias": None}, r"embeddings\.LayerNorm\.bias has shape None"),
        ({"encoder.layer.2.output.dense.weight": np.zeros((12, 20), np.float32)}, r"more layers than the 2 of the row"),
    ],
)
def test_other_weights_are_refused(tmp_path: Path, change: dict[str, np.ndarray | None], message: str) -> None:
    weights = {name: value for name, value in {**random_weights(0), **change}.items() if value is not None}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(BuildError, match=message):
        write_bert_onnx(tmp_path / "model.safetensors", SMALL, tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


def test_a_file_that_holds_no_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(BuildError, match=r"model\.safetensors: not a safetensors file"):
        write_bert_onnx(tmp_path / "model.safetensors", SMALL, tmp_path / "model.onnx")


def test_equal_weights_give_equal_bytes(tmp_path: Path) -> None:
    save_file(dict(random_weights(1)), tmp_path / "model.safetensors")
    for name in ("one", "two"):
        write_bert_onnx(tmp_path / "model.safetensors", SMALL, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
