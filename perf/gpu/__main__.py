"""`python -m perf.gpu --work DIR --cache DIR --out DIR PART...`: see `perf/gpu/run`, which sets up and calls it.

Each part adds its numbers to CARD.json in OUT, say h100.json, and leaves those of the others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from perf.gpu.several import replicas, several
from perf.gpu.sides import card_name, gpu_facts, versions
from perf.gpu.speed import LOADS, LOADS_OF_TWO, PROMPTS, speed
from perf.gpu.techniques import chunked, hits, ngram
from perf.gpu.text import text
from perf.report import describe_machine, say

Part = Callable[..., dict[str, Any]]
# Each is called with the folders, the number of gateway workers, and changes of the engine's parameters; the first
# ones with the sides too.
OF_SIDES: Mapping[str, Part] = {
    **{f"first-{precision}": partial(speed, precision, lengths=PROMPTS) for precision in ("bf16", "fp8")},
    **{f"speed-{precision}": partial(speed, precision, loads=LOADS) for precision in ("bf16", "fp8")},
    "tp2": partial(speed, "bf16", lengths=PROMPTS, loads=LOADS_OF_TWO, num_gpus=2),
}
OTHERS: Mapping[str, Part] = {
    "text": text,
    "chunked": chunked,
    "ngram": ngram,
    "hits": hits,
    "several": several,
    "replicas": replicas,
}
PARTS = (*OF_SIDES, *OTHERS)
HERE = Path(__file__).parent


def main() -> int:
    """Run the parts; returns the exit code: 1 when one failed, after all have run."""
    parser = argparse.ArgumentParser(prog="python -m perf.gpu", description="The whole stack on a GPU.")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="artifacts, kept for the next call")
    parser.add_argument("--cache", type=Path, required=True, metavar="DIR", help="the build's cache, with the GGUF")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="CARD.json and logs/")
    parser.add_argument("--sides", default="bare,own,stack", help="of the speed parts (default %(default)s)")
    parser.add_argument("--gateway-workers", type=int, default=4, metavar="N", help="(default %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="of the engine's parameters")
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    options = parser.parse_args()
    changes = {key: json.loads(value) for key, _, value in (each.partition("=") for each in options.set)}
    options.out.mkdir(parents=True, exist_ok=True)
    failed = False
    for part in options.parts:
        say(f"== {part}")
        started_s = time.monotonic()
        common = (options.work, options.cache, options.out)
        try:
            if part in OF_SIDES:
                found = OF_SIDES[part](*common, options.gateway_workers, sides=options.sides.split(","), **changes)
            else:
                found = OTHERS[part](*common, options.gateway_workers, **changes)
        except Exception as error:  # the next part is worth its time all the same
            traceback.print_exc()
            found, failed = {"error": f"{type(error).__name__}: {error}"}, True
        write(options.out / f"{card_name()}.json", part, {**found, "took_s": round(time.monotonic() - started_s, 1)})
    return int(failed)


def write(path: Path, part: str, found: dict[str, Any]) -> None:
    """Put `found` into the file at `path`, with where it comes from; the other parts stay."""
    result = json.loads(path.read_bytes()) if path.exists() else {}
    result |= {
        "machine": describe_machine(),
        "gpu": gpu_facts(),
        "engine_versions": versions(),
        "script_sha256": hash_code(),
    }
    result[part] = found
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    say(f"{path}: {part}")


def hash_code() -> str:
    """Over all files of this package, and the engine's own."""
    engine = HERE.parents[1] / "orchestrator" / "engines"
    files = sorted([*HERE.glob("*.py"), HERE / "run", *engine.glob("vllm*.py")])
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
