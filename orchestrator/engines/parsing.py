"""A request of NVIDIA's tensor contract as an `EngineRequest`, checked tensor by tensor."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from orchestrator import contracts
from orchestrator.engines import EngineRefusal, EngineRequest

# Tensors we do not honour, at the one value that asks for nothing; clients of NVIDIA's backend often send them.
_NEUTRAL: Mapping[str, Any] = {
    "num_return_sequences": 1,
    "beam_width": 1,
    "return_log_probs": False,
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
        contracts.TEMPERATURE,
        contracts.RUNTIME_TOP_K,
        contracts.RUNTIME_TOP_P,
        contracts.REPETITION_PENALTY,
        contracts.PRESENCE_PENALTY,
        contracts.FREQUENCY_PENALTY,
        contracts.MIN_TOKENS,
        contracts.SEED,
        contracts.EXCLUDE_INPUT_IN_OUTPUT,
        contracts.STREAMING,
        contracts.STOP,
    )
}


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
        if name in _HONOURED:
            continue
        if name not in _NEUTRAL:
            raise EngineRefusal(f"{name}: this engine does not support it; leave it out")
        if not np.all(tensor == _NEUTRAL[name]):
            raise EngineRefusal(f"{name}: this engine supports only {_NEUTRAL[name]} (got {tensor.tolist()})")
    if contracts.INPUT_IDS.name not in tensors:
        raise EngineRefusal("input_ids: required unless stop is true")
    ids = tensors[contracts.INPUT_IDS.name]  # [batch, tokens]
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
        raise EngineRefusal(f"input_ids: shape {list(ids.shape)}; must be [1, tokens] with at least one token")

    values = _Scalars(tensors)
    num_ids = values.read(contracts.INPUT_LENGTHS, 0, low=1)
    if num_ids != ids.shape[1]:
        raise EngineRefusal(f"input_lengths: {num_ids}, but input_ids has {ids.shape[1]} tokens")
    max_new_tokens = values.read(contracts.REQUEST_OUTPUT_LEN, 0, low=1)
    end_id = values.read(contracts.END_ID, -1, low=-1)
    # As NVIDIA's sampler: greedy unless top-k or top-p is asked for; top-k 1 is greedy, 0 means all tokens.
    has_top_p = contracts.RUNTIME_TOP_P.name in tensors
    top_k = values.read(contracts.RUNTIME_TOP_K, 0 if has_top_p else 1, low=0)
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
    )
    return ParsedRequest(
        request,
        streaming=bool(values.read(contracts.STREAMING, False)),
        exclude_input=bool(values.read(contracts.EXCLUDE_INPUT_IN_OUTPUT, exclude_input)),
    )


class _Scalars:
    """Reads one-element tensors with a range check."""

    def __init__(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        self._tensors = tensors

    def read(self, spec: contracts.TensorSpec, default: Any, *, low: Any = None, high: Any = None) -> Any:
        tensor = self._tensors.get(spec.name)
        if tensor is None:
            return default
        if tensor.size != 1:
            raise EngineRefusal(f"{spec.name}: shape {list(tensor.shape)}; must hold one value")
        value = tensor.reshape(-1)[0].item()
        # Written so that NaN fails too.
        if not ((low is None or value >= low) and (high is None or value <= high)):
            allowed = f"at least {low}" if high is None else f"{low} to {high}"
            raise EngineRefusal(f"{spec.name}: {value} is out of range; allowed is {allowed}")
        return value
