"""What NVIDIA's backend `tensorrtllm` demands of a configuration and of a request, for its stand-in.

The lists are NVIDIA's (`tests/data/trtllm_tensor_contract.json`, `trtllm_models.json`). Every function returns the
first fault as a text, None if there is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data"
CONTRACT: dict[str, Any] = json.loads((DATA / "trtllm_tensor_contract.json").read_text(encoding="utf-8"))
MODELS: dict[str, Any] = json.loads((DATA / "trtllm_models.json").read_text(encoding="utf-8"))
INPUTS = {each["name"]: each for each in CONTRACT["inputs"]}
OUTPUTS = {each["name"]: each for each in CONTRACT["outputs"]}
PARAMETERS = {each["key"]: each for each in MODELS["tensorrtllm parameters"]}
REQUIRED_OUTPUTS = ("output_ids", "sequence_length")

VERSION = "1.2.1"
# Types that NVIDIA's template leaves to whoever fills it.
_OPEN_TYPES = {
    "${logits_datatype}": ("TYPE_FP32", "TYPE_FP16"),
    "${encoder_input_features_data_type}": ("TYPE_FP16", "TYPE_BF16"),
    "${prompt_embedding_table_data_type}": ("TYPE_FP16", "TYPE_BF16"),
}
_LOOKAHEAD = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")


def find_config_fault(config: Mapping[str, Any]) -> str | None:
    """Of a model's configuration, as Triton hands it over."""
    for kind, listed in (("input", INPUTS), ("output", OUTPUTS)):
        tensors = {each["name"]: each for each in config[kind]}
        if list(tensors) != list(listed):
            differing = sorted(set(tensors) ^ set(listed)) or "the order"
            return f"{kind}s differ from NVIDIA's: {differing}"
        for name, tensor in tensors.items():
            if fault := _find_tensor_fault(tensor, listed[name], kind):
                return f"{kind} {name}: {fault}"
    if not config.get("model_transaction_policy", {}).get("decoupled"):
        return "model_transaction_policy.decoupled is false; this stand-in has no other"
    if "dynamic_batching" not in config:
        return "dynamic_batching is missing"
    (group,) = config["instance_group"]
    if group["kind"] != "KIND_CPU" or group.get("gpus"):
        return f"instance_group: {group['kind']}, gpus {group.get('gpus')}; GPUs are gpu_device_ids' to say"
    return _find_parameter_fault({key: value["string_value"] for key, value in config["parameters"].items()}, config)


def _find_tensor_fault(tensor: Mapping[str, Any], listed: Mapping[str, Any], kind: str) -> str | None:
    types = _OPEN_TYPES.get(listed["data_type"], (listed["data_type"],))
    if tensor["data_type"] not in types:
        return f"data_type {tensor['data_type']}; NVIDIA's is {' or '.join(types)}"
    if [int(dim) for dim in tensor["dims"]] != listed["dims"]:
        return f"dims {tensor['dims']}; NVIDIA's are {listed['dims']}"
    if kind == "input" and bool(tensor.get("optional")) != bool(listed.get("optional")):
        return f"optional {tensor.get('optional')}; NVIDIA's is {listed.get('optional', False)}"
    if ("reshape" in tensor) != ("reshape" in listed):
        return f"reshape {tensor.get('reshape')}; NVIDIA's is {listed.get('reshape')}"
    return None


def _find_parameter_fault(told: Mapping[str, str], config: Mapping[str, Any]) -> str | None:
    for key, value in told.items():
        if key not in PARAMETERS:
            return f"parameter {key}: NVIDIA's backend knows no such key"
        if "${" in value:
            return f"parameter {key}: {value!r} was never filled"
        if value and not _is_allowed(value, PARAMETERS[key]["allowed"]):
            return f"parameter {key}: {value!r}; allowed: {PARAMETERS[key]['allowed']}"
    for key, listed in PARAMETERS.items():
        if listed["required"] and not told.get(key):
            return f"parameter {key}: required"
        if listed.get("key_must_exist") and key not in told:
            return f"parameter {key}: the key must be there, even if empty"
    if told.get("decoding_mode") == "lookahead" and not all(told.get(key) for key in _LOOKAHEAD):
        return f"parameter decoding_mode: lookahead needs {', '.join(_LOOKAHEAD)}"
    groups = told.get("gpu_device_ids", "").split(";")
    count = int(config["instance_group"][0]["count"])
    if len(groups) != count:
        return f"parameter gpu_device_ids: {len(groups)} groups for {count} instances"
    return None


def _is_allowed(value: str, allowed: str) -> bool:
    if allowed == "bool":
        return value in ("True", "true", "TRUE", "1", "False", "false", "FALSE", "0")
    if allowed.endswith("int") or allowed.startswith("int"):
        return value.isdigit()
    if allowed == "0..1":
        return re.fullmatch(r"[0-9.]+", value) is not None and 0 < float(value) <= 1
    if allowed.startswith("comma list, semicolon"):
        return re.fullmatch(r"\d+(,\d+)*(;\d+(,\d+)*)*", value) is not None
    if allowed in ("dir path", "file path", "json file") or ("," not in allowed and " " in allowed):
        return True
    return value in allowed.split(",")


