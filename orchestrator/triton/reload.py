"""`python -m orchestrator reload`: has a running `serve` take a new `tiers.toml`, or another artifact.

The request lies in the run-dir, SIGHUP says that it does, and `serve` writes beside it what became of it.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from orchestrator.files import write_whole
from orchestrator.triton.ports import Ports
from orchestrator.triton.process import POLL_INTERVAL_S, StartError

REQUEST_FILE, OUTCOME_FILE = "reload.json", "reloaded.json"


class Request(BaseModel):
    """Without an `artifact` the one that is served, as it is on disk now."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    artifact: Path | None = None


class Outcome(BaseModel):
    """`error` is None when it is done."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    error: str | None = None


# --- in `serve` ---


def take_request(run_dir: Path) -> Request | None:
    """What was asked for, once; None without a request that can be read."""
    path = run_dir / REQUEST_FILE
    try:
        request = Request.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    path.unlink()
    return request


def tell_outcome(run_dir: Path, request: Request, error: str | None) -> None:
    write_whole(run_dir / OUTCOME_FILE, Outcome(id=request.id, error=error).model_dump_json() + "\n")


# --- the command ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `python -m orchestrator reload`."""
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=Path(".run", str(Ports().gateway)),
        metavar="DIR",
        help="that of the running serve (default %(default)s)",
    )
    parser.add_argument(
        "--artifact", type=Path, metavar="DIR", help="serve this one from now on (default: the same one, as it is now)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Ask, wait, and say what became of it; raises `StartError` when nothing was changed."""
    run_dir: Path = options.run_dir
    pid = _find_serve(run_dir)
    artifact = None if options.artifact is None else options.artifact.resolve()
    request = Request(id=secrets.token_hex(8), artifact=artifact)
    if (run_dir / REQUEST_FILE).exists():
        raise StartError(f"{run_dir / REQUEST_FILE}: another reload was asked for, and has not begun yet; wait for it")
    write_whole(run_dir / REQUEST_FILE, request.model_dump_json() + "\n")
    os.kill(pid, signal.SIGHUP)
    print("reloading: what runs goes on", flush=True)
    while (outcome := _read_outcome(run_dir)) is None or outcome.id != request.id:
        if not Path("/proc", str(pid)).exists():
            raise StartError(f"serve (pid {pid}) ended meanwhile; its log says why")
        time.sleep(POLL_INTERVAL_S)
    if outcome.error is not None:
        raise StartError(f"{outcome.error}\nnothing was changed: what was served is served on")
    print("reloaded")


def _find_serve(run_dir: Path) -> int:
    try:
        pid = int(json.loads((run_dir / "serve.json").read_text())["pid"])
        command = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError, KeyError):
        command = []
        pid = 0
    if b"serve" not in command:
        raise StartError(f"{run_dir}: no serve is ready there\nfix: --run-dir, as serve was given it (.run/<port>)")
    return pid


def _read_outcome(run_dir: Path) -> Outcome | None:
    try:
        return Outcome.model_validate_json((run_dir / OUTCOME_FILE).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
