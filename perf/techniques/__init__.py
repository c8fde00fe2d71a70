"""`python -m perf techniques`: each technique on against off, in one run; perf/README.md says what each compares.

The techniques of the engine run it alone (`engine`), the others go through a served target (`serving`). Both sides of a
round follow each other, and who goes first alternates. What was measured before an interruption, or before one that
failed, is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perf.errors import PerfError
from perf.report import format_table, say
from perf.techniques import engine, serving
from perf.techniques.comparison import Comparison
from perf.techniques.ground import Ground

TECHNIQUES: Mapping[str, Callable[[Ground], Comparison]] = {
    "in-flight-batching": engine.in_flight_batching,
    "prefix-cache": engine.prefix_cache,
    "chunked-prefill": engine.chunked_prefill,
    "speculation": engine.speculation,
    "kv-precision": engine.kv_precision,
    "warm-up": serving.warm_up,
    "streaming": serving.streaming,
    "semantic-cache": serving.semantic_cache,
    "routing": serving.routing,
    "compression": serving.compression,
    "dynamic-batching": serving.dynamic_batching,
    "connection-reuse": serving.connection_reuse,
}


def techniques(
    artifacts: Path, names: Sequence[str], num_rounds: int, keep: Callable[[dict[str, Any]], object] = lambda _: None
) -> tuple[str, dict[str, Any]]:
    """Measure those in `names`; returns table and result, which `keep` gets after each technique too.

    An interruption ends it early: then the result has `interrupted`. So does a technique that fails: `failed` has what
    it said.
    """
    measured: dict[str, dict[str, Any]] = {}
    result: dict[str, Any] = {"command": "techniques", "rounds": num_rounds, "techniques": measured}
    try:
        with Ground(artifacts, num_rounds) as ground:
            for name in (name for name in TECHNIQUES if name in names):
                say(f"{name} ({len(measured) + 1} of {len(set(names))})")
                measured[name] = TECHNIQUES[name](ground).describe()
                keep(result)
    except KeyboardInterrupt:
        result["interrupted"] = True
    except (PerfError, OSError) as error:
        result["failed"] = str(error)
    return _table(measured), result


def _table(measured: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [(name, each["on"], each["off"], each["unit"], each["ratio"]) for name, each in measured.items()]
    return format_table(("technique", "on", "off", "unit", "times better"), rows)