def find_engine_fault(folder: Path, told: Mapping[str, str], instance: int, environ: Mapping[str, str]) -> str | None:
    """Of the engine in `folder`, as the real runtime finds it when it loads."""
    path = folder / "config.json"
    if not path.is_file():
        return f"gpt_model_path: {folder} does not exist or has no config.json; encoder_model_path is empty too"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return "[json.exception.parse_error.101] parse error at line 1, column 1: attempting to parse an empty input"
    if config["version"] != VERSION:
        return (
            "Serialization assertion stdVersionRead == kSERIALIZATION_VERSION failed. Version tag does not match: "
            f"the engine is of {config['version']}, this is {VERSION}"
        )
    mapping = config["pretrained_config"]["mapping"]
    world_size = mapping["tp_size"] * mapping["pp_size"]
    groups = told["gpu_device_ids"].split(";")
    devices = groups[instance % len(groups)].split(",")
    if len(devices) != world_size:
        return f"Assertion failed: gpu_device_ids {devices} and world size {world_size} of the engine differ"
    is_orchestrator = environ.get("TRTLLM_ORCHESTRATOR") == "1"
    mpi_size = int(environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    if world_size > 1 and not is_orchestrator and mpi_size != world_size:
        return f"Assertion failed: mpiSize ({mpi_size}) != tp * pp ({world_size})"
    if is_orchestrator and mpi_size > 1:
        return f"Assertion failed: the orchestrator runs alone, not in an MPI world of {mpi_size}"
    if len(groups) > 1 and not is_orchestrator:
        return f"Assertion failed: {len(groups)} instances need the orchestrator mode"
    for rank in range(world_size):
        if not (folder / f"rank{rank}.engine").is_file():
            return f"Error opening engine file: {folder}/rank{rank}.engine"
    pool, longest = int(told["max_tokens_in_paged_kv_cache"]), config["build_config"]["max_seq_len"]
    if pool < longest:
        return f"Assertion failed: a KV cache of {pool} tokens does not hold one sequence of {longest}"
    return None


def find_request_fault(
    tensors: Mapping[str, Any], outputs: Collection[str], told: Mapping[str, str], build_config: Mapping[str, Any]
) -> str | None:
    """Of a request: `tensors` are arrays by name, batch first, `outputs` the names that were asked for."""
    for name, array in tensors.items():
        if name not in INPUTS:
            return f"unexpected inference input '{name}'"
        dims = INPUTS[name]["dims"]
        # A tensor of dims [1] that is reshaped to [] arrives as [batch].
        wanted = 1 if "reshape" in INPUTS[name] else 1 + len(dims)
        if array.ndim != wanted:
            return f"input {name}: {array.ndim} dimensions, the batch included; NVIDIA's has {wanted}"
    if "stop" in tensors and tensors["stop"].any():
        return None
    for name in REQUIRED_OUTPUTS:
        if name not in outputs:
            return f"Output tensor {name} is required, and was not requested"
    if "input_ids" not in tensors:
        return "input_ids is required"
    num_tokens = tensors["input_ids"].shape[-1]
    if num_tokens > build_config["max_input_len"]:
        return f"Prompt length ({num_tokens}) exceeds maximum input length ({build_config['max_input_len']})"
    if "lora_task_id" in tensors and not build_config.get("lora_config"):
        return "LoRA is not enabled in this engine (built without --lora_plugin)"
    if "guided_decoding_guide_type" in tensors and not told["guided_decoding_backend"]:
        return "Request has guided decoding params, but guided decoding is not enabled"
    return None


class LoraCache:
    """NVIDIA's cache of adapters, with room for one."""

    def __init__(self) -> None:
        self._task_id: int | None = None

    def find_fault(self, tensors: Mapping[str, Any]) -> str | None:
        """Of a request with an adapter; takes in what it brings along."""
        task_id = int(tensors["lora_task_id"].reshape(-1)[0])
        given = [name for name in ("lora_weights", "lora_config") if name in tensors]
        if not given:
            if task_id == self._task_id:
                return None
            return f"LoRA task {task_id} not found in cache. Please send LoRA weights with request"
        if len(given) == 1:
            return f"{given[0]} without the other of lora_weights and lora_config"
        weights, config = tensors["lora_weights"], tensors["lora_config"]
        if weights.shape[:2] != config.shape[:2]:
            return f"lora_weights {list(weights.shape)} and lora_config {list(config.shape)} differ in their rows"
        self._task_id = task_id
        print(json.dumps({"event": "adapter_taken_in", "task_id": task_id}), flush=True)
        return None
