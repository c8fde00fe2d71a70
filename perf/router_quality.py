"""How often the classifier sends a conversation to the right tier, and how far off it is else.

Over conversations, one JSON a line (``build/router_data.py`` has the fields), each judged by the product's own reader
and graph. The same conversations are judged by a heuristic of words and lengths, as routers publish them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from build.errors import BuildError
from build.router_data import Labelled, read_labelled
from build.router_scores import Scores, score
from orchestrator.config import Routing
from orchestrator.quality.wilson import wilson_interval
from orchestrator.routing.complexity import TIERS, Complexity
from orchestrator.routing.conversation import Turn
from perf.errors import PerfError
from perf.report import format_table, say
from perf.stats import percentile

# Of the probability of sufficing; the router's own default among them.
THRESHOLDS = (0.3, 0.4, Routing().threshold, 0.6, 0.7, 0.8, 0.9)


class Router(Protocol):
    """Conversations to token ids, and those to probabilities."""

    def read(self, turns: Sequence[Turn]) -> npt.NDArray[np.int32]: ...

    def judge(self, input_ids: npt.NDArray[np.int32]) -> Complexity: ...


class Judged(NamedTuple):
    """A conversation, its probabilities, and what the heuristic says of it."""

    row: Labelled
    num_tokens: int
    probabilities: tuple[float, ...]
    guess: int
    read_ms: float
    judge_ms: float


def router_quality(data: Path, router: Router, errors: Path | None = None) -> tuple[str, dict[str, Any]]:
    """Judge every conversation of the file; returns the table and the JSON line. Writes the wrong ones to `errors`.

    Raises `PerfError` for a line that is no labelled conversation.
    """
    try:
        rows = read_labelled(data)
    except BuildError as error:
        raise PerfError(str(error)) from error
    judged = []
    for number, row in enumerate(rows, 1):
        judged.append(_judge(row, router))
        if number % 200 == 0:
            say(f"{number} of {len(rows)} conversations")
    if errors is not None:
        errors.write_text("".join(map(_describe_error, judged)), encoding="utf-8")
    return _table(judged), _result(judged, data)


def _judge(row: Labelled, router: Router) -> Judged:
    started = perf_counter()
    input_ids = router.read(row.turns)
    read = perf_counter()
    found = router.judge(input_ids)
    ended = perf_counter()
    guess = guess_tier(row.turns[-1].text)
    return Judged(row, len(input_ids), found.probabilities, guess, (read - started) * 1e3, (ended - read) * 1e3)


# The kind of rule that routers ship: words that sound hard or easy, code, and length.
_HARD = re.compile(r"\b(prove|proof|derive|theorem|optimi[sz]e|architect\w*|distributed|formal\w*|rigorous\w*)\b", re.I)
_REASONING = re.compile(
    r"\b(why|explain|compare|analy[sz]e|design|implement|debug|evaluate|trade-?offs?|step by step|refactor)\b", re.I
)
_CODE = re.compile(r"```|\b(def|class|function|import|select)\b|[{};]\s*$", re.I | re.M)
_LONG_WORDS, _MIDDLE_WORDS = 150, 30


def guess_tier(text: str) -> int:
    """The tier, by its place in `TIERS`, that words and length of a last turn suggest."""
    num_words = len(text.split())
    length = (num_words >= _MIDDLE_WORDS) + (num_words >= _LONG_WORDS)
    words = bool(_REASONING.search(text)) + bool(_CODE.search(text)) + 2 * bool(_HARD.search(text))
    return min(length + words, len(TIERS) - 1)


def _scores(judged: Sequence[Judged]) -> Scores:
    return score(np.array([each.probabilities for each in judged]), _labels(judged))


def _heuristic_scores(judged: Sequence[Judged]) -> Scores:
    return score(np.eye(len(TIERS))[[each.guess for each in judged]], _labels(judged))


def choose(probabilities: Sequence[float], threshold: float) -> int:
    """The place in `TIERS` of the cheapest tier whose probability of sufficing is at least `threshold`."""
    complexity = Complexity((probabilities[0], probabilities[1], probabilities[2], probabilities[3]))
    return next((place for place, tier in enumerate(TIERS) if complexity.suffices(tier) >= threshold), len(TIERS) - 1)


def _choice_scores(judged: Sequence[Judged]) -> Scores:
    """Of what the router itself takes at its own threshold; how sure it is, is the classifier's."""
    chosen = np.eye(len(TIERS))[[choose(each.probabilities, Routing().threshold) for each in judged]]
    return score(chosen, _labels(judged))._replace(ece=_scores(judged).ece)


