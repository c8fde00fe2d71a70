"""Typed configuration, read once at start: `tiers.toml` and `embedder.toml` of an artifact.

Every model is frozen and strict: an unknown key or a wrong type is a `ConfigError` that names the file, the key,
the value and what is allowed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

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


class Tier(Row):
    """One tier: where a request of some complexity goes, and on what terms.

    `tokenizer` is a folder relative to tiers.toml with tokenizer.json and chat_template.jinja.
    `context_window` counts tokens of prompt and answer together. `tool_parser` is the format in which the model calls
    tools; a model without one takes none. Prices are in US dollars.
    """

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")]
    model: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    tokenizer: str
    context_window: Annotated[int, Field(gt=0)]
    end_id: Annotated[int, Field(ge=0)]
    pad_id: Annotated[int, Field(ge=0)]
    tool_parser: ToolFormat | None = None
    input_price_per_million_tokens: Annotated[float, Field(ge=0)]
    output_price_per_million_tokens: Annotated[float, Field(ge=0)]
    generation: Generation


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


class Limits(Row):
    """What one orchestrator instance takes on at once: up to `max_live_requests`, further ones are refused.

    An engine runs as many of them together as its batch holds, the others wait inside it.
    """

    max_live_requests: Annotated[int, Field(gt=0, le=4096)] = 256


class Tiers(Row):
    """tiers.toml: the tiers from cheap to dear, and the limits."""

    tier: Annotated[list[Tier], Field(min_length=1)]
    limits: Limits = Limits()


def read_toml(path: Path, model: type[ModelT]) -> ModelT:
    """Read `path` into `model`; raises `ConfigError` naming the file and every wrong key."""
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
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
    """Read tiers.toml; raises `ConfigError`, also for two tiers of one name."""
    tiers = read_toml(path, Tiers)
    names = [tier.name for tier in tiers.tier]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: tier.name: {name!r} is used {names.count(name)} times; names are unique")
    return tiers
