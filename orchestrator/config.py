"""Typed configuration, read once at start: `tiers.toml` and `embedder.toml` of an artifact.

Every model is frozen and strict: an unknown key or a wrong type is a `ConfigError` that names the file, the key,
the value and what is allowed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# How a model writes a tool call; `orchestrator.streaming.tool_calls` reads them.
ToolFormat = Literal["hermes", "llama3"]

ModelT = TypeVar("ModelT", bound="Row")


class ConfigError(Exception):
    """A file that configures us is wrong; the text names file, key, value and what is allowed."""


class Row(BaseModel):
    """Base of every table read from TOML: frozen, strict, no unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Generation(Row):
    """A tier's generation policy: what a request gets that does not say otherwise."""

    max_output_tokens: Annotated[int, Field(gt=0)]
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


Seconds = Annotated[float, Field(gt=0, le=3600)]


class Cloud(Row):
    """An OpenAI-compatible API as the engine of a tier.

    `base_url` is what `/chat/completions` is put behind, with the version if the API has one in its path. `model` is
    the API's own name for the model. `key_env` names the environment variable that holds the key; without it none is
    sent. `limit_field` is the name of the answer's limit in tokens: all APIs know `max_tokens`, but OpenAI's reasoning
    models refuse it. The first token is timed from the moment the request is sent, connecting included.
    """

    base_url: str
    model: Annotated[str, Field(min_length=1, max_length=256)]
    key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    connect_timeout_s: Seconds = 5.0
    first_token_timeout_s: Seconds = 30.0
    token_timeout_s: Seconds = 15.0

    @field_validator("base_url")
    @classmethod
    def _check_url(cls, base_url: str) -> str:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname or not base_url.isprintable() or " " in base_url:
            raise ValueError("must be http://host[:port][/path] or https://host[:port][/path]")
        if "@" in url.netloc or url.query or url.fragment:
            raise ValueError("takes no user, query or fragment; a key goes into the variable that key_env names")
        _ = url.port  # raises `ValueError` when it is none
        return base_url

    @model_validator(mode="after")
    def _guard_key(self) -> Cloud:
        url = urlsplit(self.base_url)
        if self.key_env is not None and url.scheme == "http" and url.hostname not in ("localhost", "127.0.0.1", "::1"):
            raise ValueError("base_url: a key leaves this machine by https alone; use https://, or leave key_env out")
        return self


class Tier(Row):
    """One tier: where a request of some complexity goes, and on what terms.

    Its model is an engine of this server or, with `cloud`, somebody else's: then `model` is only the name callers use.
    `tokenizer` is a folder relative to tiers.toml with tokenizer.json and chat_template.jinja.
    `context_window` counts tokens of prompt and answer together. `tool_parser` is the format in which the model calls
    tools; an engine's model without one takes none. Prices are in US dollars.
    """

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")]
    model: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    tokenizer: str | None = None
    context_window: Annotated[int, Field(gt=0)]
    end_id: Annotated[int, Field(ge=0)] | None = None
    pad_id: Annotated[int, Field(ge=0)] | None = None
    tool_parser: ToolFormat | None = None
    input_price_per_million_tokens: Annotated[float, Field(ge=0)]
    output_price_per_million_tokens: Annotated[float, Field(ge=0)]
    generation: Generation
    cloud: Cloud | None = None

    @model_validator(mode="after")
    def _has_one_engine(self) -> Tier:
        for field in ("tokenizer", "end_id", "pad_id"):
            if (getattr(self, field) is None) != (self.cloud is not None):
                raise ValueError(
                    f"{field}: required for a tier with an engine model, and for no other; a cloud tier leaves it out"
                )
        if self.cloud is not None and self.tool_parser is not None:
            raise ValueError("tool_parser: an API takes tools by itself; a cloud tier leaves it out")
        return self


