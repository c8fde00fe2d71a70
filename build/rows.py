"""Targets as rows of data, `targets/*.toml`, and the reading of all rows; models are in `build.model_rows`.

Rows are frozen and strict (see `orchestrator.config.Row`): an unknown key, a wrong type or a value out of
range is a `ConfigError` that names the file and the key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, model_validator

from build.engine_rows import (
    AnyOcrParameters,
    AnyParameters,
    ClassifierParameters,
    DraftTarget,
    EmbedderParameters,
    EngineParameters,
    GraphParameters,
    OnnxParameters,
    PlanParameters,
    ReadParameters,
    SpeechParameters,
    TensorRTLLMParameters,
    VLLMParameters,
)
from build.errors import BuildError
from build.gpu_rows import Container, Gpu, VLLMImage
from build.model_rows import (
    AnyModelRow,
    ComplexityRow,
    Count,
    EmbedderRow,
    ModelRow,
    Name,
    OcrRow,
    SpeechRow,
)
from orchestrator.config import (
    CachePolicy,
    Cloud,
    Compression,
    ConfigError,
    Generation,
    Limits,
    QualityPolicy,
    Routing,
    Row,
    SafetyPolicy,
    Seconds,
    ToolFormat,
    check_toml,
    parse_toml,
    read_toml,
)
from orchestrator.contracts import (
    COMPLEXITY_MODEL,
    IMAGE_PREPROCESS_MODEL,
    OCR_DETECTION_MODEL,
    OCR_DETECTOR_MODEL,
    OCR_MODEL,
    OCR_RECOGNIZER_MODEL,
    ORCHESTRATOR_MODEL,
)

HERE = Path(__file__).parent
# The networks of an OCR row, and what reads by them: each is a model of the name of its engine.
OCR_ENGINES = (OCR_DETECTOR_MODEL, OCR_RECOGNIZER_MODEL, OCR_MODEL)
OCR_MODELS = {*OCR_ENGINES, IMAGE_PREPROCESS_MODEL, OCR_DETECTION_MODEL}

# Triton takes a model's name from its folder; Python code spells it, so no dashes.
TritonName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
Price = Annotated[float, Field(ge=0)]

# Of language models, where a target has a row of its own for it. Any row can say `llmapi` of an engine.
RUNTIMES = ("vllm", "llmapi")


# --- targets -----------------------------------------------------------------------------------------------


class TritonModel(Row):
    """Settings merged into one config.pbtxt. An engine has a model row and parameters, others neither.

    `max_queue_delay_microseconds` turns on Triton's dynamic batching: how long a request may wait for others.
    `allow_ragged_batch` lets it join requests of different shapes, for a model that can take them apart.
    """

    backend: Literal["python", "tensorrtllm", "tensorrt", "onnxruntime"]
    max_batch_size: Annotated[int, Field(ge=0, le=2**31 - 1)]
    max_queue_delay_microseconds: Annotated[int, Field(ge=0, le=2000)] | None = None
    allow_ragged_batch: bool = False
    instance_kind: Literal["KIND_CPU", "KIND_GPU"]
    instance_count: Count
    model: Name | None = None
    parameters: ReadParameters | None = None

    @model_validator(mode="after")
    def _engine_is_whole(self) -> TritonModel:
        if (self.model is None) != (self.parameters is None):
            raise ValueError("an engine needs both `model` and `parameters`; another model has neither")
        is_engine = isinstance(self.parameters, TensorRTLLMParameters) and self.parameters.runtime == "engine"
        is_graph = isinstance(self.parameters, GraphParameters)
        graph_backend = "tensorrt" if isinstance(self.parameters, PlanParameters) else "onnxruntime"
        backend = "tensorrtllm" if is_engine else graph_backend if is_graph else "python"
        if self.backend != backend:
            raise ValueError(
                f"backend is {self.backend!r}; only {backend!r} is allowed here (engine 'tensorrt_llm' with runtime "
                "'engine' runs in NVIDIA's 'tensorrtllm', runtime 'tensorrt' in 'tensorrt', 'onnxruntime_gpu' in "
                "'onnxruntime', all else in 'python')"
            )
        kind = "KIND_GPU" if is_graph else "KIND_CPU"
        if self.instance_kind != kind:
            raise ValueError(
                f"instance_kind is {self.instance_kind!r}; only {kind!r} is allowed here (backends 'tensorrt' "
                "and 'onnxruntime' have instances on GPUs alone, and the others' are no matter of Triton's)"
            )
        if is_graph and self.allow_ragged_batch:
            raise ValueError(f"allow_ragged_batch: backend {backend!r} takes equal shapes alone; leave it out")
        if isinstance(self.parameters, PlanParameters):
            self._check_plan(self.parameters)
        if isinstance(self.parameters, VLLMParameters) and self.instance_count != 1:
            raise ValueError(
                f"instance_count is {self.instance_count}; engine 'vllm' has 1, which takes all of gpu_device_ids; "
                "name another engine model for other GPUs"
            )
        return self

    def _check_plan(self, parameters: PlanParameters) -> None:
        if not 1 <= parameters.opt_batch_size <= self.max_batch_size:
            raise ValueError(
                f"parameters.opt_batch_size is {parameters.opt_batch_size}; allowed: 1 to max_batch_size, "
                f"{self.max_batch_size}"
            )


class TierRow(Row):
    """A tier as a target offers it; prices are US dollars for a million tokens.

    `tool_parser` stands for the model's own where an engine plays several models, as the scripted one does. Timeouts
    that are left out are `orchestrator.config.Tier`'s. With
    `cloud` the model is an API's: `model` is the name callers use, and `context_window` is what no model row says.
    """

    name: Name
    model: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    input_price_per_million_tokens: Price
    output_price_per_million_tokens: Price
    tool_parser: ToolFormat | None = None
    first_token_timeout_s: Seconds | None = None
    token_timeout_s: Seconds | None = None
    generation: Generation
    compression: Compression | None = None
    context_window: Count | None = None
    cloud: Cloud | None = None

    @model_validator(mode="after")
    def _window_is_known_once(self) -> TierRow:
        if (self.context_window is None) != (self.cloud is None):
            raise ValueError("context_window: required for a cloud tier, and for no other; an engine has its model's")
        if self.cloud is not None and self.tool_parser is not None:
            raise ValueError("tool_parser: an API takes tools by itself; a cloud tier leaves it out")
        for field in ("first_token_timeout_s", "token_timeout_s"):
            if self.cloud is not None and getattr(self, field) is not None:
                raise ValueError(f"{field}: of a cloud tier it stands in the table `cloud`")
        return self


class TargetRow(Row):
    """One target: `targets/<name>.toml`. `models` goes by Triton model name, `tiers` from cheap to dear.

    `ensembles` are Triton models that join others of `models`; all there is to say of one is its config.pbtxt.
    `gpu` and `container` say where its engines and plans are built and run; without TensorRT-LLM they are left out.
    `vllm` says which image runs its engines `vllm`.
    """

    name: Name
    description: str
    ensembles: list[TritonName]
    models: dict[TritonName, TritonModel]
    tiers: Annotated[list[TierRow], Field(min_length=1)]
    limits: Limits = Limits()
    routing: Routing = Routing()
    cache: CachePolicy | None = None
    quality: QualityPolicy | None = None
    safety: SafetyPolicy = SafetyPolicy()
    gpu: Gpu | None = None
    container: Container | None = None
    vllm: VLLMImage | None = None

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
        if self.quality is not None:
            self.quality.check_names([tier.name for tier in self.tiers])
        if len({row for row, _ in self.embedders.values()}) != 1:
            raise ValueError(
                f"models: the embedding models must be of one model row, and there must be some "
                f"(got {', '.join(f'{name}: {row!r}' for name, (row, _) in self.embedders.items()) or 'none'})"
            )
        if not set(self.classifiers) <= {COMPLEXITY_MODEL}:
            raise ValueError(
                f"models: engine 'complexity' is for the model {COMPLEXITY_MODEL!r} alone "
                f"(got {', '.join(self.classifiers)})"
            )
        self._check_ocr()
        for name, (_, speech) in self.speech.items():
            if speech.engine != name:
                raise ValueError(f"models.{name}: a speech model is named as its engine, {speech.engine!r}")
        has_engines = bool(self.trtllm_engines)
        if (self.gpu is not None, self.container is not None) != (has_engines, has_engines):
            raise ValueError("gpu, container: both with engines 'tensorrt_llm', neither without")
        if (self.vllm is not None) != bool(self.vllm_engines):
            raise ValueError("vllm: required with engines 'vllm', and left out without")
        for name, (_, graph) in self.graphs.items():
            if not has_engines:
                raise ValueError(
                    f"models.{name}.parameters.runtime is {graph.runtime!r}, which needs a GPU; this target has none; "
                    "allowed: 'onnxruntime'"
                )
        return self

    def _check_ocr(self) -> None:
        present = OCR_MODELS & {*self.models, *self.ensembles}
        if present and present != OCR_MODELS:
            raise ValueError(
                f"models, ensembles: OCR is done by all of {', '.join(sorted(OCR_MODELS))}, or there is none "
                f"(got {', '.join(sorted(present))})"
            )
        wrong = [name for name, (_, parameters) in self.readers.items() if parameters.engine != name]
        missing = [name for name in OCR_ENGINES if present and name not in self.readers]
        for name in (*wrong, *missing):
            raise ValueError(f"models.{name}: an OCR model is named as its engine: {', '.join(OCR_ENGINES)}")
        if len({row for row, _ in self.readers.values()}) > 1:
            raise ValueError("models: the OCR models must be of one model row")

    @property
    def trtllm_engines(self) -> dict[str, tuple[TritonModel, TensorRTLLMParameters]]:
        """Settings and parameters of the engines `tensorrt_llm`, by Triton model name."""
        return {
            name: (model, model.parameters)
            for name, model in self.models.items()
            if isinstance(model.parameters, TensorRTLLMParameters)
        }

    @property
    def vllm_engines(self) -> dict[str, tuple[TritonModel, VLLMParameters]]:
        """The same of the engines `vllm`."""
        return {
            name: (model, model.parameters)
            for name, model in self.models.items()
            if isinstance(model.parameters, VLLMParameters)
        }

    @property
    def plans(self) -> dict[str, tuple[TritonModel, PlanParameters]]:
        """The same of the models that are TensorRT plans."""
        return {
            name: (model, model.parameters)
            for name, model in self.models.items()
            if isinstance(model.parameters, PlanParameters)
        }

    @property
    def graphs(self) -> dict[str, tuple[TritonModel, PlanParameters | OnnxParameters]]:
        """The same of all models that are an ONNX graph on GPUs, compiled or not."""
        return {
            name: (model, model.parameters)
            for name, model in self.models.items()
            if isinstance(model.parameters, (PlanParameters, OnnxParameters))
        }

    @property
    def compiled(self) -> list[str]:
        """The Triton models that commands of the container make."""
        return [*self.trtllm_engines, *self.graphs]

    def source_of(self, name: str) -> str:
        """The folder of the source repository that the Triton model `name` is rendered from.

        All engines that take token ids have one contract, and so one source, whatever they are called.
        """
        if name not in self.engines:
            return name
        is_text = name in self.trtllm_engines and self.trtllm_engines[name][1].runtime == "llmapi"
        return "llm_text" if is_text else "llm_small"

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
    def classifiers(self) -> dict[str, tuple[str, ClassifierParameters]]:
        """The same for the model that judges conversations, if the target has it."""
        return {
            name: (model.model, model.parameters)
            for name, model in self.models.items()
            if model.model is not None and isinstance(model.parameters, ClassifierParameters)
        }

    @property
    def readers(self) -> dict[str, tuple[str, AnyOcrParameters]]:
        """The same for the models that read text in images, if the target has them."""
        return {
            name: (model.model, model.parameters)
            for name, model in self.models.items()
            if model.model is not None and isinstance(model.parameters, AnyOcrParameters)
        }

    @property
    def speech(self) -> dict[str, tuple[str, SpeechParameters]]:
        """The same for the speech models, of those that the target has."""
        return {
            name: (model.model, model.parameters)
            for name, model in self.models.items()
            if model.model is not None and isinstance(model.parameters, SpeechParameters)
        }

    @property
    def parts(self) -> dict[str, tuple[str, AnyParameters]]:
        """The same for all of them."""
        return {**self.engines, **self.embedders, **self.classifiers, **self.readers, **self.speech}

    @property
    def embedder(self) -> str:
        """The name of the sentence embedder's row."""
        return next(row for row, _ in self.embedders.values())


