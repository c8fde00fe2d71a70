"""What a measurement leaves: a table for people, one JSON line for programs, and the machine it ran on."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PACKAGES = ("nvidia-pytriton", "openvino-genai", "grpcio", "uvicorn")


def say(text: str) -> None:
    """Progress, on stderr: stdout is the result."""
    print(text, file=sys.stderr, flush=True)


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns, the first to the left and the others to the right; floats with two digits."""
    cells = [
        list(header),
        *([f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows),
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    cells.insert(1, ["-" * width for width in widths])
    lines = []
    for first, *others in cells:
        aligned = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:]))]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def publish(table: str, result: dict[str, Any], json_path: Path | None) -> None:
    """Print the table, then `result` and the machine as one JSON line; write that to `json_path` too."""
    print(f"{table}\n\n{write_json(json_path, result)}", flush=True)


def write_json(path: Path | None, result: dict[str, Any]) -> str:
    """`result` and the machine as one JSON line, in the file at `path` if there is one; returns the line."""
    line = json.dumps({**result, "machine": describe_machine()})
    if path is not None:
        path.write_text(line + "\n", encoding="utf-8")
    return line


def describe_machine() -> dict[str, Any]:
    """Processor, usable cores, load (1 min, others' work included), Python and the versions that matter."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1m": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in _PACKAGES},
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
