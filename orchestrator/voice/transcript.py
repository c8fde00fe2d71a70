"""What was said, with times: as the model `stt` tells it, and joined from chunks that overlap.

Times are seconds from the beginning of the recording.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

# Two hearings of one word differ by less than this: Whisper's times are exact to some 0.2 s, near the edge of a chunk
# worse.
_MAX_DRIFT_S = 1.0
MAX_TEMPERATURE = 1.0


@dataclass(frozen=True)
class Word:
    """`text` has the space before it and the marks behind it."""

    text: str
    start_s: float
    end_s: float
    probability: float

    @property
    def middle_s(self) -> float:
        return (self.start_s + self.end_s) / 2

    @property
    def key(self) -> str:
        """What is the same however the model wrote it."""
        return "".join(character for character in self.text.lower() if character.isalnum())


@dataclass(frozen=True)
class Segment:
    """A stretch of speech of at least one word, with Whisper's measures of it."""

    words: tuple[Word, ...]
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    temperature: float

    @property
    def text(self) -> str:
        return "".join(word.text for word in self.words)

    @property
    def start_s(self) -> float:
        return self.words[0].start_s

    @property
    def end_s(self) -> float:
        return self.words[-1].end_s


def text_of(segments: Sequence[Segment]) -> str:
    return "".join(segment.text for segment in segments).strip()


def said_once(text: str) -> str:
    """`text`, or what it repeats: a transcriber that has lost its way says the same again and again.

    Only of three words or more, and to the end; the last time may be cut.
    """
    words = text.split()
    keys = ["".join(filter(str.isalnum, word.lower())) for word in words]
    for length in range(3, len(words) // 2 + 1):
        if all(keys[index] == keys[index - length] for index in range(length, len(words))):
            return " ".join(words[:length])
    return text


def encode_segments(segments: Sequence[Segment]) -> str:
    """JSON: a list of objects, named as the fields of `Segment` and `Word`."""
    return json.dumps([asdict(segment) for segment in segments], ensure_ascii=False)


def decode_segments(text: str | bytes, offset_s: float = 0.0) -> list[Segment]:
    """`encode_segments` back, `offset_s` later."""
    segments = []
    for fields in json.loads(text):
        words = tuple(Word(**word) for word in fields.pop("words"))
        segments.append(Segment(tuple(_later(word, offset_s) for word in words), **fields))
    return segments


def join(before: Sequence[Segment], after: Sequence[Segment], begin_s: float, end_s: float) -> list[Segment]:
    """One transcript of two, whose sounds share the time from `begin_s` to `end_s`.

    The ears change in the middle of the longest run of words that both heard there at about the same time: away from
    the edges, where words are cut and misheard. Where they agree on nothing, they change in the middle of the time.
    """
    left = [word for segment in before for word in segment.words]
    right = [word for segment in after for word in segment.words]
    first = sum(word.middle_s < begin_s - _MAX_DRIFT_S for word in left)
    last = sum(word.middle_s <= end_s + _MAX_DRIFT_S for word in right)
    run = _longest_run(left[first:], right[:last])
    if run is not None:
        num_left, num_skipped = first + run[0], run[1]
    else:
        middle_s = (begin_s + end_s) / 2
        num_left = sum(word.middle_s < middle_s for word in left)
        num_skipped = sum(word.middle_s < middle_s for word in right)
    return [*_take(before, 0, num_left), *_take(after, num_skipped, len(right))]


def _longest_run(left: Sequence[Word], right: Sequence[Word]) -> tuple[int, int] | None:
    """The middle of the longest run of equal words, as numbers of words before it; None if there is no equal word.

    A word counts for less the further apart its two times are: what is said again and again lies side by side.
    """
    best, middle = 0.0, None
    runs: dict[tuple[int, int], tuple[int, float]] = {}  # that end at a pair of words: their length, what it counts
    for i, mine in enumerate(left):
        for j, other in enumerate(right):
            nearness = 1 - abs(mine.middle_s - other.middle_s) / _MAX_DRIFT_S
            if mine.key and mine.key == other.key and nearness > 0:
                length, count = runs.get((i - 1, j - 1), (0, 0.0))
                runs[i, j] = length, count = length + 1, count + nearness
                if count > best:
                    best, middle = count, (i + 1 - length // 2, j + 1 - length // 2)
    return middle


def _take(segments: Sequence[Segment], begin: int, end: int) -> list[Segment]:
    """Those with the words from number `begin` to before number `end`, cut to them."""
    taken, index = [], 0
    for segment in segments:
        words = segment.words[max(begin - index, 0) : max(end - index, 0)]
        index += len(segment.words)
        if words:
            taken.append(replace(segment, words=words))
    return taken


def _later(word: Word, offset_s: float) -> Word:
    return replace(word, start_s=word.start_s + offset_s, end_s=word.end_s + offset_s)
