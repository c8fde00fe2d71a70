"""What `python -m build --render-only` leaves out, put into its artifact: stand-in engines and plans, and a tokenizer.

The configurations stay as they were rendered, but for the plans': their instances go to the CPU, since Triton takes
none on a GPU where there is none; what was rendered is beside the plan, for its stand-in.

The tokenizer is that of another artifact (`scripted` or `cpu`), whose engine also answers; so the artifact's tiers and
the manifest's model rows get that model's token ids, vocabulary, tool format and, if it is smaller, window, and the
manifest names the files that there are now.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format
from google.protobuf.json_format import MessageToJson
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from build.manifest import list_files
from build.profiles import INPUTS, OUTPUTS, make_profiles
from build.render import to_toml
from build.rows import load_models, load_target
from orchestrator.config import Tier, load_tiers

HERE = Path(__file__).resolve().parent
VERSION = "1.2.1"
PACKAGES = {"tensorrt_llm": VERSION, "tensorrt": "10.14.1.48"}


def dress(artifact: Path, source: Path) -> None:
    """Fill `artifact` with the parts of `source`; afterwards `serve --backend-directory tests/standins` runs it."""
    manifest: dict[str, Any] = json.loads((artifact / "manifest.json").read_bytes())
    origin: dict[str, Any] = json.loads((source / "manifest.json").read_bytes())
    given = origin["row"]["models"]["llm_small"]
    small = origin["models"][given["model"]]
    repository, parts = artifact / "model_repository", source / "model_repository"
    cpu_parts = source.parent / "cpu" / "model_repository"
    for name, model in manifest["row"]["models"].items():
        parameters, version = model["parameters"], repository / name / "1"
        if parameters is None:
            continue
        if parameters["engine"] != "tensorrt_llm":
            # What target scripted does not have, target cpu beside it has.
            made = next(each / name / "1" for each in (parts, cpu_parts) if (each / name / "1").is_dir())
            is_plan = parameters.get("runtime") == "tensorrt"
            for path in made.iterdir():
                if path.is_file() and not (version / path.name).exists() and not (is_plan and path.suffix == ".py"):
                    shutil.copyfile(path, version / path.name)
            if is_plan:
                write_plan(repository / name, manifest["target"])
            continue
        for path in (parts / "llm_small" / "1").iterdir():
            if path.is_dir() and path.name != "__pycache__":
                shutil.copytree(path, version / path.name)
        row = manifest["models"][model["model"]]
        row["architecture"]["vocab_size"] = small["architecture"]["vocab_size"]
        row["token_ids"] = small["token_ids"]
        engine = {**given["parameters"], "vocab_size": small["architecture"]["vocab_size"]}
        del engine["exclude_input_in_output"]
        engine["context_window"] = min(parameters["max_seq_len"], small["architecture"]["context_window"])
        if parameters["runtime"] == "engine":
            write_engine(version / "engine", model, row["architecture"], engine)
            for adapter in parameters["adapters"]:
                write_adapter(version / "lora" / adapter["name"])
        else:
            write_llmapi(version, engine)
    tiers = load_tiers(artifact / "tiers.toml")
    given_tiers = {tier.name: tier for tier in load_tiers(source / "tiers.toml").tier}
    tiers = tiers.model_copy(update={"tier": [_with_model_of(given_tiers, tier) for tier in tiers.tier]})
    (artifact / "tiers.toml").write_text(to_toml(tiers.model_dump(mode="json", exclude_none=True)), encoding="utf-8")
    manifest.pop("render_only", None)
    seal(artifact, manifest)


def _with_model_of(given: Mapping[str, Tier], tier: Tier) -> Tier:
    """`tier` with what another artifact's tier of its name says of the model."""
    other = given[tier.name]
    return tier.model_copy(
        update={
            "end_id": other.end_id,
            "pad_id": other.pad_id,
            "tool_parser": None if tier.runtime == "llmapi" else other.tool_parser,
            "context_window": min(tier.context_window, other.context_window),
        }
    )


