"""`python -m build.tensorrt_plan`: a TensorRT plan of an ONNX graph, with TensorRT's Python API.

The same code runs with TensorRT, which builds for the GPU that it finds, and with TensorRT for RTX, which builds
without a GPU for the SM that it is told (7.5, 8.0, 8.6, 8.9, 12.0, 12.1). Neither loads a plan without one, so what can
be known is asked of the network before the build (inputs, outputs, profiles, types) and of the builder's log after it
(layers, precisions, memory). Into the folder go `model.plan`, `plan.json`, all that was found, and `builder.log`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from traceback import clear_frames
from typing import Any

from build.errors import BuildError
from build.profiles import INPUTS, OUTPUTS, Profile, Shapes
from orchestrator.contracts import TensorSpec

PLAN, DESCRIPTION, LOG = "model.plan", "plan.json", "builder.log"
MIB = 2**20
LIBRARIES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx_bindings"}
# TensorRT's names of types, and Triton's.
TRITON_TYPES = {"FLOAT": "TYPE_FP32", "HALF": "TYPE_FP16", "INT32": "TYPE_INT32", "UINT8": "TYPE_UINT8"}
# Layers whose arithmetic a precision is chosen for.
PRODUCTS = ("MATRIX_MULTIPLY", "CONVOLUTION", "DECONVOLUTION")
# How the builder's log writes the types.
LOGGED_TYPES = {"fp16": ("Half", "FP16"), "int8": ("Int8",), "fp8": ("FP8", "Fp8"), "fp32": ("Float", "FP32")}
INSTEAD = "set runtime = 'onnxruntime' for it in the target's row"


@dataclass(frozen=True)
class Wish:
    """What is to be built: the plan of the Triton model `name`, of `engine`, whose instance may take `memory_mib`.

    `sm` is for TensorRT for RTX alone.
    """

    name: str
    engine: str
    precision: str
    profiles: Sequence[Profile]
    memory_mib: int
    sm: str | None = None


@dataclass(frozen=True)
class Tensor:
    """An input or output; `dims` have the batch first, -1 is a length that varies."""

    name: str
    data_type: str
    dims: list[int]


@dataclass(frozen=True)
class Description:
    """What is known of a plan without loading it; `layers` counts the builder's layers by the types they give."""

    name: str
    engine: str
    precision: str
    library: str
    version: str
    sm: str | None
    inputs: list[Tensor]
    outputs: list[Tensor]
    profiles: list[dict[str, Shapes]]
    layers: dict[str, int]
    weight_bytes: int
    activation_bytes: int


def load_library(name: str) -> Any:
    """TensorRT's Python package: "tensorrt" or "tensorrt-rtx"."""
    try:
        return import_module(LIBRARIES[name])
    except ImportError as error:
        fix = "run it in the target's container" if name == "tensorrt" else "pip install -e '.[tensorrt-rtx]'"
        raise BuildError(f"{LIBRARIES[name]} cannot be imported ({error}); {fix}") from error


def build_plan(trt: Any, graph: Path, wish: Wish, folder: Path, timing_cache: Path | None = None) -> Description:
    """Build the plan of `graph` into `folder` by the library `trt`; returns what `plan.json` says.

    `timing_cache` is read and written again where the library times kernels. Raises `BuildError` naming the model, and
    the node where there is one; `builder.log` is there all the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    logger = _make_logger(trt)
    builder: Any = None
    network: Any = None
    config: Any = None
    cache: Any = None
    plan: Any = None
    try:
        builder = trt.Builder(logger)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        _parse(trt, network, logger, graph, wish.name)
        check_network(network, wish)
        config = _configure(trt, builder, network, wish)
        cache = use_timing_cache(trt, config, timing_cache)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise BuildError(f"{wish.name}: TensorRT built no plan: {_complaint(logger.lines)}; {INSTEAD}")
        if cache is not None and timing_cache is not None:
            _write_whole(timing_cache, bytes(config.get_timing_cache().serialize()))
        description = _describe(trt, network, wish, logger.lines)
        _write_whole(folder / PLAN, bytes(plan))
    except BaseException as error:
        clear_frames(error.__traceback__)  # they hold what the builder made
        raise
    finally:
        # Whatever was made by the builder goes before it, or its end waits for ever (TensorRT for RTX 1.7).
        plan = cache = config = network = None
        builder = None
        (folder / LOG).write_text("\n".join(f"{kind}: {text}" for kind, text in logger.lines), encoding="utf-8")
    (folder / DESCRIPTION).write_text(json.dumps(asdict(description), indent=2) + "\n", encoding="utf-8")
    return description


def _make_logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]  # the base is known when it runs
        """Keeps all that TensorRT says."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[tuple[str, str]] = []

        def log(self, severity: Any, text: str) -> None:
            self.lines.append((severity.name, text))

    return Logger()


