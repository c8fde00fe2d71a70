"""Real plans for SM 8.9 and 8.6, built without a GPU by TensorRT for RTX: what is asked before, and read from the log.

Whether a plan loads and computes the right thing, only a GPU can tell (`build.verify_plan`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from build.errors import BuildError
from build.fetch import cache_folder
from build.model_rows import AnyModelRow
from build.onnx_graph import GRAPH, ROWS, load_samples, write_graph
from build.precision import convert
from build.profiles import make_profiles
from build.rows import HERE, load_models, load_target
from build.tensorrt_plan import (
    Description,
    Wish,
    build_plan,
    find_layer_fault,
    find_memory_fault,
    load_library,
    main,
    profiles_from_json,
    profiles_to_json,
    read_bytes_of,
    read_layers,
    use_timing_cache,
)

TRT = load_library("tensorrt-rtx")
L4 = load_target("l4")
MODELS = load_models(L4)
# Of its profiles the first and the last, which is what costs time here.
MODEL_OF = {"embedding_encoder": "all-minilm-l6-v2", "ocr_recognizer": "pp-ocrv6-small"}


def wish_for(name: str, precision: str = "fp16", sm: str = "8.9") -> Wish:
    settings, parameters = L4.plans[name]
    profiles = make_profiles(parameters.engine, settings, parameters, MODELS[MODEL_OF[name]])
    return Wish(name, parameters.engine, precision, [profiles[0], profiles[-1]], parameters.memory_mib, sm)


@pytest.fixture(scope="module")
def graph_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Makes the folder that `build.onnx_graph` writes for a Triton model in a precision."""

    def make(name: str, precision: str) -> Path:
        engine = L4.plans[name][1].engine
        row: AnyModelRow = ROWS[engine](HERE / "models" / f"{MODEL_OF[name]}.toml")
        folder = tmp_path_factory.mktemp(f"{name}-{precision}")
        write_graph(engine, row, precision, cache_folder(), folder)
        return folder

    return make


def test_the_embedder_for_sm_8_9(graph_folder: Callable[[str, str], Path], tmp_path: Path) -> None:
    folder, wish = graph_folder("embedding_encoder", "fp16"), wish_for("embedding_encoder")
    made = build_plan(TRT, folder / GRAPH, wish, tmp_path / "out", tmp_path / "timing.cache")
    plan = (tmp_path / "out" / "model.plan").read_bytes()
    assert 40e6 < len(plan) < 120e6 and made.weight_bytes > 40e6  # 22.6 million weights of 2 bytes
    assert [(each.name, each.data_type, each.dims) for each in made.inputs] == [
        ("input_ids", "TYPE_INT32", [-1, -1]),
        ("attention_mask", "TYPE_INT32", [-1, -1]),
    ]
    assert [(each.name, each.data_type, each.dims) for each in made.outputs] == [("embedding", "TYPE_FP32", [-1, 384])]
    assert made.layers["fp16"] > made.layers["fp32"] > 0
    assert 0 < made.activation_bytes < wish.memory_mib * 2**20
    told = json.loads((tmp_path / "out" / "plan.json").read_bytes())
    assert told["profiles"][0]["input_ids"] == [[1, 1], [8, 16], [32, 16]]
    assert (told["sm"], told["version"]) == ("8.9", TRT.__version__)
    assert "Layers:" in (tmp_path / "out" / "builder.log").read_text(encoding="utf-8")
    samples = load_samples(folder / "samples.npz")
    assert len(samples) == 16 and all(len(each["input_ids"]) == 4 for each in samples)


def test_int8_is_what_the_log_says(graph_folder: Callable[[str, str], Path], tmp_path: Path) -> None:
    wish = wish_for("embedding_encoder", "int8")
    wish = dataclasses.replace(wish, profiles=wish.profiles[:1])
    made = build_plan(TRT, graph_folder("embedding_encoder", "int8") / GRAPH, wish, tmp_path)
    assert made.precision == "int8" and made.weight_bytes < 38e6  # the word table stays FP16
    assert "Datatype: Int8" in (tmp_path / "builder.log").read_text(encoding="utf-8")


