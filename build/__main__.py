"""`python -m build --target cpu`: compile a target into `artifacts/cpu/`. `python -m build plan`: what a GPU holds.

`python -m build router`: train the classifier.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from build.commands import explain, list_commands, make_products
from build.compiler import build
from build.errors import BuildError
from build.fetch import cache_folder
from build.model_rows import AnyModelRow
from build.plan_report import run_plan
from build.router import run_router
from build.rows import RUNTIMES, TargetRow, list_targets, load_models, load_target, name_with_runtime
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
    """Run the command; returns its exit code: 0, 1 for an error, 130 when interrupted, 141 when nobody reads on."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        command = {"plan": run_plan, "router": run_router}.get(argv[0] if argv else "")
        code = command(argv[1:]) if command else _run(argv)
        sys.stdout.flush()
        return code
    except (BuildError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
    except BrokenPipeError:
        # Who reads us has seen enough (`| head`). What is still buffered would be written at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        print(f"error: {error.filename or 'build'}: {error.strerror or error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted; nothing was changed", file=sys.stderr)
        return 130
    return 1


def _run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m build",
        description="Compile a target into an artifact.",
        epilog="Others: python -m build plan (what a GPU target holds and costs), python -m build router (training).",
    )
    parser.add_argument("--target", default="cpu", help="what to compile for (default: cpu)")
    parser.add_argument("--runtime", choices=RUNTIMES, help="of the target's language models, if not its own")
    parser.add_argument("--output", type=Path, metavar="DIR", help="the artifact (default: artifacts/TARGET)")
    parser.add_argument("--force", action="store_true", help="build although it is up to date")
    parser.add_argument(
        "--only", metavar="MODEL", help="of one Triton model alone: run the container's commands, or say what they are"
    )
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--list", action="store_true", help="list the targets and stop")
    ways.add_argument("--dry-run", action="store_true", help="print the container's commands as a script and stop")
    ways.add_argument("--explain", action="store_true", help="say why each step would run or not, and stop")
    ways.add_argument("--render-only", action="store_true", help="make every configuration, and no engine or tokenizer")
    arguments = parser.parse_args(argv)
    if arguments.only is not None and (arguments.list or arguments.render_only or arguments.force):
        parser.error("--only goes with a build, with --dry-run or with --explain, and not with --force")
    if arguments.list:
        for name in list_targets():
            print(f"{name:<12}{load_target(name).description}")
        return 0
    target = load_target(name_with_runtime(arguments.target, arguments.runtime))
    models = load_models(target)
    output = arguments.output or Path("artifacts") / target.name
    if arguments.dry_run:
        print(list_commands(target, models, cache_folder(), arguments.only))
    elif arguments.explain:
        print(explain(target, models, output, cache_folder(), arguments.only, force=arguments.force))
    elif arguments.only is not None:
        make_products(target, models, cache_folder(), progress, arguments.only)
    else:
        _build(target, models, output, arguments.force, arguments.render_only)
    return 0


def _build(target: TargetRow, models: Mapping[str, AnyModelRow], output: Path, force: bool, render_only: bool) -> None:
    started = time.monotonic()
    print(f"build {target.name} into {output}", flush=True)
    reason = build(
        target, models, output, cache=cache_folder(), progress=progress, force=force, render_only=render_only
    )
    seconds = time.monotonic() - started
    print(f"up to date ({seconds:.1f} s)" if reason is None else f"built in {seconds:.1f} s ({reason})")


if __name__ == "__main__":
    sys.exit(main())
