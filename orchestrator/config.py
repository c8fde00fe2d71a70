"""Typed configuration, read once at start: `tiers.toml` and `embedder.toml` of an artifact.

Every model is frozen and strict: an unknown key or a wrong type is a `ConfigError` that names the file, the key,
the value and what is allowed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from orchestrator.row_faults import describe

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
    """Base of every table read from TOML: frozen, strict, no unknown keys, numbers that are some."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Generation(Row):
    """A tier's generation policy: what a request gets that does not say otherwise."""

    max_output_tokens: Annotated[int, Field(gt=0)]
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


Seconds = Annotated[float, Field(gt=0, le=3600)]

# An engine's, where its tier says nothing: well above what a full batch of long prompts takes on two CPU cores.
FIRST_TOKEN_TIMEOUT_S = 60.0
TOKEN_TIMEOUT_S = 30.0


class Compression(Row):
    """A tier whose prompts of more than `min_tokens` lose what tells least in old turns (`orchestrator.compression`).

    Of the tokens between the system prompt and the last turn about the share `keep` stays. What the embedder has not
    told within `timeout_s` is sent as it came.
    """

    keep: Annotated[float, Field(gt=0, lt=1)]
    min_tokens: Annotated[int, Field(ge=0)] = 1024
    timeout_s: Annotated[float, Field(gt=0, le=60)] = 2.0


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


