"""Who has the word: when a person has begun to speak, when he is done, and whether he means to interrupt.

Pure: frame by frame it takes how probably somebody speaks, and now and then what was understood; out come acts, which
somebody else carries out. Its clock is the sound itself, so that what comes late, or all at once, changes nothing.

* A turn begins with `START`. During an answer `HUSH` comes with it: the answer is silent while nobody knows yet what
  the person wants. Little words, and noise, end in `RESUME`; all else in `INTERRUPT`.
* Soon after the last sound `LISTEN` asks for a transcript and a judgement (smart-turn) of the turn so far. How much
  silence ends the turn depends on both. If the person speaks again before, it is `GO_ON`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from orchestrator.contracts import FRAME_SAMPLES, SAMPLE_RATE_HZ
from orchestrator.voice.backchannels import ends_like_a_sentence, hangs, is_backchannel

FRAME_MS = FRAME_SAMPLES * 1000 // SAMPLE_RATE_HZ  # 32
# Silero's own example ends speech this far below where it begins it (silero_vad/utils_vad.py, `neg_threshold`).
_HYSTERESIS = 0.15
# The VAD needs a frame or two to be sure that somebody speaks: with so much his silence is not over, but may be.
_BEGINNING = 0.1

_LONG_PAUSE_MS = 700

Answering = Literal["no", "yes", "ending"]  # "ending": of the answer so little is left that nothing is to be resumed


class Act(Enum):
    START = auto()  # a turn
    HUSH = auto()  # the answer
    LISTEN = auto()  # transcribe and judge the turn so far, as number `TurnTaking.number`
    PREPARE = auto()  # an answer, though the person did not seem to be done
    GO_ON = auto()  # what was begun in the silence is to be dropped
    INTERRUPT = auto()  # the answer ends
    RESUME = auto()  # the answer goes on, and the turn was none
    END = auto()  # the turn is over


@dataclass(frozen=True)
class TurnPolicy:
    """Of one session; times in ms.

    With `fixed_silence_ms` (OpenAI's `server_vad`) that is the silence which ends a turn, whatever was said. Else it is
    `done_silence_ms` if the person is done: if the transcript ends as sentences do, and, where nobody waits for the
    longest pause that people make in the midst of one, the judge takes him for done too; `unfinished_silence_ms` if
    neither is so, or the last word calls for another; and `unsure_silence_ms` between.

    Of pauses put into fluent speech judge and transcript together took every fourth for an end. So nobody is
    interrupted in a pause of 0.7 s; his answer is made meanwhile.
    """

    threshold: float = 0.5  # of the VAD
    interrupts: bool = True
    fixed_silence_ms: int | None = None
    done_silence_ms: int = 736
    unsure_silence_ms: int = 900
    unfinished_silence_ms: int = 1350
    done_above: float = 0.5
    unfinished_below: float = 0.1

    # A cough is one frame. Two are 64 ms, which leaves most of 200 ms for the answer to fall silent.
    onset_frames: int = 2
    # The VAD bridges the gaps inside of words by itself.
    listen_frames: int = 1
    # Who is silent for so long may be done after all.
    prepare_frames: int = 16
    # During an answer: what was said is looked at each time so much was spoken ...
    hushed_listen_frames: int = 12
    # ... and this much is an interruption, whatever it is.
    interrupt_frames: int = 47
    # In this silence a hushed answer goes on, once nothing was understood but little words; in the second in any case.
    # "Yeah, but ..." has up to 8 frames of it at the comma.
    resume_frames: int = 12
    resume_anyway_frames: int = 62

    def required_silence_ms(self, text: str | None, done: float) -> int:
        """How much silence ends a turn in which `text` was understood; None: nobody knows yet."""
        if self.fixed_silence_ms is not None:
            return self.fixed_silence_ms
        if text is None or not self.may_be_done(text, done):
            return self.unfinished_silence_ms
        is_done = ends_like_a_sentence(text) and (done >= self.done_above or not self.needs_judge(text))
        return self.done_silence_ms if is_done else self.unsure_silence_ms

    def may_be_done(self, text: str, done: float) -> bool:
        return not hangs(text) and (done >= self.unfinished_below or ends_like_a_sentence(text))

    def needs_judge(self, text: str) -> bool:
        """Whether a judgement makes a difference. It takes time, in which the answer is made."""
        if self.fixed_silence_ms is not None or hangs(text):
            return False
        return not ends_like_a_sentence(text) or self.done_silence_ms < _LONG_PAUSE_MS


class TurnTaking:
    """Of one session."""

    def __init__(self, policy: TurnPolicy) -> None:
        self.policy = policy
        self.num_frames = 0  # heard in the session
        self.number = 0  # of the last LISTEN; what was understood of an earlier one is stale
        self.in_turn = False
        self.is_hushed = False
        self.silence_frames = 0  # at the end of what was heard of the turn
        self.text: str | None = None  # what was last understood of the turn, if the person has not gone on since
        self._done = 0.0
        self._onset = 0  # frames of speech in a row
        self._may_begin = False  # speech, in the last frame
        self._voiced = 0  # frames of speech in the turn
        self._next_hushed_listen = 0

    @property
    def now_ms(self) -> int:
        return self.num_frames * FRAME_MS

    def hear(self, probability: float, answering: Answering = "no") -> list[Act]:
        """One frame, in which somebody speaks with `probability`."""
        self.num_frames += 1
        speaks = probability >= self.policy.threshold
        self._may_begin = probability >= _BEGINNING
        self._onset = self._onset + 1 if speaks else 0
        if not self.in_turn:
            return self._begin(answering) if self._onset >= self.policy.onset_frames else []
        acts: list[Act] = []
        if speaks:
            self._voiced += 1
            if self.silence_frames and self._onset >= self.policy.onset_frames:
                acts += self._go_on()
            elif self.silence_frames:
                self.silence_frames += 1  # for now
        elif self.silence_frames or probability < self.policy.threshold - _HYSTERESIS:
            self.silence_frames += 1
        if self.silence_frames == self.policy.listen_frames and not speaks:
            acts += self._listen()
        elif self.silence_frames == self.policy.prepare_frames and not self.is_hushed:
            acts.append(Act.PREPARE)
        elif self.is_hushed and not self.silence_frames and self._voiced >= self._next_hushed_listen:
            self._next_hushed_listen += self.policy.hushed_listen_frames
            acts += self._listen()
        return acts + self._decide()

    def understand(self, number: int, text: str, done: float) -> list[Act]:
        """What LISTEN `number` has brought: `text`, and how probably the person is `done` (0 to 1)."""
        if not self.in_turn:
            return []
        acts = []
        if self.is_hushed and not is_backchannel(text):
            self.is_hushed = False
            acts.append(Act.INTERRUPT)
        if number == self.number:
            self.text, self._done = text, done
        return acts + self._decide()

    def end(self) -> None:
        """The turn is over: by END or RESUME, or because somebody says so."""
        self.in_turn = self.is_hushed = False
        self.text, self._done = None, 0.0
        self.silence_frames = self._voiced = self._onset = 0
        self.number += 1

    # --- steps ---

    def _begin(self, answering: Answering) -> list[Act]:
        self.in_turn = True
        self._voiced = self._onset
        self._next_hushed_listen = self.policy.hushed_listen_frames
        if answering == "no" or not self.policy.interrupts:
            return [Act.START]
        if answering == "ending":
            return [Act.START, Act.INTERRUPT]
        self.is_hushed = True
        return [Act.START, Act.HUSH]

    def _go_on(self) -> list[Act]:
        had_listened = self.silence_frames >= self.policy.listen_frames
        self.silence_frames = 0
        if not had_listened:
            return []
        self.number += 1
        self.text, self._done = None, 0.0
        return [Act.GO_ON]

    def _listen(self) -> list[Act]:
        self.number += 1
        self.text, self._done = None, 0.0
        return [Act.LISTEN]

    def _decide(self) -> list[Act]:
        if self.is_hushed:
            return self._decide_hushed()
        required_ms = self.policy.required_silence_ms(self.text, self._done)
        if not self.silence_frames or self.silence_frames * FRAME_MS < required_ms or self._may_begin:
            return []
        self.in_turn = False
        return [Act.END]

    def _decide_hushed(self) -> list[Act]:
        if self._voiced >= self.policy.interrupt_frames:
            self.is_hushed = False
            return [Act.INTERRUPT]
        is_understood = self.text is not None and self.silence_frames >= self.policy.resume_frames
        if is_understood or self.silence_frames >= self.policy.resume_anyway_frames:
            self.in_turn = self.is_hushed = False
            return [Act.RESUME]
        return []
