"""Targets and models as rows of data: what `targets/*.toml` and `models/*.toml` may say.

Rows are frozen and strict (see `orchestrator.config.Row`): an unknown key, a wrong type or a value out of
range is a `ConfigError` that names the file and the key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, model_validator

from build.errors import BuildError
from orchestrator.config import CachePolicy, Cloud, Generation, Limits, Row, ToolFormat, read_toml
from orchestrator.contracts import ORCHESTRATOR_MODEL

HERE = Path(__file__).parent

Count = Annotated[int, Field(gt=0)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
# Triton takes a model's name from its folder; Python code spells it, so no dashes.
TritonName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
# One path part: it becomes a file name in the cache and in an artifact.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
FolderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$")]
Price = Annotated[float, Field(ge=0)]


# --- models ------------------------------------------------------------------------------------------------


class Architecture(Row):
    """The numbers of a decoder-only transformer; sizes count elements, the context window counts tokens."""

    family: Literal["llama"]
    num_layers: Count
    hidden_size: Count
    intermediate_size: Count
    num_attention_heads: Count
    num_kv_heads: Count
    head_dim: Count
    vocab_size: Count
    context_window: Count
    rope_theta: Annotated[float, Field(gt=0)]
    rms_norm_eps: Annotated[float, Field(gt=0)]


class TokenIds(Row):
    """Token ids with a meaning of their own; `end` closes an assistant's turn."""

    bos: Annotated[int, Field(ge=0)]
    end: Annotated[int, Field(ge=0)]
    pad: Annotated[int, Field(ge=0)]
    unknown: Annotated[int, Field(ge=0)]


class PackagedFile(Row):
    """A file inside a wheel on the package index; `sha256` is of the file, not of the wheel."""

    package: Name
    version: Annotated[str, Field(pattern=r"^[0-9][A-Za-z0-9.+!]*$")]
    folder: FolderName
    file: FileName
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class BertArchitecture(Row):
    """The numbers of a BERT encoder; sizes count elements, positions count tokens."""

    family: Literal["bert"]
    num_layers: Count
    hidden_size: Count
    intermediate_size: Count
    num_attention_heads: Count
    vocab_size: Count
    max_position_embeddings: Count
    layer_norm_eps: Annotated[float, Field(gt=0)]


class ModelRow(Row):
    """One language model: `models/<name>.toml`. `tool_parser` is the format in which it calls tools, if it does."""

    name: Name
    licence: str
    architecture: Architecture
    token_ids: TokenIds
    gguf: PackagedFile
    tool_parser: ToolFormat | None = None

    @property
    def sources(self) -> tuple[PackagedFile, ...]:
        return (self.gguf,)


class EmbedderTokenIds(Row):
    """`cls` begins an input and `sep` ends it."""

    cls: Annotated[int, Field(ge=0)]
    sep: Annotated[int, Field(ge=0)]
    pad: Annotated[int, Field(ge=0)]


class EmbedderRow(Row):
    """One sentence embedder: `models/<name>.toml`. Its vectors are the mean over the tokens, of length 1.

    `max_input_tokens` is the window, `cls` and `sep` included; a longer input is refused.
    """

    name: Name
    licence: str
    max_input_tokens: Count
    architecture: BertArchitecture
    token_ids: EmbedderTokenIds
    weights: PackagedFile
    tokenizer: PackagedFile

    @model_validator(mode="after")
    def _numbers_fit_together(self) -> EmbedderRow:
        if (self.weights.package, self.weights.version) != (self.tokenizer.package, self.tokenizer.version):
            raise ValueError("weights and tokenizer must come from one package in one version")
        if self.max_input_tokens > self.architecture.max_position_embeddings:
            raise ValueError(
                f"max_input_tokens is {self.max_input_tokens}; the model has "
                f"{self.architecture.max_position_embeddings} positions (architecture.max_position_embeddings)"
            )
        return self

    @property
    def sources(self) -> tuple[PackagedFile, ...]:
        return (self.weights, self.tokenizer)


