"""What NVIDIA's backend and its LLM-API model are told, against NVIDIA's own lists of keys and values."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import text_format
from gpu_targets import GPU_TARGETS, LLMAPI, MODELS, SPECULATION, alone, render, vary
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInstanceGroup

from build.fetch import cache_folder
from build.plan import make_plan
from build.rows import list_targets, load_models, load_target
from orchestrator.config import load_tiers
from orchestrator.contracts import TEXT_ENGINE_INPUTS, TEXT_ENGINE_OUTPUTS

ROOT = Path(__file__).parents[2]
PARAMETERS = {each["key"]: each for each in MODELS["tensorrtllm parameters"]}


def read_config(artifact: Path, name: str) -> Any:
    text = (artifact / "model_repository" / name / "config.pbtxt").read_text(encoding="utf-8")
    return text_format.Parse(text, ModelConfig())


def is_allowed(value: str, allowed: str) -> bool:
    """Whether NVIDIA's description of a parameter's values has this one."""
    if allowed == "bool":
        return value in ("true", "false")
    if allowed.endswith("int") or allowed.startswith("int"):
        return value.isdigit()
    if allowed == "0..1":
        return 0 < float(value) <= 1
    if allowed == "dir path" or allowed == "json file":
        return not value.startswith("/")
    if allowed.startswith("comma list, semicolon"):
        return re.fullmatch(r"\d+([,;]\d+)*", value) is not None
    return value in allowed.split(",")


@pytest.mark.parametrize("name", GPU_TARGETS)
def test_a_rendered_target_is_what_nvidia_s_backend_takes(tmp_path: Path, name: str) -> None:
    target = load_target(name)
    models = load_models(target)
    plan = make_plan(target, models)
    artifact = render(target, models, tmp_path)
    for engine, (settings, parameters) in target.trtllm_engines.items():
        config = read_config(artifact, engine)
        told = {key: value.string_value for key, value in config.parameters.items()}
        assert set(told) <= set(PARAMETERS)
        for key, listed in PARAMETERS.items():
            if listed["required"]:
                assert told[key]
            if listed.get("key_must_exist"):
                assert key in told
            if told.get(key):
                assert is_allowed(told[key], listed["allowed"]), (key, told[key])
        assert told["gpt_model_path"] == f"model_repository/{engine}/1/engine"
        assert told["max_tokens_in_paged_kv_cache"] == str(plan.engines[engine].max_tokens_in_paged_kv_cache)
        assert (config.name, config.backend, config.max_batch_size) == (engine, "tensorrtllm", settings.max_batch_size)
        assert config.model_transaction_policy.decoupled
        (group,) = config.instance_group
        # GPUs are never the instance group's: gpu_device_ids says where.
        assert (group.kind, group.count) == (ModelInstanceGroup.KIND_CPU, settings.instance_count)
        assert len(told["gpu_device_ids"].split(";")) == settings.instance_count
        assert not (artifact / "model_repository" / engine / "1" / "model.py").exists()
        assert load_tiers(artifact / "tiers.toml").tier[-1].context_window == parameters.max_seq_len


@pytest.mark.parametrize(
    ("name", "runtime"), [*((name, {}) for name in list_targets()), *((name, LLMAPI) for name in GPU_TARGETS)]
)
def test_nothing_is_unfilled_and_nothing_points_at_this_machine(
    tmp_path: Path, name: str, runtime: dict[str, Any]
) -> None:
    if not runtime:
        target = load_target(name)
        models = load_models(target)
    elif name in ("l4", "a100-80g", "h100", "h200"):  # the large model does not fit there in 16 bits
        target, models = vary(name, "llm_small", settings={"instance_count": 1}, gpu_device_ids=[0], **runtime)
    else:
        target, models = vary(name, **runtime)
    artifact = render(target, models, tmp_path)
    for path in filter(Path.is_file, artifact.rglob("*")):
        text = path.read_text(encoding="utf-8")
        assert "${" not in text, path
        assert not any(str(place) in text for place in (tmp_path, ROOT, cache_folder(), sys.prefix)), path
        if path.suffix != ".py" and path.name != "manifest.json":
            assert not re.search(r'"/\w', text), path


def test_instances_have_gpus_of_their_own(tmp_path: Path) -> None:
    artifact = render(load_target("h100"), load_models(load_target("h100")), tmp_path)
    told = {
        name: read_config(artifact, name).parameters["gpu_device_ids"].string_value
        for name in ("llm_small", "llm_large")
    }
    assert told == {"llm_small": "0;1", "llm_large": "0,1"}


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("lookahead", {"decoding_mode": "lookahead", "lookahead_window_size": "7", "lookahead_ngram_size": "7"}),
        ("medusa", {"decoding_mode": "medusa"}),
        ("draft_target", {"decoding_mode": "top_k_top_p"}),
    ],
)
def test_speculation_is_told_to_the_backend(tmp_path: Path, method: str, told: dict[str, str]) -> None:
    artifact = render(*alone("h200", speculation=SPECULATION[method], max_num_tokens=16384), tmp_path)
    parameters = {key: value.string_value for key, value in read_config(artifact, "llm_large").parameters.items()}
    assert told.items() <= parameters.items()
    assert set(parameters) <= set(PARAMETERS)


@pytest.mark.parametrize("method", ["none", "draft_target", "eagle", "ngram"])
def test_the_llm_api_model_is_what_nvidia_s_takes(tmp_path: Path, method: str) -> None:
    target, models = alone("h200", {"model": "llama-3.1-8b-instruct"}, **LLMAPI, speculation=SPECULATION[method])
    artifact = render(target, models, tmp_path)
    config = read_config(artifact, "llm_large")
    # Only batch size 0 works, and both places must say the same.
    assert (config.backend, config.max_batch_size) == ("python", 0)
    assert config.model_transaction_policy.decoupled
    assert set(config.parameters) <= set(MODELS["llmapi parameters"])
    assert config.WhichOneof("scheduling_choice") is None
    model = yaml.safe_load((artifact / "model_repository/llm_large/1/model.yaml").read_text(encoding="utf-8"))
    assert model["triton_config"] == {"max_batch_size": 0, "decoupled": True, "cancellation_check_period_ms": 10}
    assert set(model["triton_config"]) <= set(MODELS["triton_config"])
    assert set(model) - {"triton_config"} <= set(MODELS["LLM"])
    assert set(model["kv_cache_config"]) <= set(MODELS["KvCacheConfig"])
    assert model["kv_cache_config"]["dtype"] in MODELS["kv dtypes"]
    assert set(model["scheduler_config"]) <= set(MODELS["SchedulerConfig"])
    assert model["scheduler_config"]["capacity_scheduler_policy"] in MODELS["capacity_scheduler_policy"]
    assert model["model"] == "model_repository/llm_large/1/checkpoint"
    assert (model["max_batch_size"], model["tensor_parallel_size"]) == (128, 1)  # top-level: no build_config
    speculative = model.get("speculative_config")
    assert (speculative is None) == (method == "none")
    if speculative is not None:
        assert set(speculative) - {"decoding_type"} == set(MODELS["speculative"][speculative["decoding_type"]])


def test_the_text_contract_is_nvidia_s() -> None:
    for specs, listed in ((TEXT_ENGINE_INPUTS, "llmapi inputs"), (TEXT_ENGINE_OUTPUTS, "llmapi outputs")):
        assert [(spec.name, spec.dtype, list(spec.dims), spec.optional) for spec in specs] == [
            (each["name"], each["data_type"], each["dims"], each.get("optional", True)) for each in MODELS[listed]
        ]


def test_the_text_contract_is_in_the_configuration(tmp_path: Path) -> None:
    target, models = alone("h200", {"model": "llama-3.1-8b-instruct"}, **LLMAPI)
    config = read_config(render(target, models, tmp_path), "llm_large")
    assert config.name == "llm_large"
    for tensors, specs in ((config.input, TEXT_ENGINE_INPUTS), (config.output, TEXT_ENGINE_OUTPUTS)):
        assert [(each.name, DataType.Name(each.data_type), tuple(each.dims)) for each in tensors] == [
            (spec.name, spec.dtype, spec.dims) for spec in specs
        ]
    assert [each.optional for each in config.input] == [spec.optional for spec in TEXT_ENGINE_INPUTS]
