"""An FP32 ONNX graph in another precision. TensorRT's networks are strongly typed: what the graph says is what runs.

    fp16   all floats are FP16 but the tail
    int8   as fp16, and the products with weights (MatMul) are between explicit Q/DQ: INT8, weights by column
    fp8    the same in FP8 (E4M3), weights by tensor

FP32 stay the tail, from the last product or norm to the outputs, and variances that are written out (the mean of a
square): sums of squares leave FP16's range, and of equal FP16 probabilities another one may be taken for the largest.
Inputs and outputs stay what they were. The range of an activation is the largest value that samples show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

from build.errors import BuildError

# Operators that may be of the tail: those that hold no weights.
TAIL = frozenset(
    (
        *("Add", "ArgMax", "Cast", "Clip", "Div", "Exp", "Max", "Min", "Mul", "ReduceL2", "ReduceMax", "ReduceMean"),
        *("ReduceSum", "Reshape", "Sigmoid", "Softmax", "Sqrt", "Squeeze", "Sub", "Transpose", "Unsqueeze"),
    )
)
# How a variance is written out; what comes after it divides.
VARIANCE = ("Pow", "ReduceMean", "Add", "Sqrt")
# Inputs that are FP32 whatever the data are (ONNX: Resize's regions and scales).
ALWAYS_FP32 = {"Resize": (1, 2)}
FP16_MAX = 65504.0
# The largest number of each quantised type, and what numpy calls it.
QUANTISED: dict[str, tuple[float, Any]] = {"int8": (127.0, np.int8), "fp8": (448.0, ml_dtypes.float8_e4m3fn)}
# Q/DQ with FP16 scales and FP8 came with opset 19.
QDQ_OPSET = 19
FP32, FP16 = TensorProto.FLOAT, TensorProto.FLOAT16

Feeds = Mapping[str, npt.NDArray[Any]]


def convert(model: onnx.ModelProto, precision: str, samples: Sequence[Feeds] = ()) -> onnx.ModelProto:
    """`model` in `precision`: "fp32", "fp16", "int8" or "fp8"; the last two need `samples` of its inputs.

    Raises `BuildError` for weights that leave FP16's range, and when there is nothing to quantise.
    """
    model = deepcopy(model)
    _name_nodes(model.graph)
    if precision in QUANTISED:
        _quantise(model, precision, samples)
    return model if precision == "fp32" else _halve(model)


def _name_nodes(graph: onnx.GraphProto) -> None:
    """Every node gets a name, and constants become initial values."""
    nodes = []
    for index, node in enumerate(graph.node):
        node.name = node.name or f"{index}.{node.op_type}"
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            node.attribute[0].t.name = node.output[0]
            graph.initializer.append(node.attribute[0].t)
        else:
            nodes.append(node)
    nodes = deepcopy(nodes)
    del graph.node[:]
    graph.node.extend(nodes)


# --- FP16 --------------------------------------------------------------------------------------------------


def find_tail(graph: onnx.GraphProto) -> set[str]:
    """Names of the nodes from which an output is reached by operators of `TAIL` alone."""
    maker = {name: node for node in graph.node for name in node.output}
    tail: set[str] = set()
    waiting = [each.name for each in graph.output]
    while waiting:
        node = maker.get(waiting.pop())
        if node is not None and node.op_type in TAIL and node.name not in tail:
            tail.add(node.name)
            waiting.extend(node.input)
    return tail


def find_variances(graph: onnx.GraphProto) -> set[str]:
    """Names of the nodes of each chain of `VARIANCE`."""
    users: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    found: set[str] = set()
    for node in graph.node:
        chain = [node] if node.op_type == VARIANCE[0] else []
        for operator in VARIANCE[1:]:
            chain += [
                user for user in (users.get(chain[-1].output[0], ()) if chain else ()) if user.op_type == operator
            ]
        if [each.op_type for each in chain] == list(VARIANCE):
            found.update(each.name for each in chain)
    return found


def _halve(model: onnx.ModelProto) -> onnx.ModelProto:
    graph = model.graph
    tail = find_tail(graph) | find_variances(graph)
    floats = _float_tensors(model)
    initial = {each.name: each for each in graph.initializer}
    types = {each.name: FP32 for each in graph.input}
    casts: dict[tuple[str, int], str] = {}
    nodes: list[onnx.NodeProto] = []

    def as_type(name: str, wanted: int) -> str:
        """The tensor `name` in the type `wanted`, by a cast that is made once."""
        if name in initial:
            return _as_initial(initial, name, wanted)
        if types[name] == wanted:
            return name
        if (name, wanted) not in casts:
            casts[name, wanted] = f"{name}.{TensorProto.DataType.Name(wanted).lower()}"
            nodes.append(helper.make_node("Cast", [name], [casts[name, wanted]], f"{name}.to.{wanted}", to=wanted))
        return casts[name, wanted]

    outputs = {each.name for each in graph.output}
    for node in map(deepcopy, graph.node):
        own = FP32 if node.name in tail else FP16
        fixed = ALWAYS_FP32.get(node.op_type, ())
        for index, name in enumerate(node.input):
            if name in floats:
                node.input[index] = as_type(name, FP32 if index in fixed else own)
        _halve_attributes(node, own)
        nodes.append(node)
        for index, name in enumerate(node.output):
            if name not in floats:
                continue
            types[name] = own
            if name in outputs and own == FP16:  # a caller's output is FP32
                node.output[index] = f"{name}.half"
                nodes.append(helper.make_node("Cast", [node.output[index]], [name], f"{name}.whole", to=FP32))
                types[name] = FP32
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    used = {name for node in nodes for name in node.input}
    kept = [deepcopy(each) for each in initial.values() if each.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return model


def _float_tensors(model: onnx.ModelProto) -> set[str]:
    """Names of all FP32 tensors, constants included."""
    graph = shape_inference.infer_shapes(model, strict_mode=True).graph
    named = [*graph.value_info, *graph.input, *graph.output]
    floats = {each.name for each in named if each.type.tensor_type.elem_type == FP32}
    return floats | {each.name for each in graph.initializer if each.data_type == FP32}


def _as_initial(initial: dict[str, onnx.TensorProto], name: str, wanted: int) -> str:
    if wanted == FP32:
        return name
    half = f"{name}.float16"
    if half not in initial:
        initial[half] = _half_tensor(initial[name], half)
    return half


def _half_tensor(tensor: onnx.TensorProto, name: str) -> onnx.TensorProto:
    values = numpy_helper.to_array(tensor)
    if values.size and (largest := float(np.abs(values).max())) > FP16_MAX:
        raise BuildError(
            f"{tensor.name}: has {largest:g}, beyond FP16's {FP16_MAX:g}; set precision = 'fp32' in the target's row"
        )
    return numpy_helper.from_array(values.astype(np.float16), name)


def _halve_attributes(node: onnx.NodeProto, own: int) -> None:
    """What makes floats out of other things makes them in the node's own type."""
    for attribute in node.attribute:
        if node.op_type == "Cast" and attribute.name == "to" and attribute.i == FP32:
            attribute.i = own
        elif attribute.HasField("t") and attribute.t.data_type == FP32 and own == FP16:  # ConstantOfShape
            attribute.t.CopyFrom(_half_tensor(attribute.t, attribute.t.name or node.name))


