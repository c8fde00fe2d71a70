"""A TensorRT plan's commands in the target's container, in order: graph, plan, comparison.

    graph   the ONNX graph in the row's precision (`build.onnx_graph`)
    plan    TensorRT's builder, for the row's profiles, GPU and version (`build.tensorrt_plan`)
    verify  the plan against ONNX Runtime on the same inputs (`build.verify_plan`)

Each is kept by what decides it: the model's row with its sources' hashes, precision and profiles, our code, the
versions of container and packages, GPU name and SM.
"""

from __future__ import annotations

import functools
import hashlib
import json
from importlib import metadata
from pathlib import Path

from build.engine_rows import OnnxParameters, PlanParameters
from build.fetch import sha256
from build.gpu_rows import Container, Gpu
from build.model_rows import AnyModelRow
from build.products import InCache, Output, Product, of_ours
from build.profiles import make_profiles
from build.rows import TritonModel
from build.tensorrt_plan import DESCRIPTION, PLAN, profiles_to_json

HERE = Path(__file__).parent
# What writes a graph, besides rows and weights.
GRAPH_CODE = (
    *("bert_onnx.py", "complexity_onnx.py", "e5_file.py", "ocr_onnx.py", "onnx_graph.py", "precision.py"),
    *("router_adapter.py", "data/router.jsonl", "data/router_adapter.safetensors"),
)
VERIFIED = "verified.json"
GRAPH, ONNX = "graph.onnx", "model.onnx"  # as the product has it, and as Triton's `onnxruntime` looks for it


def make_graph(engine: str, parameters: PlanParameters | OnnxParameters, model: AnyModelRow) -> Product:
    """`graph.onnx`, `model.onnx` and `samples.npz`."""
    row = json.dumps(model.model_dump(mode="json"), sort_keys=True)
    return Product(
        name=f"graph-{engine.replace('_', '-')}-{model.name}-{parameters.precision}",
        words=of_ours(
            "onnx_graph",
            *("--engine", engine, "--model", model.name, "--precision", parameters.precision),
            *("--output_dir", Output()),
        ),
        versions={"row": hashlib.sha256(row.encode()).hexdigest()[:16], "code": hash_code(GRAPH_CODE)}
        | tool_versions("ml-dtypes", "numpy", "onnx", "onnxruntime-gpu", "safetensors", "tokenizers"),
        files=("graph.onnx", "model.onnx", "samples.npz"),
    )


def build_plan(
    name: str, settings: TritonModel, parameters: PlanParameters, model: AnyModelRow, gpu: Gpu, container: Container
) -> Product:
    """`model.plan` of the Triton model `name`, with what is known of it."""
    engine = _engine(settings)
    profiles = make_profiles(engine, settings, parameters, model)
    timing = InCache(f"timing/{gpu.name.replace(' ', '-')}-{container.tensorrt}-plans.cache")
    return Product(
        name=f"plan-{name.replace('_', '-')}-{parameters.precision}",
        words=of_ours(
            "tensorrt_plan",
            *("--graph", make_graph(engine, parameters, model), "--name", name, "--engine", engine),
            *("--precision", parameters.precision, "--profiles", profiles_to_json(profiles)),
            *("--memory_mib", str(parameters.memory_mib), "--timing_cache", timing, "--output_dir", Output()),
        ),
        versions={
            "gpu": gpu.name,
            "sm": gpu.sm,
            "tensorrt": container.tensorrt,
            "cuda": container.cuda,
            "code": hash_code(("tensorrt_plan.py",)),
        },
        files=(PLAN, DESCRIPTION),
    )


def verify_plan(
    name: str, settings: TritonModel, parameters: PlanParameters, model: AnyModelRow, gpu: Gpu, container: Container
) -> Product:
    """`verified.json`: how far the plan is from ONNX Runtime. It fails when it is too far."""
    return Product(
        name=f"verified-{name.replace('_', '-')}-{parameters.precision}",
        words=of_ours(
            "verify_plan",
            *("--plan", build_plan(name, settings, parameters, model, gpu, container)),
            *("--graph", make_graph(_engine(settings), parameters, model), "--output_dir", Output()),
        ),
        versions={"code": hash_code(("verify_plan.py",))} | tool_versions("numpy", "onnx", "onnxruntime-gpu"),
        files=(VERIFIED,),
    )


def _engine(settings: TritonModel) -> str:
    assert settings.parameters is not None
    return settings.parameters.engine


@functools.cache
def tool_versions(*packages: str) -> dict[str, str]:
    """Of packages that a result depends on; a machine that only prints commands may lack some."""
    versions = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


@functools.cache
def hash_code(files: tuple[str, ...]) -> str:
    """Of files of this package: what was made by other code is made anew."""
    digest = hashlib.sha256("".join(sha256(HERE / file) for file in files).encode())
    return digest.hexdigest()[:16]
