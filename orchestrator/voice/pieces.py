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
_JOINTS = "and because but for or so that when where which while who with"
_MIN_JOINED_CHARACTERS = 40
# The very first piece is a phrase: "The capital of France | is Paris."
_FIRST_JOINTS = f"{_JOINTS} are as at by can from has have in is of on to was were will would"
_MIN_FIRST_CHARACTERS = 12


def _before_any(words: str) -> re.Pattern[str]:
    return re.compile(rf"\s+(?=(?:{'|'.join(words.split())})\s)")


_JOINT, _FIRST_JOINT = _before_any(_JOINTS), _before_any(_FIRST_JOINTS)


class SpokenPieces:
    """Of one answer. Joined, the pieces are the text."""

    def __init__(self) -> None:
        self._cutter = SentenceCutter()
        self._open = ""  # what the cutter holds, while clauses are cut
        self._num_cut = 0  # characters
        self._held = ""  # nothing that can be said; goes with what follows

    def push(self, text: str) -> list[str]:
        pieces = self._cut(text)
        while (
            self._num_cut < _BEGINNING_CHARACTERS
            and (clause := _first_clause(self._open, is_first=not self._num_cut)) is not None
        ):
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


def _first_clause(text: str, *, is_first: bool) -> str | None:
    """None if there is none yet. `is_first`: nothing is being spoken."""
    joint, least = (_FIRST_JOINT, _MIN_FIRST_CHARACTERS) if is_first else (_JOINT, _MIN_JOINED_CHARACTERS)
    ends = [found.end() for found in joint.finditer(text) if found.start() >= least]
    ends += [found.end() for found in _CLAUSE_END.finditer(text) if found.end() >= min(least, _MIN_CLAUSE_CHARACTERS)]
    return next((text[:end] for end in sorted(ends) if end < len(text)), None)
