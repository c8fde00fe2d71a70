"""The report's pictures, as SVG, each from the result of one command; matplotlib is the extra `report`.

Each function draws into `path` and says False where the result has nothing to draw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window
matplotlib.rcParams["svg.hashsalt"] = "triton-realtime"  # the same figures give the same file

from matplotlib import pyplot  # noqa: E402

Result = Mapping[str, Any]
_MOST_ROWS = 80  # more cannot be told apart


def latency_cdfs(result: Result, path: Path) -> bool:
    """Of `simulate --validate`: TTFT and whole answers of target cpu at each load, measured."""
    loads = result.get("targets", {}).get("cpu", {})
    if not loads:
        return False
    figure, sides = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for load, each in loads.items():
        for side, end in zip(sides, (1, 2)):
            times_ms = sorted((times[end] - times[0]) * 1000 for times in each["requests"])
            shares = [(place + 1) / len(times_ms) for place in range(len(times_ms))]
            side.step(times_ms, shares, where="post", label=f"load {load}, {each['rate']:.1f}/s")
    for side, title in zip(sides, ("TTFT", "whole answer")):
        side.set(title=title, xlabel="ms", xscale="log")
        side.grid(alpha=0.3)
    sides[0].set_ylabel("share of requests")
    sides[1].legend()
    return _save(figure, path)


def throughput_against_latency(result: Result, path: Path) -> bool:
    """Of `triton`: each model's requests a second and p50 as more are sent at once."""
    models = {
        name: [each for each in about["concurrency"].values() if "failed" not in each]
        for name, about in result.get("models", {}).items()
    }
    models = {name: levels for name, levels in models.items() if levels}
    if not models:
        return False
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for place, (name, levels) in enumerate(models.items()):
        rates, times_ms = zip(*((each["requests_per_s"], each["ms"]["p50"]) for each in levels))
        axes.plot(rates, times_ms, marker="os^Dv"[place // 10 % 5], label=name)
    axes.set(xlabel="requests/s", ylabel="p50, ms", xscale="log", yscale="log", title="more requests at once")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=7, ncols=2)
    return _save(figure, path)


def stage_waterfall(result: Result, path: Path) -> bool:
    """Of `simulate --validate`: where the time of an answer of target cpu went, on average, at the middle load."""
    loads = list(result.get("targets", {}).get("cpu", {}).values())
    if not loads or not loads[len(loads) // 2]["stages_ms"]:
        return False
    stages_ms = loads[len(loads) // 2]["stages_ms"]
    figure, axes = pyplot.subplots(figsize=(8, 3.5))
    begin_ms = 0.0
    for row, took_ms in enumerate(stages_ms.values()):
        axes.barh(row, took_ms, left=begin_ms)
        axes.text(begin_ms + took_ms, row, f" {took_ms:.1f} ms", va="center", fontsize=8)
        begin_ms += took_ms
    axes.set_yticks(range(len(stages_ms)), list(stages_ms))
    axes.invert_yaxis()
    axes.set(xlabel="ms", xlim=(0, begin_ms * 1.15), title="stages of an answer, mean")
    return _save(figure, path)


def batching_timeline(result: Result, path: Path) -> bool:
    """Of `simulate --validate`: the first requests of target cpu's highest load, waiting and prefill, then decoding.

    Below it, how many decode at a time, of all.
    """
    loads = list(result.get("targets", {}).get("cpu", {}).values())
    if not loads:
        return False
    requests = loads[-1]["requests"]
    figure, (axes, below) = pyplot.subplots(2, 1, figsize=(10, 6), sharex=True, height_ratios=(3, 1))
    shown = requests[:_MOST_ROWS]
    sent, first, last = ([times[place] for times in shown] for place in range(3))
    rows = range(len(shown))
    axes.barh(rows, [b - a for a, b in zip(sent, first)], left=sent, color="tab:orange", label="to the first token")
    axes.barh(rows, [b - a for a, b in zip(first, last)], left=first, color="tab:blue", label="decoding")
    axes.invert_yaxis()
    axes.set(ylabel="request", title="requests side by side", xlim=(0, max(last)))
    axes.legend(loc="lower left")
    begins, ends = ([times[place] for times in requests] for place in (1, 2))
    changes = sorted([*((time_s, 1) for time_s in begins), *((time_s, -1) for time_s in ends)])
    level, steps = 0, [(0.0, 0)]
    for time_s, change in changes:
        level += change
        steps.append((time_s, level))
    below.step(*zip(*steps), where="post")
    below.set(xlabel="s", ylabel="decoding")
    below.grid(alpha=0.3)
    return _save(figure, path)


# By the command whose result they draw: file name, title, and how.
PICTURES: Mapping[str, tuple[tuple[str, str, Callable[[Result, Path], bool]], ...]] = {
    "simulate": (
        ("latency-cdfs.svg", "TTFT and whole answers, target cpu", latency_cdfs),
        ("stages.svg", "Stages of an answer, target cpu", stage_waterfall),
        ("batching.svg", "In-flight batching, target cpu", batching_timeline),
    ),
    "triton": (("throughput.svg", "Throughput against latency of each model", throughput_against_latency),),
}


def _save(figure: Any, path: Path) -> bool:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True