def _complaint(lines: Sequence[tuple[str, str]]) -> str:
    errors = [text for kind, text in lines if kind in ("ERROR", "INTERNAL_ERROR")]
    return " | ".join(errors[-3:]) or "without a word; see builder.log"


def _parse(trt: Any, network: Any, logger: Any, graph: Path, name: str) -> None:
    parser = trt.OnnxParser(network, logger)
    if parser.parse(graph.read_bytes()):
        return
    faults = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        node = error.node_name() or f"node {error.node()}"
        faults.append(f"node {node!r} ({error.node_operator() or 'unknown'}): {error.code().name}, {error.desc()}")
    raise BuildError(f"{name}: TensorRT cannot run the graph: {'; '.join(faults) or 'no reason given'}; {INSTEAD}")


# --- the network, before the build -------------------------------------------------------------------------


def check_network(network: Any, wish: Wish) -> None:
    """Raise `BuildError` if inputs, outputs or profiles are not the contract's, or a product has another precision."""
    given = [network.get_input(index) for index in range(network.num_inputs)]
    made = [network.get_output(index) for index in range(network.num_outputs)]
    for kind, tensors, specs in (("inputs", given, INPUTS[wish.engine]), ("outputs", made, OUTPUTS[wish.engine])):
        found, wanted = {each.name: _tensor(each) for each in tensors}, {spec.name: _wanted(spec) for spec in specs}
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                raise BuildError(
                    f"{wish.name}: {kind}: {name} is {found.get(name)} in the network, and {wanted.get(name)} in "
                    f"orchestrator/contracts.py"
                )
    for profile in wish.profiles:
        for tensor in given:
            _check_shapes(wish.name, tensor, profile.get(tensor.name))
    _check_types(network, wish)


def _tensor(tensor: Any) -> Tensor:
    return Tensor(tensor.name, TRITON_TYPES.get(tensor.dtype.name, tensor.dtype.name), [int(d) for d in tensor.shape])


def _wanted(spec: TensorSpec) -> Tensor:
    return Tensor(spec.name, spec.dtype, [-1, *spec.dims])


def _check_shapes(name: str, tensor: Any, shapes: Shapes | None) -> None:
    dims = [int(dim) for dim in tensor.shape]
    is_right = shapes is not None and all(
        len(dims) == len(shape) and all(dim in (-1, size) for dim, size in zip(dims, shape)) for shape in shapes
    )
    rises = shapes is not None and all(a <= b <= c for a, b, c in zip(*shapes))
    if not is_right or not rises:
        raise BuildError(
            f"{name}: a profile has {shapes} for {tensor.name}, which is {dims}; min <= opt <= max, fixed "
            "dimensions as they are"
        )


