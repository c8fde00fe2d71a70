"""BERT with mean pooling and L2 norm in plain numpy, one sentence at a time and without padding.

Written from the paper's formulas and the tensors' names, in float64, and sharing nothing with `build.bert_onnx`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_erf = np.frompyfunc(math.erf, 1, 1)


def embed(weights: Mapping[str, npt.NDArray[np.float32]], ids: Sequence[int], *, num_heads: int, eps: float) -> Array:
    """The embedding [hidden] of the token ids of one sentence."""
    mean = encode(weights, ids, num_heads=num_heads, eps=eps).mean(axis=0)
    return mean / np.linalg.norm(mean)


def encode(weights: Mapping[str, npt.NDArray[Any]], ids: Sequence[int], *, num_heads: int, eps: float) -> Array:
    """The last layer's output [tokens, hidden]."""

    def weight(name: str) -> Array:
        return weights[name].astype(np.float64)

    def dense(name: str, x: Array) -> Array:
        return x @ weight(f"{name}.weight").T + weight(f"{name}.bias")

    def norm(name: str, x: Array) -> Array:
        centred = x - x.mean(axis=-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
        return centred / deviation * weight(f"{name}.weight") + weight(f"{name}.bias")

    x = norm(
        "embeddings.LayerNorm",
        weight("embeddings.word_embeddings.weight")[list(ids)]
        + weight("embeddings.position_embeddings.weight")[: len(ids)]
        + weight("embeddings.token_type_embeddings.weight")[0],
    )
    num_layers = sum(name.endswith(".intermediate.dense.bias") for name in weights)
    for index in range(num_layers):
        layer = f"encoder.layer.{index}"
        query, key, value = (dense(f"{layer}.attention.self.{part}", x) for part in ("query", "key", "value"))
        size = x.shape[1] // num_heads
        mixed = np.zeros_like(x)
        for head in range(num_heads):
            part = slice(head * size, (head + 1) * size)
            scores = query[:, part] @ key[:, part].T / math.sqrt(size)
            shares = np.exp(scores - scores.max(axis=1, keepdims=True))
            mixed[:, part] = shares / shares.sum(axis=1, keepdims=True) @ value[:, part]
        x = norm(f"{layer}.attention.output.LayerNorm", x + dense(f"{layer}.attention.output.dense", mixed))
        inner = dense(f"{layer}.intermediate.dense", x)
        inner = inner * 0.5 * (1 + _erf(inner / math.sqrt(2)).astype(np.float64))
        x = norm(f"{layer}.output.LayerNorm", x + dense(f"{layer}.output.dense", inner))
    return x