def test_fp8_is_for_gpus_that_have_it(graph_folder: Callable[[str, str], Path], tmp_path: Path) -> None:
    wish = wish_for("embedding_encoder", "fp8")
    wish = dataclasses.replace(wish, profiles=wish.profiles[:1])
    graph = graph_folder("embedding_encoder", "fp8") / GRAPH
    made = build_plan(TRT, graph, wish, tmp_path / "new")
    assert made.layers["fp8"] > 0 and made.layers["fp16"] > made.layers["fp32"]
    with pytest.raises(BuildError, match=r"built no plan: .*Cannot compile for target\(s\) sm86, .*fp8_e4m3"):
        build_plan(TRT, graph, dataclasses.replace(wish, sm="8.6"), tmp_path / "old")


def test_the_recogniser_for_sm_8_6(graph_folder: Callable[[str, str], Path], tmp_path: Path) -> None:
    folder = graph_folder("ocr_recognizer", "fp16")
    words = [
        *("--graph", str(folder), "--name", "ocr_recognizer", "--engine", "ocr_recognizer", "--precision", "fp16"),
        *("--profiles", profiles_to_json(wish_for("ocr_recognizer").profiles), "--memory_mib", "768"),
        *("--library", "tensorrt-rtx", "--sm", "8.6", "--output_dir", str(tmp_path)),
    ]
    assert main(words) == 0
    told = json.loads((tmp_path / "plan.json").read_bytes())
    assert [each["data_type"] for each in told["inputs"] + told["outputs"]] == ["TYPE_UINT8", "TYPE_INT32", "TYPE_FP32"]
    assert told["sm"] == "8.6" and (tmp_path / "model.plan").stat().st_size > 5e6


# --- small graphs ------------------------------------------------------------------------------------------


def graph_of(folder: Path, *nodes: onnx.NodeProto, given: Any = TensorProto.UINT8) -> Path:
    """A graph with the recogniser's tensors."""
    inputs = [helper.make_tensor_value_info("crop", given, ["b", 48, "w", 3])]
    outputs = [
        helper.make_tensor_value_info("characters", TensorProto.INT32, ["b", "c"]),
        helper.make_tensor_value_info("certainties", TensorProto.FLOAT, ["b", "c"]),
    ]
    initial = [numpy_helper.from_array(np.ones((3, 4), np.float32), "weights")]
    graph = helper.make_graph(list(nodes), "small", inputs, outputs, initial)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(model, folder / GRAPH)
    return folder / GRAPH


BODY = [
    helper.make_node("Cast", ["crop"], ["float"], "to_float", to=TensorProto.FLOAT),
    helper.make_node("MatMul", ["float", "weights"], ["product"], "product"),  # [b, 48, w, 4]
    helper.make_node("ReduceMax", ["product"], ["rows"], "rows", keepdims=0),
]
AXES = [helper.make_node("Constant", [], ["axes"], value=numpy_helper.from_array(np.array([1, 3], np.int64)))]
TAIL = [
    helper.make_node("ReduceMax", ["product", "axes"], ["certainties"], "certainties", keepdims=0),
    helper.make_node("Cast", ["certainties"], ["characters"], "characters", to=TensorProto.INT32),
]
SMALL = [*BODY[:2], *AXES, *TAIL]


def small_wish(**changes: Any) -> Wish:
    profiles = profiles_from_json('[{"crop": [[1, 48, 64, 3], [2, 48, 320, 3], [4, 48, 320, 3]]}]')
    return dataclasses.replace(Wish("reader", "ocr_recognizer", "fp32", profiles, 64, "8.9"), **changes)


def test_a_small_graph_is_built(tmp_path: Path) -> None:
    made = build_plan(TRT, graph_of(tmp_path, *SMALL), small_wish(), tmp_path / "out")
    assert isinstance(made, Description) and set(made.layers) <= {"fp32", "Int32"}