def _check_types(network: Any, wish: Wish) -> None:
    """Of every product, the type it computes in: for the quantised ones, that of what is before their dequantising."""
    if wish.precision == "fp32":
        return
    products, dequantised = [], 0
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        dequantised += layer.type.name == "DEQUANTIZE"
        if layer.type.name in PRODUCTS:
            products.append(layer)
    for layer in products:
        if layer.get_output(0).dtype.name != "HALF":
            raise BuildError(
                f"{wish.name}: layer {layer.name!r} ({layer.type.name}) computes in "
                f"{layer.get_output(0).dtype.name}, and precision is {wish.precision!r}"
            )
    if wish.precision in ("int8", "fp8") and not dequantised:
        raise BuildError(f"{wish.name}: no Q/DQ is in the network, and precision is {wish.precision!r}")


# --- the build ---------------------------------------------------------------------------------------------


def _configure(trt: Any, builder: Any, network: Any, wish: Wish) -> Any:
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, wish.memory_mib * MIB)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # else the log names layers without their types
    if wish.sm is not None:
        known = getattr(trt, "ComputeCapability", None)
        capability = getattr(known, f"SM{wish.sm.replace('.', '')}", None)
        if capability is None:
            names = sorted(key for key in dir(known) if key.startswith("SM")) if known else "the GPU it runs on"
            raise BuildError(f"{wish.name}: SM {wish.sm} cannot be built for with this library; it knows {names}")
        config.num_compute_capabilities = 1
        config.set_compute_capability(capability, 0)
    for shapes in wish.profiles:
        profile = builder.create_optimization_profile()
        for name, (least, optimal, most) in shapes.items():
            profile.set_shape(name, least, optimal, most)
        if config.add_optimization_profile(profile) < 0:
            raise BuildError(f"{wish.name}: TensorRT refuses the profile {dict(shapes)}")
    return config


def use_timing_cache(trt: Any, config: Any, path: Path | None) -> Any:
    """The cache in use; None where nothing is timed (TensorRT for RTX chooses kernels when they run)."""
    if path is None or trt.__name__ != LIBRARIES["tensorrt"]:
        return None
    cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    config.set_timing_cache(cache, False)
    return cache


