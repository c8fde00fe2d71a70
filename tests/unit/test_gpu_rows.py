"""GPU targets as data: what the rows say, what a wrong one is told, and that a new one is a new file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from gpu_targets import GPU_TARGETS, IMAGES, LANGUAGE_MODELS, LLMAPI, SPECULATION, alone, vary

from build.commands import list_commands
from build.errors import BuildError
from build.pairs import check_pairs
from build.plan import make_plan
from build.rows import HERE, load_models, load_target
from orchestrator.config import ConfigError


def test_the_targets_and_models_are_all_there() -> None:
    assert GPU_TARGETS == ["a100-40g", "a100-80g", "h100", "h200", "l4", "l40s", "rtx4090"]
    assert {f"{name}.toml" for name in LANGUAGE_MODELS} <= {path.name for path in (HERE / "models").iterdir()}


@pytest.mark.parametrize("name", GPU_TARGETS)
def test_a_container_is_one_that_nvidia_lists(name: str) -> None:
    container = load_target(name).container
    assert container is not None
    (listed,) = [image for image in IMAGES["images"] if image["ngc_tag"] == container.image]
    assert (container.triton, container.tensorrt_llm, container.tensorrt, container.cuda, container.driver) == (
        listed["triton_server"],
        listed["tensorrt_llm"],
        listed["tensorrt"],
        listed["cuda"],
        listed["driver"],
    )


def write(folder: Path, old: str, new: str, name: str = "h100") -> None:
    text = (HERE / "targets" / f"{name}.toml").read_text(encoding="utf-8")
    assert old in text
    (folder / f"{name}.toml").write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('precision = "fp8"', 'precision = "fp4"', r"h100\.toml: .*precision: .*'w4a8_awq' \(got 'fp4'\)"),
        ("tp_size = 1", "tp_sise = 1", r"\.parameters\.tensorrt_llm\.tp_sise: no such key; is it tp_size or pp_size\?"),
        ("tp_size = 1", 'tp_size = "1"', r"tp_size: .*valid integer \(got '1'\)"),
        ("tokens_per_block = 32", "tokens_per_block = 48", r"tokens_per_block: .*32, 64 or 128 \(got 48\)"),
        ('backend = "tensorrtllm"', 'backend = "python"', r"backend is 'python'; only 'tensorrtllm' is allowed here"),
        ('sm = "9.0"', 'sm = "90"', r"gpu\.sm: "),
        ("count = 2", "count = 2\ncolour = 1", r"gpu\.colour: no such key; allowed: name, sm, count, .* \(got 1\)"),
        ("fp8_tflops = 1978.9\n", "", r"h100\.toml: gpu: fp8_tflops is missing; sm '9\.0' computes in FP8"),
        ("price_per_hour = 3.0", "price_per_hour = inf", r"gpu\.price_per_hour: .*finite number"),
        ("memory_gb_per_s = 3350.0", "memory_gb_per_s = 5e-324", r"memory_gb_per_s: .*greater than or equal to 1"),
        ("count = 2\n", "count = 1000000000\n", r"gpu\.count: .*less than or equal to 64 \(got 1000000000\)"),
        ("[container]", "[containers]", r"containers: no such key; is it container or tiers\?"),
        ("kv_cache_share = 0.35", "kv_cache_share = 1.5", r"kv_cache_share: .*less than 1 \(got 1\.5\)"),
        ('image = "nvcr.io', 'image = "$(rm -rf /) nvcr.io', r"container\.image: "),
        (
            "multiple_profiles = true",
            'multiple_profiles = true\nspeculation = { method = "redrafter" }',
            r"speculation: .*'lookahead', 'draft_target', 'medusa', 'eagle', 'ngram'",
        ),
    ],
)
def test_a_wrong_row_is_told_where_and_what(tmp_path: Path, old: str, new: str, message: str) -> None:
    write(tmp_path, old, new)
    with pytest.raises((BuildError, ConfigError), match=message):
        load_target("h100", tmp_path)


def test_gpu_and_container_belong_to_the_engines(tmp_path: Path) -> None:
    text = (HERE / "targets" / "scripted.toml").read_text(encoding="utf-8")
    gpu = (HERE / "targets" / "l4.toml").read_text(encoding="utf-8").split("[gpu]")[1].split("[models")[0]
    (tmp_path / "scripted.toml").write_text(f"{text}\n[gpu]{gpu}", encoding="utf-8")
    with pytest.raises(ConfigError, match="gpu, container: both with engines 'tensorrt_llm', neither without"):
        load_target("scripted", tmp_path)


NEITHER = {"enable_kv_cache_reuse": False, "enable_chunked_context": False, "max_num_tokens": 16384}


@pytest.mark.parametrize(
    ("target", "settings", "parameters", "message"),
    [
        (
            "a100-80g",
            {},
            {"precision": "fp8"},
            r"precision is 'fp8'; NVIDIA A100-SXM4-80GB has SM 8\.0, and FP8 needs 8\.9",
        ),
        ("a100-80g", {}, {"precision": "w4a8_awq"}, r"precision is 'w4a8_awq'; .* SM 8\.0"),
        (
            "a100-80g",
            {},
            {"kv_cache_precision": "fp8"},
            r"kv_cache_precision is 'fp8'; .* allowed here: 'auto', 'int8'",
        ),
        (
            "a100-80g",
            {},
            {"kv_cache_precision": "int8"},
            r"kv_cache_precision is 'int8' with enable_kv_cache_reuse and ",
        ),
        (
            "h100",
            {},
            {"precision": "int4_awq"},
            r"kv_cache_precision is 'fp8' with precision 'int4_awq' and .*take 'auto'",
        ),
        (
            "h100",
            {},
            {"precision": "int8_sq", "kv_cache_precision": "auto", "gemm_plugin": "fp8"},
            r"gemm_plugin is 'fp8'",
        ),
        (
            "h100",
            {},
            {"tp_size": 3, "gpu_device_ids": [0, 1, 2]},
            r"gpu_device_ids is \[0, 1, 2\]; allowed: each of 0 to 1",
        ),
        ("h100", {}, {"tp_size": 1}, r"gpu_device_ids is \[0, 1\]; 1 instances of tp_size 1 x pp_size 1 take 1 GPUs"),
        ("h100", {"instance_count": 2}, {}, r"gpu_device_ids is \[0, 1\]; 2 instances .* take 4 GPUs"),
        ("h100", {}, {"gpu_device_ids": [1, 1]}, r"gpu_device_ids is \[1, 1\]; allowed: .* at most once"),
        (
            "h100",
            {"model": "smollm2-135m-instruct"},
            {"max_seq_len": 4096, "max_input_len": 2048},
            r"llm_large\.parameters\.tp_size is 2; it must divide the 3 KV heads of smollm2-135m-instruct: 1, 3",
        ),
        (
            "h100",
            {"model": "qwen2.5-7b-instruct"},
            {"max_seq_len": 65536},
            r"max_seq_len is 65536; the context window of ",
        ),
        ("h100", {}, {"tp_size": 1, "pp_size": 2, "max_seq_len": 14336}, r"max_input_len is 14336; it must leave room"),
        ("h100", {"max_batch_size": 0}, {}, r"max_batch_size is 0"),
        ("h100", {"max_batch_size": 9000}, {}, r"max_num_tokens is 8192; a step of max_batch_size 9000 sequences"),
        ("h100", {}, {"enable_chunked_context": False}, r"max_num_tokens is 8192; without enable_chunked_context"),
        ("h100", {"max_queue_delay_microseconds": None}, {}, r"max_queue_delay_microseconds is missing"),
        (
            "h100",
            {},
            {"speculation": SPECULATION["eagle"]},
            r"speculation\.method is 'eagle'; .*'lookahead', 'draft_target'",
        ),
        (
            "h100",
            {},
            {"speculation": SPECULATION["medusa"] | {"num_heads": 1, "max_draft_len": 2}},
            r"num_heads 1 and max_draft_len 2; the backend's tree of drafts takes 4 heads or more, and 63 draft tokens",
        ),
        (
            "h100",
            {},
            {"speculation": {"method": "lookahead", "window_size": 1, "ngram_size": 1, "verification_set_size": 1}},
            r"speculation is a lookahead of no draft token",
        ),
        ("h100", {}, {"speculation": SPECULATION["ngram"]}, r"speculation\.method is 'ngram'"),
        ("h100", {}, {"speculation": SPECULATION["medusa"] | {"max_draft_len": 64}}, r"64 draft tokens each has 8320"),
        (
            "h100",
            {"model": "qwen2.5-7b-instruct"},
            {"speculation": SPECULATION["draft_target"]},
            r"share the 152064 of qwen",
        ),
        ("h100", {}, {"runtime": "llmapi"}, r"precision is 'fp8'; runtime 'llmapi' loads the model's own checkpoint"),
        (
            "h100",
            {"instance_count": 1, "max_queue_delay_microseconds": 0},
            {"runtime": "llmapi", "precision": "bf16"},
            r"max_queue_delay_microseconds is set; runtime 'llmapi' does not batch in Triton",
        ),
        (
            "h100",
            {},
            {
                "runtime": "llmapi",
                "precision": "bf16",
                "max_num_tokens": 16384,
                "speculation": SPECULATION["lookahead"],
            },
            r"speculation\.method is 'lookahead', which TensorRT-LLM has for engines alone",
        ),
        (
            "a100-80g",
            {},
            {"runtime": "llmapi", "precision": "fp16", "kv_cache_precision": "int8"},
            r"kv_cache_config\.dtype of runtime 'llmapi' takes 'auto' or 'fp8'",
        ),
        (
            "h100",
            {"instance_count": 2},
            {"runtime": "llmapi", "precision": "bf16", "tp_size": 1},
            r"instance_count is 2; several instances of runtime 'llmapi'",
        ),
    ],
)
def test_what_cannot_go_together_is_told_where_and_what(
    target: str, settings: dict[str, Any], parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(BuildError, match=message) as caught:
        check_pairs(*vary(target, settings=settings, **parameters))
    assert str(caught.value).startswith(f"{target}.toml: models.llm_large.")


def test_int8_kv_without_what_it_excludes_is_fine() -> None:
    check_pairs(*vary("a100-40g", kv_cache_precision="int8", **NEITHER))
    check_pairs(*vary("h100", precision="int4_awq", kv_cache_precision="fp8", **NEITHER))


def test_awq_needs_whole_blocks() -> None:
    target, models = alone(
        "l4", {"model": "smollm2-135m-instruct"}, precision="int4_awq", kv_cache_precision="auto", max_seq_len=8192
    )
    with pytest.raises(BuildError, match="AWQ scales blocks of 128, and hidden_size 576 of smollm2-135m-instruct"):
        check_pairs(target, models)


def test_engines_end_with_1_2() -> None:
    target, models = vary("h100")
    assert target.container is not None
    later = target.model_copy(update={"container": target.container.model_copy(update={"tensorrt_llm": "1.3.0"})})
    with pytest.raises(BuildError, match=r"runtime is 'engine', but container\.tensorrt_llm is 1\.3\.0"):
        check_pairs(later, models)


def test_a_model_without_the_weights_that_its_engine_needs() -> None:
    target, models = vary("l4")
    gguf = {name: row.model_copy(update={"checkpoint": None}) for name, row in models.items()}
    with pytest.raises(BuildError, match="model is 'llama-3.2-1b-instruct', whose row has no `checkpoint`"):
        check_pairs(target, gguf)
    cpu = load_target("cpu")
    plain = {name: row.model_copy(update={"gguf": None}) for name, row in load_models(cpu).items()}
    with pytest.raises(
        BuildError, match="cpu.toml: models.llm_small.model is 'smollm2-135m-instruct', whose row has no `g"
    ):
        check_pairs(cpu, plain)


def test_a_gpu_that_is_too_old() -> None:
    target, models = alone("a100-40g", precision="bf16", kv_cache_precision="auto")
    assert target.gpu is not None
    old = target.model_copy(update={"gpu": target.gpu.model_copy(update={"sm": "7.5"})})
    with pytest.raises(BuildError, match=r"has SM 7\.5, and TensorRT-LLM 1\.2 needs 8\.0 or later"):
        check_pairs(old, models)


def test_a_model_of_another_kind_is_the_targets_fault(tmp_path: Path) -> None:
    write(tmp_path, 'model = "llama-3.1-8b-instruct"', 'model = "complexity"', "l4")
    target = load_target("l4", tmp_path)
    with pytest.raises(
        BuildError, match=r"^l4\.toml: models\.llm_large: model 'complexity' is of another kind; allowed: ll"
    ):
        load_models(target)


def test_a_new_gpu_and_a_new_model_are_new_files(tmp_path: Path) -> None:
    shutil.copytree(HERE / "models", tmp_path / "models")
    row = (HERE / "models" / "qwen2.5-7b-instruct.toml").read_text(encoding="utf-8")
    row = row.replace("qwen2.5-7b-instruct", "qwen2.5-3b-instruct").replace("Qwen2.5-7B", "Qwen2.5-3B")
    for old, new in [("num_layers = 28", "num_layers = 36"), ("hidden_size = 3584", "hidden_size = 2048")]:
        row = row.replace(old, new)
    for old, new in [("= 18944", "= 11008"), ("heads = 28", "heads = 16"), ("kv_heads = 4", "kv_heads = 2")]:
        row = row.replace(old, new)
    (tmp_path / "models" / "qwen2.5-3b-instruct.toml").write_text(row, encoding="utf-8")
    target = (HERE / "targets" / "l4.toml").read_text(encoding="utf-8").replace('name = "l4"', 'name = "rtx3090"')
    target = target.replace('name = "NVIDIA L4"', 'name = "NVIDIA GeForce RTX 3090"').replace(
        'sm = "8.9"', 'sm = "8.6"'
    )
    target = target.replace("memory_mib = 23034", "memory_mib = 24576").replace("fp8_tflops = 242.0\n", "")
    target = target.replace('precision = "fp8"', 'precision = "int8_sq"').replace(
        'kv_cache_precision = "int8_sq"', 'kv_cache_precision = "auto"'
    )
    target = target.replace('"llama-3.1-8b-instruct"', '"qwen2.5-3b-instruct"')
    (tmp_path / "rtx3090.toml").write_text(target, encoding="utf-8")
    loaded = load_target("rtx3090", tmp_path)
    models = load_models(loaded, tmp_path / "models")
    assert make_plan(loaded, models).engines["llm_large"].model == "qwen2.5-3b-instruct"
    assert "hf download Qwen/Qwen2.5-3B-Instruct" in list_commands(loaded, models, tmp_path)


def test_the_llm_api_begins_with_1_2() -> None:
    target, models = alone("l4", **LLMAPI)
    assert target.container is not None
    check_pairs(target, models)
    earlier = target.model_copy(update={"container": target.container.model_copy(update={"tensorrt_llm": "1.1.0"})})
    with pytest.raises(BuildError, match=r"earlier than 1\.2 its cancelled requests pile up; take an image with 1\.2"):
        check_pairs(earlier, models)
