"""Matrices in INT8, a scale a block: what becomes of a graph, and that it still says the same."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from sentences import varied_sentences
from tokenizers import Tokenizer

from build.blockwise import BLOCK, quantize_blockwise
from orchestrator.embedding.encoder import Encoder


def write_products(path: Path, *matrices: np.ndarray) -> None:
    """A graph that multiplies `rows` with each of `matrices` in turn."""
    names = ["rows", *(f"product{index}" for index in range(len(matrices)))]
    nodes = [
        helper.make_node("MatMul", [before, f"matrix{index}"], [after])
        for index, (before, after) in enumerate(pairwise(names))
    ]
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["rows", matrices[0].shape[0]])],
        [helper.make_tensor_value_info(names[-1], TensorProto.FLOAT, ["rows", matrices[-1].shape[1]])],
        [numpy_helper.from_array(matrix, f"matrix{index}") for index, matrix in enumerate(matrices)],
    )
    path.write_bytes(
        helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString()
    )


def run(path: Path, rows: np.ndarray) -> np.ndarray:
    return np.asarray(onnxruntime.InferenceSession(path).run(None, {"rows": rows})[0])


def test_matrices_are_quantised_and_others_are_not(tmp_path: Path) -> None:
    randomness = np.random.default_rng(0)
    wide = randomness.normal(0, 1, (2 * BLOCK, BLOCK - 1)).astype(np.float32)
    wide[:BLOCK, 0] = 0  # a block without a scale
    odd = randomness.normal(0, 1, (BLOCK - 1, 3)).astype(np.float32)
    path = tmp_path / "model.onnx"
    write_products(path, wide, odd)
    quantize_blockwise(path)
    graph = onnx.load(path).graph
    assert [node.op_type for node in graph.node] == ["MatMulNBits", "MatMul"]
    assert {each.name for each in graph.initializer} == {"matrix0.codes", "matrix0.scales", "matrix1"}
    rows = randomness.normal(0, 1, (7, 2 * BLOCK)).astype(np.float32)
    expected, found = rows @ wide @ odd, run(path, rows)
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


def test_a_row_gets_what_it_gets_alone(tmp_path: Path) -> None:
    """Whatever it is batched with, and however much larger that is."""
    randomness = np.random.default_rng(1)
    path = tmp_path / "model.onnx"
    write_products(path, randomness.normal(0, 1, (4 * BLOCK, 100)).astype(np.float32))
    quantize_blockwise(path)
    rows = (
        randomness.normal(0, 1, (9, 4 * BLOCK)).astype(np.float32) * (10.0 ** np.arange(9, dtype=np.float32))[:, None]
    )
    together = run(path, rows)
    for index in range(len(rows)):
        np.testing.assert_allclose(run(path, rows[index : index + 1])[0], together[index], rtol=1e-5, atol=1e-3)


def test_the_embedder_of_target_cpu_says_what_it_says_in_fp32(artifact: Callable[[str], Path]) -> None:
    """On 200 varied sentences; target scripted has the graph in FP32."""
    quantised, exact = (
        Encoder(artifact(target) / "model_repository" / "embedding_encoder" / "1" / "model.onnx", num_threads=1)
        for target in ("cpu", "scripted")
    )
    tokenizer = Tokenizer.from_file(
        str(artifact("cpu") / "model_repository" / "embedding_tokenizer" / "1" / "tokenizer.json")
    )
    cosines = []
    for sentence in varied_sentences(200):
        ids = np.array([tokenizer.encode(sentence).ids], np.int32)
        cosines.append(float(np.vdot(quantised.encode(ids, np.ones_like(ids)), exact.encode(ids, np.ones_like(ids)))))
    assert len(cosines) == 200
    assert 0.99 <= min(cosines) < 0.99999  # the one is in INT8, the other is not