def _write_whole(path: Path, content: bytes) -> None:
    """At once: others may read the file, or write it, at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_bytes(content)
    os.replace(scratch, path)


# --- the log, after the build ------------------------------------------------------------------------------


def read_layers(lines: Sequence[tuple[str, str]]) -> dict[str, int]:
    """How many of the engine's layers give which types, by the list that the builder logs at its end.

    A layer is a line `Name: …, LayerType: …, Inputs: […], …, Outputs: [ { …, Datatype: Half, … } ], …`; older versions
    write `Format/Datatype: Row major linear FP16 format`.
    """
    counts: Counter[str] = Counter()
    for text in _layer_lines(lines):
        outputs = text.partition("Outputs: [")[2].partition("TacticName:")[0]
        counts.update(set(map(_type_name, re.findall(r"Datatype: ([^,}]+)", outputs))))
    return dict(sorted(counts.items()))


def _layer_lines(lines: Sequence[tuple[str, str]]) -> list[str]:
    return [
        line for _, text in lines for line in text.splitlines() if line.startswith("Name: ") and "LayerType: " in line
    ]


def _type_name(logged: str) -> str:
    words = set(logged.split())
    return next((name for name, marks in LOGGED_TYPES.items() if words & set(marks)), logged.strip())


def find_layer_fault(precision: str, lines: Sequence[tuple[str, str]]) -> str | None:
    """What the list of layers has against a plan of `precision`; nothing against one whose builder lists none."""
    listed = " ".join(_layer_lines(lines))
    for each in sorted({"fp16", precision}) if precision != "fp32" and listed else ():
        if not any(re.search(rf"\b{mark}\b", listed) for mark in LOGGED_TYPES[each]):
            return f"precision is {precision!r}, and no layer of the plan has {each}"
    return None


def read_bytes_of(lines: Sequence[tuple[str, str]], what: str) -> int:
    """The sum of `Total <what> Memory: N bytes`, which is said for each profile: Triton has a context for each."""
    found = [re.search(rf"Total {what} Memory: (\d+) bytes", text) for _, text in lines]
    return sum(int(each[1]) for each in found if each)


def find_memory_fault(wish: Wish, weight_bytes: int, activation_bytes: int) -> str | None:
    """What is wrong with what a plan takes, None if it is no more than it may."""
    if weight_bytes + activation_bytes <= wish.memory_mib * MIB:
        return None
    return (
        f"the plan takes {weight_bytes / MIB:.0f} MiB of weights and {activation_bytes / MIB:.0f} MiB of activations; "
        f"memory_mib is {wish.memory_mib}; raise it, or lower max_batch_size, in the target's row"
    )


def _describe(trt: Any, network: Any, wish: Wish, lines: Sequence[tuple[str, str]]) -> Description:
    layers = read_layers(lines)
    if fault := find_layer_fault(wish.precision, lines):
        raise BuildError(f"{wish.name}: {fault}: {layers}; see builder.log")
    weights, activations = read_bytes_of(lines, "Weights"), read_bytes_of(lines, "Activation")
    if fault := find_memory_fault(wish, weights, activations):
        raise BuildError(f"{wish.name}: {fault}")
    return Description(
        name=wish.name,
        engine=wish.engine,
        precision=wish.precision,
        library=trt.__name__,
        version=trt.__version__,
        sm=wish.sm,
        inputs=[_tensor(network.get_input(index)) for index in range(network.num_inputs)],
        outputs=[_tensor(network.get_output(index)) for index in range(network.num_outputs)],
        profiles=[dict(profile) for profile in wish.profiles],
        layers=layers,
        weight_bytes=weights,
        activation_bytes=activations,
    )


# --- the command -------------------------------------------------------------------------------------------


def profiles_to_json(profiles: Sequence[Profile]) -> str:
    """One word for the command line."""
    return json.dumps([{name: list(shapes) for name, shapes in profile.items()} for profile in profiles])


def profiles_from_json(text: str) -> list[dict[str, Shapes]]:
    """What `profiles_to_json` wrote; raises `BuildError` for anything else."""
    try:
        given: Sequence[Mapping[str, Sequence[Sequence[int]]]] = json.loads(text)
        return [
            {name: Shapes(*(tuple(map(int, shape)) for shape in shapes)) for name, shapes in each.items()}
            for each in given
        ]
    except (ValueError, TypeError, AttributeError) as error:
        raise BuildError(f'--profiles: {error}; give [{{"input": [[min], [opt], [max]]}}, …]') from error


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m build.tensorrt_plan")
    parser.add_argument("--graph", type=Path, required=True, help="a folder that build.onnx_graph wrote")
    parser.add_argument("--name", required=True, help="the Triton model, for messages")
    parser.add_argument("--engine", choices=sorted(INPUTS), required=True)
    parser.add_argument("--precision", choices=sorted(LOGGED_TYPES), required=True)
    parser.add_argument("--profiles", required=True, help="a list of {input: [min, opt, max]} as JSON")
    parser.add_argument("--memory_mib", type=int, required=True)
    parser.add_argument("--timing_cache", type=Path)
    parser.add_argument("--library", choices=sorted(LIBRARIES), default="tensorrt")
    parser.add_argument("--sm", help="what to build for, with library tensorrt-rtx")
    parser.add_argument("--output_dir", type=Path, required=True)
    options = parser.parse_args(argv)
    try:
        profiles = profiles_from_json(options.profiles)
        wish = Wish(options.name, options.engine, options.precision, profiles, options.memory_mib, options.sm)
        library = load_library(options.library)
        made = build_plan(library, options.graph / "graph.onnx", wish, options.output_dir, options.timing_cache)
    except (BuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    known = f"layers {made.layers}" if made.layers else "the builder's log lists no layers, so their types are unknown"
    print(f"{made.name}: {known}; {made.weight_bytes} bytes of weights, {made.activation_bytes} of activations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