AnyModelRow = ModelRow | EmbedderRow


# --- targets -----------------------------------------------------------------------------------------------


class OpenVINOParameters(Row):
    """Engine `openvino`: OpenVINO GenAI's continuous batching. Where TensorRT-LLM has a name, it is used.

    The KV pool is `max_tokens_in_paged_kv_cache` tokens, `max_num_tokens` is the most tokens in one step over
    all requests; `num_draft_tokens` and `max_ngram_size` matter with `speculation` "prompt_lookup".
    """

    engine: Literal["openvino"]
    max_tokens_in_paged_kv_cache: Count
    kv_cache_precision: Literal["u8", "f16", "bf16", "f32"]
    enable_kv_cache_reuse: bool
    enable_chunked_context: bool
    max_num_tokens: Count
    exclude_input_in_output: bool
    speculation: Literal["none", "prompt_lookup"]
    num_draft_tokens: Count
    max_ngram_size: Count


class ScriptedParameters(Row):
    """Engine `scripted`: no model; it answers as the prompt tells it, at a pace set here (ms)."""

    engine: Literal["scripted"]
    exclude_input_in_output: bool
    first_token_ms: Annotated[float, Field(ge=0)]
    itl_ms: Annotated[float, Field(ge=0)]


class WordPieceParameters(Row):
    """Engine `wordpiece`: the tokenizer of a sentence embedder."""

    engine: Literal["wordpiece"]


class OnnxRuntimeParameters(Row):
    """Engine `onnxruntime`: a sentence embedder's graph; `num_threads` is how many compute one batch."""

    engine: Literal["onnxruntime"]
    num_threads: Count


EmbedderParameters = WordPieceParameters | OnnxRuntimeParameters
EngineParameters = OpenVINOParameters | ScriptedParameters


class TritonModel(Row):
    """Settings merged into one config.pbtxt. An engine has a model row and parameters, others neither.

    `max_queue_delay_microseconds` turns on Triton's dynamic batching: how long a request may wait for others.
    `allow_ragged_batch` lets it join requests of different shapes, for a model that can take them apart.
    """

    backend: Literal["python"]
    max_batch_size: Annotated[int, Field(ge=0)]
    max_queue_delay_microseconds: Annotated[int, Field(ge=0, le=2000)] | None = None
    allow_ragged_batch: bool = False
    instance_kind: Literal["KIND_CPU"]
    instance_count: Count
    model: Name | None = None
    parameters: Annotated[EngineParameters | EmbedderParameters, Field(discriminator="engine")] | None = None

    @model_validator(mode="after")
    def _engine_is_whole(self) -> TritonModel:
        if (self.model is None) != (self.parameters is None):
            raise ValueError("an engine needs both `model` and `parameters`; another model has neither")
        return self


class TierRow(Row):
    """A tier as a target offers it; prices are US dollars for a million tokens.

    `tool_parser` stands for the model's own where an engine plays several models, as the scripted one does. With
    `cloud` the model is an API's: `model` is the name callers use, and `context_window` is what no model row says.
    """

    name: Name
    model: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    input_price_per_million_tokens: Price
    output_price_per_million_tokens: Price
    tool_parser: ToolFormat | None = None
    generation: Generation
    context_window: Count | None = None
    cloud: Cloud | None = None

    @model_validator(mode="after")
    def _window_is_known_once(self) -> TierRow:
        if (self.context_window is None) != (self.cloud is None):
            raise ValueError("context_window: required for a cloud tier, and for no other; an engine has its model's")
        if self.cloud is not None and self.tool_parser is not None:
            raise ValueError("tool_parser: an API takes tools by itself; a cloud tier leaves it out")
        return self


