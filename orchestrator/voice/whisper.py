"""Whisper in CTranslate2, by faster-whisper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from faster_whisper import WhisperModel

from orchestrator.contracts import SAMPLE_RATE_HZ
from orchestrator.voice.chunks import Floats
from orchestrator.voice.transcript import Segment, Word

# Where words are improbable or repeat themselves, the next one is tried (Radford et al. 2022, section 4.5).
_TEMPERATURES = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
# Of the silence that fills Whisper's 30 s, so much is kept behind the sound: 5 s, in frames of 10 ms. Most of the work
# goes into the rest of it (2 s of speech: 1.1 s of processor time with all of it, 0.2 s so). With 1 s the last words
# were repeated over and over; with 3 s the texts were those of all 30 s.
_SILENT_FRAMES, _PARTIAL_SILENT_FRAMES = 500, 300
# Whisper now and then says the last words over and over, or makes some up. So of a partial transcript no more tokens
# come than anybody can say (most people speak 4 words a second, fast ones 6), and what it made up is left out: it finds
# no place in the sound for such words, or is most unsure of them (Radford et al. 2022, section 4.5, has the same -1).
_TOKENS_A_S, _MORE_TOKENS = 8, 8
_NO_PLACE_S = 0.02
_MIN_LOGPROB = -1.0
# A transcript that gzip makes so much smaller says the same again and again (as above, the paper and faster-whisper).
_MAX_COMPRESSION_RATIO = 2.4
_MIN_TIMES = 3  # people say things twice


class _ShortWindow(WhisperModel):  # type: ignore[misc]
    """faster-whisper's, whose encoder hears no more silence than it must. For one thread."""

    silent_frames = _SILENT_FRAMES

    def encode(self, features: Any) -> Any:
        """`features`: FP32 [..., 80, frames], exactly 0 where faster-whisper has filled it up."""
        used = np.flatnonzero(features.reshape(-1, features.shape[-1]).any(axis=0))
        num_frames = min(features.shape[-1], (int(used[-1]) + 1 if len(used) else 0) + self.silent_frames)
        num_frames += num_frames % 2  # the encoder halves them
        return super().encode(np.ascontiguousarray(features[..., :num_frames]))


class Whisper:
    """`num_threads` compute one transcript. For one thread."""

    def __init__(self, folder: Path, *, num_threads: int) -> None:
        self._model = _ShortWindow(
            str(folder), device="cpu", compute_type="int8", cpu_threads=num_threads, local_files_only=True
        )

    def transcribe(self, audio: Floats, temperature: float = 0.0, *, is_partial: bool = False) -> list[Segment]:
        """FP32 [samples] at 16 kHz -> what was said; nothing where nobody speaks.

        Silence and noise are cut out before Whisper hears them, by the VAD that faster-whisper brings: it would make
        words of them. `is_partial`, for somebody who waits, looks for the likeliest next word alone, and never tries
        again.
        """
        max_tokens = _MORE_TOKENS + int(_TOKENS_A_S * len(audio) / SAMPLE_RATE_HZ) if is_partial else None
        self._model.silent_frames = _PARTIAL_SILENT_FRAMES if is_partial else _SILENT_FRAMES
        segments, _ = self._model.transcribe(
            audio,
            max_new_tokens=max_tokens,
            beam_size=1 if is_partial else 5,
            temperature=temperature if temperature or is_partial else _TEMPERATURES,
            condition_on_previous_text=False,  # what was misheard once would be misheard again
            word_timestamps=True,
            vad_filter=True,
        )
        heard = [
            Segment(
                words=tuple(
                    Word(word.word, float(word.start), float(word.end), float(word.probability))
                    for word in segment.words
                ),
                avg_logprob=float(segment.avg_logprob),
                compression_ratio=float(segment.compression_ratio),
                no_speech_prob=float(segment.no_speech_prob),
                temperature=float(segment.temperature or 0.0),
            )
            for segment in segments
            if segment.words
        ]
        return leave_out_made_up(heard) if is_partial else leave_out_loops(heard)


def leave_out_loops(segments: Sequence[Segment]) -> list[Segment]:
    """Once what is said three times and more, where a transcript is so repetitive that Whisper has failed.

    At the end of a recording each temperature may fail so ("Only. Only. Only. ...").
    """
    kept: list[Segment] = []
    for failed, group in groupby(segments, _has_failed):
        run = list(group)
        kept += _without_loops(run) if failed else run
    return kept


def _has_failed(segment: Segment) -> bool:
    return segment.compression_ratio > _MAX_COMPRESSION_RATIO


def _without_loops(segments: Sequence[Segment]) -> list[Segment]:
    words = [(number, word) for number, segment in enumerate(segments) for word in segment.words]
    keys = [word.key for _, word in words]
    kept: list[list[Word]] = [[] for _ in segments]
    index = 0
    while index < len(words):
        length, times = _find_loop(keys[index:])
        for number, word in words[index : index + length]:
            kept[number].append(word)
        index += length * times
    return [replace(segment, words=tuple(each)) for segment, each in zip(segments, kept) if each]


def _find_loop(keys: Sequence[str]) -> tuple[int, int]:
    """How many words it begins with come again at once, and how often in all; (1, 1) if that is less than thrice."""
    for length in range(1, len(keys) // _MIN_TIMES + 1):
        times = 1
        while keys[:length] == keys[length * times : length * (times + 1)]:
            times += 1
        if times >= _MIN_TIMES:
            return length, times
    return 1, 1


def leave_out_made_up(segments: Sequence[Segment]) -> list[Segment]:
    """Without the words at the end that have no place in the sound, and without segments that are most unsure."""
    kept = [segment for segment in segments if segment.avg_logprob >= _MIN_LOGPROB]
    while kept:
        words = kept[-1].words
        while words and words[-1].end_s - words[-1].start_s <= _NO_PLACE_S:
            words = words[:-1]
        if words:
            kept[-1] = replace(kept[-1], words=words)
            break
        kept.pop()
    return kept
