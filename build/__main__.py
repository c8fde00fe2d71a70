"""`python -m build --target cpu`: compile a target into `artifacts/cpu/`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from build.compiler import build
from build.errors import BuildError
from build.fetch import cache_folder
from build.rows import list_targets, load_models, load_target
from orchestrator.config import ConfigError


@contextmanager
def progress(step: str) -> Iterator[None]:
    """Print a line for a step: its name when it starts, its seconds when it ends."""
    started = time.monotonic()
    print(f"  {step:<44}", end="", flush=True)
    try:
        yield
    except BaseException:
        print("failed", flush=True)
        raise
    print(f"{time.monotonic() - started:6.1f} s", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 1 for an error, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m build", description="Compile a target into an artifact.")
    parser.add_argument("--target", default="cpu", help="what to compile for (default: cpu)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="the artifact (default: artifacts/TARGET)")
    parser.add_argument("--force", action="store_true", help="build although it is up to date")
    parser.add_argument("--list", action="store_true", help="list the targets and stop")
    arguments = parser.parse_args(argv)
    try:
        if arguments.list:
            for name in list_targets():
                print(f"{name:<12}{load_target(name).description}")
            return 0
        return _build(arguments.target, arguments.output, arguments.force)
    except (BuildError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename or 'build'}: {error.strerror or error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted; nothing was changed", file=sys.stderr)
        return 130
    return 1


def _build(target_name: str, output: Path | None, force: bool) -> int:
    started = time.monotonic()
    target = load_target(target_name)
    models = load_models(target)
    output = output or Path("artifacts") / target.name
    print(f"build {target.name} into {output}", flush=True)
    reason = build(target, models, output, cache=cache_folder(), progress=progress, force=force)
    seconds = time.monotonic() - started
    print(f"up to date ({seconds:.1f} s)" if reason is None else f"built in {seconds:.1f} s ({reason})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