@pytest.mark.parametrize("sm", ["8.0", "12.0", "12.1"])
def test_other_sms(tmp_path: Path, sm: str) -> None:
    assert build_plan(TRT, graph_of(tmp_path, *SMALL), small_wish(sm=sm), tmp_path / "out").sm == sm


def test_an_operator_that_tensorrt_does_not_have(tmp_path: Path) -> None:
    shift = helper.make_node("BitShift", ["crop", "crop"], ["shifted"], "unpack", direction="RIGHT")
    cast = helper.make_node("Cast", ["shifted"], ["float"], "to_float", to=TensorProto.FLOAT)
    graph = graph_of(tmp_path, shift, cast, *SMALL[1:])
    with pytest.raises(BuildError) as caught:
        build_plan(TRT, graph, small_wish(), tmp_path / "out")
    assert str(caught.value).startswith(
        "reader: TensorRT cannot run the graph: node 'unpack' (BitShift): UNSUPPORTED_NODE"
    )
    assert str(caught.value).endswith("set runtime = 'onnxruntime' for it in the target's row")
    assert (tmp_path / "out" / "builder.log").is_file() and not (tmp_path / "out" / "model.plan").exists()


PROFILE = '[{"crop": [[1, 48, 64, 3], [2, 48, %s, 3], [4, 48, 320, 3]]}]'


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"engine": "ocr_detector"},
            "reader: inputs: crop is Tensor.* in the network, and None in orchestrator/contracts",
        ),
        ({"profiles": profiles_from_json("[{}]")}, "a profile has None for crop, which is"),
        (
            {"profiles": profiles_from_json(PROFILE.replace("48", "32") % 64)},
            r"a profile has Shapes.*\[-1, 48, -1, 3\]",
        ),
        ({"profiles": profiles_from_json(PROFILE % 400)}, "min <= opt <= max"),
        ({"sm": "9.0"}, r"SM 9\.0 cannot be built for with this library; it knows \['SM120', .*'SM89'\]"),
        ({"precision": "fp16"}, r"layer 'product' \(MATRIX_MULTIPLY\) computes in FLOAT, and precision is 'fp16'"),
        (
            {"memory_mib": 0},
            "reader: TensorRT built no plan: .*requires workspace memory .*; set runtime = 'onnxruntime'",
        ),
        ({"sm": "7.5"}, r"TensorRT built no plan: .*Turing \(SM75\): FP32 GEMM is not supported"),
    ],
)
def test_what_is_asked_of_the_network(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        build_plan(TRT, graph_of(tmp_path, *SMALL), small_wish(**changes), tmp_path / "out")


def test_another_type_of_input(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, *SMALL[1:], given=TensorProto.FLOAT)
    model = onnx.load(graph)
    model.graph.node[0].input[0] = "crop"
    onnx.save(model, graph)
    with pytest.raises(BuildError, match=r"inputs: crop is .*TYPE_FP32.* in the network, and .*TYPE_UINT8"):
        build_plan(TRT, graph, small_wish(), tmp_path / "out")


def test_int8_without_q_dq(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, *SMALL)
    onnx.save(convert(onnx.load(graph), "fp32"), graph)
    half = onnx.load(graph)
    half.graph.node[0].attribute[0].i = TensorProto.FLOAT16
    half.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones((3, 4), np.float16), "weights"))
    half.graph.output[1].type.tensor_type.elem_type = TensorProto.FLOAT16
    for node in half.graph.node:
        node.output[:] = [f"{name}.half" if name == "certainties" else name for name in node.output]
        node.input[:] = [f"{name}.half" if name == "certainties" else name for name in node.input]
    half.graph.node.append(helper.make_node("Cast", ["certainties.half"], ["certainties"], to=TensorProto.FLOAT))
    half.graph.output[1].type.tensor_type.elem_type = TensorProto.FLOAT
    onnx.save(half, graph)
    with pytest.raises(BuildError, match="no Q/DQ is in the network, and precision is 'int8'"):
        build_plan(TRT, graph, small_wish(precision="int8"), tmp_path / "out")