def _choice_rates(judged: Sequence[Judged], threshold: float) -> dict[str, float]:
    off = np.array([choose(each.probabilities, threshold) - each.row.label for each in judged])
    rates = {"accuracy": off == 0, "under1_rate": off == -1, "under2_rate": off <= -2, "over_rate": off > 0}
    return {name: round(float(found.mean()), 4) for name, found in rates.items()}


def _labels(judged: Sequence[Judged]) -> npt.NDArray[np.int64]:
    return np.array([each.row.label for each in judged], dtype=np.int64)


def _describe_error(judged: Judged) -> str:
    found = choose(judged.probabilities, Routing().threshold)
    if found == judged.row.label:
        return ""
    shares = " ".join(f"{share:.2f}" for share in judged.probabilities)
    return f"{judged.row.tier} -> {TIERS[found]} ({shares}) {judged.row.lang}: {judged.row.turns[-1].text[:200]!r}\n"


def _length(judged: Judged) -> str:
    edge = next((edge for edge in (16, 32, 64, 128) if judged.num_tokens <= edge), None)
    return f"  over {128:>3} tokens" if edge is None else f"  to {edge:>5} tokens"


def _groups(judged: Sequence[Judged], name: Callable[[Judged], str]) -> dict[str, list[Judged]]:
    groups: dict[str, list[Judged]] = {}
    for each in judged:
        groups.setdefault(name(each), []).append(each)
    return dict(sorted(groups.items()))


_HEADER = ("conversations", "rows", "right %", "95 %", "macro-F1", "ECE", "1 too low %", "2+ too low %", "too high %")


def _row(name: str, scores: Scores) -> list[object]:
    low, high = wilson_interval(round(scores.accuracy * scores.rows), scores.rows)
    shares = (scores.under1_rate, scores.under2_rate, scores.over_rate)
    return [
        name,
        scores.rows,
        f"{100 * scores.accuracy:.1f}",
        f"{100 * low:.1f}-{100 * high:.1f}",
        f"{scores.macro_f1:.3f}",
        f"{scores.ece:.3f}",
        *(f"{100 * share:.1f}" for share in shares),
    ]


def _table(judged: Sequence[Judged]) -> str:
    groups = {
        **_groups(judged, lambda each: each.row.lang),
        **_groups(judged, _length),
        **_groups(judged, lambda each: f"  {'one turn' if len(each.row.messages) == 1 else 'more turns'}"),
    }
    rows = [_row(name, _choice_scores(group)) for name, group in groups.items()]
    rows.append(_row("all", _choice_scores(judged)))
    rows.append(_row("all, the most probable tier", _scores(judged)))
    return format_table(_HEADER, [*rows, _row("all, by words and length", _heuristic_scores(judged))])


def _result(judged: Sequence[Judged], data: Path) -> dict[str, Any]:
    languages = _groups(judged, lambda each: each.row.lang)

    def times(values: list[float]) -> dict[str, float]:
        return {"p50": round(percentile(values, 50), 3), "p99": round(percentile(values, 99), 3)}

    return {
        "command": "router-quality",
        "data": data.name,
        **_choice_scores(judged).rounded(),
        "most_probable": _scores(judged).rounded(),
        "thresholds": {f"{threshold:.2f}": _choice_rates(judged, threshold) for threshold in THRESHOLDS},
        "heuristic": _heuristic_scores(judged).rounded(),
        "languages": {language: _choice_scores(group).rounded() for language, group in languages.items()},
        "read_ms": times([each.read_ms for each in judged]),
        "judge_ms": times([each.judge_ms for each in judged]),
    }
