"""TensorRT-LLM's engines and TensorRT's plans in an artifact: whole, of the version and size that the row says.

An engine must have room for a sequence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from orchestrator.doctor.findings import Finding
from orchestrator.doctor.repository import read_config
from orchestrator.manifest import MODEL_REPOSITORY, Graph, Manifest, TrtllmEngine

CHECK = "engine"
_KV_BYTES = {"auto": 2, "fp8": 1, "int8": 1}
# Keys of the engine's build_config and those of the row that they come from.
_LIMITS = ("max_input_len", "max_seq_len", "max_num_tokens")


def check_engines(root: Path, manifest: Manifest) -> Iterator[Finding]:
    """A finding for each engine, or for each of its faults."""
    for engine in manifest.trtllm_engines:
        find = _find_faults if engine.parameters.runtime == "engine" else _find_llmapi_faults
        faults = [*find(root, manifest, engine), *_find_pool_faults(root, manifest, engine)]
        what = f"{engine.name}: {engine.settings.model}, tp {engine.parameters.tp_size}"
        yield from faults or [Finding(CHECK, f"{what}, a KV cache of {pool_tokens(root, engine)} tokens")]


def check_graphs(root: Path, manifest: Manifest) -> Iterator[Finding]:
    """A finding for each TensorRT plan or ONNX graph, or for its fault."""
    for graph in manifest.graphs:
        what = "a plan of TensorRT" if graph.parameters.runtime == "tensorrt" else "a graph for ONNX Runtime"
        yield _find_graph_fault(root, manifest, graph) or Finding(
            CHECK, f"{graph.name}: {graph.settings.model}, {what}"
        )


def _find_graph_fault(root: Path, manifest: Manifest, graph: Graph) -> Finding | None:
    folder, fix = root / MODEL_REPOSITORY / graph.name / "1", manifest.rebuild
    is_plan = graph.parameters.runtime == "tensorrt"
    file, path = folder / ("model.plan" if is_plan else "model.onnx"), folder / "plan.json"
    if not file.is_file() or not file.stat().st_size:
        what = f"the {'plan' if is_plan else 'graph'} that the build makes"
        return Finding(CHECK, f"{file}: missing or empty", what, fix)
    if not is_plan:
        return None
    try:
        version = str(json.loads(path.read_bytes())["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Finding(CHECK, f"{path}: not the description of a plan: {error!r}", "what the build wrote", fix)
    container = manifest.row.container
    # A package's version may have a suffix, such as .post1.
    if container is not None and not f"{version}.".startswith(f"{container.tensorrt}."):
        return Finding(CHECK, f"{path}: a plan of TensorRT {version}", f"{container.tensorrt}, which will load it", fix)
    return None


def engine_folder(root: Path, engine: TrtllmEngine) -> Path:
    """Where the build puts an engine; its configuration says the same."""
    return root / MODEL_REPOSITORY / engine.name / "1" / "engine"


def _find_faults(root: Path, manifest: Manifest, engine: TrtllmEngine) -> Iterator[Finding]:
    folder, fix = engine_folder(root, engine), manifest.rebuild
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_bytes())
        version, limits = config["version"], config["build_config"]
        mapping = config["pretrained_config"]["mapping"]
        sizes = {name: mapping[name] for name in ("tp_size", "pp_size")}
        found = {name: limits[name] for name in ("max_batch_size", *_LIMITS)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield Finding(CHECK, f"{path}: not the configuration of an engine: {error!r}", "what trtllm-build wrote", fix)
        return
    parameters = engine.parameters
    container = manifest.row.container
    if container is not None and version != container.tensorrt_llm:
        yield Finding(
            CHECK, f"{path}: an engine of TensorRT-LLM {version}", f"{container.tensorrt_llm}, which will load it", fix
        )
    wanted = {"tp_size": parameters.tp_size, "pp_size": parameters.pp_size}
    if sizes != wanted:
        yield Finding(CHECK, f"{path}: an engine of {sizes}", str(wanted), fix)
    for name, value in found.items():
        want = engine.settings.max_batch_size if name == "max_batch_size" else getattr(parameters, name)
        # trtllm-build makes room for draft tokens.
        is_longer = name == "max_seq_len" and parameters.speculation is not None and value > want
        if value != want and not is_longer:
            yield Finding(CHECK, f"{path}: build_config.{name} is {value}", f"{want}, the row's", fix)
    for rank in range(parameters.world_size):
        file = folder / f"rank{rank}.engine"
        if not file.is_file() or not file.stat().st_size:
            yield Finding(CHECK, f"{file}: missing or empty", f"{parameters.world_size} files, one a GPU", fix)


def _find_llmapi_faults(root: Path, manifest: Manifest, engine: TrtllmEngine) -> Iterator[Finding]:
    version = root / MODEL_REPOSITORY / engine.name / "1"
    for name in ("model.py", "helpers.py", "model.yaml", "checkpoint/config.json"):
        if not (version / name).is_file():
            yield Finding(CHECK, f"{version / name}: missing", "NVIDIA's LLM-API model, complete", manifest.rebuild)


def _find_pool_faults(root: Path, manifest: Manifest, engine: TrtllmEngine) -> Iterator[Finding]:
    tokens, longest = pool_tokens(root, engine), longest_sequence(engine)
    if tokens is not None and tokens < longest:
        yield Finding(
            CHECK,
            f"{engine.name}: the KV cache holds {tokens} tokens (max_tokens_in_paged_kv_cache)",
            f"{longest}, one sequence of max_seq_len",
            f"raise kv_cache_share or lower max_seq_len in the row, then {manifest.rebuild}",
        )


def longest_sequence(engine: TrtllmEngine) -> int:
    """The tokens that the longest sequence takes, drafts included, in whole blocks."""
    block = max(engine.parameters.tokens_per_block, 1)
    return math.ceil((engine.parameters.max_seq_len + engine.parameters.max_draft_len) / block) * block


def pool_tokens(root: Path, engine: TrtllmEngine) -> int | None:
    """How many tokens the engine's KV cache holds; None where the configuration does not say."""
    version = root / MODEL_REPOSITORY / engine.name / "1"
    try:
        if engine.parameters.runtime == "llmapi":
            # JSON's numbers are YAML's, and the key is written once.
            lines = (version / "model.yaml").read_text(encoding="utf-8").splitlines()
            text = next(line.partition(":")[2] for line in lines if line.strip().startswith("max_tokens:"))
        else:
            text = read_config(root, engine.name).parameters["max_tokens_in_paged_kv_cache"].string_value
        return int(text)
    except (OSError, ValueError, StopIteration, text_format.ParseError):
        return None


def needed_bytes(root: Path, manifest: Manifest, engine: TrtllmEngine) -> int:
    """On each of its GPUs: its file, or its part of the checkpoint, and the KV cache. Activations come on top."""
    if engine.parameters.runtime == "llmapi":
        checkpoint = root / MODEL_REPOSITORY / engine.name / "1" / "checkpoint"
        weights = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors")) // engine.parameters.world_size
    else:
        weights = max((path.stat().st_size for path in engine_folder(root, engine).glob("rank*.engine")), default=0)
    numbers = manifest.find_architecture(engine.settings)
    if numbers is None:
        return weights
    element = _KV_BYTES.get(engine.parameters.kv_cache_precision, 2)
    a_token = 2 * numbers.num_layers * numbers.num_kv_heads * numbers.head_dim * element // engine.parameters.world_size
    return weights + a_token * (pool_tokens(root, engine) or 0)