def write_engine(folder: Path, model: dict[str, Any], architecture: dict[str, Any], engine: dict[str, Any]) -> None:
    """An engine's folder as trtllm-build leaves it; `engine` is what its stand-in is told."""
    parameters = model["parameters"]
    mapping = {name: parameters[name] for name in ("tp_size", "pp_size")}
    config = {
        "version": VERSION,
        "pretrained_config": {
            "vocab_size": architecture["vocab_size"],
            "num_hidden_layers": architecture["num_layers"],
            "mapping": {"world_size": mapping["tp_size"] * mapping["pp_size"], **mapping},
        },
        "build_config": {
            "lora_config": {"max_lora_rank": parameters.get("max_lora_rank")} if parameters.get("adapters") else {},
            "max_batch_size": model["max_batch_size"],
            **{name: parameters[name] for name in ("max_input_len", "max_seq_len", "max_num_tokens")},
        },
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for rank in range(mapping["tp_size"] * mapping["pp_size"]):
        (folder / f"rank{rank}.engine").write_text(json.dumps(_as_texts(engine)), encoding="utf-8")


def plan_of(target_name: str, name: str) -> dict[str, Any]:
    """What NVIDIA's backend would ask the plan of a Triton model for, by the target's row: tensors and profiles."""
    target = load_target(target_name)
    settings, parameters = target.plans[name]
    engine = parameters.engine
    profiles = make_profiles(engine, settings, parameters, load_models(target)[settings.model or ""])
    tensors = {
        kind: [{"name": spec.name, "data_type": spec.dtype, "dims": [-1, *spec.dims]} for spec in specs[engine]]
        for kind, specs in (("inputs", INPUTS), ("outputs", OUTPUTS))
    }
    return {**tensors, "profiles": profiles}


def write_plan(folder: Path, target_name: str) -> None:
    """The stand-in's `model.plan` of the Triton model in `folder`, whose configuration then needs no GPU."""
    plan = plan_of(target_name, folder.name) | {"version": PACKAGES["tensorrt"]}
    for name in ("model.plan", "plan.json"):
        (folder / "1" / name).write_text(json.dumps(plan), encoding="utf-8")
    path = folder / "config.pbtxt"
    config = text_format.Parse(path.read_text(encoding="utf-8"), ModelConfig())
    rendered = MessageToJson(config, preserving_proto_field_name=True)
    (folder / "1" / "rendered.json").write_text(rendered, encoding="utf-8")
    for group in config.instance_group:
        group.kind = ModelInstanceGroup.Kind.Value("KIND_CPU")
        del group.gpus[:], group.profile[:]
    path.write_text(text_format.MessageToString(config), encoding="utf-8")


def write_llmapi(version: Path, engine: dict[str, Any]) -> None:
    """The version folder of NVIDIA's LLM-API model, with the stand-in's model.py."""
    for name in ("model.py", "helpers.py"):
        (version / name).write_bytes((HERE / "llmapi" / "model.py").read_bytes() if name == "model.py" else b"")
    shutil.copyfile(HERE.parent / "data" / "trtllm_models.json", version / "contract.json")
    shutil.copytree(version / "tokenizer", version / "checkpoint" / "tokenizer")
    (version / "checkpoint" / "standin.json").write_text(json.dumps(_as_texts(engine)), encoding="utf-8")
    (version / "checkpoint" / "config.json").write_text("{}", encoding="utf-8")


def write_adapter(folder: Path) -> None:
    """The tensors of an adapter of two rows."""
    folder.mkdir(parents=True)
    np.save(folder / "lora_weights.npy", np.zeros((2, 10), np.float16))
    np.save(folder / "lora_config.npy", np.array([[1, 0, 2], [1, 1, 2]], np.int32))


def _as_texts(engine: dict[str, Any]) -> dict[str, str]:
    return {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in engine.items()
        if value is not None
    }


def seal(artifact: Path, manifest: dict[str, Any] | None = None) -> None:
    """Make the manifest, or the one given, name the files that there are."""
    path = artifact / "manifest.json"
    manifest = manifest or json.loads(path.read_bytes())
    manifest["files"] = {
        file.relative_to(artifact).as_posix(): {
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            "bytes": file.stat().st_size,
        }
        for file in list_files(artifact)
        if file != path
    }
    path.write_text(json.dumps(manifest, indent=2, sort_keys=True), encoding="utf-8")


def write_machine(folder: Path, artifact: Path) -> dict[str, str]:
    """A machine as `artifact` wants it, for its programs and Python packages; returns the environment to see it in.

    `nvidia-smi` tells of the row's GPUs, `mpirun` runs the first of its programs, and the container's packages have
    their versions. To be put before PATH and PYTHONPATH.
    """
    row = json.loads((artifact / "manifest.json").read_bytes())["row"]
    gpu, container = row["gpu"], row["container"]
    programs, packages = folder / "bin", folder / "packages"
    programs.mkdir(parents=True)
    line = f"{gpu['name']}, {gpu['sm']}, {gpu['memory_mib']}, {gpu['memory_mib'] - 500}, {container['driver']}"
    _write_program(programs / "nvidia-smi", f"for i in $(seq {gpu['count']}); do echo '{line}'; done")
    _write_program(programs / "mpirun", 'shift 3; export OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0; exec "$@"')
    _write_program(programs / "trtllm-llmapi-launch", 'exec "$@"')
    for package, version in PACKAGES.items():
        info = packages / f"{package}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return {"PATH": str(programs), "PYTHONPATH": str(packages)}


def _write_program(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
