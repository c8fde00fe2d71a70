"""One build: from rows and sources to a finished artifact that appears at once or not at all.

Beside the artifact `cpu` live `.cpu.lock` (held while building), `.cpu.tmp` (what is being built) and, for
a moment, `.cpu.old` (what is being replaced). What a killed build leaves of these, the next one clears.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from build.errors import BuildError
from build.locks import lock
from build.machine import check_machine
from build.manifest import NAME as MANIFEST
from build.manifest import describe_inputs, find_fault, list_files, write_manifest
from build.model_rows import AnyModelRow
from build.pairs import check_pairs
from build.plan import Plan, make_plan
from build.recipes import make_job, read_verified, steps_of
from build.render import make_embedder, make_speech, make_tiers, render_config, render_ensemble, to_toml
from build.render_trtllm import model_yaml
from build.router_adapter import PATH as ADAPTER
from build.rows import TargetRow
from orchestrator.config import Row, load_tiers

HERE = Path(__file__).parent
SOURCES = HERE.parent / "model_repository"

# Progress: names a step that takes as long as the `with` block.
Progress = Callable[[str], AbstractContextManager[None]]


def build(
    target: TargetRow,
    models: Mapping[str, AnyModelRow],
    output: Path,
    *,
    cache: Path,
    progress: Progress,
    force: bool = False,
    render_only: bool = False,
    sources: Path = SOURCES,
) -> str | None:
    """Make the artifact of `target` at `output`; returns why it was built, None if it was up to date.

    `sources` is the source repository, `cache` keeps fetched weights and what the container's commands made. With
    `render_only` the artifact has all configurations and nothing that a step makes: no engine, no tokenizer. Waits for
    another build of the same `output`. Raises `BuildError`; `output` is then what it was before.
    """
    check_pairs(target, models)
    plan = None if target.gpu is None else make_plan(target, models)
    if target.gpu is not None and target.container is not None and not render_only:
        check_machine(target.gpu, target.container)
    output = output.absolute()
    if output.exists() and not _is_ours(output):
        raise BuildError(f"--output: {output} is there and is no artifact; name a folder that the build may replace")
    output.parent.mkdir(parents=True, exist_ok=True)
    with lock(_beside(output, "lock")):
        _clear(output)
        inputs = describe_inputs(target, models, code_files(target, sources), render_only=render_only)
        fault = "asked for by --force" if force else find_fault(output, inputs)
        if fault is None:
            return None
        work = _beside(output, "tmp")
        try:
            _render(target, models, plan, work, sources, progress)
            if not render_only:
                _run_steps(target, models, work, cache, progress)
            with progress("write manifest"):
                verified = {} if render_only else read_verified(target, models, cache)
                write_manifest(work, inputs, verified)
            _publish(work, output)
        finally:
            _clear(output)
        return fault


def code_files(target: TargetRow, sources: Path) -> dict[str, Path]:
    """The files that decide the result, besides rows and weights: ours, and the sources of the models."""
    files = {f"build/{path.name}": path for path in sorted(HERE.glob("*.py"))}
    if target.classifiers:
        files[f"build/data/{ADAPTER.name}"] = ADAPTER
    for name in {target.source_of(name) for name in (*target.models, *target.ensembles)}:
        files |= {path.relative_to(sources).as_posix(): path for path in list_files(sources / name)}
    return files


def _render(
    target: TargetRow,
    models: Mapping[str, AnyModelRow],
    plan: Plan | None,
    root: Path,
    sources: Path,
    progress: Progress,
) -> None:
    """Every configuration, into `root`."""
    repository = root / "model_repository"
    for name in (*target.models, *target.ensembles):
        source = sources / target.source_of(name)
        config = source / "config.pbtxt"
        if not config.is_file():
            raise BuildError(f"target {target.name!r} has model {name!r}, but {config} does not exist")
        with progress(f"{name}: render"):
            # What runs an engine or a plan is NVIDIA's, not our model.py.
            ours = ("__pycache__", "1") if name in target.compiled else ("__pycache__",)
            shutil.copytree(source, repository / name, ignore=shutil.ignore_patterns(*ours))
            version = repository / name / "1"
            version.mkdir(exist_ok=True)  # Triton wants one, though an ensemble has nothing in it
            if settings := target.models.get(name):
                model = models[settings.model] if settings.model else None
                engine = plan.engines.get(name) if plan else None
                text = render_config(config, name, settings, model, engine)
                if engine and name in target.trtllm_engines and target.source_of(name) == "llm_text":
                    parameters = target.trtllm_engines[name][1]
                    (version / "model.yaml").write_text(
                        model_yaml(name, settings, parameters, engine), encoding="utf-8"
                    )
            else:
                text = render_ensemble(config, target.models)
            (repository / name / "config.pbtxt").write_text(
                f"# Target {target.name}, rendered by python -m build.\n{text}", encoding="utf-8"
            )
    with progress("tiers"):
        _write_toml(root / "tiers.toml", make_tiers(target, models))
        load_tiers(root / "tiers.toml")
        _write_toml(root / "embedder.toml", make_embedder(target, models))
        if (speech := make_speech(target, models)) is not None:
            _write_toml(root / "speech.toml", speech)


def _run_steps(
    target: TargetRow, models: Mapping[str, AnyModelRow], root: Path, cache: Path, progress: Progress
) -> None:
    """What each engine's version folder holds, into `root`."""
    for name in target.parts:
        job = make_job(name, target, models, root / "model_repository", cache)
        for step in steps_of(job):
            with progress(f"{name}: {step.name}"):
                step.run(job)


def _write_toml(path: Path, row: Row) -> None:
    path.write_text(to_toml(row.model_dump(mode="json", exclude_none=True)).lstrip(), encoding="utf-8")


def _publish(work: Path, output: Path) -> None:
    """Put the finished `work` in the place of `output`; `_clear` removes what was there."""
    if output.exists():
        os.rename(output, _beside(output, "old"))
    os.rename(work, output)
    folder = os.open(output.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _clear(output: Path) -> None:
    """Remove what a build left beside `output`, and bring `output` back if the swap was cut short."""
    shutil.rmtree(_beside(output, "tmp"), ignore_errors=True)
    old = _beside(output, "old")
    if old.exists() and not output.exists():
        os.rename(old, output)
    shutil.rmtree(old, ignore_errors=True)


def _is_ours(output: Path) -> bool:
    """Whether `output` is an artifact, whole or damaged: replacing it takes nothing else away."""
    parts = {MANIFEST, "tiers.toml", "embedder.toml", "speech.toml", "model_repository"}
    return output.is_dir() and not output.is_symlink() and {path.name for path in output.iterdir()} <= parts


def _beside(output: Path, kind: str) -> Path:
    return output.with_name(f".{output.name}.{kind}")
