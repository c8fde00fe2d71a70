"""A GGUF as the checkpoint that Hugging Face's libraries read: config.json, and model.safetensors in BF16."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file

from build.errors import BuildError
from build.model_rows import Architecture, ModelRow
from build.tokenizer import check_metadata, model_config, read_metadata

# llama.cpp's names of a Llama's tensors and Hugging Face's (`TensorNameMap` in gguf-py).
_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_checkpoint(gguf: Path, model: ModelRow, folder: Path) -> None:
    """Write the checkpoint of `model` into `folder`, which is made.

    Raises `BuildError` if the GGUF is another model, or a tensor is missing or of a wrong shape.
    """
    check_metadata(read_metadata(gguf), model, gguf.name)
    tensors = dict(_read_tensors(gguf, model.architecture))
    _check_shapes(tensors, model.architecture, gguf.name)
    folder.mkdir(parents=True)
    config = {**model_config(model), "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    halves = {name: values.astype(ml_dtypes.bfloat16) for name, values in tensors.items()}
    save_file(halves, folder / "model.safetensors", {"format": "pt"})


def unpermute(weights: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """The rows of a query or key matrix in Hugging Face's order.

    llama.cpp rotates neighbours, Hugging Face the two halves of a head; its converter reorders the rows
    (`LlamaModel.permute` in convert_hf_to_gguf.py), and this undoes it.
    """
    num_rows, num_columns = weights.shape
    pairs = weights.reshape(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weights.shape)


def _read_tensors(gguf: Path, numbers: Architecture) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    heads = {"attn_q": numbers.num_attention_heads, "attn_k": numbers.num_kv_heads}
    for tensor in GGUFReader(gguf).tensors:
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name in _GLOBAL:
            yield _GLOBAL[tensor.name], values
            continue
        block, _, rest = tensor.name.removeprefix("blk.").partition(".")
        part, _, kind = rest.rpartition(".")
        if not tensor.name.startswith("blk.") or part not in _LAYER or kind != "weight":
            raise BuildError(f"{gguf.name}: tensor {tensor.name!r} is none of a Llama's")
        yield f"model.layers.{block}.{_LAYER[part]}.weight", unpermute(values, heads[part]) if part in heads else values


def _shapes(numbers: Architecture) -> dict[str, tuple[int, ...]]:
    hidden, inner = numbers.hidden_size, numbers.intermediate_size
    queries, keys = numbers.num_attention_heads * numbers.head_dim, numbers.num_kv_heads * numbers.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (numbers.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not numbers.tie_word_embeddings:
        shapes["lm_head.weight"] = (numbers.vocab_size, hidden)
    for number in range(numbers.num_layers):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def _check_shapes(tensors: dict[str, Any], numbers: Architecture, file: str) -> None:
    found = {name: tuple(values.shape) for name, values in tensors.items()}
    wanted = _shapes(numbers)
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise BuildError(f"{file}: {name} has shape {found.get(name)}, the row says {wanted.get(name)}")