class Adapter(Row):
    """A LoRA adapter of a tier's model: callers ask for `model:name`.

    `folder`, relative to tiers.toml, holds its two tensors (`orchestrator.triton.lora`); `task_id` is its number in the
    engine's cache of adapters.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    task_id: Annotated[int, Field(gt=0, lt=2**63)]
    folder: str


class Tier(Row):
    """One tier: where a request of some complexity goes, and on what terms.

    Its model is an engine of this server or, with `cloud`, somebody else's: then `model` is only the name callers use.
    `tokenizer` is a folder relative to tiers.toml with tokenizer.json and chat_template.jinja.
    `context_window` counts tokens of prompt and answer together. `tool_parser` is the format in which the model calls
    tools; an engine's model without one takes none. `runtime` "llmapi" is an engine of text (see
    `orchestrator.text_engine`), `has_guides` says that it can be held to a schema, and `num_instances` are those of the
    engine model. `adapters` are what may be put on it; `adapter` is the one of them that a request chose, and in no
    file. Prices are in US dollars.

    An engine that has been given a request and is silent for `first_token_timeout_s`, or between two tokens for
    `token_timeout_s`, has failed it. Left out they are the constants above; a cloud tier has its own in `cloud`.
    """

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")]
    model: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    tokenizer: str | None = None
    context_window: Annotated[int, Field(gt=0)]
    end_id: Annotated[int, Field(ge=0)] | None = None
    pad_id: Annotated[int, Field(ge=0)] | None = None
    tool_parser: ToolFormat | None = None
    runtime: Literal["engine", "llmapi"] = "engine"
    has_guides: bool = True
    num_instances: Annotated[int, Field(gt=0)] = 1
    adapters: list[Adapter] = []
    adapter: Annotated[Adapter | None, Field(exclude=True)] = None
    input_price_per_million_tokens: Annotated[float, Field(ge=0)]
    output_price_per_million_tokens: Annotated[float, Field(ge=0)]
    first_token_timeout_s: Seconds | None = None
    token_timeout_s: Seconds | None = None
    generation: Generation
    compression: Compression | None = None
    cloud: Cloud | None = None

    @model_validator(mode="after")
    def _has_one_engine(self) -> Tier:
        for field in ("tokenizer", "end_id", "pad_id"):
            if (getattr(self, field) is None) != (self.cloud is not None):
                raise ValueError(
                    f"{field}: required for a tier with an engine model, and for no other; a cloud tier leaves it out"
                )
        if self.adapters and (self.cloud is not None or self.runtime == "llmapi"):
            raise ValueError("adapters: only engines of token ids take them; leave them out")
        if len({each.name for each in self.adapters}) < len(self.adapters):
            raise ValueError("adapters: two have one name")
        if len({each.task_id for each in self.adapters}) < len(self.adapters):
            raise ValueError("adapters: two have one task_id")
        if self.cloud is not None and self.tool_parser is not None:
            raise ValueError("tool_parser: an API takes tools by itself; a cloud tier leaves it out")
        for field in ("first_token_timeout_s", "token_timeout_s"):
            if self.cloud is not None and getattr(self, field) is not None:
                raise ValueError(f"{field}: of a cloud tier it stands in the table `cloud`")
        return self

    @property
    def backend(self) -> str:
        """Who answers: tiers of one engine share its fate, a cloud tier has its own."""
        return self.model if self.cloud is None else self.name


def split_model(name: str) -> tuple[str, str | None]:
    """What a request calls `model`, and the adapter that it asks for after a colon."""
    base, colon, adapter = name.partition(":")
    return base, adapter if colon else None


def with_adapter(tiers: Sequence[Tier], adapter: str | None) -> list[Tier]:
    """Those of `tiers` that have the adapter, with it put on; all of them if None is wanted."""
    if adapter is None:
        return list(tiers)
    found = [(tier, each) for tier in tiers for each in tier.adapters if each.name == adapter]
    return [tier.model_copy(update={"adapter": each}) for tier, each in found]


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


NumRunning = Annotated[int, Field(gt=0, le=4096)]


class Beside(Row):
    """How many requests each model that answers beside the orchestrator runs at once; the others wait before it.

    A request to `embedding` has up to 256 texts, 16 of them in Triton at a time; one to `stt` or `tts` has one chunk or
    sentence there. What is in Triton nobody overtakes, so `embedding` has no more than keep the encoder busy with texts
    that come alone: to 64 clients on two cores 64 places gave 463 texts/s, and 16 gave 470, with a p99 of 170 ms
    instead of 210. Of lists they hold 256 texts instead of 1,024.
    """

    embedding: NumRunning = 16
    ocr: NumRunning = 8
    stt: NumRunning = 4
    tts: NumRunning = 4


class Limits(Row):
    """What one orchestrator instance takes on at once: up to `max_live_requests`, further ones are refused.

    Of them each engine model gets up to `max_running_requests`, which should be about its batch: who waits inside an
    engine cannot be overtaken. The others wait before it, interactive ones first (but of ten turns one is a batch
    one's), up to `max_batch_waiting` batch ones. So does who waits for one of the models `beside`, of whose requests
    the live ones are not counted with the others.
    """

    max_live_requests: Annotated[int, Field(gt=0, le=4096)] = 256
    max_running_requests: Annotated[int, Field(gt=0, le=4096)] = 64
    max_batch_waiting: Annotated[int, Field(gt=0, le=4096)] = 64
    beside: Beside = Beside()


class Routing(Row):
    """The table `[routing]`: how "auto" chooses, and when an engine or API that fails is left alone.

    A tier is likely to suffice where the classifier gives that at least the probability `threshold`. What it has not
    said `classifier_timeout_s` after it was asked, the router does without. After `failures_to_open` failures in a row
    nobody is sent to an engine for `open_s`, then one request at a time until one gets its first token.
    """

    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    classifier_timeout_s: Annotated[float, Field(gt=0, le=10)] = 0.25
    failures_to_open: Annotated[int, Field(gt=0, le=1000)] = 10
    open_s: Seconds = 5.0


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


Share = Annotated[float, Field(ge=0, le=1)]


class QualityPolicy(Row):
    """The table `[quality]`: how answers of cheap tiers are watched. Without it none is.

    A share `sampling` of the answers of `tiers` is asked again of the tier `expert`; of answers whose cosine to it is
    below `similarity` the tier is said to be poor. What share is good is judged against what is usual for the tier (or
    a cluster of questions): it is doubtful when it is surely below that by more than the share `max_drop`, or surely
    below `min_quality` at all (0: whatever is usual will do). `retrain_above` is by how much the poor ones of the last
    100 may be more than usual. `seed` makes the choice of samples repeatable. What is known of a tier or cluster that
    has had no samples for `keep_days` is forgotten.
    """

    sampling: Share = 0.05
    tiers: Annotated[list[str], Field(min_length=1)] = ["simple", "medium"]
    expert: str = "expert"
    similarity: Annotated[float, Field(gt=0, lt=1)] = 0.85
    min_quality: Share = 0.3
    max_drop: Annotated[float, Field(gt=0, lt=1)] = 0.3
    retrain_above: Annotated[float, Field(gt=0, lt=1)] = 0.15
    timeout_s: Seconds = 60.0
    keep_days: Annotated[float, Field(gt=0, le=365)] = 30.0
    seed: int | None = None

    def check_names(self, names: Sequence[str]) -> None:
        """Raises `ValueError` unless `expert` is one of the tiers `names`, and `tiers` are cheaper ones."""
        place = {name: index for index, name in enumerate(names)}
        if self.expert not in place:
            raise ValueError(f"quality.expert: {self.expert!r} is no tier; one of {', '.join(names)}")
        cheaper = names[: place[self.expert]]
        for name in self.tiers:
            if name not in cheaper:
                raise ValueError(
                    f"quality.tiers: {name!r} is not cheaper than {self.expert!r}; allowed are "
                    f"{', '.join(cheaper) or 'none'}"
                )


class SafetyPolicy(Row):
    """The table `[safety]`: words that no answer may have, beside the secrets and card numbers that are looked for
    anyway. Case does not count; of a language with spaces only whole words do."""

    words: Annotated[list[Annotated[str, Field(min_length=2, max_length=100)]], Field(max_length=1000)] = []


class Tiers(Row):
    """tiers.toml: the tiers from cheap to dear, limits, routing, and the policies of what is optional."""

    tier: Annotated[list[Tier], Field(min_length=1)]
    limits: Limits = Limits()
    routing: Routing = Routing()
    cache: CachePolicy | None = None
    quality: QualityPolicy | None = None
    safety: SafetyPolicy = SafetyPolicy()

    @model_validator(mode="after")
    def _quality_is_of_tiers(self) -> Tiers:
        if self.quality is not None:
            self.quality.check_names([tier.name for tier in self.tier])
        return self


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
        raise ConfigError("\n".join(f"{path}: {line}" for line in describe(error, model))) from error


def load_tiers(path: Path) -> Tiers:
    """Read tiers.toml; raises `ConfigError`, also for two tiers of one name, and a model that is engine and cloud."""
    tiers = read_toml(path, Tiers)
    names = [tier.name for tier in tiers.tier]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: tier.name: {name!r} is used {names.count(name)} times; names are unique")
    engines = {tier.model for tier in tiers.tier if tier.cloud is None}
    for tier in tiers.tier:
        for field, name in (("model", tier.model), ("name", tier.name)):
            if tier.cloud is not None and name in engines:
                raise ConfigError(
                    f"{path}: tier.{field}: {name!r} of the cloud tier {tier.name!r} is an engine model too; rename it"
                )
    return tiers
