"""config.pbtxt, tiers.toml and embedder.toml of an artifact.

A config is parsed into Triton's own `ModelConfig`, the target's settings are merged into the message, and the
message is written out: there is no template, so nothing can stay unfilled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from build.engine_rows import GraphParameters, PlanParameters, TensorRTLLMParameters, VLLMParameters
from build.errors import BuildError
from build.model_rows import AnyModelRow, ComplexityRow, EmbedderRow, ModelRow, SpeechRow
from build.plan import EnginePlan
from build.plan_commands import ONNX
from build.render_trtllm import backend_parameters, llmapi_parameters
from build.rows import TargetRow, TierRow, TritonModel
from build.tensorrt_plan import PLAN
from orchestrator.config import Adapter, Embedder, Speaker, Speech, Tier, Tiers, Transcriber
from orchestrator.contracts import STT_MODEL, TTS_MODEL


def render_config(
    source: Path, name: str, settings: TritonModel, model: AnyModelRow | None, plan: EnginePlan | None = None
) -> str:
    """The config.pbtxt at `source` with a target's `settings` merged in, as text, for the Triton model `name`.

    `model` is the model behind an engine, None for other models; `plan` is there for an engine `tensorrt_llm`. Raises
    `BuildError` if the source does not parse or already says what only a target may say.
    """
    config = _read_config(source)
    config.name = name
    config.backend = settings.backend
    config.max_batch_size = 0 if _is_llmapi(settings) else settings.max_batch_size
    if settings.max_queue_delay_microseconds is not None:
        # Without priority levels: with them Triton 2.51 lets 2 % of single requests wait 500 ms.
        config.dynamic_batching.max_queue_delay_microseconds = settings.max_queue_delay_microseconds
    if settings.allow_ragged_batch:
        for tensor in config.input:
            tensor.allow_ragged_batch = True
    group = config.instance_group.add(
        kind=model_config_pb2.ModelInstanceGroup.Kind.Value(settings.instance_kind),
        count=settings.instance_count,
    )
    if isinstance(settings.parameters, GraphParameters):
        is_plan = isinstance(settings.parameters, PlanParameters)
        config.platform = "tensorrt_plan" if is_plan else "onnxruntime_onnx"
        config.default_model_filename = PLAN if is_plan else ONNX
        group.gpus.extend(settings.parameters.gpu_device_ids)
    if isinstance(settings.parameters, PlanParameters):
        group.profile.extend(str(index) for index in range(len(settings.parameters.profile_sizes)))
    for key, value in engine_parameters(name, settings, model, plan).items():
        config.parameters[key].string_value = value
    text: str = text_format.MessageToString(config)
    return text


def render_ensemble(source: Path, models: Mapping[str, TritonModel]) -> str:
    """The config.pbtxt of an ensemble, as text: it takes the largest batch that all its steps take.

    Raises `BuildError` like `render_config`, and if a step is none of `models`.
    """
    config = _read_config(source)
    for step in config.ensemble_scheduling.step:
        if step.model_name not in models:
            raise BuildError(f"{source}: step {step.model_name!r} is no model of this target: {', '.join(models)}")
    config.platform = "ensemble"
    config.max_batch_size = min(models[step.model_name].max_batch_size for step in config.ensemble_scheduling.step)
    text: str = text_format.MessageToString(config)
    return text


def _read_config(source: Path) -> Any:
    config = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(source.read_text(encoding="utf-8"), config)
    except text_format.ParseError as error:
        raise BuildError(f"{source}: not a Triton model configuration: {error}") from error
    for field in ("backend", "platform", "instance_group", "parameters"):
        if getattr(config, field):
            raise BuildError(f"{source}: {field}: the source is target-neutral; set it in the targets' rows")
    return config


def engine_parameters(
    name: str, settings: TritonModel, model: AnyModelRow | None, plan: EnginePlan | None = None
) -> dict[str, str]:
    """What an engine reads from its configuration: the target's parameters, and some numbers of the model."""
    if settings.parameters is None or model is None or isinstance(settings.parameters, PlanParameters):
        return {}
    if isinstance(settings.parameters, GraphParameters):
        # Of the arena of one instance; weights and activations both come out of it.
        return {"gpu_mem_limit": str(settings.parameters.memory_mib * 2**20)}
    if isinstance(settings.parameters, TensorRTLLMParameters):
        if _is_llmapi(settings):
            return llmapi_parameters(settings.parameters)
        assert plan is not None
        return backend_parameters(name, settings.parameters, plan)
    values = settings.parameters.model_dump()
    if isinstance(model, EmbedderRow):
        values |= {"max_input_tokens": model.max_input_tokens, "pad_id": model.token_ids.pad}
    elif isinstance(model, ComplexityRow):
        values |= {"max_input_tokens": model.max_input_tokens}
    elif isinstance(model, ModelRow):
        values |= {
            "context_window": model.architecture.context_window,
            "vocab_size": model.architecture.vocab_size,
        }
    # Lists and booleans as in JSON.
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}


