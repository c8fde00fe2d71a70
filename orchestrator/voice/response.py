"""One answer of a realtime session: asked of the language model, spoken sentence by sentence, dealt out as it is heard.

Three steps run side by side, each from the first output of the one before: the model's text becomes pieces, the pieces
become sound, and the sound goes out. What is dealt out can wait, before it was begun (nobody knows yet whether it is
wanted: `is_held`) and in its midst (somebody speaks: `hush`), while the two others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from orchestrator.errors import ApiError, CancelledError
from orchestrator.voice.backchannels import ends_like_a_sentence
from orchestrator.voice.client_events import MaxTokens
from orchestrator.voice.conversation import Item
from orchestrator.voice.engines import Engines, Events, Sound
from orchestrator.voice.pcm import Resampler, cut_silence, encode_pcm
from orchestrator.voice.pieces import SpokenPieces
from orchestrator.voice.playback import LEAD_S, Mark, Playback
from orchestrator.voice.speaking import can_be_said

_CHUNK_S = 0.08
# So much is spoken ahead of what is heard: of an answer that is interrupted, little is spoken in vain, and in between
# other sessions get their turn.
_AHEAD_S = 4.0
# With less than this left, an answer that somebody speaks into is not worth going on with.
ENDING_S = 0.5

Samples = npt.NDArray[np.int16]
Reason = Literal["turn_detected", "client_cancelled"]


class Outlet(Protocol):
    """Where events go."""

    def emit(self, event: dict[str, Any]) -> None: ...

    async def drain(self) -> None:
        """Until the client has taken what was sent, but for little."""
        ...


@dataclass
class TurnTimes:
    """When what happened, by one monotonic clock; None: not, or not yet."""

    speech_end_s: float | None = None  # the last sound with speech came
    transcript_s: float | None = None
    turn_end_s: float | None = None  # the person was taken for done
    asked_s: float | None = None  # the language model
    first_token_s: float | None = None
    first_piece_s: float | None = None  # something to be spoken
    first_audio_s: float | None = None  # sent

    def describe(self) -> dict[str, float | None]:
        """ms from the end of speech, or from the question to the model where nobody spoke."""
        begin_s = self.asked_s if self.speech_end_s is None else self.speech_end_s
        return {
            name.removesuffix("_s") + "_ms": None
            if at_s is None or begin_s is None
            else round((at_s - begin_s) * 1000, 1)
            for name, at_s in vars(self).items()
            if name != "speech_end_s"
        }


@dataclass(frozen=True)
class Order:
    """What is asked for: `messages` as `/v1/chat/completions` takes them."""

    messages: list[dict[str, str]]
    model: str
    speaks: bool
    rate_hz: int
    speed: float
    max_tokens: MaxTokens
    metadata: dict[str, str] | None = None

    def body(self) -> bytes:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.max_tokens != "inf":
            body["max_completion_tokens"] = self.max_tokens
        return json.dumps(body).encode()


class _Spoken:
    """Sound that waits to be dealt out, and which text it says. What was dealt out a while ago is let go."""

    def __init__(self, rate_hz: int) -> None:
        self.marks: list[Mark] = []
        self.num_samples = 0  # of all of it
        self.num_dealt = 0
        self.num_told = 0  # marks whose text was sent
        self._kept = int(2 * LEAD_S * rate_hz)
        self._samples = np.empty(0, np.int16)
        self._begin = 0  # samples that were let go

    def begin(self, text: str) -> None:
        self.marks.append(Mark(text, self.num_samples))

    def add(self, samples: Samples) -> None:
        """More of what the last text says."""
        let_go = max(self.num_dealt - self._kept - self._begin, 0)
        self._samples = np.concatenate([self._samples[let_go:], samples])
        self._begin += let_go
        self.num_samples += len(samples)
        self.marks[-1] = self.marks[-1]._replace(end_sample=self.num_samples)

    def next_samples(self, count: int) -> Samples:
        return self._samples[self.num_dealt - self._begin :][:count]

    def next_texts(self) -> list[str]:
        """Those that the next samples begin to say."""
        begin = self.num_told
        while self.num_told < len(self.marks) and (
            self.num_told == 0 or self.marks[self.num_told - 1].end_sample <= self.num_dealt
        ):
            self.num_told += 1
        return [mark.text for mark in self.marks[begin : self.num_told]]


class Response:
    """For one event loop. `run` ends when nothing more comes of it."""

    def __init__(
        self,
        order: Order,
        engines: Engines,
        outlet: Outlet,
        times: TurnTimes,
        *,
        is_held: bool = False,
        shorten: Callable[[], list[dict[str, str]] | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shorten` makes the messages fewer, where they are too many for the model; None when it cannot."""
        self.id = f"resp_{uuid.uuid4().hex}"
        kind: Literal["output_text", "output_audio"] = "output_audio" if order.speaks else "output_text"
        self.item = Item(
            f"item_{uuid.uuid4().hex[:24]}", "assistant", kind, status="in_progress", rate_hz=order.rate_hz
        )
        self.times = times
        self.status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"] = "in_progress"
        self.is_held = is_held
        self.conversation_id: str | None = None  # None: it is beside the conversation
        self.previous_item_id: str | None = None
        self._order = order
        self._engines = engines
        self._outlet = outlet
        self._shorten = shorten
        self._clock = clock
        self._is_told = False  # that it has begun
        self._is_hushed = False
        self._reason: str | None = None
        self._error: ApiError | None = None
        self._events: Events | None = None
        self._sound: Sound | None = None
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()
        self._text = ""  # of the model, so far
        self._num_text_dealt = 0
        self._is_made = False  # nothing more will come to be dealt out
        self._finish_reason: str | None = None
        self._usage: dict[str, int] = {}
        self._rt: dict[str, Any] = {}
        self._spoken = _Spoken(order.rate_hz)
        self.item.marks = self._spoken.marks
        self._playback = Playback(order.rate_hz)
        self._changed = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()

    # --- what the session does with it ---

    @property
    def is_over(self) -> bool:
        return self.status != "in_progress"

    @property
    def is_ending(self) -> bool:
        """Whether so little is left to be heard that it could as well end here."""
        if not self._order.speaks:
            return False
        left = self._spoken.num_samples - self._playback.num_heard(self._clock())
        return self._is_made and left < ENDING_S * self._order.rate_hz

    @property
    def has_begun(self) -> bool:
        """Whether anything of it was heard, or read."""
        return self._num_text_dealt > 0 if not self._order.speaks else self._playback.num_sent > 0

    def release(self) -> None:
        """It is wanted."""
        self.is_held = False
        self._changed.set()

    def hush(self) -> None:
        """Deal out nothing for now. What was not heard yet is thrown away by the client, and sent again on `resume`."""
        self._is_hushed = True
        spoken = self._spoken
        spoken.num_dealt -= self._playback.rewind(self._clock())
        self._changed.set()

    def resume(self) -> int:
        """Returns from where it goes on, in ms of the answer's sound."""
        self._is_hushed = False
        self._changed.set()
        return self._spoken.num_dealt * 1000 // self._order.rate_hz

    def ask(self, messages: list[dict[str, str]]) -> None:
        """Before `run`: other messages."""
        self._order = replace(self._order, messages=messages)

    def cancel(self, reason: Reason, audio_end_ms: int | None = None) -> int:
        """It ends here, in the engines too. Returns how many ms of its sound were heard.

        That is `audio_end_ms`, if the client says it, but not more than was sent.
        """
        if self.is_over:
            return 0
        if not self.is_held:
            self._emit_begin()
        rate_hz = self._order.rate_hz
        heard_ms = self._playback.num_heard(self._clock()) * 1000 // rate_hz
        if audio_end_ms is not None:
            heard_ms = min(audio_end_ms, self._playback.num_sent * 1000 // rate_hz + round(LEAD_S * 1000))
        self._reason = reason
        self.status = "cancelled"
        self._stop_engines()
        self._changed.set()
        if self._order.speaks:
            self.item.truncate(heard_ms)
        self.item.status = "incomplete"
        if not self.is_held:
            self._emit_end()
        return heard_ms

    async def run(self) -> None:
        """To its end, which is told; raises nothing."""
        making = [asyncio.create_task(self._read_model())]
        if self._order.speaks:
            making.append(asyncio.create_task(self._speak_pieces()))
        try:
            await self._deal()
        except ApiError as error:
            self._error = self._error or error
        if not self.is_over:
            self._finish()
        self._stop_engines()
        self._pieces.put_nowait(None)
        await asyncio.gather(*making, *self._background)

    # --- making ---

    async def _read_model(self) -> None:
        """The model's text, and the pieces to be spoken."""
        pieces = SpokenPieces()
        messages = self._order.messages
        try:
            while True:
                self.times.asked_s = self.times.asked_s or self._clock()
                self._events = self._engines.answer(self._order.body())
                if self.is_over:
                    break
                try:
                    async with contextlib.aclosing(self._events.read()) as reading:
                        async for raw in reading:
                            self._take(json.loads(raw), pieces)
                    break
                except ApiError as error:
                    # A conversation grows until it is too long for the model; then its beginning is forgotten.
                    shorter = (
                        self._shorten() if error.param == "messages" and self._shorten and not self._text else None
                    )
                    if shorter is None or shorter == messages:
                        raise
                    messages = shorter
                    self._order = replace(self._order, messages=messages)
            for piece in pieces.flush():
                self._put_piece(piece)
        except CancelledError:
            pass
        except ApiError as error:
            self._error = self._error or error
        finally:
            self._events = None
            if self._order.speaks:
                self._pieces.put_nowait(None)
            else:
                self._is_made = True
            self._changed.set()

    def _take(self, event: dict[str, Any], pieces: SpokenPieces) -> None:
        for choice in event.get("choices", ()):
            if delta := choice["delta"].get("content"):
                self.times.first_token_s = self.times.first_token_s or self._clock()
                self._text += delta
                for piece in pieces.push(delta) if self._order.speaks else ():
                    self._put_piece(piece)
                self._changed.set()
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
        self._usage = event.get("usage") or self._usage
        self._rt = event.get("rt") or self._rt

    def _put_piece(self, piece: str) -> None:
        self.times.first_piece_s = self.times.first_piece_s or self._clock()
        self._pieces.put_nowait(piece)

    async def _speak_pieces(self) -> None:
        """The pieces' sound, one after the other, not far ahead of what is heard."""
        spoken, resampler = self._spoken, None
        has_paid = False
        try:
            while (piece := await self._pieces.get()) is not None and not self.is_over:
                if not has_paid:
                    await self._engines.charge("tts")
                    has_paid = True
                if not await self._is_wanted():
                    break
                spoken.begin(piece)
                if can_be_said(piece):
                    self._sound = self._engines.speak(piece.strip(), self._order.speed)
                    async with contextlib.aclosing(self._sound.read()) as reading:
                        async for pcm, rate_hz in reading:
                            resampler = resampler or Resampler(rate_hz, self._order.rate_hz, "int16")
                            samples = np.frombuffer(pcm, "<i2")
                            goes_on = not ends_like_a_sentence(piece)
                            spoken.add(resampler.push(cut_silence(samples, rate_hz) if goes_on else samples))
                            self._changed.set()
                    self._sound = None
            if resampler is not None and not self.is_over:
                spoken.add(resampler.push(np.empty(0, np.int16), last=True))
        except CancelledError:
            pass
        except ApiError as error:
            self._error = self._error or error
        finally:
            self._sound = None
            self._is_made = True
            self._changed.set()

    async def _is_wanted(self) -> bool:
        """Whether more is to be spoken; waits until what was spoken is nearly heard."""
        while self._spoken.num_samples - self._spoken.num_dealt > _AHEAD_S * self._order.rate_hz and not self.is_over:
            await asyncio.sleep(0.1)
        return not self.is_over

    # --- dealing out ---

    async def _deal(self) -> None:
        await self._wait_while(lambda: self.is_held)
        if self.is_over:
            return
        self._emit_begin()
        await (self._deal_sound() if self._order.speaks else self._deal_text())

    async def _deal_text(self) -> None:
        while True:
            await self._wait_while(
                lambda: self._is_hushed or (self._num_text_dealt == len(self._text) and not self._is_made)
            )
            delta = self._text[self._num_text_dealt :]
            if self.is_over or not delta:
                return
            self._num_text_dealt += len(delta)
            self.item.text += delta
            self._emit("response.output_text.delta", delta=delta)
            await self._outlet.drain()

    async def _deal_sound(self) -> None:
        spoken, rate_hz = self._spoken, self._order.rate_hz
        while True:
            await self._wait_while(
                lambda: self._is_hushed or (spoken.num_dealt == spoken.num_samples and not self._is_made)
            )
            if self.is_over:
                return
            now_s = self._clock()
            samples = spoken.next_samples(int(_CHUNK_S * rate_hz))
            # What was sent is heard to its end before the answer has ended.
            left_s = (self._playback.num_sent - self._playback.num_heard(now_s)) / rate_hz
            wait_s = self._playback.wait_s(len(samples), now_s) if len(samples) else left_s
            if wait_s > 0:
                await self._wait(wait_s)
                continue
            for text in spoken.next_texts():
                self._emit("response.output_audio_transcript.delta", delta=text)
            if not len(samples):
                return
            spoken.num_dealt += len(samples)
            self._playback.send(len(samples), now_s)
            self.times.first_audio_s = self.times.first_audio_s or now_s
            self._emit("response.output_audio.delta", delta=encode_pcm(samples))
            await self._outlet.drain()

    async def _wait_while(self, must_wait: Callable[[], bool]) -> None:
        while must_wait() and not self.is_over:
            self._changed.clear()
            await self._changed.wait()

    async def _wait(self, seconds: float) -> None:
        self._changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    # --- the end ---

    def _finish(self) -> None:
        """By itself: the model has ended, or something failed."""
        self.item.text = self._text
        if self._error is not None:
            self.status = "failed"
            if self._order.speaks:
                self.item.text = "".join(mark.text for mark in self._spoken.marks).rstrip()
        elif self._finish_reason in ("length", "content_filter"):
            self.status = "incomplete"
            self._reason = "max_output_tokens" if self._finish_reason == "length" else self._finish_reason
        else:
            self.status = "completed"
        self.item.status = "completed" if self.status == "completed" else "incomplete"
        self._emit_end()

    def _stop_engines(self) -> None:
        for running in (self._events, self._sound):
            if running is not None:
                task = asyncio.create_task(_cancel(running.cancel))
                self._background.add(task)
                task.add_done_callback(self._background.discard)
        self._pieces.put_nowait(None)

    # --- events ---

    def describe(self) -> dict[str, Any]:
        """OpenAI's object."""
        details: dict[str, Any] | None = None
        if self.is_over:
            details = {"type": self.status}
            if self._reason is not None:
                details["reason"] = self._reason
            if self.status == "failed" and self._error is not None:
                details["error"] = {key: value for key, value in self._error.body()["error"].items() if key != "param"}
        usage = None
        if self._usage:
            num_in, num_out = self._usage["prompt_tokens"], self._usage["completion_tokens"]
            usage = {"input_tokens": num_in, "output_tokens": num_out, "total_tokens": num_in + num_out}
        return {
            "id": self.id,
            "object": "realtime.response",
            "status": self.status,
            "status_details": details,
            "output": [self.item.describe()] if self.is_over else [],
            "conversation_id": self.conversation_id,
            "output_modalities": ["audio" if self._order.speaks else "text"],
            "max_output_tokens": self._order.max_tokens,
            "metadata": self._order.metadata,
            "usage": usage,
        }

    def _emit_begin(self) -> None:
        """Once: it may be cancelled before `run` comes to it."""
        if self._is_told:
            return
        self._is_told = True
        self._outlet.emit({"type": "response.created", "response": self.describe()})
        self._emit_item("response.output_item.added")
        self._emit_in_conversation("conversation.item.added")
        self._emit("response.content_part.added", part=self._part(""))

    def _emit_end(self) -> None:
        text = self.item.text
        if self._order.speaks:
            self._emit("response.output_audio.done")
            self._emit("response.output_audio_transcript.done", transcript=text)
        else:
            self._emit("response.output_text.done", text=text)
        self._emit("response.content_part.done", part=self._part(text))
        self._emit_item("response.output_item.done")
        self._emit_in_conversation("conversation.item.done")
        times = {"type": "rt.turn", "response_id": self.id, "item_id": self.item.id, **self.times.describe()}
        self._outlet.emit({**times, "rt": self._rt})
        self._outlet.emit({"type": "response.done", "response": self.describe()})

    def _part(self, text: str) -> dict[str, str]:
        return {"type": "audio", "transcript": text} if self._order.speaks else {"type": "text", "text": text}

    def _emit_in_conversation(self, name: str) -> None:
        if self.conversation_id is not None:
            item, previous_id = self.item.describe(), self.previous_item_id
            self._outlet.emit({"type": name, "item": item, "previous_item_id": previous_id})

    def _emit_item(self, name: str) -> None:
        self._outlet.emit({"type": name, "response_id": self.id, "output_index": 0, "item": self.item.describe()})

    def _emit(self, name: str, **fields: Any) -> None:
        place = {"response_id": self.id, "item_id": self.item.id, "output_index": 0, "content_index": 0}
        self._outlet.emit({"type": name, **place, **fields})


async def _cancel(cancel: Callable[[], Awaitable[None]]) -> None:
    with contextlib.suppress(ApiError):  # what broke has ended
        await cancel()
