"""What a build would run, and running a part of it: `--dry-run`, `--explain`, `--only`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from build.compiler import SOURCES, Progress, code_files
from build.errors import BuildError
from build.machine import check_machine
from build.manifest import describe_inputs, find_fault
from build.model_rows import AnyModelRow
from build.pairs import check_pairs
from build.plan import make_plan
from build.products import as_script
from build.recipes import find_products, make_job, steps_of
from build.rows import TargetRow


def list_commands(target: TargetRow, models: Mapping[str, AnyModelRow], cache: Path, only: str | None = None) -> str:
    """The shell script of everything that `build` runs in the target's container, in order; needs no GPU.

    `only` is one Triton model. What has no commands is named in comments. Raises `BuildError` like `build`.
    """
    _check(target, models)
    products, notes = [], []
    for name in target.parts if only is None else [only]:
        job = make_job(_known(target, name), target, models, Path("model_repository"), cache)
        products += [product for _, product in find_products(job)]
        notes += [f"#   {name}: {step.name}" for step in steps_of(job) if step.product is None]
    if target.gpu is not None and target.container is not None:
        place = [
            f"# Target {target.name}: {target.gpu.count} x {target.gpu.name} (SM {target.gpu.sm}), inside",
            f"# {target.container.image}, TensorRT-LLM {target.container.tensorrt_llm}.",
        ]
    else:
        place = [f"# Target {target.name}: no commands, all steps are in Python."]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *place,
            "# What python -m build does by itself, after these commands:",
            *notes,
            "set -euo pipefail",
            "",
            as_script(products, cache),
        ]
    )


def make_products(
    target: TargetRow, models: Mapping[str, AnyModelRow], cache: Path, progress: Progress, only: str
) -> None:
    """Run the commands of one Triton model; what they make stays in the cache, where `build` finds it."""
    _check(target, models)
    job = make_job(_known(target, only), target, models, Path("model_repository"), cache)
    if target.gpu is None or target.container is None or only not in target.compiled:
        raise BuildError(
            f"--only: {only!r} has no commands in a container, and what its steps make is not kept; models of target "
            f"{target.name!r} that have: {', '.join(target.compiled) or 'none'}"
        )
    check_machine(target.gpu, target.container)
    for step, product in find_products(job):
        with progress(f"{only}: {step.name}"):
            product.make(cache)


def explain(
    target: TargetRow,
    models: Mapping[str, AnyModelRow],
    output: Path,
    cache: Path,
    only: str | None = None,
    *,
    force: bool = False,
    sources: Path = SOURCES,
) -> str:
    """Why each step of `build` will run or be skipped, a line each; changes nothing. `only` is one Triton model.

    Raises `BuildError` for a target that `build` would refuse on every machine.
    """
    _check(target, models)
    names = list(target.parts) if only is None else [_known(target, only)]
    try:
        fault = find_fault(output.absolute(), describe_inputs(target, models, code_files(target, sources)))
    except BuildError as error:
        fault = f"cannot be built here: {error}"
    if force and fault is None:
        fault = "asked for by --force"
    lines = []
    for name in names:
        job = make_job(name, target, models, Path("model_repository"), cache)
        products = {step.name: product for step, product in find_products(job)}
        for step in steps_of(job):
            product = products.get(step.name)
            if fault is None:
                why = "skipped: the artifact is up to date"
            elif product is None:
                why = "runs with every build"
            elif product.path(cache).is_dir():
                why = f"skipped: {product.path(cache).name} is in the cache"
            else:
                why = f"will run: {product.why_missing(cache)}"
            lines.append((f"{name}: {step.name}", why))
    width = max(len(step) for step, _ in lines)
    return "\n".join(
        [f"{output}: {fault or 'up to date, so no step runs'}", *(f"  {step:<{width}}  {why}" for step, why in lines)]
    )


def _check(target: TargetRow, models: Mapping[str, AnyModelRow]) -> None:
    """Raise `BuildError` for what no machine could build."""
    check_pairs(target, models)
    if target.gpu is not None:
        make_plan(target, models)


def _known(target: TargetRow, name: str) -> str:
    if name not in target.parts:
        raise BuildError(
            f"--only: target {target.name!r} has no such engine, {name!r}; there are {', '.join(target.parts)}"
        )
    return name
