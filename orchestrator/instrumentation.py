"""Whether requests are logged, counted, timed and traced: always, but for who measures what that costs."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.config import ConfigError

VARIABLE = "TRITON_REALTIME_INSTRUMENTATION"


def is_instrumented(environ: Mapping[str, str]) -> bool:
    """Unless the variable says "off". Then there is no log line a request, no metric of ours and no trace.

    What stays is what an answer itself says (`rt`), and Triton's own metrics. Raises `ConfigError` for another word.
    """
    word = environ.get(VARIABLE) or "on"
    if word not in ("on", "off"):
        raise ConfigError(f"{VARIABLE}: {word[:40]!r} is not allowed; on or off")
    return word == "on"
