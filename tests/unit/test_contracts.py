"""One contract, three spellings: ours, NVIDIA's, and the config.pbtxt files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import TYPE_UINT64, DataType, ModelConfig, ModelInput, ModelOutput

from orchestrator import contracts
from orchestrator.contracts import (
    ATTENTION_MASK,
    EMBEDDING,
    EMBEDDING_INPUT_IDS,
    ENGINE_INPUTS,
    ENGINE_OUTPUTS,
    EVENT,
    HEADERS,
    NUM_TOKENS,
    PROBABILITIES,
    REQUEST,
    TEXT,
    TensorSpec,
)

ROOT = Path(__file__).parents[2]
NVIDIA: dict[str, Any] = json.loads((ROOT / "tests/data/trtllm_tensor_contract.json").read_text())
# What NVIDIA's template leaves to whoever fills it.
FILLED_BY_US = {
    "${encoder_input_features_data_type}": "TYPE_FP16",
    "${logits_datatype}": "TYPE_FP32",
    "${prompt_embedding_table_data_type}": "TYPE_FP16",
}


def read_config(model: str) -> ModelConfig:
    text = (ROOT / "model_repository" / model / "config.pbtxt").read_text()
    return text_format.Parse(text, ModelConfig())


def as_declared(tensors: Sequence[ModelInput | ModelOutput]) -> list[tuple[Any, ...]]:
    return [
        (
            tensor.name,
            DataType.Name(tensor.data_type),
            tuple(tensor.dims),
            getattr(tensor, "optional", False),
            tensor.HasField("reshape"),
        )
        for tensor in tensors
    ]


def as_specified(inputs: Sequence[TensorSpec] = (), outputs: Sequence[TensorSpec] = ()) -> list[tuple[Any, ...]]:
    """As `as_declared`; config.pbtxt has no optional outputs."""
    return [
        *((spec.name, spec.dtype, spec.dims, spec.optional, spec.scalar) for spec in inputs),
        *((spec.name, spec.dtype, spec.dims, False, spec.scalar) for spec in outputs),
    ]


@pytest.mark.parametrize(
    ("side", "specified"),
    [("inputs", as_specified(inputs=ENGINE_INPUTS)), ("outputs", as_specified(outputs=ENGINE_OUTPUTS))],
)
def test_the_engine_contract_is_nvidias(side: str, specified: list[tuple[Any, ...]]) -> None:
    theirs = [
        (
            row["name"],
            FILLED_BY_US.get(row["data_type"], row["data_type"]),
            tuple(row["dims"]),
            row.get("optional", False),
            "reshape" in row,
        )
        for row in NVIDIA[side]
    ]
    assert specified == theirs


def test_the_engine_config_is_the_contract() -> None:
    config = read_config("llm_small")
    assert as_declared(config.input) == as_specified(ENGINE_INPUTS)
    assert as_declared(config.output) == as_specified(outputs=ENGINE_OUTPUTS)
    assert config.model_transaction_policy.decoupled


def test_the_orchestrator_config_is_the_contract() -> None:
    config = read_config("orchestrator")
    assert as_declared(config.input) == as_specified([REQUEST])
    assert as_declared(config.output) == as_specified(outputs=[EVENT, HEADERS])
    assert config.model_transaction_policy.decoupled


@pytest.mark.parametrize(
    ("model", "inputs", "outputs"),
    [
        ("embedding", [TEXT], [EMBEDDING, NUM_TOKENS]),
        ("embedding_tokenizer", [TEXT], [EMBEDDING_INPUT_IDS, ATTENTION_MASK, NUM_TOKENS]),
        ("embedding_encoder", [EMBEDDING_INPUT_IDS, ATTENTION_MASK], [EMBEDDING]),
        ("complexity", [EMBEDDING_INPUT_IDS, ATTENTION_MASK], [PROBABILITIES]),
        ("image_preprocess", [contracts.IMAGE], [contracts.PIXELS, contracts.PAGE_SIZE]),
        ("ocr_detector", [contracts.PIXELS], [contracts.TEXT_MAP]),
        ("ocr_detection", [contracts.IMAGE], [contracts.PIXELS, contracts.PAGE_SIZE, contracts.TEXT_MAP]),
        ("ocr_recognizer", [contracts.CROP], [contracts.CHARACTERS, contracts.CERTAINTIES]),
        ("ocr", [contracts.IMAGE], [contracts.OCR_RESULT]),
        ("vad", [contracts.FRAME], [contracts.SPEECH_PROBABILITY]),
        (
            "stt",
            [contracts.AUDIO, contracts.SAMPLE_RATE, contracts.TEMPERATURE, contracts.PARTIAL],
            [contracts.TRANSCRIPT, contracts.SEGMENTS],
        ),
        ("turn", [contracts.AUDIO, contracts.SAMPLE_RATE], [contracts.DONE_PROBABILITY]),
        ("tts", [contracts.TEXT, contracts.SPEED], [contracts.PCM, contracts.PCM_RATE, contracts.SENTENCE]),
    ],
)
def test_the_batched_models_configs_are_the_contract(
    model: str, inputs: list[TensorSpec], outputs: list[TensorSpec]
) -> None:
    config = read_config(model)
    assert as_declared(config.input) == as_specified(inputs)
    assert as_declared(config.output) == as_specified(outputs=outputs)


def test_the_controls_of_a_sequence_are_the_contract() -> None:
    config = read_config("vad")
    controls = {
        control.name: (control.control[0].Kind.Name(control.control[0].kind), control.control[0].data_type)
        for control in config.sequence_batching.control_input
    }
    # The first two have their type by the values they take.
    assert controls == {
        contracts.SEQUENCE_START.name: ("CONTROL_SEQUENCE_START", 0),
        contracts.SEQUENCE_END.name: ("CONTROL_SEQUENCE_END", 0),
        contracts.SEQUENCE_ID.name: ("CONTROL_SEQUENCE_CORRID", TYPE_UINT64),
    }


def test_speech_that_streams_is_decoupled() -> None:
    assert read_config("tts").model_transaction_policy.decoupled


def test_no_tensor_is_named_twice() -> None:
    names = [spec.name for spec in ENGINE_INPUTS + ENGINE_OUTPUTS]
    assert len(names) == len(set(names)) + 1  # context_phase_params goes in and comes out


def test_forwarded_headers_are_lower_case_as_grpc_metadata_must_be() -> None:
    assert all(name == name.lower() for name in contracts.FORWARDED_HEADERS)
