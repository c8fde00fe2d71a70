"""What the safety filter costs: after an answer it takes time from other calls' event loop, before a sentence from its
own caller."""

from __future__ import annotations

from time import thread_time
from typing import Any

from build.router_data import PATH, read_labelled
from orchestrator.safety.check import PART_CHARACTERS
from orchestrator.safety.rules import RuleFilter
from perf.report import format_table
from perf.stats import summarize

_SENTENCE_CHARACTERS = 120
_SIZES = (_SENTENCE_CHARACTERS, 1000, PART_CHARACTERS)
# Text made to take long: what rules begin with again and again, and digits in groups.
HOSTILE = ("eyJ", "sk-", "-----BEGIN ", "ghp_a", "4", "1 2 3-", "4111 1111 1111 111 ")


def safety_speed(rounds: int) -> tuple[str, dict[str, Any]]:
    """Processor time of one call of the filter, in microseconds: of real questions, and of text made to take long."""
    safety = RuleFilter(("project nightfall", "internal only"))
    prose = "\n".join(row.turns[-1].text for row in read_labelled(PATH))
    rows: list[list[object]] = []
    result: dict[str, Any] = {"command": "safety", "prose_us": {}, "hostile_us": {}}
    for size in _SIZES:
        starts = range(0, min(len(prose) - size, rounds * size), size)
        result["prose_us"][str(size)] = _time(safety, [prose[start : start + size] for start in starts])
        rows.append([f"prose, {size} characters", *result["prose_us"][str(size)].values()])
    for part in HOSTILE:
        text = part * (PART_CHARACTERS // len(part))
        result["hostile_us"][part] = _time(safety, [text] * 20)
        rows.append([f"{part!r} again and again", *result["hostile_us"][part].values()])
    return format_table(("text", "num", "p50 us", "p90 us", "p99 us", "most us"), rows), result


def _time(safety: RuleFilter, texts: list[str]) -> dict[str, float]:
    times = []
    for text in texts:
        started = thread_time()
        safety.find(text)
        times.append((thread_time() - started) * 1e6)
    return summarize(times)