MODEL_KINDS = (ModelRow, EmbedderRow, ComplexityRow, OcrRow, SpeechRow)
RowT = TypeVar("RowT", TargetRow, ModelRow, EmbedderRow, ComplexityRow, OcrRow, SpeechRow)


# --- reading -----------------------------------------------------------------------------------------------


def list_targets(folder: Path = HERE / "targets") -> list[str]:
    """Names of the targets there are rows for."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def name_with_runtime(name: str, runtime: str | None) -> str:
    """The target `name` as it is with another `runtime` of its language models: a row of its own.

    Raises `BuildError` naming the targets that have it.
    """
    if runtime is None:
        return name
    found = f"{name}-{runtime}"
    if found not in list_targets():
        names = [each.removesuffix(f"-{runtime}") for each in list_targets() if each.endswith(f"-{runtime}")]
        raise BuildError(
            f"--runtime: target {name!r} has no {runtime!r}; targets that have: {', '.join(names) or 'none'}; "
            f"fix: a row build/targets/{found}.toml (docs/gpu.md, Rows)"
        )
    return found


def load_target(name: str, folder: Path = HERE / "targets") -> TargetRow:
    """The row of target `name`; raises `BuildError` if there is none and `ConfigError` if it is wrong.

    A row may say `extends = "cpu"`: it is that one, with what it says itself put over it, table by table.
    """
    if name not in list_targets(folder):
        raise BuildError(f"unknown target {name!r}; targets: {', '.join(list_targets(folder))}")
    path = folder / f"{name}.toml"
    data = parse_toml(path)
    if (base := data.pop("extends", None)) is not None:
        if base not in list_targets(folder):
            raise BuildError(f"{name}.toml: extends: {base!r} is no target; targets: {', '.join(list_targets(folder))}")
        data = _put_over(parse_toml(folder / f"{base}.toml"), data)  # one that extends another has an unknown key
    return _named(check_toml(path, data, TargetRow), name)


def _put_over(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with what `over` says: tables are joined, all else is replaced, and so are another engine's parameters."""
    merged = dict(base)
    for key, value in over.items():
        is_table = isinstance(value, dict) and isinstance(base.get(key), dict)
        if is_table and "engine" in value and value["engine"] != base[key].get("engine"):
            is_table = False
        merged[key] = _put_over(base[key], value) if is_table else value
    return merged


