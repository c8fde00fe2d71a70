"""`python -m orchestrator quality status|cases`: what the quality monitor of a server knows."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path
from typing import Any

from orchestrator.config import ConfigError, QualityPolicy, Tiers, load_tiers
from orchestrator.quality import create_store, fingerprints
from orchestrator.quality.cases import CASES_FILE, read_cases, training_lines
from orchestrator.quality.monitor import Monitor
from orchestrator.quality.track import WINDOWS, Z_DOUBT, Track
from orchestrator.quality.wilson import wilson_interval
from orchestrator.redis_address import REDIS_VARIABLE

_HEADER = ("tier", "questions", "answers", "good", "surely below", "usual", "bar", "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    status = actions.add_parser("status", help="how good the watched tiers are, in all and by clusters of questions")
    cases = actions.add_parser("cases", help="the kept cases as JSON lines, for python -m build router --add")
    for action in (status, cases):
        action.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="as `serve` has it")
    status.add_argument("artifact", type=Path, help="what is served, such as artifacts/cpu")
    status.add_argument("--json", action="store_true", help="as one JSON line")
    status.set_defaults(run=_status)
    cases.set_defaults(run=_cases)


def _status(options: argparse.Namespace) -> None:
    """Some seconds old: as the server has kept it last, in the run folder or in Redis."""
    tiers = load_tiers(options.artifact / "tiers.toml")
    if tiers.quality is None:
        raise ConfigError(f"{options.artifact / 'tiers.toml'}: no table [quality], so nothing is watched")
    monitor = asyncio.run(_load(tiers, tiers.quality, options.run_dir))
    rows = [_row(tier, cluster, track, tiers.quality) for (tier, cluster), track in sorted_tracks(monitor)]
    calls = {tier: monitor.calls[tier] for tier in tiers.quality.tiers}
    if options.json:
        samples = {tier: {verdict: monitor.samples[tier, verdict] for verdict in ("good", "poor")} for tier in calls}
        print(json.dumps({"samples": samples, "retraining_calls": calls, "records": rows}))
        return
    print(_table(rows))
    for tier, num in calls.items():
        if num:
            print(f"{tier}: called for retraining {num} times; see `quality cases` and python -m build router --add")


async def _load(tiers: Tiers, policy: QualityPolicy, folder: Path) -> Monitor:
    prints = fingerprints(policy, tiers)
    monitor = Monitor(policy, prints)
    store = create_store(policy, prints, folder, os.environ.get(REDIS_VARIABLE, ""))
    try:
        if (state := await store.load()) is not None:
            monitor.restore(state)
    except Exception as error:  # whatever a client raises about its connection, whose address it may hold
        raise ConfigError(f"the state of the quality monitor cannot be read: {type(error).__name__}") from None
    finally:
        await store.close()
    return monitor


def sorted_tracks(monitor: Monitor) -> list[tuple[tuple[str, int | None], Track]]:
    """By tier, the tier itself first, then its clusters."""
    order = list(monitor.policy.tiers)
    return sorted(
        monitor.tracks.items(), key=lambda each: (order.index(each[0][0]), -1 if each[0][1] is None else each[0][1])
    )


def _row(tier: str, cluster: int | None, track: Track, policy: QualityPolicy) -> dict[str, Any]:
    good, num = track.share(WINDOWS[0])
    return {
        "tier": tier,
        "cluster": cluster,
        "answers": num,
        "good": good,
        "upper": round(wilson_interval(good, num, Z_DOUBT)[1], 3),
        "usual": None if track.usual is None else round(track.usual, 3),
        "bar": round(track.bar(policy), 3),
        "is_doubtful": track.is_doubtful,
    }


def _table(rows: list[dict[str, Any]]) -> str:
    cells: list[tuple[str, ...]] = [_HEADER]
    for row in rows:
        cells.append(
            (
                row["tier"],
                "all" if row["cluster"] is None else f"cluster {row['cluster']}",
                str(row["answers"]),
                str(row["good"]),
                f"{row['upper']:.3f}",
                "learning" if row["usual"] is None else f"{row['usual']:.3f}",
                f"{row['bar']:.3f}",
                "doubtful" if row["is_doubtful"] else "",
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in cells)


def _cases(options: argparse.Namespace) -> None:
    for line in training_lines(read_cases(options.run_dir / CASES_FILE)):
        print(line)
