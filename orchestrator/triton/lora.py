"""A LoRA adapter's two tensors by NVIDIA's contract, as `python -m build` wrote them.

`lora_weights` [rows, width] FP16 holds for each module of each layer the matrix of rank x inputs and, after it, the one
of outputs x rank, scaled; shorter rows end in zeros. `lora_config` [rows, 3] INT32 has module id, layer and rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from orchestrator import contracts

WEIGHTS_FILE, CONFIG_FILE = "lora_weights.npy", "lora_config.npy"
# What NVIDIA's cache of adapters says of one that it does not hold, or no longer (peftCacheManager.cpp).
NOT_CACHED = "not found in cache"


class LoraTensors(NamedTuple):
    """What the first request with an adapter brings along."""

    weights: npt.NDArray[np.float16]
    config: npt.NDArray[np.int32]


def read_lora(folder: Path) -> LoraTensors:
    """The tensors in `folder`; raises `OSError` when a file is missing, `ValueError` when it is not what it must be."""
    weights, config = np.load(folder / WEIGHTS_FILE), np.load(folder / CONFIG_FILE)
    if weights.ndim != 2 or weights.dtype != np.float16 or config.dtype != np.int32:
        raise ValueError(f"{folder}: not the tensors of a LoRA adapter")
    if config.shape != (len(weights), 3):
        raise ValueError(f"{folder}: {len(weights)} rows of weights, and a configuration of {config.shape}")
    return LoraTensors(weights, config)


def add_lora(message: Any, task_id: int, tensors: LoraTensors | None) -> None:
    """Put the adapter `task_id` on a request of a batching engine; `tensors` when the engine may not have them yet."""
    message.inputs.add(name=contracts.LORA_TASK_ID.name, datatype="UINT64", shape=(1, 1))
    message.raw_input_contents.append(np.uint64(task_id).tobytes())
    if tensors is not None:
        for spec, array in ((contracts.LORA_WEIGHTS, tensors.weights), (contracts.LORA_CONFIG, tensors.config)):
            message.inputs.add(name=spec.name, datatype=spec.dtype.removeprefix("TYPE_"), shape=(1, *array.shape))
            message.raw_input_contents.append(np.ascontiguousarray(array).tobytes())
