"""What a realtime session asks the models for; the gateway has it done by Triton, tests by fakes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Literal, Protocol

from orchestrator.voice.chunks import Floats
from orchestrator.voice.transcript import Segment


class Events(Protocol):
    """The events of a streamed chat completion (JSON), for one reader."""

    def read(self) -> AsyncGenerator[bytes, None]: ...

    async def cancel(self) -> None: ...


class Sound(Protocol):
    """PCM16, and its samples a second, as it is spoken, for one reader."""

    def read(self) -> AsyncGenerator[tuple[bytes, int], None]: ...

    async def cancel(self) -> None: ...


class Person(Protocol):
    """Somebody whose sound is heard frame by frame."""

    async def hear(self, frame: Floats) -> float:
        """FP32 [512] at 16 kHz, how probably he speaks."""
        ...


class Engines(Protocol):
    """All raise the `ApiError` that the model answered with. Who is cancelled while he waits stops nothing."""

    def meet(self) -> Person: ...

    async def transcribe(self, audio: Floats, offset_s: float) -> Sequence[Segment]:
        """What is said in `audio` (16 kHz), with times that are `offset_s` later; quickly."""
        ...

    def is_transcribing(self) -> bool:
        """Whether anybody is being transcribed: what is not urgent had better wait."""
        ...

    async def judge(self, audio: Floats) -> float:
        """How probably the person whose turn is `audio` so far is done."""
        ...

    def answer(self, body: bytes) -> Events: ...

    def speak(self, text: str, speed: float) -> Sound: ...

    async def charge(self, model: Literal["stt", "tts"]) -> None:
        """One request of the caller's to `model`, as if it came by HTTP; raises the `ApiError` that refuses."""
        ...
