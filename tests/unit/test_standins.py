"""The stand-ins of NVIDIA's backends: they take what we render, and refuse what NVIDIA's would."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from google.protobuf.json_format import MessageToDict
from gpu_targets import GPU_TARGETS, render
from standins import nvidia, plans
from standins.dress import plan_of, write_engine
from tritonclient.grpc.model_config_pb2 import ModelConfig

from build.rows import load_models, load_target


def read(artifact: Path, name: str) -> dict[str, Any]:
    """A configuration as Triton hands it to a Python model."""
    text = (artifact / "model_repository" / name / "config.pbtxt").read_text(encoding="utf-8")
    config: dict[str, Any] = MessageToDict(text_format.Parse(text, ModelConfig()), preserving_proto_field_name=True)
    for value in config.get("parameters", {}).values():
        value.setdefault("string_value", "")  # an empty text is left out of JSON
    return config


@pytest.fixture(scope="module")
def l4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = load_target("l4")
    return render(target, load_models(target), tmp_path_factory.mktemp("l4"))


@pytest.mark.parametrize("name", GPU_TARGETS)
def test_every_rendered_configuration_loads(tmp_path: Path, name: str) -> None:
    target = load_target(name)
    artifact = render(target, load_models(target), tmp_path)
    for engine in target.trtllm_engines:
        assert nvidia.find_config_fault(read(artifact, engine)) is None


def tell(config: dict[str, Any], **values: str | None) -> None:
    for key, value in values.items():
        if value is None:
            del config["parameters"][key]
        else:
            config["parameters"][key] = {"string_value": value}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda config: tell(config, gpt_model_type=None), "parameter gpt_model_type: required"),
        (lambda config: tell(config, gpt_model_type="v2"), "parameter gpt_model_type: 'v2'; allowed: inflight_fused"),
        (lambda config: tell(config, tokenizer_dir=None), "parameter tokenizer_dir: the key must be there, even if"),
        (lambda config: tell(config, max_beam_width="${max_beam_width}"), "parameter max_beam_width: '${max_beam_wid"),
        (lambda config: tell(config, max_batch_size="1"), "parameter max_batch_size: NVIDIA's backend knows no such"),
        (lambda config: tell(config, kv_cache_free_gpu_mem_fraction="1.5"), "kv_cache_free_gpu_mem_fraction: '1.5'"),
        (lambda config: tell(config, gpu_device_ids="0;1"), "parameter gpu_device_ids: 2 groups for 1 instances"),
        (lambda config: tell(config, decoding_mode="lookahead"), "parameter decoding_mode: lookahead needs lookahead_"),
        (lambda config: config["input"].pop(), "inputs differ from NVIDIA's: ['lookahead_verification_set_size']"),
        (lambda config: config["input"].reverse(), "inputs differ from NVIDIA's: the order"),
        (lambda config: config["input"][0].update(data_type="TYPE_INT64"), "input input_ids: data_type TYPE_INT64"),
        (lambda config: config["input"][0].update(dims=["1"]), "input input_ids: dims ['1']; NVIDIA's are [-1]"),
        (lambda config: config["input"][3].update(optional=True), "input input_lengths: optional True"),
        (lambda config: config["input"][3].pop("reshape"), "input input_lengths: reshape None"),
        (lambda config: config["output"][0].update(dims=["-1"]), "output output_ids: dims ['-1']"),
        (lambda config: config.pop("model_transaction_policy"), "model_transaction_policy.decoupled is false"),
        (lambda config: config.pop("dynamic_batching"), "dynamic_batching is missing"),
        (lambda config: config["instance_group"][0].update(gpus=[0]), "instance_group: KIND_CPU, gpus [0]"),
    ],
)
def test_what_would_not_load(l4: Path, damage: Any, message: str) -> None:
    config = copy.deepcopy(read(l4, "llm_small"))
    damage(config)
    assert message in (nvidia.find_config_fault(config) or "")


MODEL = {
    "max_batch_size": 8,
    "parameters": {"tp_size": 2, "pp_size": 1, "max_input_len": 10, "max_seq_len": 20, "max_num_tokens": 30},
}
TOLD = {"gpu_device_ids": "0,1", "max_tokens_in_paged_kv_cache": "100", "guided_decoding_backend": ""}
ORCHESTRATOR = {"TRTLLM_ORCHESTRATOR": "1"}


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    write_engine(tmp_path / "engine", MODEL, {"vocab_size": 100, "num_layers": 2}, {})
    return tmp_path / "engine"


def test_an_engine_of_two_gpus_loads(engine: Path) -> None:
    assert nvidia.find_engine_fault(engine, TOLD, 0, ORCHESTRATOR) is None
    assert nvidia.find_engine_fault(engine, TOLD, 0, {"OMPI_COMM_WORLD_SIZE": "2"}) is None
    two = {**TOLD, "gpu_device_ids": "0,1;2,3"}
    assert nvidia.find_engine_fault(engine, two, 1, ORCHESTRATOR) is None


@pytest.mark.parametrize(
    ("told", "environ", "message"),
    [
        ({}, {}, "mpiSize (1) != tp * pp (2)"),
        ({}, {**ORCHESTRATOR, "OMPI_COMM_WORLD_SIZE": "2"}, "the orchestrator runs alone"),
        ({"gpu_device_ids": "0"}, ORCHESTRATOR, "gpu_device_ids ['0'] and world size 2 of the engine differ"),
        ({"gpu_device_ids": "0,1;2,3"}, {"OMPI_COMM_WORLD_SIZE": "2"}, "2 instances need the orchestrator mode"),
        ({"max_tokens_in_paged_kv_cache": "19"}, ORCHESTRATOR, "KV cache of 19 tokens does not hold one sequence"),
    ],
)
def test_an_engine_that_would_not_load(
    engine: Path, told: dict[str, str], environ: dict[str, str], message: str
) -> None:
    assert message in (nvidia.find_engine_fault(engine, {**TOLD, **told}, 0, environ) or "")


def test_a_damaged_engine(engine: Path) -> None:
    (engine / "rank1.engine").unlink()
    assert "rank1.engine" in (nvidia.find_engine_fault(engine, TOLD, 0, ORCHESTRATOR) or "")
    config = json.loads((engine / "config.json").read_text())
    (engine / "config.json").write_text(json.dumps({**config, "version": "1.1.0"}))
    assert "Version tag does not match" in (nvidia.find_engine_fault(engine, TOLD, 0, ORCHESTRATOR) or "")
    (engine / "config.json").write_text("")
    assert "parse error at line 1, column 1" in (nvidia.find_engine_fault(engine, TOLD, 0, ORCHESTRATOR) or "")
    (engine / "config.json").unlink()
    assert "gpt_model_path" in (nvidia.find_engine_fault(engine, TOLD, 0, ORCHESTRATOR) or "")


BUILD = {"max_input_len": 4}
OUTPUTS = ("output_ids", "sequence_length")
REQUEST = {
    "input_ids": np.array([[1, 2, 3]], np.int32),
    "input_lengths": np.array([3], np.int32),
    "request_output_len": np.array([5], np.int32),
}


@pytest.mark.parametrize(
    ("more", "outputs", "message"),
    [
        ({}, OUTPUTS, None),
        ({"stop": np.array([True])}, (), None),
        ({}, ("output_ids",), "Output tensor sequence_length is required"),
        ({"input_lengths": np.array([[3]], np.int32)}, OUTPUTS, "input input_lengths: 2 dimensions"),
        ({"prompt": np.array([[3]], np.int32)}, OUTPUTS, "unexpected inference input 'prompt'"),
        ({"input_ids": np.array([[1] * 5])}, OUTPUTS, "Prompt length (5) exceeds maximum input length (4)"),
        ({"guided_decoding_guide_type": np.array([["json"]])}, OUTPUTS, "guided decoding is not enabled"),
    ],
)
def test_requests(more: dict[str, Any], outputs: tuple[str, ...], message: str | None) -> None:
    fault = nvidia.find_request_fault({**REQUEST, **more}, outputs, TOLD, BUILD)
    assert fault == message if message is None else message in (fault or "")


# --- backend tensorrt --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GPU_TARGETS)
def test_every_rendered_plan_loads(tmp_path: Path, name: str) -> None:
    target = load_target(name)
    artifact = render(target, load_models(target), tmp_path)
    for model in target.plans:
        assert plans.find_config_fault(read(artifact, model), plan_of(name, model)) is None
        assert list((artifact / "model_repository" / model / "1").iterdir()) == []  # no model.py of ours


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda config: config.update(platform="onnxruntime_onnx"), "platform tensorrt_plan and file model.plan are"),
        (
            lambda config: config["instance_group"][0].update(kind="KIND_CPU"),
            "TensorRT backend supports only GPU device",
        ),
        (lambda config: config["instance_group"][0].pop("gpus"), "TensorRT backend supports only GPU device"),
        (lambda config: config["instance_group"][0]["profile"].append("5"), "the plan has no optimization profile 5"),
        (
            lambda config: config.update(max_batch_size=64),
            "specified max-batch 64 but TensorRT engine only supports max-",
        ),
        (lambda config: config["input"].pop(), "inputs ['input_ids'], the plan has ['attention_mask', 'input_ids']"),
        (lambda config: config["output"][0].update(dims=["512"]), "making complete shape [-1, 512])"),
        (
            lambda config: config["output"][0].update(dims=["1", "384"]),
            "the model expects 2 dimensions (shape [-1, 384])",
        ),
        (
            lambda config: config["input"][0].update(data_type="TYPE_INT64"),
            "unexpected datatype TYPE_INT64 for inference",
        ),
        (lambda config: config["input"][0].update(allow_ragged_batch=True), "ragged input without batch_input"),
    ],
)
def test_what_would_not_load_as_a_plan(l4: Path, damage: Any, message: str) -> None:
    config = copy.deepcopy(read(l4, "embedding_encoder"))
    damage(config)
    assert message in (plans.find_config_fault(config, plan_of("l4", "embedding_encoder")) or "")


@pytest.mark.parametrize(
    ("model", "tensors", "message"),
    [
        ("ocr_recognizer", {"crop": np.zeros((8, 48, 320, 3), np.uint8)}, None),
        ("ocr_recognizer", {"crop": np.zeros((1, 48, 384, 3), np.uint8)}, None),
        (
            "ocr_recognizer",
            {"crop": np.zeros((1, 48, 352, 3), np.uint8)},
            "dimension 2 to be between 64 and 320 but rec",
        ),
        ("ocr_recognizer", {"crop": np.zeros((9, 48, 320, 3), np.uint8)}, "batch size 9 for 'x_0', max allowed is 8"),
        (
            "ocr_recognizer",
            {"crop": np.zeros((1, 48, 64, 3), np.float32)},
            "unexpected datatype float32 for inference in",
        ),
        (
            "ocr_recognizer",
            {"crop": np.zeros((1, 48, 64), np.uint8)},
            "model expected 4 dimensions but received 3 dimen",
        ),
        ("ocr_recognizer", {"page": np.zeros((1, 48, 64), np.uint8)}, "missing input 'crop'"),
        ("ocr_detector", {"pixels": np.zeros((1, 64, 1600, 3), np.uint8)}, None),
        (
            "ocr_detector",
            {"pixels": np.zeros((1, 32, 640, 3), np.uint8)},
            "dimension 1 to be between 64 and 640 but rec",
        ),
    ],
)
def test_shapes_against_the_profiles(model: str, tensors: dict[str, Any], message: str | None) -> None:
    most = load_target("l4").models[model].max_batch_size
    fault = plans.find_request_fault("x_0", tensors, plan_of("l4", model), most)
    assert fault is None if message is None else message in (fault or "")