def _is_llmapi(settings: TritonModel) -> bool:
    # It does not batch in Triton: its model takes batch size 0 and nothing else.
    return isinstance(settings.parameters, TensorRTLLMParameters) and settings.parameters.runtime == "llmapi"


def make_tiers(target: TargetRow, models: Mapping[str, AnyModelRow]) -> Tiers:
    """The target's tiers with what the orchestrator must know of the model behind each."""
    tiers = [
        _engine_tier(row, models[target.engines[row.model][0]], target) if row.cloud is None else _cloud_tier(row)
        for row in target.tiers
    ]
    return Tiers(
        tier=tiers,
        limits=target.limits,
        routing=target.routing,
        cache=target.cache,
        quality=target.quality,
        safety=target.safety,
    )


def make_embedder(target: TargetRow, models: Mapping[str, AnyModelRow]) -> Embedder:
    """What the gateway must know of the target's sentence embedder."""
    model = models[target.embedder]
    assert isinstance(model, EmbedderRow)
    return Embedder(
        name=model.name,
        max_input_tokens=model.max_input_tokens,
        vocab_size=model.architecture.vocab_size,
        cls_id=model.token_ids.cls,
        sep_id=model.token_ids.sep,
        pad_id=model.token_ids.pad,
    )


def make_speech(target: TargetRow, models: Mapping[str, AnyModelRow]) -> Speech | None:
    """What the gateway must know of the target's speech models; None where it has none to know of."""
    rows = {name: models[row] for name, (row, _) in target.speech.items()}
    transcriber, speaker = None, None
    if isinstance(row := rows.get(STT_MODEL), SpeechRow):
        transcriber = Transcriber(name=row.name, language=row.language or "")
    if isinstance(row := rows.get(TTS_MODEL), SpeechRow):
        speaker = Speaker(name=row.name, voice=row.voice or "")
    return Speech(transcriber=transcriber, speaker=speaker) if transcriber or speaker else None


def _cloud_tier(row: TierRow) -> Tier:
    return Tier.model_validate(dict(row))


def _engine_tier(row: TierRow, model: AnyModelRow, target: TargetRow) -> Tier:
    assert isinstance(model, ModelRow)
    _, parameters = target.engines[row.model]
    is_trtllm = isinstance(parameters, TensorRTLLMParameters)
    # An engine may take less than its model could.
    limit = parameters.max_seq_len if isinstance(parameters, (TensorRTLLMParameters, VLLMParameters)) else None
    is_text = _is_llmapi(target.models[row.model])
    return Tier(
        name=row.name,
        model=row.model,
        tokenizer=f"model_repository/{row.model}/1/tokenizer",
        context_window=limit or model.architecture.context_window,
        end_id=model.token_ids.end,
        pad_id=model.token_ids.pad,
        # Text engines leave out the control tokens that calls are written with.
        tool_parser=None if is_text else row.tool_parser or model.tool_parser,
        runtime="llmapi" if is_text else "engine",
        has_guides=not is_trtllm,  # NVIDIA's xgrammar needs a file that nothing makes yet
        num_instances=target.models[row.model].instance_count,
        adapters=_adapters(row.model, parameters) if isinstance(parameters, TensorRTLLMParameters) else [],
        input_price_per_million_tokens=row.input_price_per_million_tokens,
        output_price_per_million_tokens=row.output_price_per_million_tokens,
        generation=row.generation,
        compression=row.compression,
        first_token_timeout_s=row.first_token_timeout_s,
        token_timeout_s=row.token_timeout_s,
    )


def _adapters(engine: str, parameters: TensorRTLLMParameters) -> list[Adapter]:
    return [
        Adapter(name=each.name, task_id=number, folder=f"model_repository/{engine}/1/lora/{each.name}")
        for number, each in enumerate(parameters.adapters, 1)
    ]


def to_toml(table: Mapping[str, Any], path: str = "") -> str:
    """TOML of nested tables and lists of tables; leaves are strings, booleans, numbers, and lists of such."""
    # Plain keys first: TOML would count one that follows a sub-table to the sub-table.
    tables = {key for key, value in table.items() if isinstance(value, dict) or _is_list_of_tables(value)}
    lines = [f"{key} = {_leaf(value)}\n" for key, value in table.items() if key not in tables]
    for key, value in table.items():
        if isinstance(value, dict):
            lines.append(f"\n[{path}{key}]\n{to_toml(value, f'{path}{key}.')}")
        elif _is_list_of_tables(value):
            lines.extend(f"\n[[{path}{key}]]\n{to_toml(item, f'{path}{key}.')}" for item in value)
    return "".join(lines)


def _is_list_of_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _leaf(value: str | bool | int | float | list[str] | list[float]) -> str:
    # JSON's strings, booleans, numbers and lists are TOML's too, except for one control character that JSON allows.
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007F")
