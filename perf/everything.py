"""`python -m perf all`: every command that this machine can run, one result file and a report with pictures.

Each command is a process of its own, so that none inherits what another left. After each, and when it is interrupted,
what was measured so far is written: `FOLDER/<machine>.json`, `FOLDER/<machine>.md` and the pictures beside them.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perf.errors import PerfError
from perf.processes import stop
from perf.report import describe_machine, say

_STOPPING_S = 90.0  # a command's servers drain, and its child processes end


class Part(NamedTuple):
    """A command, the targets that it needs built, about how long it takes."""

    arguments: tuple[str, ...]
    targets: tuple[str, ...]
    minutes: int

    @property
    def name(self) -> str:
        return self.arguments[0]


# What says most comes first.
PARTS = (
    Part(("overhead",), ("cpu", "scripted"), 4),
    Part(("streams",), ("cpu",), 3),
    Part(("simulate", "--validate"), ("cpu", "scripted"), 7),
    Part(("triton",), ("cpu",), 10),
    Part(("openai",), ("cpu",), 5),
    Part(("techniques",), ("cpu",), 12),
    Part(("stagger",), ("cpu",), 2),
    Part(("cancel",), ("cpu",), 1),
    Part(("token-path",), ("scripted",), 2),
    Part(("instrumentation",), ("cpu",), 4),
    Part(("soak", "--minutes", "10"), (), 11),
    Part(("litellm",), ("scripted",), 2),
    Part(("cache-speed",), (), 5),
    Part(("cache-quality",), ("cpu",), 1),
    Part(("cache-lookup",), ("cpu",), 5),
    Part(("router-quality",), ("cpu",), 1),
    Part(("routing",), (), 3),
    Part(("quality",), ("cpu",), 5),
    Part(("cost",), ("cpu",), 1),
    Part(("safety",), (), 1),
    Part(("ocr",), (), 5),
    Part(("speech",), ("cpu-voice",), 1),
    Part(("voice",), ("cpu-voice",), 9),
)
NAMES = tuple(part.name for part in PARTS)


def everything(artifacts: Path, only: Sequence[str], folder: Path) -> tuple[str, dict[str, Any]]:
    """Run the commands in `only`; returns the report and the result.

    A part has `result`, `table` and `pictures`, or `failed` or `skipped` with the reason. Raises `PerfError`, before
    anything runs, when the pictures cannot be drawn.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise PerfError("matplotlib: not installed, and draws the report's pictures\nfix: pip install -e '.[report]'")
    machine = describe_machine()
    file = folder / f"{machine_name(machine)}.json"
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in PARTS if part.name in only]
    parts: dict[str, dict[str, Any]] = {}
    result: dict[str, Any] = {"command": "all", "parts": parts}
    say(f"{len(chosen)} commands, about {sum(part.minutes for part in chosen)} minutes; Ctrl-C keeps what was measured")
    for place, part in enumerate(chosen):
        say(f"=== {' '.join(part.arguments)} ({place + 1} of {len(chosen)}, about {part.minutes} min)")
        try:
            parts[part.name] = run_part(part, artifacts)
        except KeyboardInterrupt:
            parts[part.name] = {"failed": "interrupted"}
            result["interrupted"] = True
        if parts[part.name].get("interrupted"):
            result["interrupted"] = True
        parts[part.name]["pictures"] = draw(part.name, parts[part.name].get("result", {}), file.with_suffix(""))
        file.write_text(json.dumps({**result, "machine": machine}) + "\n", encoding="utf-8")
        file.with_suffix(".md").write_text(report(result, machine, file.stem), encoding="utf-8")
        if result.get("interrupted"):
            break
    if failed := [name for name, each in parts.items() if "failed" in each]:
        result["failed"] = f"{', '.join(failed)}: see {file.with_suffix('.md')}"
    return f"{_summary(parts)}\n\n{file.with_suffix('.md')}", result


def machine_name(machine: Mapping[str, Any]) -> str:
    """Such as `amd-epyc-2-cores`."""
    processor = re.sub(r"[^a-z0-9]+", "-", str(machine["cpu"]).lower()).strip("-")
    return f"{processor}-{machine['cores']}-cores"


def run_part(part: Part, artifacts: Path) -> dict[str, Any]:
    """One command; an interruption is passed on to it, and what it then still says is kept."""
    for target in part.targets:
        if not (artifacts / target / "manifest.json").is_file():
            return {"skipped": f"needs `python -m build --target {target}`"}
    with tempfile.TemporaryDirectory(prefix="perf-all-") as scratch:
        file, out = Path(scratch) / "result.json", Path(scratch) / "out"
        command = [
            *(sys.executable, "-m", "perf", *part.arguments, f"--artifacts={artifacts}", f"--json={file}"),
        ]
        started_s = time.monotonic()
        interrupted = False
        with out.open("wb") as stdout:
            # In a session of its own Ctrl-C does not reach it: it is told once, below.
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, start_new_session=True)
        try:
            process.wait()
        except KeyboardInterrupt:
            interrupted = True
            stop(process, _STOPPING_S)  # as Ctrl-C, but also in the background, where that is ignored
        told: dict[str, Any] = {"took_s": round(time.monotonic() - started_s, 1)}
        if file.exists():
            told["result"] = json.loads(file.read_text(encoding="utf-8"))
            told["table"] = out.read_text(encoding="utf-8", errors="replace").rpartition("\n\n")[0].strip()
        if interrupted:
            told["interrupted"] = True
        elif process.returncode != 0:
            told["failed"] = (
                f"exit code {process.returncode}; {told.get('result', {}).get('failed', 'it says above why')}"
            )
        return told


def draw(name: str, result: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Draw the pictures of a command's result into `folder`; their titles by file name."""
    from perf.pictures import PICTURES  # matplotlib, of no other command

    folder.mkdir(exist_ok=True)
    return {file: title for file, title, picture in PICTURES.get(name, ()) if picture(result, folder / file)}


def report(result: Mapping[str, Any], machine: Mapping[str, Any], folder: str) -> str:
    """The report as Markdown; the pictures are in `folder` beside it."""
    lines = [
        f"# {machine['cpu']}, {machine['cores']} cores",
        "",
        f"Python {machine['python']}, kernel {machine['kernel']}. Load before: {machine['load_1m']}.",
        "What the figures mean is in [perf/README.md](../README.md).",
    ]
    if result.get("interrupted"):
        lines += ["", "**Interrupted**: what follows is what was measured until then."]
    for name, part in result["parts"].items():
        lines += ["", f"## {name}", ""]
        if "skipped" in part:
            lines.append(f"Skipped: {part['skipped']}.")
            continue
        if "failed" in part:
            lines += [f"Failed: {part['failed']}.", ""]
        if "table" in part:
            lines += ["```text", part["table"], "```"]
        for file, title in part.get("pictures", {}).items():
            lines += ["", f"![{title}]({folder}/{file})"]
    return "\n".join(lines) + "\n"


def _summary(parts: Mapping[str, Mapping[str, Any]]) -> str:
    def word(part: Mapping[str, Any]) -> str:
        for key in ("skipped", "failed", "interrupted"):
            if key in part:
                return key if part[key] is True else f"{key}: {part[key]}"
        return f"{part['took_s']:.0f} s"

    return "\n".join(f"{name}: {word(part)}" for name, part in parts.items())
