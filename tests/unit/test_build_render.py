"""config.pbtxt and tiers.toml: the contract, and the target's settings merged into it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from gpu_targets import with_onnx
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2

from build.compiler import SOURCES
from build.errors import BuildError
from build.plan import make_plan
from build.render import (
    engine_parameters,
    make_embedder,
    make_speech,
    make_tiers,
    render_config,
    render_ensemble,
    to_toml,
)
from build.rows import list_targets, load_models, load_target
from orchestrator import contracts
from orchestrator.config import Embedder, Speaker, Speech, Transcriber, load_tiers, read_toml
from orchestrator.contracts import TensorSpec
from orchestrator.engines import scripted

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DataType = model_config_pb2.DataType


def parse(text: str) -> Any:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def render(target_name: str, name: str) -> Any:
    target = load_target(target_name)
    if name in target.ensembles:
        return parse(render_ensemble(SOURCES / name / "config.pbtxt", target.models))
    settings, models = target.models[name], load_models(target)
    model = models[settings.model] if settings.model else None
    plan = make_plan(target, models).engines.get(name) if target.gpu else None
    return parse(render_config(SOURCES / target.source_of(name) / "config.pbtxt", name, settings, model, plan))


def test_a_plan_s_configuration() -> None:
    config = render("h100", "embedding_encoder")
    assert (config.platform, config.backend, config.default_model_filename) == (
        "tensorrt_plan",
        "tensorrt",
        "model.plan",
    )
    (group,) = config.instance_group
    assert group.kind == model_config_pb2.ModelInstanceGroup.KIND_GPU
    assert (group.count, list(group.gpus), list(group.profile)) == (1, [0], ["0", "1", "2", "3", "4"])
    assert config.max_batch_size == 32 and not config.parameters
    assert not any(tensor.allow_ragged_batch for tensor in config.input)
    assert render("h100", "embedding").max_batch_size == 32
    assert render("h100", "ocr_detection").max_batch_size == 2


def test_an_onnx_graph_s_configuration() -> None:
    """As Triton's backend `onnxruntime` wants it: CUDA without an accelerator that would compile it."""
    target = with_onnx("l4", "embedding_encoder")
    models = load_models(target)
    source = SOURCES / "embedding_encoder" / "config.pbtxt"
    settings = target.models["embedding_encoder"]
    config = parse(render_config(source, "embedding_encoder", settings, models[settings.model or ""]))
    assert (config.backend, config.platform) == ("onnxruntime", "onnxruntime_onnx")
    assert config.default_model_filename == "model.onnx" and not config.HasField("optimization")
    (group,) = config.instance_group
    assert group.kind == model_config_pb2.ModelInstanceGroup.KIND_GPU
    assert (group.count, list(group.gpus), list(group.profile)) == (1, [0], [])
    assert {key: value.string_value for key, value in config.parameters.items()} == {"gpu_mem_limit": str(256 << 20)}
    as_plan = render("l4", "embedding_encoder")
    assert (config.input, config.output) == (as_plan.input, as_plan.output)


def test_batching_is_the_target_s() -> None:
    config = render("cpu", "embedding_encoder")
    assert config.dynamic_batching.max_queue_delay_microseconds == 0
    assert [tensor.allow_ragged_batch for tensor in config.input] == [True, True]
    assert not render("cpu", "embedding_tokenizer").input[0].allow_ragged_batch


def spec(tensor: Any) -> TensorSpec:
    scalar = tensor.HasField("reshape") and list(tensor.dims) == [1] and not tensor.reshape.shape
    optional = getattr(tensor, "optional", False)
    return TensorSpec(tensor.name, DataType.Name(tensor.data_type), tuple(tensor.dims), optional, scalar)


