"""Optimisation profiles: every request that our side can make fits one, and what a row says of them wrongly is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpu_targets import GPU_TARGETS, with_onnx
from hypothesis import given
from hypothesis import strategies as st

from build.commands import list_commands
from build.errors import BuildError
from build.pairs import check_pairs
from build.plan import plan_bytes
from build.profiles import INPUTS, Profile, Shapes, find_size_fault, make_profiles, sizes_of
from build.rows import TargetRow, load_models, load_target
from orchestrator.embedding.window import choose_length
from orchestrator.vision.sizes import CROP_WIDTHS, SIDES, choose_crop_width, choose_sides, fit

L4 = load_target("l4")
MODELS = load_models(L4)


def profiles_of(name: str) -> list[Profile]:
    settings, parameters = L4.plans[name]
    return make_profiles(parameters.engine, settings, parameters, MODELS[settings.model or ""])


def takes(profile: Profile, shape: tuple[int, ...]) -> bool:
    return all(
        len(shape) == len(each.max) and all(a <= b <= c for a, b, c in zip(each.min, shape, each.max))
        for each in profile.values()
    )


def test_the_embedder_has_a_profile_for_each_length_that_texts_are_padded_to() -> None:
    profiles = profiles_of("embedding_encoder")
    assert [each["input_ids"].max for each in profiles] == [(32, size) for size in (16, 32, 64, 128, 256)]
    assert profiles[1]["attention_mask"] == Shapes((1, 17), (8, 32), (32, 32))
    assert all(set(each) == {"input_ids", "attention_mask"} for each in profiles)


@given(st.integers(1, 32), st.integers(1, 256), st.booleans())
def test_every_text_fits_one_profile(batch: int, num_tokens: int, is_padded: bool) -> None:
    """The orchestrator sends them unpadded."""
    length = choose_length(num_tokens, 256) if is_padded else num_tokens
    assert sum(takes(each, (batch, length)) for each in profiles_of("embedding_encoder")) == 1


@given(st.integers(1, 2), st.integers(1, 9000), st.integers(1, 9000))
def test_every_image_fits_a_profile(batch: int, width: int, height: int) -> None:
    width, height = choose_sides(*fit(width, height))
    assert any(takes(each, (batch, height, width, 3)) for each in profiles_of("ocr_detector"))


@given(st.integers(1, 8), st.integers(1, 9000))
def test_every_line_fits_one_profile(batch: int, width: int) -> None:
    shape = (batch, 48, choose_crop_width(width), 3)
    assert sum(takes(each, shape) for each in profiles_of("ocr_recognizer")) == 1


@pytest.mark.parametrize(("shape", "fits"), [((33, 16), False), ((1, 257), False), ((0, 16), False), ((32, 256), True)])
def test_what_is_too_large_fits_none(shape: tuple[int, ...], fits: bool) -> None:
    assert any(takes(each, shape) for each in profiles_of("embedding_encoder")) is fits


@pytest.mark.parametrize("name", GPU_TARGETS)
def test_every_gpu_target_has_plans_for_all_networks(name: str) -> None:
    target = load_target(name)
    assert set(target.plans) == {"embedding_encoder", "complexity", "ocr_detector", "ocr_recognizer"}
    for settings, parameters in target.plans.values():
        assert find_size_fault(parameters.engine, parameters, load_models(target)[settings.model or ""]) is None
        assert set(INPUTS[parameters.engine]) and parameters.opt_batch_size <= settings.max_batch_size


def test_sizes_are_those_that_our_side_pads_to() -> None:
    assert sizes_of("encoder", MODELS["all-minilm-l6-v2"]) == (16, 32, 64, 128, 256)
    assert sizes_of("ocr_detector", MODELS["pp-ocrv6-small"]) == SIDES
    assert sizes_of("ocr_recognizer", MODELS["pp-ocrv6-small"]) == CROP_WIDTHS


# --- wrong rows --------------------------------------------------------------------------------------------


def vary(model: str, settings: dict[str, Any] | None = None, **parameters: Any) -> TargetRow:
    row = L4.model_dump()
    row["models"][model] |= settings or {}
    row["models"][model]["parameters"] |= parameters
    return TargetRow.model_validate(row)


@pytest.mark.parametrize(
    ("model", "parameters", "message"),
    [
        (
            "embedding_encoder",
            {"profile_sizes": [64, 32, 256]},
            r"l4\.toml: models\.embedding_encoder\.parameters\.profile_sizes is \[64, 32, 256\]; allowed, from small "
            r"to large: 16, 32, 64, 128, 256",
        ),
        ("embedding_encoder", {"profile_sizes": [48, 256]}, r"profile_sizes is \[48, 256\]; allowed"),
        ("embedding_encoder", {"profile_sizes": [128]}, r"ends with 128; requests have up to 256, which must be the"),
        (
            "ocr_recognizer",
            {"profile_sizes": [320]},
            r"ends with 320; requests have up to 2784, which must be the last",
        ),
        (
            "ocr_detector",
            {"precision": "int8"},
            r"precision is 'int8', which needs samples .* allowed here: 'fp32', 'fp",
        ),
        ("embedding_encoder", {"gpu_device_ids": [1]}, r"gpu_device_ids is \[1\]; allowed: each of 0 to 0"),
    ],
)
def test_a_wrong_plan_is_refused(model: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        check_pairs(vary(model, **parameters), MODELS)


@pytest.mark.parametrize(
    ("settings", "parameters", "message"),
    [
        ({"backend": "python"}, {}, "backend is 'python'; only 'tensorrt' is allowed here"),
        ({"instance_kind": "KIND_CPU"}, {}, "instance_kind is 'KIND_CPU'; only 'KIND_GPU' is allowed here"),
        ({"allow_ragged_batch": True}, {}, "backend 'tensorrt' takes equal shapes alone; leave it out"),
        ({}, {"opt_batch_size": 33}, "opt_batch_size is 33; allowed: 1 to max_batch_size, 32"),
        ({}, {"profile_sizes": []}, "at least 1 item"),
        ({}, {"precision": "int4"}, "'fp32', 'fp16', 'int8' or 'fp8'"),
    ],
)
def test_a_wrong_row_is_refused(settings: dict[str, Any], parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vary("embedding_encoder", settings, **parameters)


def test_fp8_needs_a_gpu_that_has_it() -> None:
    target = load_target("a100-40g")
    row = target.model_dump()
    row["models"]["embedding_encoder"]["parameters"]["precision"] = "fp8"
    with pytest.raises(BuildError, match=r"precision is 'fp8'; NVIDIA A100.* has SM 8\.0, and FP8 needs 8\.9"):
        check_pairs(TargetRow.model_validate(row), load_models(target))


def test_a_target_without_a_gpu_has_no_plans() -> None:
    row = load_target("cpu").model_dump()
    row["models"]["embedding_encoder"] = L4.model_dump()["models"]["embedding_encoder"]
    with pytest.raises(ValueError, match=r"embedding_encoder\.parameters\.runtime is 'tensorrt', which needs a GPU"):
        TargetRow.model_validate(row)


def test_the_fallback_is_data() -> None:
    """A GPU target may run a network on the CPU, like target cpu."""
    row = L4.model_dump()
    row["models"]["embedding_encoder"] = load_target("cpu").model_dump()["models"]["embedding_encoder"]
    target = TargetRow.model_validate(row)
    check_pairs(target, MODELS)
    assert set(target.plans) == {"complexity", "ocr_detector", "ocr_recognizer"}


NETWORKS = ("embedding_encoder", "complexity", "ocr_detector", "ocr_recognizer")


def test_the_fallback_on_the_gpu_is_data_too() -> None:
    target = with_onnx("l4", *NETWORKS)
    check_pairs(target, MODELS)
    assert not target.plans and tuple(target.graphs) == NETWORKS
    # It takes the memory that the row says, beside the engines.
    assert plan_bytes(target, 0) == plan_bytes(L4, 0) > 0
    script = list_commands(target, MODELS, Path("/cache"))
    assert script.count("-m build.onnx_graph ") == 4
    assert "build.tensorrt_plan" not in script and "build.verify_plan" not in script


@pytest.mark.parametrize(
    ("settings", "parameters", "message"),
    [
        ({"backend": "tensorrt"}, {}, "backend is 'tensorrt'; only 'onnxruntime' is allowed here"),
        ({"instance_kind": "KIND_CPU"}, {}, "instance_kind is 'KIND_CPU'; only 'KIND_GPU' is allowed here"),
        ({"allow_ragged_batch": True}, {}, "backend 'onnxruntime' takes equal shapes alone; leave it out"),
        ({}, {"precision": "int8"}, "'fp32' or 'fp16'"),
        ({}, {"profile_sizes": [16]}, "Extra inputs"),
    ],
)
def test_a_wrong_row_of_the_fallback_is_refused(
    settings: dict[str, Any], parameters: dict[str, Any], message: str
) -> None:
    row = with_onnx("l4", "embedding_encoder").model_dump()
    row["models"]["embedding_encoder"] |= settings
    row["models"]["embedding_encoder"]["parameters"] |= parameters
    with pytest.raises(ValueError, match=message):
        TargetRow.model_validate(row)


def test_the_fallback_is_on_gpus_that_there_are() -> None:
    row = with_onnx("l4", "embedding_encoder").model_dump()
    row["models"]["embedding_encoder"]["parameters"]["gpu_device_ids"] = [1]
    with pytest.raises(BuildError, match=r"gpu_device_ids is \[1\]; allowed: each of 0 to 0"):
        check_pairs(TargetRow.model_validate(row), MODELS)
