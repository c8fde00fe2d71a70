"""The trained part of the classifier, `data/router_adapter.safetensors`: low-rank changes, norms and the head.

    encoder.layer.<i>.<matrix>.lora_a [rank, inputs] and .lora_b [outputs, rank]: added to the matrix is lora_b · lora_a
    encoder.layer.<i>.<norm>.weight, .bias: in the place of the encoder's
    head.<0|1>.weight [outputs, inputs], .bias: pooled embedding → GELU → a number for each tier

FP16. Its metadata says, under `training`, what it was trained from and what came of it, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from build.errors import BuildError

FOLDER = Path(__file__).parent / "data"
PATH = FOLDER / "router_adapter.safetensors"

MATRICES = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)
NORMS = ("attention.output.LayerNorm", "output.LayerNorm")

# The head is given the mean over the tokens times this: small numbers, which it would learn from slowly.
POOLED_SCALE = 4.0

Floats = npt.NDArray[np.float32]
Weights = Mapping[str, Floats]


class Adapter(NamedTuple):
    """`training` is the metadata; its `temperature` divides the head's numbers before the softmax."""

    tensors: dict[str, Floats]
    training: dict[str, Any]

    @property
    def temperature(self) -> float:
        return float(self.training["temperature"])

    @property
    def num_layers(self) -> int:
        """How many of the encoder's layers it was trained on, from the first."""
        return sum(name.endswith(".intermediate.dense.lora_a") for name in self.tensors)


def read_adapter(path: Path = PATH) -> Adapter:
    """Raises `BuildError` for a file that is none."""
    try:
        with safe_open(str(path), "np") as file:
            tensors = {name: file.get_tensor(name).astype(np.float32) for name in file.keys()}  # noqa: SIM118
            training = json.loads(file.metadata()["training"])
        adapter = Adapter(tensors, training)
        _ = adapter.temperature
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise BuildError(
            f"{path}: no adapter that can be read ({error!r}); make one: python -m build router"
        ) from error
    return adapter


def write_adapter(adapter: Adapter, path: Path = PATH) -> None:
    """Write it, FP16; equal contents give equal bytes."""
    tensors = {name: np.ascontiguousarray(value, np.float16) for name, value in sorted(adapter.tensors.items())}
    save_file(tensors, path, {"training": json.dumps(adapter.training, sort_keys=True)})


def merge(weights: Weights, adapter: Adapter) -> dict[str, Floats]:
    """The weights of the first `adapter.num_layers` layers with the adapter in them, and its head.

    Raises `BuildError` naming the tensor when it is another encoder's.
    """
    merged = {name: value for name, value in weights.items() if _is_used(name, adapter.num_layers)}
    for name, value in adapter.tensors.items():
        if name.startswith("head."):
            merged[name] = value
        elif name.endswith(".lora_a"):
            matrix = name.removesuffix(".lora_a") + ".weight"
            change = adapter.tensors[name.removesuffix("a") + "b"] @ value
            merged[matrix] = _same_shape(matrix, weights.get(matrix), change) + change
        elif not name.endswith(".lora_b"):
            _same_shape(name, weights.get(name), value)
            merged[name] = value
    return merged


def _is_used(name: str, num_layers: int) -> bool:
    return not name.startswith("encoder.layer.") or int(name.split(".")[2]) < num_layers


def _same_shape(name: str, found: Floats | None, change: Floats) -> Floats:
    if found is None or found.shape != change.shape:
        raise BuildError(
            f"the adapter's {name} has shape {change.shape}, the encoder's {None if found is None else found.shape}; "
            "they are not of one model: python -m build router"
        )
    return found
