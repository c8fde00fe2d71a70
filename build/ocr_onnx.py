"""PP-OCR's graphs as the models `ocr_detector` and `ocr_recognizer` run them, and the characters they know.

Both take bytes, as image files have them, and normalise inside the graph; the recogniser tells of each column the most
probable class and its probability, which are a nine-thousandth of what it computes. So every target gives the same, and
little passes between processes. The weights stay as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from build.bert_onnx import write_graph
from build.errors import BuildError
from build.model_rows import OcrRow
from orchestrator.contracts import CERTAINTIES, CHARACTERS, CROP, PIXELS, TEXT_MAP, TensorSpec

# Of 0 to 255 makes -1 to 1 (rapidocr 3.10, config.yaml: mean 0.5, std 0.5).
HALF_RANGE = 127.5
# In the recogniser's own metadata: its characters, one a line. The first class stands for none, the last for a space.
ALPHABET_KEY = "character"
NUM_EXTRA_CLASSES = 2
# Apache-2.0, section 4b, asks for it.
NOTICE = "Changed by triton-realtime: input as bytes, normalised inside; outputs reduced. The weights are PP-OCR's."


def write_detector_onnx(source: Path, path: Path) -> None:
    """pixels UINT8 [batch, height, width, 3] -> text_map FP32 [batch, height, width]."""
    graph = _Graph(source)
    graph.normalise(PIXELS, ["batch", "height", "width", 3])
    graph.add("Squeeze", graph.result, TEXT_MAP.name, axes=[1])
    graph.write(path, [(TEXT_MAP, TensorProto.FLOAT, ["batch", "height", "width"])])


def write_recognizer_onnx(source: Path, model: OcrRow, path: Path) -> None:
    """crop UINT8 [batch, 48, width, 3] -> characters INT32 and certainties FP32, both [batch, columns].

    Raises `BuildError` when the graph's classes are not those of the model's row.
    """
    graph = _Graph(source)
    num_classes = graph.num_columns
    if num_classes != model.num_characters + NUM_EXTRA_CLASSES:
        raise BuildError(
            f"{source.name}: tells {num_classes} classes apart, the row of {model.name!r} has {model.num_characters} "
            f"characters and {NUM_EXTRA_CLASSES} more; fix the row"
        )
    graph.normalise(CROP, ["batch", CROP.dims[0], "width", 3])
    graph.add("ArgMax", graph.result, "best", axis=2, keepdims=0)
    graph.add("Cast", "best", CHARACTERS.name, to=TensorProto.INT32)
    graph.add("ReduceMax", graph.result, CERTAINTIES.name, axes=[2], keepdims=0)
    columns = ["batch", "columns"]
    graph.write(path, [(CHARACTERS, TensorProto.INT32, columns), (CERTAINTIES, TensorProto.FLOAT, columns)])


def write_alphabet(source: Path, model: OcrRow, path: Path) -> None:
    """The recogniser's characters, one a line; raises `BuildError` when they are not as many as the row says."""
    metadata = {each.key: each.value for each in _load(source).metadata_props}
    characters = metadata.get(ALPHABET_KEY, "").splitlines()
    if len(characters) != model.num_characters:
        raise BuildError(
            f"{source.name}: has {len(characters)} characters, the row of {model.name!r} says {model.num_characters}; "
            "fix the row"
        )
    path.write_text("\n".join(characters) + "\n", encoding="utf-8")


class _Graph:
    """A graph of one input, FP32 [batch, 3, height, width] before `normalise`, and one output. Its opset, 11, stays."""

    def __init__(self, source: Path) -> None:
        self._model = _load(source)
        self._graph = self._model.graph
        if len(self._graph.input) != 1 or len(self._graph.output) != 1:
            raise BuildError(f"{source.name}: has not one input and one output; it is no model of PP-OCR's")
        self.result = self._graph.output[0].name
        self._last = [dim.dim_value for dim in self._graph.output[0].type.tensor_type.shape.dim][-1]

    @property
    def num_columns(self) -> int:
        """The size of the result's last dimension; 0 where it is not fixed."""
        return int(self._last)

    def add(self, kind: str, given: str, output: str, **attributes: Any) -> None:
        self._graph.node.append(helper.make_node(kind, [given], [output], **attributes))

    def normalise(self, given: TensorSpec, shape: list[str | int]) -> None:
        """Put what makes the graph's own input of bytes [batch, height, width, 3] before it."""
        for name, value in (("half_range", HALF_RANGE), ("one", 1.0)):
            self._graph.initializer.append(helper.make_tensor(name, TensorProto.FLOAT, [], [value]))
        nodes = [
            helper.make_node("Cast", [given.name], ["given_float"], to=TensorProto.FLOAT),
            helper.make_node("Transpose", ["given_float"], ["given_planes"], perm=[0, 3, 1, 2]),
            helper.make_node("Div", ["given_planes", "half_range"], ["given_scaled"]),
            helper.make_node("Sub", ["given_scaled", "one"], [self._graph.input[0].name]),
            *self._graph.node,
        ]
        del self._graph.node[:], self._graph.input[:]
        self._graph.node.extend(nodes)
        self._graph.input.append(helper.make_tensor_value_info(given.name, TensorProto.UINT8, shape))

    def write(self, path: Path, outputs: list[tuple[TensorSpec, int, list[str]]]) -> None:
        # The inferred shapes name dimensions that have other names now; the characters are kept beside the graph.
        del self._graph.output[:], self._graph.value_info[:], self._model.metadata_props[:]
        self._model.doc_string = NOTICE
        for spec, kind, shape in outputs:
            self._graph.output.append(helper.make_tensor_value_info(spec.name, kind, shape))
        write_graph(self._model, path)


def _load(source: Path) -> onnx.ModelProto:
    try:
        return onnx.load(source)
    except Exception as error:  # protobuf's, or the operating system's
        raise BuildError(f"{source.name}: not an ONNX model that can be read: {error}") from error