# --- INT8 and FP8 ------------------------------------------------------------------------------------------


def _quantise(model: onnx.ModelProto, precision: str, samples: Sequence[Feeds]) -> None:
    """Put Q/DQ around both inputs of every product with weights that is not of the tail."""
    graph, (largest, kind) = model.graph, QUANTISED[precision]
    initial = {each.name: each for each in graph.initializer}
    tail = find_tail(graph)
    products = [
        node for node in graph.node if node.op_type == "MatMul" and node.input[1] in initial and node.name not in tail
    ]
    if not products or model.opset_import[0].version < QDQ_OPSET:
        raise BuildError(
            f"graph {graph.name!r}: precision {precision!r} needs products with weights and opset {QDQ_OPSET}; it has "
            f"{len(products)} and opset {model.opset_import[0].version}; set precision = 'fp16' in the target's row"
        )
    ranges = _find_ranges(model, sorted({node.input[0] for node in products}), samples)
    nodes: dict[str, list[onnx.NodeProto]] = {}
    quantised: dict[str, str] = {}
    graph.initializer.append(numpy_helper.from_array(np.zeros((), kind), "quantised.zero"))
    for product in products:
        before = nodes.setdefault(product.name, [])
        given, weights = product.input
        if given not in quantised:
            quantised[given] = f"{given}.dequantised"
            scale = np.float32(max(ranges[given], 1e-6) / largest)
            before.extend(_activation_pair(graph, given, scale))
        product.input[0] = quantised[given]
        product.input[1] = f"{weights}.dequantised"
        before.append(_quantised_weights(graph, initial[weights], precision))
        graph.initializer.remove(initial[weights])
    ordered = [each for node in graph.node for each in (*nodes.get(node.name, ()), deepcopy(node))]
    del graph.node[:]
    graph.node.extend(ordered)