def load_models(target: TargetRow, folder: Path = HERE / "models") -> dict[str, AnyModelRow]:
    """The model rows that `target` uses, drafting models included, by name; raises like `load_target`."""
    rows: dict[str, AnyModelRow] = {}
    drafts = {
        parameters.speculation.draft_model
        for _, parameters in target.trtllm_engines.values()
        if isinstance(parameters.speculation, DraftTarget)
    }
    for name in sorted({model for model, _ in target.engines.values()} | drafts):
        rows[name] = _load_model(target, name, ModelRow, folder)
    for name, _ in target.classifiers.values():
        rows[name] = _load_model(target, name, ComplexityRow, folder)
    for name, _ in target.readers.values():
        rows[name] = rows.get(name) or _load_model(target, name, OcrRow, folder)
    for name, _ in target.speech.values():
        rows[name] = _load_model(target, name, SpeechRow, folder)
    return rows | {target.embedder: _load_model(target, target.embedder, EmbedderRow, folder)}


def _load_model(target: TargetRow, name: str, kind: type[RowT], folder: Path) -> RowT:
    path = folder / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(each.stem for each in folder.glob("*.toml")))
        raise BuildError(f"{target.name}.toml: models: model {name!r} has no row; models: {known}")
    try:
        return _named(read_toml(path, kind), name)
    except ConfigError:
        # Its file may be right, and the target's wrong.
        fitting = [file.stem for file in sorted(folder.glob("*.toml")) if _is_of_kind(file, kind)]
        if not any(_is_of_kind(path, other) for other in MODEL_KINDS):
            raise
        user = next((user for user, model in target.models.items() if model.model == name), "speculation.draft_model")
        raise BuildError(
            f"{target.name}.toml: models.{user}: model {name!r} is of another kind; allowed: {', '.join(fitting)}"
        ) from None


def _is_of_kind(path: Path, kind: type[Row]) -> bool:
    try:
        read_toml(path, kind)
    except ConfigError:
        return False
    return True


def _named(row: RowT, name: str) -> RowT:
    if row.name != name:
        raise BuildError(f"{name}.toml: name: a row is named like its file, {name!r} (got {row.name!r})")
    return row
