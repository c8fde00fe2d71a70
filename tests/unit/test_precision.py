"""An ONNX graph in another precision computes nearly the same, and what must not lose precision does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_bert_onnx import SMALL, random_weights

from build.bert_onnx import make_bert_onnx
from build.errors import BuildError
from build.precision import convert, find_tail, find_variances

RANDOM = np.random.default_rng(3)


def texts(length: int) -> dict[str, npt.NDArray[Any]]:
    ids = RANDOM.integers(0, SMALL.architecture.vocab_size, (4, length), np.int32)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def run(model: onnx.ModelProto, feeds: dict[str, npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    results: list[npt.NDArray[Any]] = session.run(None, feeds)
    return results


def types_of(model: onnx.ModelProto, operator: str) -> set[int]:
    """Types of the results of all nodes of an operator."""
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    types = {each.name: each.type.tensor_type.elem_type for each in (*inferred.value_info, *inferred.output)}
    return {types[name] for node in model.graph.node if node.op_type == operator for name in node.output}


@pytest.fixture(scope="module")
def bert() -> onnx.ModelProto:
    return make_bert_onnx(random_weights(0), SMALL)


@pytest.mark.parametrize(("precision", "least"), [("fp32", 0.999999), ("fp16", 0.9999), ("int8", 0.99), ("fp8", 0.98)])
def test_an_embedder_gives_nearly_the_same(bert: onnx.ModelProto, precision: str, least: float) -> None:
    converted = convert(bert, precision, [texts(12), texts(5)])
    onnx.checker.check_model(converted, full_check=True)
    feeds = texts(8)
    (wanted,), (found,) = run(bert, feeds), run(converted, feeds)
    assert found.dtype == np.float32
    assert ((wanted * found).sum(axis=1) > least).all()
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)  # the norm is FP32


def test_the_given_graph_stays_as_it_was(bert: onnx.ModelProto) -> None:
    before = bert.SerializeToString(deterministic=True)
    convert(bert, "int8", [texts(4)])
    assert bert.SerializeToString(deterministic=True) == before


def test_fp16_is_everywhere_but_in_the_tail(bert: onnx.ModelProto) -> None:
    half = convert(bert, "fp16")
    assert types_of(half, "MatMul") == types_of(half, "LayerNormalization") == {TensorProto.FLOAT16}
    assert types_of(half, "ReduceSum") == types_of(half, "ReduceL2") == {TensorProto.FLOAT}
    size = sum(len(each.raw_data) for each in half.graph.initializer)
    assert size < 0.55 * sum(len(each.raw_data) for each in bert.graph.initializer)


@pytest.mark.parametrize(("precision", "kind"), [("int8", TensorProto.INT8), ("fp8", TensorProto.FLOAT8E4M3FN)])
def test_products_with_weights_are_between_q_dq(bert: onnx.ModelProto, precision: str, kind: int) -> None:
    graph = convert(bert, precision, [texts(8)])
    assert types_of(graph, "QuantizeLinear") == {kind}
    assert types_of(graph, "DequantizeLinear") == types_of(graph, "MatMul") == {TensorProto.FLOAT16}
    makers = {name: node.op_type for node in graph.graph.node for name in node.output}
    products = [node for node in graph.graph.node if node.op_type == "MatMul"]
    quantised = [node for node in products if [makers.get(name) for name in node.input] == ["DequantizeLinear"] * 2]
    # Four of each layer have weights; scores and mixing have not.
    assert (len(quantised), len(products)) == (4 * SMALL.architecture.num_layers, 6 * SMALL.architecture.num_layers)
    weights = [each for each in graph.graph.initializer if each.data_type == kind and each.dims and each.dims[0] > 1]
    zeros = [each for each in weights if not numpy_helper.to_array(each).astype(np.float32).any()]
    assert len(weights) - len(zeros) == len(quantised)


def graph_of(nodes: list[onnx.NodeProto], *initial: onnx.TensorProto, opset: int = 20) -> onnx.ModelProto:
    """A graph from x to y, both FP32 [batch, 4]."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", tensors[:1], tensors[1:], list(initial))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def test_a_variance_that_is_written_out_does_not_overflow() -> None:
    """The square of 400 is more than FP16 holds."""
    nodes = [
        helper.make_node("Pow", ["x", "two"], ["square"]),
        helper.make_node("ReduceMean", ["square", "axis"], ["mean"], keepdims=1),
        helper.make_node("Add", ["mean", "tiny"], ["safe"]),
        helper.make_node("Sqrt", ["safe"], ["deviation"]),
        helper.make_node("Div", ["x", "deviation"], ["norm"]),
        helper.make_node("MatMul", ["norm", "weights"], ["product"]),
        helper.make_node("Relu", ["product"], ["y"]),
    ]
    initial = [
        numpy_helper.from_array(np.array(2, np.float32), "two"),
        numpy_helper.from_array(np.array([1], np.int64), "axis"),
        numpy_helper.from_array(np.array(1e-12, np.float32), "tiny"),
        numpy_helper.from_array(np.eye(4, dtype=np.float32), "weights"),
    ]
    model = graph_of(nodes, *initial)
    half = convert(model, "fp16")
    assert len(find_variances(half.graph)) == 4
    feeds = {"x": np.array([[400, -400, 300, 0]], np.float32)}
    np.testing.assert_allclose(run(half, feeds)[0], run(model, feeds)[0], atol=1e-2)
    assert types_of(half, "MatMul") == {TensorProto.FLOAT16}


def test_constants_of_nodes_are_taken_along() -> None:
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.ones((4, 4), np.float32)))
    half = convert(graph_of([constant, helper.make_node("MatMul", ["x", "c"], ["y"])]), "fp16")
    assert types_of(half, "MatMul") == {TensorProto.FLOAT16}
    np.testing.assert_allclose(run(half, {"x": np.ones((1, 4), np.float32)})[0], 4)


def test_a_tail_ends_at_what_has_weights(bert: onnx.ModelProto) -> None:
    named = convert(bert, "fp32")
    operators = {node.name: node.op_type for node in named.graph.node}
    assert {operators[name] for name in find_tail(named.graph)} >= {"Div", "Max", "ReduceL2", "ReduceSum"}
    assert "MatMul" not in {operators[name] for name in find_tail(named.graph)}


def test_weights_beyond_fp16_are_refused() -> None:
    large = numpy_helper.from_array(np.full((4, 4), 1e5, np.float32), "weights")
    with pytest.raises(BuildError, match=r"weights: has 100000, beyond FP16's 65504; set precision = 'fp32'"):
        convert(graph_of([helper.make_node("MatMul", ["x", "weights"], ["y"])], large), "fp16")


def test_what_cannot_be_quantised_is_refused(bert: onnx.ModelProto) -> None:
    with pytest.raises(BuildError, match="there are no samples to find the ranges"):
        convert(bert, "int8")
    with pytest.raises(
        BuildError, match=r"precision 'int8' needs products with weights and opset 19; it has 0 and opset"
    ):
        convert(graph_of([helper.make_node("Relu", ["x"], ["y"])]), "int8", [{"x": np.ones((1, 4), np.float32)}])
