"""A realtime session's neighbours without models: whoever speaks is loud, and says what the test put in his mouth."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal

import numpy as np

from orchestrator.config import Speaker, Transcriber
from orchestrator.errors import ApiError, CancelledError
from orchestrator.voice.session import Abilities, Counts, Session
from orchestrator.voice.transcript import Segment, Word

ABILITIES = Abilities(Transcriber(name="whisper-tiny.en", language="en"), Speaker(name="piper-joe", voice="joe"))
TEXT_ONLY = Abilities(None, None)
RATE_HZ = 16_000


class FakeEvents:
    def __init__(self, engines: FakeEngines, body: dict[str, Any]) -> None:
        self._engines = engines
        self._body = body
        self._cancelled = asyncio.Event()

    async def read(self) -> AsyncGenerator[bytes, None]:
        engines = self._engines
        engines.asked.append(self._body)
        if (refusal := engines.refuse(self._body)) is not None:
            raise refusal
        for delta in engines.answer_deltas:
            if engines.token_s:
                try:
                    await asyncio.wait_for(self._cancelled.wait(), engines.token_s)
                except asyncio.TimeoutError:
                    pass
            if self._cancelled.is_set():
                engines.num_cancelled += 1
                raise CancelledError("the caller left")
            yield json.dumps({"choices": [{"delta": {"content": delta}}]}).encode()
        last = {"choices": [{"delta": {}, "finish_reason": engines.finish_reason}], "rt": {"tier": "simple"}}
        yield json.dumps({**last, "usage": {"prompt_tokens": 5, "completion_tokens": 3}}).encode()

    async def cancel(self) -> None:
        self._cancelled.set()


class FakeSound:
    """50 ms a word, all at once."""

    def __init__(self, engines: FakeEngines, text: str) -> None:
        self._engines = engines
        self._text = text
        self._is_cancelled = False

    async def read(self) -> AsyncGenerator[tuple[bytes, int], None]:
        if self._engines.tts_error is not None:
            raise self._engines.tts_error
        await asyncio.sleep(0)
        if self._is_cancelled:
            raise CancelledError("the caller left")
        self._engines.spoken.append(self._text)
        num_samples = int(self._engines.word_s * RATE_HZ) * len(self._text.split())
        yield np.ones(num_samples, "<i2").tobytes(), RATE_HZ

    async def cancel(self) -> None:
        self._is_cancelled = True


class FakePerson:
    async def hear(self, frame: np.ndarray) -> float:
        return 0.95 if np.abs(frame).max() > 0.1 else 0.02


class FakeEngines:
    """What is transcribed is `says`, the judge says `done`; the model answers `answer_deltas`."""

    def __init__(self) -> None:
        self.says = "What is the capital of France?"
        self.done = 0.9
        self.answer_deltas = ["It is ", "Paris. ", "It lies ", "on the Seine."]
        self.finish_reason = "stop"
        self.token_s = 0.0
        self.word_s = 0.05
        self.transcribe_s = 0.0
        self.is_busy = True  # no partial transcripts
        self.offsets_s: list[float] = []
        self.stt_error: ApiError | None = None
        self.tts_error: ApiError | None = None
        self.charge_error: ApiError | None = None
        self.refuse: Callable[[dict[str, Any]], ApiError | None] = lambda body: None
        self.asked: list[dict[str, Any]] = []
        self.spoken: list[str] = []
        self.charged: list[str] = []
        self.num_transcribed = 0
        self.num_cancelled = 0

    def meet(self) -> FakePerson:
        return FakePerson()

    async def transcribe(self, audio: np.ndarray, offset_s: float) -> list[Segment]:
        self.num_transcribed += 1
        self.offsets_s.append(offset_s)
        await asyncio.sleep(self.transcribe_s)
        if self.stt_error is not None:
            raise self.stt_error
        words = tuple(Word(f" {word}", index, index + 1, 1.0) for index, word in enumerate(self.says.split()))
        return [Segment(words, 0, 1, 0, 0)] if words else []

    def is_transcribing(self) -> bool:
        return self.is_busy

    async def judge(self, audio: np.ndarray) -> float:
        return self.done

    def answer(self, body: bytes) -> FakeEvents:
        return FakeEvents(self, json.loads(body))

    def speak(self, text: str, speed: float) -> FakeSound:
        return FakeSound(self, text)

    async def charge(self, model: Literal["stt", "tts"]) -> None:
        self.charged.append(model)
        if self.charge_error is not None:
            raise self.charge_error


class Client(Counts):
    """A session, and all that it told."""

    def __init__(self, engines: FakeEngines | None = None, abilities: Abilities = ABILITIES) -> None:
        self.engines = engines or FakeEngines()
        self.events: list[dict[str, Any]] = []
        self.decisions: list[str] = []
        self.session = Session(self.engines, abilities, self, counts=self)
        self.session.begin()

    # --- as outlet and counts ---

    def emit(self, event: dict[str, Any]) -> None:
        self.events.append(json.loads(json.dumps(event)))

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def decide(self, what: str) -> None:
        self.decisions.append(what)

    # --- as client ---

    async def send(self, name: str, **fields: Any) -> None:
        await self.session.receive(json.dumps({"type": name, **fields}))

    async def configure(self, **session: Any) -> None:
        await self.send("session.update", session={"type": "realtime", **session})
        assert self.types[-1] == "session.updated", self.events[-1]

    async def speak(self, ms: int, *, loud: bool = True) -> None:
        """Sound at 24 kHz, in pieces of 32 ms; each lets the session's tasks run."""
        piece = np.full(768, 8000 if loud else 0, "<i2")
        audio = base64.b64encode(piece.tobytes()).decode()
        for _ in range(ms // 32):
            await self.send("input_audio_buffer.append", audio=audio)
            for _ in range(5):
                await asyncio.sleep(0)

    async def wait_for(self, name: str, count: int = 1, timeout_s: float = 5.0) -> dict[str, Any]:
        async def wait() -> None:
            while self.types.count(name) < count:
                await asyncio.sleep(0.005)

        try:
            await asyncio.wait_for(wait(), timeout_s)
        except asyncio.TimeoutError:
            raise AssertionError((name, self.types, self.all("error"))) from None
        return self.all(name)[count - 1]

    @property
    def types(self) -> list[str]:
        return [event["type"] for event in self.events]

    def all(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == name]

    @property
    def audio_ms(self) -> int:
        """How much sound came, at 24 kHz."""
        return sum(
            len(base64.b64decode(event["delta"])) // 48
            for event in self.events
            if event["type"].endswith("audio.delta")
        )
