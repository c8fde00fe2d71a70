"""A request of NVIDIA's tensor contract as an `EngineRequest`, checked tensor by tensor."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from orchestrator import contracts
from orchestrator.engines import EngineRefusal, EngineRequest
from orchestrator.engines.words import parse_words

# Tensors we do not honour, at the one value that asks for nothing; clients of NVIDIA's backend often send them.
_NEUTRAL: Mapping[str, Any] = {
    "num_return_sequences": 1,
    "beam_width": 1,
    "return_context_logits": False,
    "return_generation_logits": False,
    "return_perf_metrics": False,
    "return_num_input_tokens": False,
    "return_num_output_tokens": False,
}

_HONOURED = {
    spec.name
    for spec in (
        contracts.INPUT_IDS,
        contracts.INPUT_LENGTHS,
        contracts.REQUEST_OUTPUT_LEN,
        contracts.END_ID,
        contracts.PAD_ID,
        contracts.STOP_WORDS_LIST,
        contracts.BAD_WORDS_LIST,
        contracts.TEMPERATURE,
        contracts.RUNTIME_TOP_K,
        contracts.RUNTIME_TOP_P,
        contracts.REPETITION_PENALTY,
        contracts.PRESENCE_PENALTY,
        contracts.FREQUENCY_PENALTY,
        contracts.MIN_TOKENS,
        contracts.SEED,
        contracts.RETURN_LOG_PROBS,
        contracts.EXCLUDE_INPUT_IN_OUTPUT,
        contracts.STREAMING,
        contracts.STOP,
        contracts.GUIDED_DECODING_GUIDE_TYPE,
        contracts.GUIDED_DECODING_GUIDE,
    )
}
_SPECS = {spec.name: spec for spec in contracts.ENGINE_INPUTS}

# numpy's kinds of what may stand in a tensor of a declared type. Triton has checked the exact type of what it delivers.
_KINDS = {
    "TYPE_BOOL": "b",
    "TYPE_FP16": "f",
    "TYPE_FP32": "f",
    "TYPE_INT32": "iu",
    "TYPE_INT64": "iu",
    "TYPE_STRING": "OSU",
    "TYPE_UINT8": "iu",
    "TYPE_UINT64": "iu",
}

# NVIDIA's guide types (`getGuidedDecodingParamsFromTensors` in TensorRT-LLM's
# triton_backend/inflight_batcher_llm/src/utils.cc) and the most bytes of UTF-8 that each guide may have: a grammar
# costs time and memory by its length, a regular expression most of all.
GUIDE_TYPES: Mapping[str, int] = {"json": 0, "json_schema": 16 << 10, "regex": 1 << 10, "ebnf_grammar": 16 << 10}
# How deep a JSON schema may nest: whoever compiles it recurses.
MAX_GUIDE_NESTING = 64


class ParsedRequest(NamedTuple):
    """An engine request and how its answer is wanted: in pieces, and without the prompt's ids in a whole one."""

    request: EngineRequest
    streaming: bool
    exclude_input: bool


def parse_engine_request(
    request_id: str, tensors: Mapping[str, npt.NDArray[Any]], *, exclude_input: bool
) -> ParsedRequest:
    """Check and translate one request; `exclude_input` is the model's own setting.

    `tensors` are the inputs that were sent, batch dimension first. A request without an id gets one.
    Raises `EngineRefusal` naming the tensor, its value and what is allowed.
    """
    for name, tensor in tensors.items():
        _check_supported(name, tensor)
    if contracts.INPUT_IDS.name not in tensors:
        raise EngineRefusal("input_ids: required unless stop is true")
    ids = tensors[contracts.INPUT_IDS.name]  # [batch, tokens]
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
        raise EngineRefusal(f"input_ids: shape {list(ids.shape)}; must be [1, tokens] with at least one token")
    for name, tensor in tensors.items():
        if _SPECS[name].scalar and tensor.size != 1:
            raise EngineRefusal(f"{name}: shape {list(tensor.shape)}; must hold one value")

    values = _Values(tensors)
    num_ids = values.read(contracts.INPUT_LENGTHS, 0, low=1)
    if num_ids != ids.shape[1]:
        raise EngineRefusal(f"input_lengths: {num_ids}, but input_ids has {ids.shape[1]} tokens")
    max_new_tokens = values.read(contracts.REQUEST_OUTPUT_LEN, 0, low=1)
    end_id = values.read(contracts.END_ID, -1, low=-1)
    # As NVIDIA's sampler: greedy unless top-k or top-p is asked for; top-k 1 is greedy, 0 means all tokens.
    has_top_p = contracts.RUNTIME_TOP_P.name in tensors
    top_k = values.read(contracts.RUNTIME_TOP_K, 0 if has_top_p else 1, low=0)
    guide_type, guide = _read_guide(values)
    request = EngineRequest(
        request_id=request_id or uuid.uuid4().hex,
        input_ids=ids[0].tolist(),
        max_new_tokens=max_new_tokens,
        end_id=None if end_id == -1 else end_id,
        min_tokens=values.read(contracts.MIN_TOKENS, 0, low=0, high=max_new_tokens),
        sample=top_k != 1,
        temperature=values.read(contracts.TEMPERATURE, 1.0, low=1e-3, high=100.0),
        top_k=top_k,
        top_p=values.read(contracts.RUNTIME_TOP_P, 1.0, low=1e-7, high=1.0),
        repetition_penalty=values.read(contracts.REPETITION_PENALTY, 1.0, low=1e-3, high=100.0),
        presence_penalty=values.read(contracts.PRESENCE_PENALTY, 0.0, low=-2.0, high=2.0),
        frequency_penalty=values.read(contracts.FREQUENCY_PENALTY, 0.0, low=-2.0, high=2.0),
        seed=values.read(contracts.SEED, 0, low=0) if contracts.SEED.name in tensors else None,
        stop_words=values.read_words(contracts.STOP_WORDS_LIST),
        bad_words=values.read_words(contracts.BAD_WORDS_LIST),
        log_probs=values.read(contracts.RETURN_LOG_PROBS, False),
        guide_type=guide_type,
        guide=guide,
    )
    return ParsedRequest(
        request,
        streaming=values.read(contracts.STREAMING, False),
        exclude_input=values.read(contracts.EXCLUDE_INPUT_IN_OUTPUT, exclude_input),
    )


