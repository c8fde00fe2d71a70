"""What is certain of a transcript while the person still speaks.

The sound so far is transcribed again and again, as it grows. A word counts once two transcripts in a row have it in the
same place (Macháček et al. 2023, "Turning Whisper into Real-Time Transcription System": local agreement); what was once
certain stays. The sound of what is certain need not be heard again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.voice.transcript import Segment, Word


class Partial(NamedTuple):
    """`new` has become certain just now; `tentative` may still change."""

    new: tuple[Word, ...]
    tentative: tuple[Word, ...]


class PartialTranscript:
    """Of one person's turn."""

    def __init__(self) -> None:
        self.certain: list[Word] = []
        self._last: tuple[Word, ...] = ()  # the last transcript, behind what is certain

    @property
    def certain_until_s(self) -> float:
        """Sound before it need not be heard again: the end of the last word that is certain."""
        return self.certain[-1].end_s if self.certain else 0.0

    def update(self, segments: Sequence[Segment]) -> Partial:
        """Take the transcript of the sound so far, or of what of it is behind `certain_until_s`."""
        # A word's middle: its end may move a little with each hearing.
        words = tuple(word for segment in segments for word in segment.words if word.middle_s > self.certain_until_s)
        num_new = 0
        while num_new < min(len(words), len(self._last)) and words[num_new].key == self._last[num_new].key:
            num_new += 1
        self.certain.extend(words[:num_new])
        self._last = words[num_new:]
        return Partial(words[:num_new], self._last)
