"""An answer as it comes, as pieces to be spoken: sentences, but the first one may be its first clause.

Nobody speaks before the first piece is whole; a clause is whole sooner.
"""

from __future__ import annotations

import re

from orchestrator.streaming.sentences import SentenceCutter
from orchestrator.voice.speaking import can_be_said

_MIN_CLAUSE_CHARACTERS = 18  # shorter ones sound torn off
_CLAUSE_END = re.compile(r"[,;:—–]\s+")  # with the space: not in 1,000, 12:30 or a word that is still coming


class SpokenPieces:
    """Of one answer. Joined, the pieces are the text."""

    def __init__(self) -> None:
        self._cutter = SentenceCutter()
        self._first: str | None = ""  # of the answer, while nothing was cut
        self._held = ""  # nothing that can be said; goes with what follows

    def push(self, text: str) -> list[str]:
        pieces = self._cutter.push(text)
        if self._first is not None:
            self._first += text
            if pieces:
                self._first = None
            elif (clause := self._cut_clause(self._first)) is not None:
                rest = self._first[len(clause) :]
                self._cutter, self._first = SentenceCutter(), None
                pieces = [clause, *self._cutter.push(rest)]
        return self._keep_sayable(pieces)

    def flush(self) -> list[str]:
        """The answer has ended."""
        pieces = self._keep_sayable(self._cutter.flush())
        if self._held:
            pieces.append(self._held)
        return pieces

    def _cut_clause(self, text: str) -> str | None:
        ends = [found.end() for found in _CLAUSE_END.finditer(text)]
        return next((text[:end] for end in ends if _MIN_CLAUSE_CHARACTERS <= end < len(text)), None)

    def _keep_sayable(self, pieces: list[str]) -> list[str]:
        sayable = []
        for piece in pieces:
            self._held += piece
            if can_be_said(self._held):
                sayable.append(self._held)
                self._held = ""
        return sayable