# --- the log and the command -------------------------------------------------------------------------------


def test_layers_of_newer_and_older_logs() -> None:
    layers = [
        "Name: a, LayerType: kgen, Inputs: [ { Name: x, Dimensions: [1], Datatype: UInt8, Format: (Linear) } ], "
        "Outputs: [ { Name: y, Dimensions: [1], Datatype: Half, Format: (Linear) linear format } ], TacticName: t",
        "Name: b, LayerType: gemm, Inputs: [], Outputs: [ { Name: z, Format/Datatype: Row major linear FP16 format }, "
        "{ Name: w, Format/Datatype: Float }], TacticName: t",
        "Name: c, LayerType: shape_call, Inputs: [], Outputs: [], TacticName: ",
    ]
    assert read_layers([("VERBOSE", "Parsing"), ("VERBOSE", "\n".join(["Layers:", *layers]))]) == {"fp16": 2, "fp32": 1}


@pytest.mark.parametrize(
    ("precision", "types", "fault"),
    [
        ("fp32", "Float", None),
        ("fp16", "Half", None),
        ("fp16", "Float", "precision is 'fp16', and no layer of the plan has fp16"),
        ("int8", "Half", "precision is 'int8', and no layer of the plan has int8"),
        ("int8", "Half, Datatype: Int8", None),
        ("fp8", "Half, Datatype: FP8", None),
    ],
)
def test_layers_have_the_precision_that_was_asked_for(precision: str, types: str, fault: str | None) -> None:
    layer = f"Name: a, LayerType: gemm, Inputs: [], Outputs: [ {{ Name: y, Datatype: {types} }} ], TacticName: t"
    assert find_layer_fault(precision, [("VERBOSE", layer)]) == fault
    assert find_layer_fault(precision, [("VERBOSE", "no list")]) is None


class TimedConfig:
    """A builder's configuration of a library that times kernels."""

    def __init__(self) -> None:
        self.read: bytes | None = None

    def create_timing_cache(self, content: bytes) -> bytes:
        self.read = content
        return content

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> None:
        assert cache == self.read and not ignore_mismatch


def test_the_timing_cache_is_tensorrt_s_alone(tmp_path: Path) -> None:
    config, path = TimedConfig(), tmp_path / "timing.cache"
    tensorrt = SimpleNamespace(__name__="tensorrt")
    assert use_timing_cache(tensorrt, config, None) is None and config.read is None
    assert use_timing_cache(TRT, config, path) is None and config.read is None
    assert use_timing_cache(tensorrt, config, path) == b""
    path.write_bytes(b"timed")
    assert use_timing_cache(tensorrt, config, path) == b"timed"


def test_memory_is_that_of_all_profiles() -> None:
    lines = [("INFO", f"Total Activation Memory: {size} bytes") for size in (100, 250)]
    assert (read_bytes_of(lines, "Activation"), read_bytes_of(lines, "Weights")) == (350, 0)


def test_a_plan_that_takes_more_than_was_planned_for() -> None:
    assert find_memory_fault(small_wish(), 30 << 20, 34 << 20) is None
    assert find_memory_fault(small_wish(), 30 << 20, 35 << 20) == (
        "the plan takes 30 MiB of weights and 35 MiB of activations; memory_mib is 64; raise it, or lower "
        "max_batch_size, in the target's row"
    )


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"x": [[1]]}]', '[{"x": [["a"], [1], [1]]}]'])
def test_profiles_that_are_none(text: str) -> None:
    with pytest.raises(BuildError, match="--profiles: "):
        profiles_from_json(text)


def test_the_container_s_library_is_not_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--graph", "x", "--name", "n", "--engine", "encoder", "--precision", "fp16", "--profiles", "[]"]
    assert main([*words, "--memory_mib", "1", "--output_dir", str(tmp_path)]) == 1
    assert "tensorrt cannot be imported" in capsys.readouterr().err
