"""manifest.json: what an artifact was made from and every file it consists of.

Equal inputs give an equal manifest, byte for byte: no times, no host names, no paths of this machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from build.errors import BuildError
from build.fetch import sha256
from build.model_rows import AnyModelRow
from build.recipes import CONTAINER_TOOLS, recipe_of
from build.rows import TargetRow

NAME = "manifest.json"
SCHEMA = 1

# These take part whatever the target is; its recipes name more.
COMMON_TOOLS = ("protobuf", "pydantic", "tritonclient")


def describe_inputs(
    target: TargetRow, models: Mapping[str, AnyModelRow], code: Mapping[str, Path], *, render_only: bool = False
) -> dict[str, Any]:
    """The manifest without its files: everything that decides the result, and `inputs_sha256` over it.

    `code` names the files of the compiler and of the source repository that take part. With `render_only` the engines'
    steps are not run, and the manifest says so. Raises `BuildError` when a tool is not installed.
    """
    recipes = [] if render_only else [recipe_of(parameters) for _, parameters in target.parts.values()]
    tools = {*COMMON_TOOLS, *(tool for recipe in recipes for tool in recipe.tools)}
    inputs = {
        "schema": SCHEMA,
        "target": target.name,
        "row": target.model_dump(mode="json"),
        "models": {name: model.model_dump(mode="json") for name, model in models.items()},
        "sources": {
            source.package: {
                "version": source.version,
                "files": {each.file: each.sha256 for each in model.sources if each.package == source.package},
            }
            for model in models.values()
            for source in model.sources
        },
        "tools": {tool: _version(tool) for tool in sorted(tools)} | {"python": platform.python_version()},
    }
    if render_only:
        inputs["render_only"] = True
    decides = inputs | {"code": {name: sha256(path) for name, path in code.items()}}
    return inputs | {"inputs_sha256": hashlib.sha256(_to_bytes(decides)).hexdigest()}


def write_manifest(root: Path, inputs: Mapping[str, Any], verified: Mapping[str, Any] | None = None) -> None:
    """Write manifest.json last: it and every file it names have reached the disk when this returns.

    `verified` is what was found when engines and plans were compared with what they were made from.
    """
    files = {}
    for path in list_files(root):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.relative_to(root).as_posix()] = _entry(path)
    with (root / NAME).open("wb") as file:
        file.write(_to_bytes({**inputs, **({"verified": verified} if verified else {}), "files": files}))
        file.flush()
        os.fsync(file.fileno())


def find_fault(root: Path, inputs: Mapping[str, Any]) -> str | None:
    """Why the artifact at `root` is not what a build from `inputs` would make; None if it is."""
    if not root.exists():
        return "not built yet"
    try:
        found = json.loads((root / NAME).read_bytes())
        files = found.pop("files")
        found.pop("verified", None)
        if found != inputs:
            return "rows, sources, code or tools changed"
        present = [path for path in list_files(root) if path != root / NAME]
        entries = {path.relative_to(root).as_posix(): _entry(path) for path in present}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{NAME} is missing or damaged: {error}"
    changed = sorted(name for name in files.keys() | entries.keys() if files.get(name) != entries.get(name))
    return f"{changed[0]} is damaged, missing or new" if changed else None


def list_files(folder: Path) -> list[Path]:
    """Every file below `folder`, sorted; not what Python compiles beside the sources."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _entry(path: Path) -> dict[str, Any]:
    return {"sha256": sha256(path), "bytes": path.stat().st_size}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        if package == "onnxruntime-gpu":
            where = "inside the target's container: pip install -c constraints.txt -e '.[build]'"
        else:
            where = "run it inside the target's container" if package in CONTAINER_TOOLS else "pip install -e '.[cpu]'"
        raise BuildError(f"the build needs package {package}, which is not installed; {where}") from None


def _to_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