def _activation_pair(graph: onnx.GraphProto, name: str, scale: np.float32) -> Iterator[onnx.NodeProto]:
    graph.initializer.append(numpy_helper.from_array(np.array(scale, np.float32), f"{name}.scale"))
    inputs = [f"{name}.scale", "quantised.zero"]
    yield helper.make_node("QuantizeLinear", [name, *inputs], [f"{name}.quantised"], f"{name}.quantise")
    yield helper.make_node(
        "DequantizeLinear", [f"{name}.quantised", *inputs], [f"{name}.dequantised"], f"{name}.dequantise"
    )


def _quantised_weights(graph: onnx.GraphProto, tensor: onnx.TensorProto, precision: str) -> onnx.NodeProto:
    """[inputs, outputs] as INT8 with a scale for each output, or as FP8 with one for all."""
    largest, kind = QUANTISED[precision]
    values, name = numpy_helper.to_array(tensor), tensor.name
    limits = np.abs(values).max(axis=0) if precision == "int8" else np.abs(values).max()
    scale = np.maximum(limits, 1e-6).astype(np.float32) / np.float32(largest)
    scaled = np.round(values / scale) if precision == "int8" else values / scale
    graph.initializer.extend(
        [
            numpy_helper.from_array(np.clip(scaled, -largest, largest).astype(kind), f"{name}.quantised"),
            numpy_helper.from_array(np.asarray(scale, np.float32), f"{name}.scale"),
            numpy_helper.from_array(np.zeros(scale.shape, kind), f"{name}.zero"),
        ]
    )
    inputs = [f"{name}.{part}" for part in ("quantised", "scale", "zero")]
    return helper.make_node("DequantizeLinear", inputs, [f"{name}.dequantised"], f"{name}.dequantise", axis=1)


def _find_ranges(model: onnx.ModelProto, names: Sequence[str], samples: Sequence[Feeds]) -> dict[str, float]:
    """The largest absolute value of each tensor over all samples, computed by ONNX Runtime."""
    import onnxruntime  # on the machine that quantises alone

    probe = deepcopy(model)
    outputs = {each.name for each in probe.graph.output}
    probe.graph.output.extend(helper.make_tensor_value_info(name, FP32, None) for name in names if name not in outputs)
    session = onnxruntime.InferenceSession(probe.SerializeToString(), providers=["CPUExecutionProvider"])
    ranges = dict.fromkeys(names, 0.0)
    for feeds in samples:
        for name, values in zip(names, session.run(list(names), dict(feeds))):
            ranges[name] = max(ranges[name], float(np.abs(values).max()))
    if not samples:
        raise BuildError(f"graph {model.graph.name!r}: there are no samples to find the ranges of its activations with")
    return ranges
