"""A text as what is spoken one after the other, and its sound as a file that streams."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from orchestrator.streaming.sentences import SentenceCutter

# OpenAI's limits.
MAX_TEXT_CHARACTERS = 4096
MIN_SPEED, MAX_SPEED = 0.25, 4.0


def sentences_of(text: str) -> Iterator[str]:
    """The sentences of a whole text; those without a letter or a digit, which say nothing, come with the one before.

    Joined they are the text.
    """
    cutter = SentenceCutter()
    held = ""
    for piece in [*cutter.push(text), *cutter.flush()]:
        if held and can_be_said(held) and can_be_said(piece):
            yield held
            held = ""
        held += piece
    if held:
        yield held


def can_be_said(text: str) -> bool:
    return any(character.isalnum() for character in text)


def wav_header(sample_rate_hz: int) -> bytes:
    """Of PCM16 of one channel, as long as it will be: both lengths are the largest, as of any WAV that is streamed."""
    unknown = 0xFFFFFFFF
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate_hz, sample_rate_hz * 2, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", unknown, b"WAVE") + form + struct.pack("<4sI", b"data", unknown)
