"""`python -m build.verify_plan`: a TensorRT plan against ONNX Runtime on the same inputs, on the GPU machine.

ONNX Runtime computes `model.onnx`, the FP32 graph, by its CUDA provider; TensorRT computes the same by the plan.
`verified.json` has the differences; a plan that is too far off fails, and is not installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from build.errors import BuildError
from build.onnx_graph import MODEL, SAMPLES, Samples, load_samples
from build.tensorrt_plan import DESCRIPTION, INSTEAD, PLAN, load_library

Arrays = Mapping[str, npt.NDArray[Any]]
# The least cosine of an FP32 output to the reference's, and the least share of equal integers. Not measured on a GPU:
# FP16 graphs in ONNX Runtime on a CPU have cosines above 0.9999 and equal characters, INT8 ones above 0.96.
LIMITS = {"fp32": (0.9999, 0.999), "fp16": (0.999, 0.98), "int8": (0.95, 0.95), "fp8": (0.95, 0.95)}


def compare(references: Sequence[Arrays], found: Sequence[Arrays]) -> dict[str, dict[str, float]]:
    """By output, over all samples: `cosine` and `largest_difference` of floats, `agreement` of integers.

    Raises `BuildError` for a shape that is another one, and for numbers that are none.
    """
    measures = {}
    for name in references[0]:
        for wanted, given in zip(references, found):
            if wanted[name].shape != given[name].shape:
                raise BuildError(f"{name}: has shape {given[name].shape}, ONNX Runtime's has {wanted[name].shape}")
            if not np.isfinite(given[name]).all():
                raise BuildError(f"{name}: has numbers that are infinite or none (NaN); set precision = 'fp32'")
        first = np.concatenate([each[name].ravel() for each in references]).astype(np.float64)
        second = np.concatenate([each[name].ravel() for each in found]).astype(np.float64)
        if np.issubdtype(references[0][name].dtype, np.integer):
            measures[name] = {"agreement": round(float((first == second).mean()), 4)}
            continue
        lengths = float(np.linalg.norm(first) * np.linalg.norm(second))
        measures[name] = {
            "cosine": round(float(first @ second) / lengths, 5) if lengths else 0.0,
            "largest_difference": round(float(np.abs(first - second).max()), 5),
        }
    return measures


def find_fault(measures: Mapping[str, Mapping[str, float]], precision: str) -> str | None:
    """The first output that is too far off for `precision`, None if there is none."""
    cosine, agreement = LIMITS[precision]
    for name, measure in measures.items():
        for kind, least in (("cosine", cosine), ("agreement", agreement)):
            if kind in measure and measure[kind] < least:
                return (
                    f"{name}: {kind} to ONNX Runtime's result is {measure[kind]}; precision {precision!r} must have at "
                    f"least {least}; take a higher precision, or {INSTEAD}"
                )
    return None


def fits(feeds: Arrays, profiles: Sequence[Mapping[str, Sequence[Sequence[int]]]]) -> int | None:
    """The first profile that takes `feeds`; None if none does."""
    for index, profile in enumerate(profiles):
        limits = [(feeds[name].shape, least, most) for name, (least, _, most) in profile.items()]
        if all(a <= b <= c for shape, least, most in limits for a, b, c in zip(least, shape, most)):
            return index
    return None


def run_reference(model: Path, samples: Samples) -> list[Arrays]:
    """By onnxruntime-gpu; raises `BuildError` where its CUDA provider is not there."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(model), providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
    if "CUDAExecutionProvider" not in session.get_providers():
        raise BuildError("ONNX Runtime runs on the CPU here; pip install onnxruntime-gpu, and CUDA as it wants it")
    names = [each.name for each in session.get_outputs()]
    return [dict(zip(names, session.run(names, feeds))) for feeds in samples]


def run_plan(plan: Path, description: Mapping[str, Any], samples: Samples) -> list[Arrays]:
    """By TensorRT, with PyTorch's memory; raises `BuildError` if the plan does not load or run."""
    import torch

    trt = load_library("tensorrt")
    runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
    engine = runtime.deserialize_cuda_engine(plan.read_bytes())
    if engine is None:
        raise BuildError(f"{plan}: TensorRT {trt.__version__} does not load it on this GPU; build it here")
    context, stream = engine.create_execution_context(), torch.cuda.Stream()
    results: list[Arrays] = []
    for feeds in samples:
        profile = fits(feeds, description["profiles"])
        if profile is None:
            raise BuildError(f"{plan}: no profile takes the shapes {[each.shape for each in feeds.values()]}")
        context.set_optimization_profile_async(profile, stream.cuda_stream)
        stream.synchronize()
        given = {name: torch.from_numpy(array).cuda() for name, array in feeds.items()}
        for name, tensor in given.items():
            context.set_input_shape(name, tuple(tensor.shape))
            context.set_tensor_address(name, tensor.data_ptr())
        made = {}
        for each in description["outputs"]:
            kind = torch.int32 if each["data_type"] == "TYPE_INT32" else torch.float32
            made[each["name"]] = torch.empty(tuple(context.get_tensor_shape(each["name"])), dtype=kind, device="cuda")
            context.set_tensor_address(each["name"], made[each["name"]].data_ptr())
        torch.cuda.synchronize()
        if not context.execute_async_v3(stream.cuda_stream):
            raise BuildError(f"{plan}: TensorRT could not run it")
        stream.synchronize()
        results.append({name: tensor.cpu().numpy() for name, tensor in made.items()})
    return results


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m build.verify_plan")
    parser.add_argument("--plan", type=Path, required=True, help="a folder that build.tensorrt_plan wrote")
    parser.add_argument("--graph", type=Path, required=True, help="the folder of its graph")
    parser.add_argument("--output_dir", type=Path, required=True)
    options = parser.parse_args(argv)
    try:
        description = json.loads((options.plan / DESCRIPTION).read_bytes())
        samples = load_samples(options.graph / SAMPLES)
        reference = run_reference(options.graph / MODEL, samples)
        measures = compare(reference, run_plan(options.plan / PLAN, description, samples))
        if fault := find_fault(measures, description["precision"]):
            raise BuildError(f"{description['name']}: {fault}")
        options.output_dir.mkdir(parents=True, exist_ok=True)
        result = {"precision": description["precision"], "num_samples": len(samples), "outputs": measures}
        (options.output_dir / "verified.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except (BuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{description['name']}: {measures}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