TOKENS = (contracts.EMBEDDING_INPUT_IDS, contracts.ATTENTION_MASK)


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "scheduling"),
    [
        ("llm_small", contracts.ENGINE_INPUTS, contracts.ENGINE_OUTPUTS, None),
        ("orchestrator", (contracts.REQUEST,), (contracts.EVENT, contracts.HEADERS), None),
        ("embedding_tokenizer", (contracts.TEXT,), (*TOKENS, contracts.NUM_TOKENS), "dynamic_batching"),
        ("embedding_encoder", TOKENS, (contracts.EMBEDDING,), "dynamic_batching"),
        ("embedding", (contracts.TEXT,), (contracts.EMBEDDING, contracts.NUM_TOKENS), "ensemble_scheduling"),
    ],
)
@pytest.mark.parametrize("target", list_targets())
def test_tensors_are_those_of_the_contract(
    target: str,
    name: str,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    scheduling: str | None,
) -> None:
    config = render(target, name)
    assert tuple(spec(tensor) for tensor in config.input) == inputs
    # Triton has no optional outputs.
    assert tuple(spec(tensor) for tensor in config.output) == tuple(each._replace(optional=False) for each in outputs)
    assert config.name == name
    assert config.model_transaction_policy.decoupled == (scheduling is None)
    assert not config.response_cache.enable
    # NVIDIA's backend takes an engine's requests by Triton's dynamic batching.
    batched = "dynamic_batching" if config.backend == "tensorrtllm" else None
    assert config.WhichOneof("scheduling_choice") == (scheduling or batched)


def test_speech_models_are_rendered(tmp_path: Path) -> None:
    vad, tts = render("cpu-voice", "vad"), render("cpu-voice", "tts")
    assert (vad.max_batch_size, vad.WhichOneof("scheduling_choice")) == (16, "sequence_batching")
    assert (tts.max_batch_size, tts.model_transaction_policy.decoupled) == (0, True)
    assert {key: value.string_value for key, value in vad.parameters.items()} == {"engine": "vad", "num_threads": "1"}


def test_the_speech_models_are_what_the_gateway_reads(tmp_path: Path) -> None:
    assert make_speech(load_target("cpu"), load_models(load_target("cpu"))) is None
    target = load_target("cpu-voice")
    speech = make_speech(target, load_models(target))
    assert speech is not None
    path = tmp_path / "speech.toml"
    path.write_text(to_toml(speech.model_dump(mode="json", exclude_none=True)), encoding="utf-8")
    assert read_toml(path, Speech) == speech
    assert speech.transcriber == Transcriber(name="whisper-tiny.en", language="en")
    assert speech.speaker == Speaker(name="piper-joe", voice="joe")


@pytest.mark.parametrize("target", ["cpu", "scripted"])
def test_the_classifier_is_rendered_like_the_encoder(target: str) -> None:
    config = render(target, "complexity")
    assert tuple(spec(tensor) for tensor in config.input) == TOKENS
    assert tuple(spec(tensor) for tensor in config.output) == (contracts.PROBABILITIES,)
    assert all(tensor.allow_ragged_batch for tensor in config.input)
    assert config.dynamic_batching.max_queue_delay_microseconds == 0
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    del parameters["runtime"]
    assert parameters == {
        "engine": "complexity",
        "num_threads": "1",
        "max_input_tokens": "256",
        "precision": "int8",
    }


def test_settings_are_merged() -> None:
    config = render("cpu", "llm_small")
    assert (config.backend, config.max_batch_size) == ("python", 64)
    assert [(group.count, group.Kind.Name(group.kind)) for group in config.instance_group] == [(1, "KIND_CPU")]
    assert {key: value.string_value for key, value in config.parameters.items()} == {
        "engine": "openvino",
        "max_tokens_in_paged_kv_cache": "65536",
        "kv_cache_precision": "u8",
        "enable_kv_cache_reuse": "true",
        "enable_chunked_context": "true",
        "max_num_tokens": "512",
        "exclude_input_in_output": "true",
        "stream_interval": "2",
        "speculation": "none",
        "num_draft_tokens": "4",
        "max_ngram_size": "3",
        "context_window": "8192",
        "vocab_size": "49152",
    }
    assert not render("cpu", "orchestrator").parameters