class TargetRow(Row):
    """One target: `targets/<name>.toml`. `models` goes by Triton model name, `tiers` from cheap to dear.

    `ensembles` are Triton models that join others of `models`; all there is to say of one is its config.pbtxt.
    """

    name: Name
    description: str
    ensembles: list[TritonName]
    models: dict[TritonName, TritonModel]
    tiers: Annotated[list[TierRow], Field(min_length=1)]
    limits: Limits = Limits()
    cache: CachePolicy | None = None

    @model_validator(mode="after")
    def _models_fit_together(self) -> TargetRow:
        orchestrator = self.models.get(ORCHESTRATOR_MODEL)
        if orchestrator is None:
            raise ValueError(f"models.{ORCHESTRATOR_MODEL} is missing; every target serves through it")
        # Each instance of a Python model is a process: quotas, single flight and breakers would be one each.
        if orchestrator.instance_count != 1:
            raise ValueError(
                f"models.{ORCHESTRATOR_MODEL}.instance_count is {orchestrator.instance_count}; "
                "only 1 is allowed, because its state lives in one process"
            )
        for tier in self.tiers:
            if tier.cloud is None and tier.model not in self.engines:
                raise ValueError(
                    f"tiers: {tier.name!r} uses model {tier.model!r}; engines here: {', '.join(self.engines)}"
                )
        if len({row for row, _ in self.embedders.values()}) != 1:
            raise ValueError(
                f"models: the embedding models must be of one model row, and there must be some "
                f"(got {', '.join(f'{name}: {row!r}' for name, (row, _) in self.embedders.items()) or 'none'})"
            )
        return self

    @property
    def engines(self) -> dict[str, tuple[str, EngineParameters]]:
        """Name of model row and parameters, by Triton model name, for models that run a language model."""
        return {
            name: (model.model, model.parameters)
            for name, model in self.models.items()
            if model.model is not None and isinstance(model.parameters, EngineParameters)
        }

    @property
    def embedders(self) -> dict[str, tuple[str, EmbedderParameters]]:
        """The same for the models that make up the sentence embedder."""
        return {
            name: (model.model, model.parameters)
            for name, model in self.models.items()
            if model.model is not None and isinstance(model.parameters, EmbedderParameters)
        }

    @property
    def embedder(self) -> str:
        """The name of the sentence embedder's row."""
        return next(row for row, _ in self.embedders.values())


RowT = TypeVar("RowT", TargetRow, ModelRow, EmbedderRow)


# --- reading -----------------------------------------------------------------------------------------------


def list_targets(folder: Path = HERE / "targets") -> list[str]:
    """Names of the targets there are rows for."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def load_target(name: str, folder: Path = HERE / "targets") -> TargetRow:
    """The row of target `name`; raises `BuildError` if there is none and `ConfigError` if it is wrong."""
    if name not in list_targets(folder):
        raise BuildError(f"unknown target {name!r}; targets: {', '.join(list_targets(folder))}")
    return _named(read_toml(folder / f"{name}.toml", TargetRow), name)


def load_models(target: TargetRow, folder: Path = HERE / "models") -> dict[str, AnyModelRow]:
    """The model rows that `target` uses, by name; raises like `load_target`."""
    rows: dict[str, AnyModelRow] = {}
    for name in sorted({model for model, _ in target.engines.values()}):
        rows[name] = _load_model(target, name, ModelRow, folder)
    return rows | {target.embedder: _load_model(target, target.embedder, EmbedderRow, folder)}


def _load_model(target: TargetRow, name: str, kind: type[RowT], folder: Path) -> RowT:
    path = folder / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(each.stem for each in folder.glob("*.toml")))
        raise BuildError(f"target {target.name!r} uses model {name!r}, which has no row; models: {known}")
    return _named(read_toml(path, kind), name)


def _named(row: RowT, name: str) -> RowT:
    if row.name != name:
        raise BuildError(f"{name}.toml: name: a row is named like its file, {name!r} (got {row.name!r})")
    return row
