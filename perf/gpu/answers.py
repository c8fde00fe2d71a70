"""When the tokens of many streams came, as numbers: the same for every side."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from perf.sse import Answer
from perf.stats import summarize


def describe(answers: Sequence[Answer], started_s: float) -> dict[str, Any]:
    """Rates over all `answers`, which were asked for together from `started_s` on.

    `seconds` is until the last token. `gap_ms` is between the events of a stream; `tpot_ms`, a stream's own, is what
    its tokens after the first event took, by their number.
    """
    gaps = [(after - before) * 1000 for each in answers for before, after in itertools.pairwise(each.times_s)]
    tpots = [each.tpot_ms for each in answers if each.num_tokens > 1]
    seconds = max(each.last_token_s for each in answers) - started_s
    num_tokens = sum(each.num_tokens for each in answers)
    num_events = sum(each.num_events for each in answers)
    return {
        "streams": len(answers),
        "tokens": num_tokens,
        "events": num_events,
        "seconds": round(seconds, 4),
        "tokens_per_s": round(num_tokens / seconds, 1),
        "tokens_per_event": round(num_tokens / num_events, 3),
        "ttft_ms": summarize([each.ttft_ms for each in answers]),
        "gap_ms": summarize(gaps) if gaps else None,
        "tpot_ms": summarize(tpots) if tpots else None,
    }
