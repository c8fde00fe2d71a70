"""The classifier's graph against plain numpy on small random weights, and the adapter that goes into it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from bert_reference import encode

from build.bert_onnx import Weights, write_graph
from build.complexity_onnx import make_complexity_onnx, quantize
from build.e5_file import WordBlocks
from build.errors import BuildError
from build.model_rows import BertArchitecture
from build.router_adapter import MATRICES, NORMS, Adapter, merge, read_adapter, write_adapter

NUMBERS = BertArchitecture(
    family="bert",
    num_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    vocab_size=30,
    max_position_embeddings=12,
    layer_norm_eps=1e-6,
)
RANK, HEAD = 2, 8


def shape(name: str) -> tuple[int, int]:
    hidden, inner = NUMBERS.hidden_size, NUMBERS.intermediate_size
    return {"intermediate.dense": (inner, hidden), "output.dense": (hidden, inner)}.get(name, (hidden, hidden))


def random_encoder(randomness: np.random.Generator, num_layers: int = 3) -> dict[str, np.ndarray]:
    """More layers than are kept."""
    hidden = NUMBERS.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.position_embeddings.weight": (12, hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
    }
    for index in range(num_layers):
        for name in MATRICES:
            shapes[f"encoder.layer.{index}.{name}.weight"] = shape(name)
            shapes[f"encoder.layer.{index}.{name}.bias"] = shape(name)[:1]
        for name in NORMS:
            shapes[f"encoder.layer.{index}.{name}.weight"] = shapes[f"encoder.layer.{index}.{name}.bias"] = (hidden,)
    return {name: randomness.normal(0, 0.4, size).astype(np.float32) for name, size in shapes.items()}


def random_adapter(randomness: np.random.Generator, temperature: float = 0.8) -> Adapter:
    tensors = {}
    for index in range(NUMBERS.num_layers):
        for name in MATRICES:
            num_outputs, num_inputs = shape(name)
            tensors[f"encoder.layer.{index}.{name}.lora_a"] = randomness.normal(0, 0.3, (RANK, num_inputs))
            tensors[f"encoder.layer.{index}.{name}.lora_b"] = randomness.normal(0, 0.3, (num_outputs, RANK))
        for name in NORMS:
            for part in ("weight", "bias"):
                tensors[f"encoder.layer.{index}.{name}.{part}"] = randomness.normal(0, 1, NUMBERS.hidden_size)
    for index, (num_outputs, num_inputs) in enumerate(((HEAD, NUMBERS.hidden_size), (4, HEAD))):
        tensors[f"head.{index}.weight"] = randomness.normal(0, 0.3, (num_outputs, num_inputs))
        tensors[f"head.{index}.bias"] = randomness.normal(0, 0.3, num_outputs)
    return Adapter({name: value.astype(np.float32) for name, value in tensors.items()}, {"temperature": temperature})


def expected(weights: Weights, adapter: Adapter, words: WordBlocks, ids: list[int]) -> np.ndarray:
    """In float64, the low-rank changes beside the matrices instead of in them."""
    tensors = {name: value.astype(np.float64) for name, value in {**weights, **adapter.tensors}.items()}
    for name in list(tensors):
        if name.endswith(".lora_a"):
            matrix = name.removesuffix(".lora_a")
            tensors[f"{matrix}.weight"] = tensors[f"{matrix}.weight"] + tensors[f"{matrix}.lora_b"] @ tensors[name]
    tensors = {name: value for name, value in tensors.items() if not name.startswith("encoder.layer.2.")}
    tensors["embeddings.word_embeddings.weight"] = words.rows(np.arange(30)).astype(np.float64)
    pooled = 4 * encode(tensors, ids, num_heads=4, eps=1e-6).mean(axis=0)
    inner = tensors["head.0.weight"] @ pooled + tensors["head.0.bias"]
    inner = np.array([value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in inner])
    powers = np.exp((tensors["head.1.weight"] @ inner + tensors["head.1.bias"]) / adapter.temperature)
    return np.asarray(powers / powers.sum())


@pytest.mark.parametrize(("seed", "is_unpacked"), [(0, False), (1, False), (2, False), (2, True)])
def test_the_graph_is_the_classifier(seed: int, is_unpacked: bool) -> None:
    randomness = np.random.default_rng(seed)
    weights, adapter = random_encoder(randomness), random_adapter(randomness)
    packed = randomness.integers(0, 256, (30, 1, 16)).astype(np.uint8)
    words = WordBlocks(packed, randomness.normal(0, 0.1, (30, 1)).astype(np.float16))
    merged = merge(weights, adapter)
    graph = make_complexity_onnx(words, merged, NUMBERS, adapter.temperature, is_unpacked=is_unpacked)
    session = onnxruntime.InferenceSession(graph.SerializeToString())
    conversations = [randomness.integers(0, 30, length).tolist() for length in (1, 2, 7, 12)]
    input_ids = np.full((4, 12), 29, np.int32)  # padding that would show
    mask = np.zeros_like(input_ids)
    for row, ids in enumerate(conversations):
        input_ids[row, : len(ids)], mask[row, : len(ids)] = ids, 1
    (found,) = session.run(None, {"input_ids": input_ids, "attention_mask": mask})
    assert found.dtype == np.float32 and found.shape == (4, 4)
    for row, ids in enumerate(conversations):
        np.testing.assert_allclose(found[row], expected(weights, adapter, words, ids), atol=2e-5)


def test_in_int8_it_judges_nearly_the_same(tmp_path: Path) -> None:
    randomness = np.random.default_rng(3)
    weights, adapter = random_encoder(randomness), random_adapter(randomness)
    words = WordBlocks(
        randomness.integers(0, 256, (30, 1, 16)).astype(np.uint8),
        randomness.normal(0, 0.1, (30, 1)).astype(np.float16),
    )
    path = tmp_path / "model.onnx"
    write_graph(make_complexity_onnx(words, merge(weights, adapter), NUMBERS, adapter.temperature), path)
    ids = np.array([randomness.permutation(30)[:12] for _ in range(20)], np.int32)

    def judge() -> np.ndarray:
        session = onnxruntime.InferenceSession(path)
        return np.asarray(session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0])

    exact, size = judge(), path.stat().st_size
    quantize(path)
    found = judge()
    assert path.stat().st_size < size
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-5)
    assert 0 < np.abs(found - exact).mean() < 0.02


def test_an_adapter_of_another_encoder_is_refused() -> None:
    randomness = np.random.default_rng(0)
    adapter, weights = random_adapter(randomness), random_encoder(randomness)
    weights["encoder.layer.1.output.dense.weight"] = np.zeros((32, 40), np.float32)
    with pytest.raises(
        BuildError, match=r"encoder\.layer\.1\.output\.dense\.weight has shape \(32, 48\), .* \(32, 40\)"
    ):
        merge(weights, adapter)
    with pytest.raises(BuildError, match=r"has shape \(32, 32\), the encoder's None"):
        merge({}, adapter)


def test_an_adapter_is_kept_in_half_precision_and_equal_bytes(tmp_path: Path) -> None:
    adapter = random_adapter(np.random.default_rng(1))
    for name in ("one", "two"):
        write_adapter(adapter, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    found = read_adapter(tmp_path / "one")
    assert found.training == {"temperature": 0.8} and found.num_layers == 2
    for name, value in adapter.tensors.items():
        np.testing.assert_array_equal(found.tensors[name], value.astype(np.float16).astype(np.float32))


def test_what_is_no_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"adapter")
    for name in ("a", "b"):
        with pytest.raises(BuildError, match=r"no adapter that can be read .*python -m build router"):
            read_adapter(tmp_path / name)
