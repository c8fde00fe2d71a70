"""A sentence embedder's weights as one ONNX graph, without torch: BERT, mean pooling over the mask, L2 norm.

The graph is the source of every target, so that all of them give the same vector:

    input_ids, attention_mask   INT32 [batch, sequence]; the mask is 1 for tokens and 0 for padding
    embedding                   FP32 [batch, hidden_size], of length 1
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors import SafetensorError
from safetensors.numpy import load_file

from build.errors import BuildError
from build.model_rows import BertArchitecture, EmbedderRow
from orchestrator.contracts import ATTENTION_MASK, EMBEDDING, EMBEDDING_INPUT_IDS, TensorSpec

Weights = Mapping[str, npt.NDArray[np.float32]]

# The first with Gelu as one operator (LayerNormalization is of 17), and the IR version that came with it.
OPSET = 20
IR_VERSION = 9
# Added to the scores of padding; after the softmax exactly 0, in FP16 too.
MASKED = -10000.0


def write_bert_onnx(safetensors: Path, model: EmbedderRow, path: Path) -> None:
    """Write the graph of `model` to `path`; raises `BuildError` if the weights are another model's."""
    try:
        weights = load_file(safetensors)
    except (SafetensorError, OSError) as error:
        raise BuildError(f"{safetensors.name}: not a safetensors file that can be read: {error}") from error
    check_weights(weights, model, safetensors.name)
    write_graph(make_bert_onnx(weights, model), path)


def write_graph(graph: onnx.ModelProto, path: Path) -> None:
    """Check `graph` and write it to `path`; equal graphs give equal bytes."""
    onnx.checker.check_model(graph, full_check=True)
    path.write_bytes(graph.SerializeToString(deterministic=True))


def check_weights(weights: Weights, model: EmbedderRow, file: str) -> None:
    """Raise `BuildError` naming the first tensor whose shape is not the one that the model's row makes."""
    for name, shape in weight_shapes(model).items():
        found = tuple(weights[name].shape) if name in weights else None
        if found != shape:
            raise BuildError(
                f"{file}: {name} has shape {found}, the row of {model.name!r} makes it {shape}; fix the row"
            )
    num_layers = model.architecture.num_layers
    if _layer(num_layers) + "output.dense.weight" in weights:
        raise BuildError(f"{file}: has more layers than the {num_layers} of the row of {model.name!r}; fix the row")


def make_bert_onnx(weights: Weights, model: EmbedderRow) -> onnx.ModelProto:
    """The graph, all weights inside."""
    graph = _EmbedderGraph(weights, model.architecture)
    graph.pool(*graph.encode())
    return graph.finish(model.name, EMBEDDING)


def _layer(index: int) -> str:
    return f"encoder.layer.{index}."


