"""Stop strings over a stream of text pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a stream at the first stop string, whatever the borders of its pieces.

    First is the one that is complete first; of two complete at the same character, the longer. The stop string is
    left out. Text is held back only while it could still be the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The part of the stream that is certain to belong to the answer; sets `matched` when a stop was found."""
        if not self._stops:
            return text
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        keep = max(overlap(text, stop) for stop in self._stops)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What is still held when the stream ends without a stop."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
