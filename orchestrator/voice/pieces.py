"""An answer as it comes, as pieces to be spoken: sentences, and at its beginning clauses.

Nobody speaks before the first piece is whole, and the next ones must be spoken before it was heard: clauses are whole
sooner, and spoken sooner. Further on there is sound enough in hand.
"""

from __future__ import annotations

import re

from orchestrator.streaming.sentences import SentenceCutter
from orchestrator.voice.speaking import can_be_said

# Some five seconds of speech.
_BEGINNING_CHARACTERS = 80
# With the space: not in 1,000, 12:30 or a word that is still coming. Shorter clauses sound torn off.
_CLAUSE_END = re.compile(r"[,;:—–]\s+")
_MIN_CLAUSE_CHARACTERS = 18
# Of a long sentence without a mark, before a word that joins.
_JOINT = re.compile(r"\s+(?=(?:and|because|but|for|or|so|that|when|where|which|while|who|with)\s)")
_MIN_JOINED_CHARACTERS = 40


class SpokenPieces:
    """Of one answer. Joined, the pieces are the text."""

    def __init__(self) -> None:
        self._cutter = SentenceCutter()
        self._open = ""  # what the cutter holds, while clauses are cut
        self._num_cut = 0  # characters
        self._held = ""  # nothing that can be said; goes with what follows

    def push(self, text: str) -> list[str]:
        pieces = self._cut(text)
        while self._num_cut < _BEGINNING_CHARACTERS and (clause := _first_clause(self._open)) is not None:
            rest = self._open[len(clause) :]
            self._cutter, self._open = SentenceCutter(), ""
            self._num_cut += len(clause)
            pieces += [clause, *self._cut(rest)]
        return self._keep_sayable(pieces)

    def flush(self) -> list[str]:
        """The answer has ended."""
        pieces = self._keep_sayable(self._cutter.flush())
        if self._held:
            pieces.append(self._held)
        return pieces

    def _cut(self, text: str) -> list[str]:
        pieces = self._cutter.push(text)
        length = sum(map(len, pieces))
        self._open = (self._open + text)[length:]
        self._num_cut += length
        return pieces

    def _keep_sayable(self, pieces: list[str]) -> list[str]:
        sayable = []
        for piece in pieces:
            self._held += piece
            if can_be_said(self._held):
                sayable.append(self._held)
                self._held = ""
        return sayable


def _first_clause(text: str) -> str | None:
    """None if there is none yet."""
    ends = [found.end() for found in _CLAUSE_END.finditer(text, _MIN_CLAUSE_CHARACTERS - 2)]
    ends = [end for end in ends if end >= _MIN_CLAUSE_CHARACTERS]
    ends += [found.end() for found in _JOINT.finditer(text, _MIN_JOINED_CHARACTERS)]
    return next((text[:end] for end in sorted(ends) if end < len(text)), None)
