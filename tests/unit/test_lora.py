"""LoRA adapters: PEFT's files as NVIDIA's two tensors, requests that carry them, models with one after a colon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_targets import ADAPTERS, FLAGS, MODELS, render, vary
from safetensors.numpy import save_file
from test_render_trtllm import read_config

from build.commands import list_commands
from build.errors import BuildError
from build.lora import MODULES, write_lora
from build.model_rows import Architecture
from build.pairs import check_pairs
from orchestrator.cache.key import Origin, identify
from orchestrator.config import load_tiers, split_model, with_adapter
from orchestrator.contracts import ENGINE_INPUTS
from orchestrator.engines import EngineRequest, Lora
from orchestrator.request import parse_request
from orchestrator.triton.engine_client import build_request
from orchestrator.triton.lora import read_lora

MODEL = Architecture(
    family="llama",
    num_layers=2,
    hidden_size=8,
    intermediate_size=12,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab_size=100,
    context_window=64,
    rope_theta=1e4,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)
INT8 = {"precision": "int8_sq", "kv_cache_precision": "auto"}


def write_adapter(folder: Path, matrices: dict[str, np.ndarray], **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 3, "lora_alpha": 6, **settings}))
    save_file(
        {f"base_model.model.model.layers.{name}.weight": array for name, array in matrices.items()},
        folder / "adapter_model.safetensors",
    )
    return folder


def matrix(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


PAIR = {
    "1.self_attn.k_proj.lora_A": matrix(3, 8),
    "1.self_attn.k_proj.lora_B": matrix(4, 3, seed=2),
    "0.mlp.down_proj.lora_A": matrix(3, 12, seed=3),
    "0.mlp.down_proj.lora_B": matrix(8, 3, seed=4),
}


# --- the tensors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "scale"), [({}, 2.0), ({"use_rslora": True}, 6 / 3**0.5)])
def test_the_rows_hold_both_matrices(tmp_path: Path, settings: dict[str, Any], scale: float) -> None:
    write_lora(write_adapter(tmp_path / "a", PAIR, **settings), MODEL, 4, tmp_path / "out")
    weights, config = read_lora(tmp_path / "out")
    assert config.tolist() == [[MODULES["down_proj"][1], 0, 3], [MODULES["k_proj"][1], 1, 3]]
    assert weights.shape == (2, 3 * 12 + 8 * 3)
    for row, module, inputs, outputs in (
        (weights[0], "0.mlp.down_proj", 12, 8),
        (weights[1], "1.self_attn.k_proj", 8, 4),
    ):
        a, b = row[: 3 * inputs].reshape(3, inputs), row[3 * inputs : 3 * inputs + outputs * 3].reshape(outputs, 3)
        x = matrix(inputs, seed=9)
        expected = scale * PAIR[f"{module}.lora_B"] @ (PAIR[f"{module}.lora_A"] @ x)
        assert b.astype(np.float32) @ (a.astype(np.float32) @ x) == pytest.approx(expected, abs=0.05)
        assert not row[3 * inputs + outputs * 3 :].any()


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({}, {"use_dora": True}, "use_dora is True; an engine takes low-rank matrices alone"),
        ({}, {"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({}, {"alpha_pattern": {"k_proj": 64}}, "alpha_pattern is {'k_proj': 64}; an engine takes low-rank"),
        ({}, {"use_qalora": True}, "use_qalora is True"),
        ({}, {"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({}, {"trainable_token_indices": [1]}, "trainable_token_indices is [1]"),
        ({}, {"alora_invocation_tokens": [5]}, "alora_invocation_tokens is [5]"),
        ({}, {"peft_type": "IA3"}, "peft_type is 'IA3'; an engine takes low-rank matrices alone; allowed: 'LORA'"),
        ({}, {"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({}, {"lora_alpha": None}, "lora_alpha is None; allowed: a number above 0"),
        ({}, {"lora_alpha": "16"}, "lora_alpha is '16'; allowed"),
        ({}, {"lora_alpha": float("inf")}, "lora_alpha is inf; allowed"),
        ({"0.mlp.router.lora_A": matrix(3, 8)}, {}, "engines do not have this; allowed: q_proj"),
        ({"0.self_attn.q_proj.lora_A": matrix(3, 8)}, {}, "layer 0, q_proj: only lora_A is there"),
        ({"1.self_attn.k_proj.lora_A": matrix(3, 9)}, {}, "matrices (3, 9) and (4, 3) are not of this model"),
        (
            {"5.self_attn.k_proj.lora_A": matrix(3, 8), "5.self_attn.k_proj.lora_B": matrix(4, 3)},
            {},
            "layer 5, k_proj: matrices",
        ),
        (
            {"1.self_attn.k_proj.lora_A": matrix(5, 8), "1.self_attn.k_proj.lora_B": matrix(4, 5)},
            {},
            "rank 5; the row's max_lora_rank is 4; raise it",
        ),
    ],
)
def test_an_adapter_that_an_engine_cannot_take(
    tmp_path: Path, change: dict[str, np.ndarray], settings: dict[str, Any], message: str
) -> None:
    adapter = write_adapter(tmp_path / "a", PAIR | change, **settings)
    with pytest.raises(BuildError) as caught:
        write_lora(adapter, MODEL, 4, tmp_path / "out")
    assert message in str(caught.value)


def test_settings_that_are_no_table(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", PAIR)
    (adapter / "adapter_config.json").write_text("[]")
    with pytest.raises(BuildError, match=r"a/adapter_config\.json: list, no table of settings"):
        write_lora(adapter, MODEL, 4, tmp_path / "out")


def test_a_request_carries_an_adapter_by_nvidia_s_contract(tmp_path: Path) -> None:
    write_lora(write_adapter(tmp_path / "a", PAIR), MODEL, 4, tmp_path / "out")
    request = EngineRequest("id", [1, 2], 3, lora=Lora(7, "lora/legal"))
    specs = {spec.name: spec for spec in ENGINE_INPUTS}
    for tensors in (read_lora(tmp_path / "out"), None):
        message = build_request("m", request, tensors)
        sent = {each.name: each for each in message.inputs if each.name.startswith("lora_")}
        assert set(sent) == ({"lora_task_id"} if tensors is None else {"lora_task_id", "lora_weights", "lora_config"})
        for name, tensor in sent.items():
            assert f"TYPE_{tensor.datatype}" == specs[name].dtype
            assert len(tensor.shape) == 1 + len(specs[name].dims)
        sizes = {each.name: len(raw) for each, raw in zip(message.inputs, message.raw_input_contents)}
        assert sizes["lora_task_id"] == 8
        if tensors is not None:
            assert (sizes["lora_weights"], sizes["lora_config"]) == (2 * tensors.weights.size, 4 * tensors.config.size)


# --- the build ---------------------------------------------------------------------------------------------


def test_an_engine_is_built_for_its_adapters(tmp_path: Path) -> None:
    script = list_commands(*vary("l4", "llm_small", **ADAPTERS), tmp_path, "llm_small")
    assert "hf download someone/draft" in script
    (build,) = [line for line in script.splitlines() if "trtllm-build" in line]
    assert "--lora_plugin float16 --max_lora_rank 16 --lora_target_modules attn_q attn_k attn_v attn_dense" in build
    known = {flag["flag"]: flag for flag in FLAGS["trtllm-build"]}
    assert {name for name, _ in MODULES.values()} <= set(known["--lora_target_modules"]["choices"])


def test_the_configuration_and_the_tiers_name_them(tmp_path: Path) -> None:
    artifact = render(*vary("l4", "llm_small", **ADAPTERS), tmp_path)
    told = {key: value.string_value for key, value in read_config(artifact, "llm_small").parameters.items()}
    assert told["lora_cache_max_adapter_size"] == "16"
    assert set(told) <= {each["key"] for each in MODELS["tensorrtllm parameters"]}
    simple = load_tiers(artifact / "tiers.toml").tier[0]
    assert [(each.name, each.task_id, each.folder) for each in simple.adapters] == [
        ("legal", 1, "model_repository/llm_small/1/lora/legal"),
        ("medical", 2, "model_repository/llm_small/1/lora/medical"),
    ]
    assert load_tiers(artifact / "tiers.toml").tier[-1].adapters == []


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({**ADAPTERS, "max_lora_rank": None}, "max_lora_rank goes with parameters.adapters"),
        ({"max_lora_rank": 8}, "max_lora_rank goes with parameters.adapters"),
        ({**ADAPTERS, "adapters": ADAPTERS["adapters"][:1] * 2}, "each name once"),
        (
            {**ADAPTERS, "precision": "fp8", "kv_cache_precision": "fp8"},
            "precision 'fp8', whose activations",
        ),
        ({**ADAPTERS, "runtime": "llmapi", "precision": "bf16"}, "runtime 'llmapi' has no adapters in 1.2"),
    ],
)
def test_rows_that_cannot_be(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError) as caught:
        check_pairs(*vary("l4", "llm_small", **parameters))
    assert message in str(caught.value)


# --- choosing one ------------------------------------------------------------------------------------------


def test_a_model_with_an_adapter(tmp_path: Path) -> None:
    tiers = load_tiers(render(*vary("l4", "llm_small", **ADAPTERS), tmp_path) / "tiers.toml").tier
    assert split_model("llm_small:legal") == ("llm_small", "legal")
    assert split_model("llm_small") == ("llm_small", None)
    chosen = with_adapter(tiers, "medical")
    assert [tier.name for tier in chosen] == ["simple", "medium"]  # those of the small engine
    assert {tier.adapter.task_id for tier in chosen if tier.adapter} == {2}
    assert with_adapter(tiers, "other") == [] and with_adapter(tiers, None) == tiers
    assert "adapter =" not in (tmp_path / "l4" / "tiers.toml").read_text()


def test_answers_of_adapters_are_not_mixed() -> None:
    request = parse_request(b'{"model": "m", "messages": [{"role": "user", "content": "Hi"}]}')
    keys = {identify(request, Origin("t", "m", adapter)).partition for adapter in ("", "legal", "medical")}
    assert len(keys) == 3