class Embedder(Row):
    """embedder.toml: the model behind the Triton model `embedding`, as who sends token ids must know it.

    `max_input_tokens` counts word pieces, `cls_id` and `sep_id` included, which begin and end an input.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    max_input_tokens: Annotated[int, Field(gt=2)]
    vocab_size: Annotated[int, Field(gt=0)]
    cls_id: Annotated[int, Field(ge=0)]
    sep_id: Annotated[int, Field(ge=0)]
    pad_id: Annotated[int, Field(ge=0)]


ModelName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]


class Transcriber(Row):
    """What the gateway must know of the model behind `stt`; `language` is the one that it understands (ISO 639-1)."""

    name: ModelName
    language: Annotated[str, Field(pattern=r"^[a-z]{2}$")]


class Speaker(Row):
    """What the gateway must know of the model behind `tts`."""

    name: ModelName
    voice: ModelName


class Speech(Row):
    """speech.toml: the speech models that `/v1/audio` uses; a model is left out where the target has none."""

    transcriber: Transcriber | None = None
    speaker: Speaker | None = None


class Limits(Row):
    """What one orchestrator instance takes on at once: up to `max_live_requests`, further ones are refused.

    Of them each engine model gets up to `max_running_requests`, which should be about its batch: who waits inside an
    engine cannot be overtaken. The others wait before it, interactive ones first, up to `max_batch_waiting` batch ones.
    """

    max_live_requests: Annotated[int, Field(gt=0, le=4096)] = 256
    max_running_requests: Annotated[int, Field(gt=0, le=4096)] = 64
    max_batch_waiting: Annotated[int, Field(gt=0, le=4096)] = 64


class CachePolicy(Row):
    """The table `[cache]`: what is kept, and for how long. Without it nothing is stored or looked up.

    An answer lives `ttl_s` from when it was stored, however often it is served. `semantic` also serves stored answers
    to questions that ask the same in other words. What a caller asks for with a temperature above `max_temperature` is
    neither stored nor looked up; one who states none gets the tier's own, whatever it is.
    """

    ttl_s: Annotated[float, Field(gt=0, le=30 * 86400)]
    max_bytes: Annotated[int, Field(gt=0)]
    semantic: bool
    max_temperature: Annotated[float, Field(ge=0, le=2)]


class Tiers(Row):
    """tiers.toml: the tiers from cheap to dear, the limits, and the cache's policy if there is a cache."""

    tier: Annotated[list[Tier], Field(min_length=1)]
    limits: Limits = Limits()
    cache: CachePolicy | None = None


def read_toml(path: Path, model: type[ModelT]) -> ModelT:
    """Read `path` into `model`; raises `ConfigError` naming the file and every wrong key."""
    return check_toml(path, parse_toml(path), model)


def parse_toml(path: Path) -> dict[str, Any]:
    """The table in the file at `path`; raises `ConfigError`."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def check_toml(path: Path, data: dict[str, Any], model: type[ModelT]) -> ModelT:
    """`data`, which is of the file at `path`, as `model`; raises `ConfigError` naming the file and every wrong key."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in describe(error))) from error


def describe(error: ValidationError) -> list[str]:
    """One line for each fault: key, what is allowed, and the value that came."""
    lines = []
    for fault in error.errors(include_url=False, include_context=False):
        key = ".".join(str(part) for part in fault["loc"]) or "(top level)"
        given = "" if fault["type"] == "missing" else f" (got {fault['input']!r})"
        lines.append(f"{key}: {fault['msg']}{given}")
    return lines


def load_tiers(path: Path) -> Tiers:
    """Read tiers.toml; raises `ConfigError`, also for two tiers of one name, and a model that is engine and cloud."""
    tiers = read_toml(path, Tiers)
    names = [tier.name for tier in tiers.tier]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: tier.name: {name!r} is used {names.count(name)} times; names are unique")
    engines = {tier.model for tier in tiers.tier if tier.cloud is None}
    for tier in tiers.tier:
        if tier.cloud is not None and tier.model in engines:
            raise ConfigError(
                f"{path}: tier.model: {tier.model!r} of the cloud tier {tier.name!r} is an engine model too; rename it"
            )
    return tiers
