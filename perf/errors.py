"""What ends a measurement."""

from __future__ import annotations


class PerfError(Exception):
    """A measurement cannot start or cannot be trusted; the text says why and, where it can, what to do."""
