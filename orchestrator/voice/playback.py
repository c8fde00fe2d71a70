"""How much of an answer was heard: what is sent is played as it comes, one after the other, in real time.

Audio is sent little ahead of when it is heard, so that an interruption finds little to be thrown away, and what was
heard is known without being told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# The most that a listener has in hand: enough for the steps of a busy event loop and a home's network.
LEAD_S = 0.2


class Playback:
    """Of one answer. Samples are those of the session's output; times are a monotonic clock's."""

    def __init__(self, rate_hz: int) -> None:
        self.rate_hz = rate_hz
        self.num_sent = 0
        self._ends_s = 0.0  # when what was sent will have been played

    def send(self, num_samples: int, now_s: float) -> None:
        self.num_sent += num_samples
        self._ends_s = max(self._ends_s, now_s) + num_samples / self.rate_hz

    def num_heard(self, now_s: float) -> int:
        """Samples that were played by now."""
        return self.num_sent - round(max(self._ends_s - now_s, 0) * self.rate_hz)

    def wait_s(self, num_samples: int, now_s: float) -> float:
        """How long until so many more are to be sent."""
        return max(self._ends_s + num_samples / self.rate_hz - LEAD_S - now_s, 0)

    def rewind(self, now_s: float) -> int:
        """The listener throws away what he has not heard yet; returns how many samples that are, to be sent again."""
        num_unheard = self.num_sent - self.num_heard(now_s)
        self.num_sent -= num_unheard
        self._ends_s = min(self._ends_s, now_s)
        return num_unheard


class Mark(NamedTuple):
    """A piece of text, and where in the sound it ends."""

    text: str
    end_sample: int


def text_until(marks: Sequence[Mark], num_samples: int) -> str:
    """What of the text was said within the first `num_samples`: of the piece that was begun, as many whole words as its
    share of the time."""
    said, begin = "", 0
    for mark in marks:
        if num_samples >= mark.end_sample:
            said += mark.text
        elif num_samples > begin:
            said += _share(mark.text, (num_samples - begin) / (mark.end_sample - begin))
        begin = mark.end_sample
    return said.rstrip()


def _share(text: str, share: float) -> str:
    cut = int(len(text) * share)
    return text if cut >= len(text) else text[: text.rfind(" ", 0, cut + 1) + 1]
