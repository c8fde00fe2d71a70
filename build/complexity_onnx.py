"""The classifier as one ONNX graph: the encoder with its adapter merged, mean pooling, head, temperature, softmax.

    input_ids, attention_mask   INT32 [batch, sequence], as the embedder's
    probabilities               FP32 [batch, 4], of sum 1

The word table stays in the 4 bits that it comes in, 54 MB instead of 384; its rows are unpacked as they are looked up,
by operators that TensorRT does not have, so for it the table is unpacked. All else is FP32.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto
from onnxruntime.quantization import quantize_dynamic

from build.bert_onnx import BertGraph, Weights, write_graph
from build.e5_file import E5File, WordBlocks
from build.errors import BuildError
from build.model_rows import BertArchitecture, ComplexityRow
from build.router_adapter import POOLED_SCALE, Adapter, merge
from orchestrator.contracts import PROBABILITIES


def write_complexity_onnx(
    file: E5File, adapter: Adapter, model: ComplexityRow, path: Path, *, is_unpacked: bool = False
) -> None:
    """Write the graph of `model` to `path`; raises `BuildError` if file, adapter and row are not of one model."""
    numbers = model.architecture
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings"):
        if file.numbers[key] != getattr(numbers, key):
            raise BuildError(
                f"{model.weights.file}: has {key} {file.numbers[key]}, the row of {model.name!r} says "
                f"{getattr(numbers, key)}; fix the row"
            )
    if len(file.words.packed) < numbers.vocab_size:
        raise BuildError(
            f"{model.weights.file}: has {len(file.words.packed)} words, the row of {model.name!r} {numbers.vocab_size}"
        )
    if adapter.num_layers != numbers.num_layers:
        raise BuildError(
            f"the adapter was trained on {adapter.num_layers} layers, architecture.num_layers of {model.name!r} is "
            f"{numbers.num_layers}; fix the row, or train again: python -m build router"
        )
    # Beyond the vocabulary are rows without a token.
    words = WordBlocks(file.words.packed[: numbers.vocab_size], file.words.scales[: numbers.vocab_size])
    weights = merge(file.weights, adapter)
    write_graph(make_complexity_onnx(words, weights, numbers, adapter.temperature, is_unpacked=is_unpacked), path)


def quantize(path: Path) -> None:
    """The matrices of the graph at `path` to INT8, in place: a scale a column, the other side quantised as it comes.

    Without VNNI, AVX2 adds pairs of products in 16 bits, which 7 bits do not overflow (`reduce_range`).
    """
    quantize_dynamic(path, path, per_channel=True, reduce_range=True, op_types_to_quantize=["MatMul"])


def make_complexity_onnx(
    words: WordBlocks,
    weights: Weights,
    architecture: BertArchitecture,
    temperature: float,
    *,
    is_unpacked: bool = False,
) -> onnx.ModelProto:
    """The graph, all weights inside; `weights` are merged ones. With `is_unpacked` the word table is FP32."""
    graph = _ComplexityGraph(words, weights, architecture, is_unpacked)
    graph.classify(*graph.encode(), temperature)
    return graph.finish("complexity", PROBABILITIES)


class _ComplexityGraph(BertGraph):
    def __init__(self, words: WordBlocks, weights: Weights, architecture: BertArchitecture, is_unpacked: bool) -> None:
        super().__init__(weights, architecture)
        self._words = words
        self._is_unpacked = is_unpacked

    @property
    def num_outputs(self) -> int:
        return int(self.weights["head.1.bias"].shape[0])

    def words(self, input_ids: str) -> str:
        """[B, S] -> [B, S, H], by way of blocks [B, S, H / 32, 16] of two weights a byte."""
        if self._is_unpacked:
            table = self._words.rows(np.arange(len(self._words.packed)))
            return self.add("Gather", self.constant("words", table), input_ids)
        packed = self.add("Gather", self.constant("words.packed", self._words.packed), input_ids)
        low = self.add("BitwiseAnd", packed, self.constant("low_half", np.array(15, np.uint8)))
        high = self.add("BitShift", packed, self.constant("half", np.array(4, np.uint8)), direction="RIGHT")
        weights = self.add("Cast", self.add("Concat", low, high, axis=-1), to=TensorProto.FLOAT)  # [B, S, H / 32, 32]
        centred = self.add("Sub", weights, self.number("eight", 8.0))
        scales = self.add("Gather", self.constant("words.scales", self._words.scales[..., None]), input_ids)
        scaled = self.add("Mul", centred, self.add("Cast", scales, to=TensorProto.FLOAT))
        return self.add("Reshape", scaled, self.integers(0, 0, self.numbers.hidden_size))

    def classify(self, hidden: str, mask: str, temperature: float) -> None:
        """[B, S, H] -> [B, 4]."""
        num_tokens = self.add("ReduceSum", mask, self.integers(1), keepdims=1)
        num_tokens = self.add("Max", num_tokens, self.number("one", 1.0))  # nothing but padding is no division by 0
        mean = self.add("Div", self.sum_tokens(hidden, mask), num_tokens)
        pooled = self.add("Mul", mean, self.number("pooled_scale", POOLED_SCALE))
        logits = self.dense("head.1", self.add("Gelu", self.dense("head.0", pooled)))
        cooled = self.add("Div", logits, self.number("temperature", temperature))
        self.add("Softmax", cooled, axis=-1, result=PROBABILITIES.name)
