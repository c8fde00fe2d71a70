"""A LoRA adapter as PEFT saves it into the two tensors of TensorRT-LLM's contract (`orchestrator.triton.lora`).

The layout is that of NVIDIA's examples/hf_lora_convert.py, for the modules of Llama and Qwen2; the numbers of modules
are those of tensorrt_llm/lora_manager.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from build.errors import BuildError
from build.model_rows import Architecture
from orchestrator.triton.lora import CONFIG_FILE, WEIGHTS_FILE

# PEFT's name of a module, NVIDIA's, and its number there.
MODULES = {
    "q_proj": ("attn_q", 1),
    "k_proj": ("attn_k", 2),
    "v_proj": ("attn_v", 3),
    "o_proj": ("attn_dense", 4),
    "gate_proj": ("mlp_h_to_4h", 5),
    "down_proj": ("mlp_4h_to_h", 6),
    "up_proj": ("mlp_gate", 7),
}
_NAME = re.compile(r".*\.layers\.(\d+)\.(?:self_attn|mlp)\.([a-z_]+)\.lora_([AB])\.weight")


def write_lora(adapter: Path, model: Architecture, max_rank: int, folder: Path) -> None:
    """Write `lora_weights.npy` and `lora_config.npy` of the adapter in `adapter` into `folder`, which is made.

    Raises `BuildError` naming what of the adapter the engine could not take.
    """
    try:
        settings: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise BuildError(f"{adapter.name}/adapter_config.json: not a JSON file that can be read: {error}") from error
    for key, allowed in (("use_dora", False), ("modules_to_save", None), ("bias", "none")):
        if settings.get(key, allowed) != allowed and settings.get(key):
            raise BuildError(f"{adapter.name}: {key} is {settings[key]!r}; an engine takes low-rank matrices alone")
    matrices = _read_matrices(adapter)
    rows, config = [], []
    for (layer, module), pair in sorted(matrices.items(), key=lambda item: (item[0][0], MODULES[item[0][1]][1])):
        if set(pair) != {"A", "B"}:
            raise BuildError(f"{adapter.name}: layer {layer}, {module}: only lora_{next(iter(pair))} is there")
        rank = len(pair["A"])  # A is [rank, inputs], B is [outputs, rank]
        expected = _sizes(model)[module]
        if (pair["A"].shape[1], pair["B"].shape) != (expected[0], (expected[1], rank)) or layer >= model.num_layers:
            raise BuildError(
                f"{adapter.name}: layer {layer}, {module}: matrices {pair['A'].shape} and {pair['B'].shape} are not of "
                f"this model, which has {expected[0]} inputs and {expected[1]} outputs there"
            )
        if rank > max_rank:
            raise BuildError(f"{adapter.name}: rank {rank}; the row's max_lora_rank is {max_rank}; raise it")
        scale = settings["lora_alpha"] / (rank**0.5 if settings.get("use_rslora") else rank)
        rows.append(np.concatenate([pair["A"].ravel(), (pair["B"] * scale).ravel()]).astype(np.float16))
        config.append((MODULES[module][1], layer, rank))
    width = max(len(row) for row in rows)
    folder.mkdir(parents=True)
    np.save(folder / WEIGHTS_FILE, np.stack([np.pad(row, (0, width - len(row))) for row in rows]))
    np.save(folder / CONFIG_FILE, np.array(config, dtype=np.int32))


def _read_matrices(adapter: Path) -> dict[tuple[int, str], dict[str, npt.NDArray[np.float32]]]:
    """Of each layer and module, A and B."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(adapter / "adapter_model.safetensors")
    except (OSError, SafetensorError) as error:
        raise BuildError(f"{adapter.name}/adapter_model.safetensors: cannot be read: {error}") from error
    matrices: dict[tuple[int, str], dict[str, npt.NDArray[np.float32]]] = {}
    for name, tensor in tensors.items():
        found = _NAME.fullmatch(name)
        if found is None or found[2] not in MODULES:
            raise BuildError(f"{adapter.name}: {name}: engines do not have this; allowed: {', '.join(MODULES)}")
        matrices.setdefault((int(found[1]), found[2]), {})[found[3]] = tensor.astype(np.float32)
    if not matrices:
        raise BuildError(f"{adapter.name}: the adapter is empty")
    return matrices


def _sizes(model: Architecture) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each module."""
    hidden, inner = model.hidden_size, model.intermediate_size
    queries, keys = model.num_attention_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
        "gate_proj": (hidden, inner),
        "down_proj": (inner, hidden),
        "up_proj": (hidden, inner),
    }