def _check_supported(name: str, tensor: npt.NDArray[Any]) -> None:
    if name == "embedding_bias":
        raise EngineRefusal(f"{name}: this engine has no bias on logits; leave it out")
    if name not in _HONOURED and name not in _NEUTRAL:
        raise EngineRefusal(f"{name}: this engine does not support it; leave it out")
    declared = _SPECS[name].dtype
    if tensor.dtype.kind not in _KINDS[declared]:
        raise EngineRefusal(f"{name}: {tensor.dtype} values; must be {declared.removeprefix('TYPE_')}")
    if name in _NEUTRAL and not np.all(tensor == _NEUTRAL[name]):
        raise EngineRefusal(f"{name}: this engine supports only {_NEUTRAL[name]} (got {tensor.tolist()})")


def _read_guide(values: _Values) -> tuple[str | None, str | None]:
    """The guide's type and its text, which is None for type json."""
    type_name, guide_name = contracts.GUIDED_DECODING_GUIDE_TYPE.name, contracts.GUIDED_DECODING_GUIDE.name
    guide_type = values.read_text(contracts.GUIDED_DECODING_GUIDE_TYPE)
    guide = values.read_text(contracts.GUIDED_DECODING_GUIDE)
    if guide_type is None:
        if guide is not None:
            raise EngineRefusal(f"{guide_name}: needs {type_name}, one of {', '.join(GUIDE_TYPES)}")
        return None, None
    if guide_type not in GUIDE_TYPES:
        raise EngineRefusal(f"{type_name}: {guide_type[:100]!r}; must be one of {', '.join(GUIDE_TYPES)}")
    if guide_type == "json":
        if guide:
            raise EngineRefusal(f"{guide_name}: type json takes no guide; leave it out or use type json_schema")
        return guide_type, None
    if not guide:
        raise EngineRefusal(f"{guide_name}: required with {type_name} {guide_type}")
    num_bytes = len(guide.encode())
    if num_bytes > GUIDE_TYPES[guide_type]:
        raise EngineRefusal(f"{guide_name}: {num_bytes} bytes; {guide_type} may have {GUIDE_TYPES[guide_type]}")
    if guide_type == "json_schema":
        _check_schema(guide_name, guide)
    return guide_type, guide


def _check_schema(name: str, text: str) -> None:
    too_deep = EngineRefusal(f"{name}: the schema nests too deep; at most {MAX_GUIDE_NESTING} levels")
    try:
        level = [json.loads(text)]
    except RecursionError:
        raise too_deep from None
    except ValueError as error:
        raise EngineRefusal(f"{name}: the schema is not JSON: {error}") from None
    for _ in range(MAX_GUIDE_NESTING + 1):
        containers = [value for value in level if isinstance(value, (dict, list))]
        level = [inner for value in containers for inner in (value.values() if isinstance(value, dict) else value)]
        if not containers:
            return
    raise too_deep


class _Values:
    """Reads tensors of known kinds, those of one element with a range check."""

    def __init__(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        self._tensors = tensors

    def read(self, spec: contracts.TensorSpec, default: Any, *, low: Any = None, high: Any = None) -> Any:
        tensor = self._tensors.get(spec.name)
        if tensor is None:
            return default
        value = tensor.reshape(-1)[0].item()
        # Written so that NaN fails too.
        if not ((low is None or value >= low) and (high is None or value <= high)):
            allowed = f"at least {low}" if high is None else f"{low} to {high}"
            raise EngineRefusal(f"{spec.name}: {value} is out of range; allowed is {allowed}")
        return value

    def read_words(self, spec: contracts.TensorSpec) -> list[list[int]]:
        tensor = self._tensors.get(spec.name)
        return [] if tensor is None else parse_words(spec.name, tensor)

    def read_text(self, spec: contracts.TensorSpec) -> str | None:
        tensor = self._tensors.get(spec.name)
        if tensor is None:
            return None
        if tensor.size != 1:
            raise EngineRefusal(f"{spec.name}: shape {list(tensor.shape)}; must be [1, 1]")
        value = tensor.reshape(-1)[0]
        try:
            text: str = value.decode() if isinstance(value, bytes) else str(value)
            text.encode()  # no half of a surrogate pair either
        except UnicodeError:
            raise EngineRefusal(f"{spec.name}: not UTF-8") from None
        return text
