"""The request header `Cache-Control` (RFC 9111, section 5.2.1)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from orchestrator.errors import InvalidRequestError, shorten

HEADER = "cache-control"
# Up to the next comma that is in no quoted string; a string that never ends takes the rest.
_DIRECTIVE = re.compile(r'(?:[^,"]|"(?:\\.|[^"\\])*"?)+', re.DOTALL)
_SECONDS = re.compile(r"[0-9]+")


class CacheControl(NamedTuple):
    """What a caller wants of the cache.

    `no_store`: nothing is looked up, and nothing is kept. `no_cache`: a fresh answer, which may be kept. `max_age_s`:
    no stored answer older than that. `only_if_cached`: a stored answer or none.
    """

    no_store: bool = False
    no_cache: bool = False
    max_age_s: float | None = None
    only_if_cached: bool = False

    @property
    def oldest_s(self) -> float:
        """The age of the oldest stored answer that will do."""
        return math.inf if self.max_age_s is None else self.max_age_s


def parse_cache_control(header: str) -> CacheControl:
    """Read the header. Unknown directives are ignored, as HTTP wants it; of several max-age the least counts.

    Raises `InvalidRequestError` for a max-age that is no whole number of seconds.
    """
    names = set()
    max_age_s: float | None = None
    for name, value in _directives(header):
        names.add(name)
        if name == "max-age":
            if not _SECONDS.fullmatch(value):
                raise InvalidRequestError(
                    f"{HEADER}: max-age must be a whole number of seconds, such as max-age=60 (got {shorten(value)})",
                    param=HEADER,
                )
            seconds = float(value)  # of any length
            max_age_s = seconds if max_age_s is None else min(max_age_s, seconds)
    return CacheControl("no-store" in names, "no-cache" in names, max_age_s, "only-if-cached" in names)


def _directives(header: str) -> Iterator[tuple[str, str]]:
    """Each name in lower case with its value, which is empty when there is none."""
    for part in _DIRECTIVE.findall(header):
        name, _, value = part.partition("=")
        value = value.strip()
        if len(value) > 1 and value[0] == value[-1] == '"':
            value = re.sub(r"\\(.)", r"\1", value[1:-1], flags=re.DOTALL)
        yield name.strip().lower(), value
