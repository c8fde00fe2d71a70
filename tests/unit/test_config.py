"""tiers.toml: every fault names file, key, value and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config import Cloud, ConfigError, Limits, load_tiers

TIER = """
[[tier]]
name = "simple"
model = "llm_small"
tokenizer = "t"
context_window = 8192
end_id = 2
pad_id = 2
input_price_per_million_tokens = 0.05
output_price_per_million_tokens = 0.1
generation = { max_output_tokens = 256 }
"""

CACHE = """
[cache]
ttl_s = 60
max_bytes = 1000
semantic = true
max_temperature = 0.5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tiers.toml"


def test_defaults(file: Path) -> None:
    file.write_text(TIER)
    tiers = load_tiers(file)
    assert tiers.limits == Limits(max_live_requests=256)
    assert tiers.cache is None and tiers.quality is None and tiers.safety.words == []
    generation = tiers.tier[0].generation
    assert (generation.max_output_tokens, generation.temperature, generation.top_p) == (256, 1.0, 1.0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[[tier]]", "[[tier", "not TOML: "),
        (TIER, "", "tier: Field required"),
        (TIER, "tier = []", "tier: List should have at least 1 item after validation, not 0 (got [])"),
        ('model = "llm_small"', "", "tier.0.model: Field required"),
        ('"simple"', '"Simple"', "tier.0.name: String should match pattern '^[a-z][a-z0-9_-]*$' (got 'Simple')"),
        ("8192", '"8192"', "tier.0.context_window: Input should be a valid integer (got '8192')"),
        ('tokenizer = "t"', "", "tier.0: tokenizer: required for a tier with an engine model"),
        ("8192", "0", "tier.0.context_window: Input should be greater than 0 (got 0)"),
        ("0.05", "-1.0", "per_million_tokens: Input should be greater than or equal to 0 (got -1.0)"),
        ("pad_id = 2", "pad_id = 2\npad = 2", "tier.0.pad: no such key; is it pad_id? (got 2)"),
        ("256", "256, temperature = 3.0", "generation.temperature: Input should be less than or equal to 2 (got 3.0)"),
        ("256", "0", "tier.0.generation.max_output_tokens: Input should be greater than 0 (got 0)"),
        (TIER, TIER + TIER, "tier.name: 'simple' is used 2 times; names are unique"),
        (TIER, TIER + "[limits]\nmax_live_requests = 0", "limits.max_live_requests: Input should be greater than 0"),
        (TIER, TIER + "[cache]\n", "cache.ttl_s: Field required"),
        (TIER, TIER + CACHE.replace("60", "0"), "cache.ttl_s: Input should be greater than 0 (got 0)"),
        (TIER, TIER + CACHE.replace("true", "1"), "cache.semantic: Input should be a valid boolean (got 1)"),
        (TIER, TIER + CACHE.replace("0.5", "2.5"), "cache.max_temperature: Input should be less than or equal to 2"),
        (TIER, TIER + CACHE + "redis = 5", "cache.redis: no such key; allowed: "),
        (TIER, TIER + "[quality]\n", "quality.expert: 'expert' is no tier; one of simple"),
        (TIER, TIER + '[quality]\nexpert = "simple"', "quality.tiers: 'simple' is not cheaper than 'simple'"),
        (TIER, TIER + "[quality]\nsampling = 1.5", "quality.sampling: Input should be less than or equal to 1"),
        (TIER, TIER + "[quality]\nsample = 0.1", "quality.sample: no such key; is it sampling? (got 0.1)"),
        (TIER, TIER + '[safety]\nwords = ["x"]', "safety.words.0: String should have at least 2 characters"),
        (TIER, TIER + "[limit]\n", "limit: no such key; is it limits? (got {})"),
    ],
)
def test_a_fault_is_named(file: Path, old: str, new: str, message: str) -> None:
    assert old in TIER
    file.write_text(TIER.replace(old, new))
    with pytest.raises(ConfigError) as got:
        load_tiers(file)
    assert str(got.value).startswith(f"{file}: ")
    assert message in str(got.value)


CLOUD = """
[[tier]]
name = "cloud"
model = "gpt-4.1"
context_window = 8192
input_price_per_million_tokens = 0.05
output_price_per_million_tokens = 0.1
generation = { max_output_tokens = 256 }
[tier.cloud]
base_url = "https://api.example.com/v1"
model = "vendor/gpt-4.1"
key_env = "API_KEY"
"""


def test_a_cloud_tier(file: Path) -> None:
    file.write_text(TIER + CLOUD)
    engine, cloud = load_tiers(file).tier
    assert engine.cloud is None
    assert cloud.cloud == Cloud(base_url="https://api.example.com/v1", model="vendor/gpt-4.1", key_env="API_KEY")
    assert (cloud.cloud.connect_timeout_s, cloud.cloud.first_token_timeout_s, cloud.cloud.token_timeout_s) == (
        5,
        30,
        15,
    )


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/v1", "http://localhost", "http://[::1]:1/", "https://x:443"])
def test_a_place_that_may_be_sent_a_key(file: Path, url: str) -> None:
    file.write_text(CLOUD.replace("https://api.example.com/v1", url))
    assert load_tiers(file).tier[0].cloud is not None


URL = "https://api.example.com/v1"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("context_window = 8192", 'context_window = 8192\ntokenizer = "t"', "tier.0: tokenizer: required"),
        (
            "context_window = 8192",
            "context_window = 8192\nend_id = 2",
            "tier.0: end_id: required for a tier",
        ),
        ("context_window = 8192", 'context_window = 8192\ntool_parser = "hermes"', "tool_parser: an API takes tools"),
        (
            "context_window = 8192",
            "context_window = 8192\nfirst_token_timeout_s = 9",
            "first_token_timeout_s: of a cloud tier it stands in the table `cloud`",
        ),
        ("[tier.cloud]", "[tier.clouds]", "tier.0.clouds: no such key; is it cloud?"),
        (URL, "api.example.com", "tier.0.cloud.base_url: must be http://host[:port][/path] or https://"),
        (URL, "ftp://x", "cloud.base_url: must be http://"),
        (URL, "https://", "cloud.base_url: must be http://"),
        (URL, "https://x/a b", "cloud.base_url: must be http://"),
        (URL, "https://x:port", "cloud.base_url: Port could not be cast"),
        (URL, "https://x/?key=1", "cloud.base_url: takes no user, query or fragment"),
        (URL, "https://me@x/", "cloud.base_url: takes no user, query or fragment"),
        (URL, "http://api.example.com", "base_url: a key leaves this machine by https alone"),
        ('model = "vendor/gpt-4.1"', "", "tier.0.cloud.model: Field required"),
        ('"API_KEY"', '"sk-1"', "tier.0.cloud.key_env: String should match pattern"),
        ("key_env", "key", "tier.0.cloud.key: no such key; is it key_env?"),
        ('"API_KEY"', '"K"\ntoken_timeout_s = 0', "tier.0.cloud.token_timeout_s: Input should be greater than 0"),
        ('"API_KEY"', '"K"\nlimit_field = "n"', "Input should be 'max_tokens' or 'max_completion_tokens' (got 'n')"),
        ('model = "gpt-4.1"', 'model = "llm_small"', "'llm_small' of the cloud tier 'cloud' is an engine model too"),
    ],
)
def test_a_fault_of_a_cloud_tier_is_named(file: Path, old: str, new: str, message: str) -> None:
    assert old in CLOUD
    file.write_text(CLOUD.replace(old, new, 1) + TIER)
    with pytest.raises(ConfigError) as got:
        load_tiers(file)
    assert message in str(got.value)


def test_every_fault_has_a_line(file: Path) -> None:
    file.write_text(TIER.replace("8192", "0").replace("256", "0"))
    with pytest.raises(ConfigError) as got:
        load_tiers(file)
    assert len(str(got.value).splitlines()) == 2


def test_a_missing_file(file: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        load_tiers(file)


def test_a_file_that_is_not_text(file: Path) -> None:
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not TOML: "):
        load_tiers(file)
