"""What NVIDIA's backend `tensorrt` demands of a configuration and of a request, for its stand-in.

Rules and texts are those of tensorrt_backend's sources (src/instance_state.cc, src/tensorrt_utils.cc). A stand-in plan
is what of `plan.json`, as `build.tensorrt_plan` writes it, the backend asks a plan for. Every function returns the
first fault as a text, None if there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PLATFORM, FILE = "tensorrt_plan", "model.plan"
DTYPES = {"TYPE_FP32": "float32", "TYPE_INT32": "int32", "TYPE_UINT8": "uint8"}


def find_config_fault(config: Mapping[str, Any], plan: Mapping[str, Any]) -> str | None:
    """Of a model's configuration, as it was rendered."""
    name = config["name"]
    if (config.get("platform"), config.get("default_model_filename")) != (PLATFORM, FILE):
        return f"unable to load model '{name}': platform {PLATFORM} and file {FILE} are what the backend loads"
    for group in config["instance_group"]:
        if group.get("kind") != "KIND_GPU" or not group.get("gpus"):
            return f"unable to load model '{name}', TensorRT backend supports only GPU device"
        for profile in group.get("profile", []):
            if not profile.isdigit() or int(profile) >= len(plan["profiles"]):
                return f"unable to load model '{name}', the plan has no optimization profile {profile}"
    batch = int(config.get("max_batch_size", 0))
    largest = max(shapes[2][0] for profile in plan["profiles"] for shapes in profile.values())
    if batch > largest:
        return (
            f"autofill failed for model '{name}': configuration specified max-batch {batch} but TensorRT engine only "
            f"supports max-batch {largest}"
        )
    for kind in ("input", "output"):
        given = {each["name"]: each for each in config[kind]}
        known = {each["name"]: each for each in plan[f"{kind}s"]}
        if given.keys() != known.keys():
            return f"unable to load model '{name}': {kind}s {sorted(given)}, the plan has {sorted(known)}"
        for tensor, each in given.items():
            if fault := _find_tensor_fault(name, each, known[tensor], batch, kind):
                return fault
    return None


def _find_tensor_fault(
    name: str, given: Mapping[str, Any], known: Mapping[str, Any], batch: int, kind: str
) -> str | None:
    if given["data_type"] != known["data_type"]:
        return (
            f"unexpected datatype {given['data_type']} for inference {kind} '{given['name']}', expecting "
            f"{known['data_type']} for {name}"
        )
    if given.get("allow_ragged_batch"):
        return f"model '{name}', tensor '{given['name']}': ragged input without batch_input"
    dims = [int(dim) for dim in given["dims"]]
    full = [-1, *dims] if batch else dims
    if len(full) != len(known["dims"]) or any(a != b for a, b in zip(full, known["dims"]) if -1 not in (a, b)):
        return (
            f"model '{name}', tensor '{given['name']}': the model expects {len(known['dims'])} dimensions (shape "
            f"{known['dims']}) but the model configuration specifies {len(full)} dimensions (an initial batch "
            f"dimension because max_batch_size > 0 followed by the explicit tensor shape, making complete shape {full})"
        )
    return None


def find_request_fault(instance: str, tensors: Mapping[str, Any], plan: Mapping[str, Any], most: int) -> str | None:
    """Of what Triton has batched: `tensors` are arrays by name, `most` is max_batch_size."""
    for each in plan["inputs"]:
        name = each["name"]
        if name not in tensors:
            return f"missing input '{name}' for {instance}"
        if tensors[name].dtype != DTYPES[each["data_type"]]:
            return f"unexpected datatype {tensors[name].dtype} for inference input '{name}' for {instance}"
    batch = next(iter(tensors.values())).shape[0]
    if batch > most:
        return f"batch size {batch} for '{instance}', max allowed is {most}"
    faults = [_find_shape_fault(instance, tensors, profile) for profile in plan["profiles"]]
    return None if None in faults else faults[0]


def _find_shape_fault(
    instance: str, tensors: Mapping[str, Any], profile: Mapping[str, Sequence[Sequence[int]]]
) -> str | None:
    for name, (least, _, most) in profile.items():
        shape = tensors[name].shape
        told = f"request specifies invalid shape for input '{name}' for {instance}. Error details: model expected "
        if len(shape) != len(most):
            return f"{told}{len(most)} dimensions but received {len(shape)} dimensions"
        for index, size in enumerate(shape):
            if not least[index] <= size <= most[index]:
                return (
                    f"{told}the shape of dimension {index} to be between {least[index]} and {most[index]} but received "
                    f"{size}"
                )
    return None
