"""A LoRA adapter as PEFT saves it into the two tensors of TensorRT-LLM's contract (`orchestrator.triton.lora`).

The layout is that of NVIDIA's examples/hf_lora_convert.py, for the modules of Llama and Qwen2; the numbers of modules
are those of tensorrt_llm/lora_manager.py.
"""

from __future__ import annotations

import json
import math
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
# What else of PEFT's settings says of how an adapter is computed; only empty it is what an engine does.
NEITHER = (
    *("use_dora", "use_qalora", "use_bdlora", "alpha_pattern", "modules_to_save", "trainable_token_indices"),
    *("fan_in_fan_out", "lora_bias", "layer_replication", "megatron_config", "target_parameters", "arrow_config"),
    "alora_invocation_tokens",
)
# Other ways to begin (PiSSA, OLoRA, LoftQ, CorDA) change the model's own weights as well.
BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
_NAME = re.compile(r".*\.layers\.(\d+)\.(?:self_attn|mlp)\.([a-z_]+)\.lora_([AB])\.weight")


def write_lora(adapter: Path, model: Architecture, max_rank: int, folder: Path) -> None:
    """Write `lora_weights.npy` and `lora_config.npy` of the adapter in `adapter` into `folder`, which is made.

    Raises `BuildError` naming what of the adapter the engine could not take.
    """
    settings = _read_settings(adapter)
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


def _read_settings(adapter: Path) -> dict[str, Any]:
    """PEFT's settings, of an adapter that is two matrices a module and one scale for all."""
    file = f"{adapter.name}/adapter_config.json"
    try:
        settings = json.loads((adapter / "adapter_config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise BuildError(f"{file}: not a JSON file that can be read: {error}") from error
    if not isinstance(settings, dict):
        raise BuildError(f"{file}: {type(settings).__name__}, no table of settings as PEFT writes it")
    wanted = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": BEGINNINGS}
    for key, allowed in wanted.items():
        if key in settings and settings[key] not in allowed:
            raise BuildError(
                f"{file}: {key} is {settings[key]!r}; an engine takes low-rank matrices alone; allowed: "
                f"{', '.join(map(repr, allowed))}"
            )
    for key in NEITHER:
        if settings.get(key):
            raise BuildError(
                f"{file}: {key} is {settings[key]!r}; an engine takes low-rank matrices alone; leave it out"
            )
    alpha = settings.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise BuildError(f"{file}: lora_alpha is {alpha!r}; allowed: a number above 0, which scales all matrices")
    return settings


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