def test_an_ensemble_takes_the_batch_that_all_its_steps_take() -> None:
    target = load_target("cpu")
    smaller = target.models["embedding_encoder"].model_copy(update={"max_batch_size": 3})
    models = target.models | {"embedding_encoder": smaller}
    config = parse(render_ensemble(SOURCES / "embedding" / "config.pbtxt", models))
    assert (config.platform, config.max_batch_size) == ("ensemble", 3)
    del models["embedding_tokenizer"]
    with pytest.raises(BuildError, match="step 'embedding_tokenizer' is no model of this target: orchestrator, llm_s"):
        render_ensemble(SOURCES / "embedding" / "config.pbtxt", models)


def test_the_embedder_is_what_the_gateway_reads(tmp_path: Path) -> None:
    target = load_target("cpu")
    embedder = make_embedder(target, load_models(target))
    (tmp_path / "embedder.toml").write_text(to_toml(embedder.model_dump(mode="json")), encoding="utf-8")
    assert read_toml(tmp_path / "embedder.toml", Embedder) == embedder
    assert (embedder.name, embedder.max_input_tokens, embedder.cls_id) == ("all-minilm-l6-v2", 256, 101)


def engine_settings(target_name: str) -> dict[str, str]:
    """What `orchestrator.triton.engine_model` and the engine's process hand to an engine."""
    target = load_target(target_name)
    settings = target.models["llm_small"]
    parameters = engine_parameters("llm_small", settings, load_models(target)[settings.model or ""])
    del parameters["exclude_input_in_output"]
    parameters.pop("stream_interval", None)
    return parameters | {"max_batch_size": str(settings.max_batch_size)}


def test_the_scripted_engine_takes_what_is_rendered() -> None:
    assert scripted.Settings.model_validate(engine_settings("scripted")).max_batch_size == 64


def test_the_openvino_engine_takes_what_is_rendered() -> None:
    openvino = pytest.importorskip("orchestrator.engines.openvino", exc_type=ModuleNotFoundError)
    assert openvino.Settings.model_validate(engine_settings("cpu")).max_num_tokens == 512


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name: "m" backend: "onnxruntime"', "backend: the source is target-neutral"),
        ('name: "m" instance_group { count: 1 }', "instance_group: the source is target-neutral"),
        ('name: "m" max_batch_size: ${size}', "not a Triton model configuration: "),
        ('name: "m" nothing: 1', "not a Triton model configuration: .*nothing"),
    ],
)
def test_a_wrong_source_is_refused(tmp_path: Path, text: str, message: str) -> None:
    source = tmp_path / "config.pbtxt"
    source.write_text(text, encoding="utf-8")
    with pytest.raises(BuildError, match=message):
        render_config(source, "m", load_target("cpu").models["orchestrator"], None)


@pytest.mark.parametrize("name", list_targets())
def test_tiers_are_what_the_orchestrator_reads(tmp_path: Path, name: str) -> None:
    target = load_target(name)
    tiers = make_tiers(target, load_models(target))
    path = tmp_path / "tiers.toml"
    path.write_text(to_toml(tiers.model_dump(mode="json", exclude_none=True)), encoding="utf-8")
    assert load_tiers(path) == tiers
    assert tiers.tier[0].tokenizer == "model_repository/llm_small/1/tokenizer"
    if target.vllm is not None:
        assert tiers.tier[0].context_window == target.vllm_engines["llm_small"][1].max_seq_len < 131072
        assert tiers.tier[0].has_guides
    elif target.gpu is None:
        assert (tiers.tier[0].context_window, tiers.tier[0].end_id, tiers.tier[0].pad_id) == (8192, 2, 2)
    else:
        # What the engine was built for, not what its model could.
        assert tiers.tier[0].context_window == target.trtllm_engines["llm_small"][1].max_seq_len < 131072


leaves = st.text() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
flat = st.dictionaries(st.sampled_from(["a", "b_c"]), leaves)
# A plain key after the tables, as models may declare them in any order.
tables = st.fixed_dictionaries(
    {"rows": st.lists(st.fixed_dictionaries({"sub": flat, "x": leaves}), min_size=1), "y": leaves}
)


@given(tables)
def test_toml_reads_back_as_it_was(table: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(table)) == table