def weight_shapes(model: EmbedderRow) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that the weights of `model` must have, by name."""
    numbers = model.architecture
    hidden, inner = numbers.hidden_size, numbers.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (numbers.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (numbers.max_position_embeddings, hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
    }
    for index in range(numbers.num_layers):
        dense = {
            **{f"attention.self.{part}": (hidden, hidden) for part in ("query", "key", "value")},
            "attention.output.dense": (hidden, hidden),
            "intermediate.dense": (inner, hidden),
            "output.dense": (hidden, inner),
        }
        for name, (num_outputs, num_inputs) in dense.items():
            shapes[f"{_layer(index)}{name}.weight"] = (num_outputs, num_inputs)
            shapes[f"{_layer(index)}{name}.bias"] = (num_outputs,)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"{_layer(index)}{name}.weight"] = shapes[f"{_layer(index)}{name}.bias"] = (hidden,)
    return shapes


class BertGraph:
    """Collects nodes and constants; every method adds some and returns the name of its result.

    B is the batch, S the sequence, H the hidden size, N the heads, D the size of a head.
    """

    def __init__(self, weights: Weights, architecture: BertArchitecture) -> None:
        self.weights = weights
        self.numbers = architecture
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}

    def encode(self) -> tuple[str, str]:
        """The last layer's output [B, S, H], and the mask as FP32 [B, S]."""
        mask = self.add("Cast", ATTENTION_MASK.name, to=TensorProto.FLOAT)
        hidden = self._embed(EMBEDDING_INPUT_IDS.name)
        bias = self._mask_bias(mask)
        for index in range(self.numbers.num_layers):
            hidden = self._transform(_layer(index), hidden, bias)
        return hidden, mask

    def finish(self, name: str, output: TensorSpec) -> onnx.ModelProto:
        """The model `name`, whose output is the result of that name."""
        batch_sequence = ["batch", "sequence"]
        graph = helper.make_graph(
            self._nodes,
            name,
            [
                helper.make_tensor_value_info(EMBEDDING_INPUT_IDS.name, TensorProto.INT32, batch_sequence),
                helper.make_tensor_value_info(ATTENTION_MASK.name, TensorProto.INT32, batch_sequence),
            ],
            [helper.make_tensor_value_info(output.name, TensorProto.FLOAT, ["batch", self.num_outputs])],
            list(self._constants.values()),
        )
        opset = helper.make_opsetid("", OPSET)
        return helper.make_model(graph, ir_version=IR_VERSION, opset_imports=[opset], producer_name="triton-realtime")

    @property
    def num_outputs(self) -> int:
        """Elements of one row of the output."""
        return self.numbers.hidden_size

    def words(self, input_ids: str) -> str:
        """[B, S] -> [B, S, H]: the words' embeddings."""
        return self.add("Gather", self.weight("embeddings.word_embeddings.weight"), input_ids)

    def sum_tokens(self, hidden: str, mask: str) -> str:
        """[B, S, H] -> [B, H]: the sum over the tokens that are no padding."""
        weighted = self.add("Mul", hidden, self.add("Unsqueeze", mask, self.integers(2)))
        return self.add("ReduceSum", weighted, self.integers(1), keepdims=0)

    def _embed(self, input_ids: str) -> str:
        """[B, S] -> [B, S, H]: the word's, the position's and the first sentence's embedding."""
        words = self.words(input_ids)
        positions = self.weights["embeddings.position_embeddings.weight"]
        positions = positions + self.weights["embeddings.token_type_embeddings.weight"][0]
        length = self.add("Shape", input_ids, start=1, end=2)
        table = self.constant("positions", positions)  # [positions, H]
        first = self.add("Slice", table, self.integers(0), length, self.integers(0))  # [S, H]
        return self._norm("embeddings.LayerNorm", self.add("Add", words, first))

    def _mask_bias(self, mask: str) -> str:
        """[B, S] of 1 and 0 -> [B, 1, 1, S] of 0 and `MASKED`."""
        absent = self.add("Sub", self.number("one", 1.0), mask)
        bias = self.add("Mul", absent, self.number("masked", MASKED))
        return self.add("Unsqueeze", bias, self.integers(1, 2))

    def _transform(self, layer: str, hidden: str, bias: str) -> str:
        """One layer, [B, S, H] -> [B, S, H], with the norms behind the sums, as in BERT."""
        attended = self._attend(layer, hidden, bias)
        summed = self.add("Add", self.dense(f"{layer}attention.output.dense", attended), hidden)
        hidden = self._norm(f"{layer}attention.output.LayerNorm", summed)
        inner = self.add("Gelu", self.dense(f"{layer}intermediate.dense", hidden))  # by erf, not tanh
        summed = self.add("Add", self.dense(f"{layer}output.dense", inner), hidden)
        return self._norm(f"{layer}output.LayerNorm", summed)

    def _attend(self, layer: str, hidden: str, bias: str) -> str:
        numbers = self.numbers
        num_heads = numbers.num_attention_heads
        head_size = numbers.hidden_size // num_heads
        parts = [f"{layer}attention.self.{part}" for part in ("query", "key", "value")]
        # The three as one product.
        joined = self.linear(
            f"{layer}attention.self",
            hidden,
            np.concatenate([self.weights[f"{part}.weight"] for part in parts]),
            np.concatenate([self.weights[f"{part}.bias"] for part in parts]),
        )
        heads = self.add("Reshape", joined, self.integers(0, 0, 3 * num_heads, head_size))  # [B, S, 3N, D]
        heads = self.add("Transpose", heads, perm=[0, 2, 1, 3])  # [B, 3N, S, D]
        names = [f"{layer}{part}" for part in ("query", "key", "value")]
        query, key, value = self.add_many("Split", heads, results=names, num_outputs=3, axis=1)  # [B, N, S, D] each
        scale = self.number("scale", head_size**-0.5)
        scores = self.add("MatMul", self.add("Mul", query, scale), self.add("Transpose", key, perm=[0, 1, 3, 2]))
        shares = self.add("Softmax", self.add("Add", scores, bias), axis=-1)  # [B, N, S, S]
        mixed = self.add("Transpose", self.add("MatMul", shares, value), perm=[0, 2, 1, 3])  # [B, S, N, D]
        return self.add("Reshape", mixed, self.integers(0, 0, numbers.hidden_size))

    def dense(self, name: str, value: str) -> str:
        return self.linear(name, value, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def linear(self, name: str, value: str, weight: npt.NDArray[np.float32], bias: npt.NDArray[np.float32]) -> str:
        """`weight` is [outputs, inputs], as torch keeps it; MatMul wants [inputs, outputs]."""
        product = self.add("MatMul", value, self.constant(f"{name}.weight", weight.T))
        return self.add("Add", product, self.constant(f"{name}.bias", bias))

    def _norm(self, name: str, value: str) -> str:
        weight, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        return self.add("LayerNormalization", value, weight, bias, axis=-1, epsilon=self.numbers.layer_norm_eps)

    def weight(self, name: str) -> str:
        return self.constant(name, self.weights[name])

    def number(self, name: str, value: float) -> str:
        return self.constant(name, np.array(value, dtype=np.float32))

    def integers(self, *values: int) -> str:
        return self.constant("integers." + "_".join(map(str, values)), np.array(values, dtype=np.int64))

    def constant(self, name: str, value: npt.NDArray[Any]) -> str:
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def add(self, operator: str, *inputs: str, result: str | None = None, **attributes: Any) -> str:
        """One node of one result, called `result` if it has a name."""
        return self.add_many(operator, *inputs, results=[result or f"{len(self._nodes)}.{operator}"], **attributes)[0]

    def add_many(self, operator: str, *inputs: str, results: list[str], **attributes: Any) -> list[str]:
        self._nodes.append(helper.make_node(operator, inputs, results, **attributes))
        return results


class _EmbedderGraph(BertGraph):
    def pool(self, hidden: str, mask: str) -> None:
        """[B, S, H] -> [B, H]: the tokens' mean, made one long. The L2 norm takes a sum for a mean just as well."""
        summed = self.sum_tokens(hidden, mask)
        length = self.add("ReduceL2", summed, self.integers(1), keepdims=1)
        # A row that is all padding has no direction; it stays 0 instead of becoming NaN.
        length = self.add("Max", length, self.number("tiny", 1e-12))
        self.add("Div", summed, length, result=EMBEDDING.name)
