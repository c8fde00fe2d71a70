"""One session of `/v1/realtime`: a client's events in, events out; no socket.

What a client sends is taken in order, one event at a time. What is heard goes through the VAD frame by frame to
`TurnTaking`, whose acts are carried out here.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from orchestrator.config import Speaker, Transcriber
from orchestrator.contracts import FRAME_SAMPLES, SAMPLE_RATE_HZ
from orchestrator.errors import ApiError, InvalidRequestError, RequestTooLargeError
from orchestrator.voice.chunks import Floats
from orchestrator.voice.client_events import (
    AppendAudio,
    CancelResponse,
    ClearAudio,
    ClientEvent,
    CommitAudio,
    CreateItem,
    CreateResponse,
    OneItem,
    ResponseOptions,
    SessionConfig,
    TruncateItem,
    TurnDetection,
    UpdateSession,
    parse_event,
    read_json,
    refused,
)
from orchestrator.voice.conversation import Conversation, Item
from orchestrator.voice.engines import Engines
from orchestrator.voice.partial import PartialTranscript
from orchestrator.voice.pcm import Inlet, decode_pcm
from orchestrator.voice.response import Order, Outlet, Reason, Response, TurnTimes
from orchestrator.voice.transcript import said_once
from orchestrator.voice.turn_taking import FRAME_MS, Act, Answering, TurnPolicy, TurnTaking

INSTRUCTIONS = "You are a friendly voice assistant. Answer in one or two short sentences."
MAX_TURN_S = 55  # the model `stt` takes 60
MIN_COMMIT_S = 0.1  # OpenAI's
# A turn that is longer is not heard again from its beginning: what was certain stays.
_HEARD_WHOLE_S = 10
# Somebody who speaks is heard first after 3 s, then every 1.5 s. The last hearing, for which an answer waits, may have
# to wait for such a one; short questions need none.
_FIRST_PARTIAL_FRAMES, _PARTIAL_FRAMES = 94, 47
_SILENT = 1e-3  # -60 dBFS, the peak of a frame in which the VAD need not look for speech


@dataclass
class _Turn:
    """What a person is saying, and what was made of it."""

    item_id: str
    start_ms: int  # of the session's sound
    frames: list[Floats]
    partial: PartialTranscript = field(default_factory=PartialTranscript)
    times: TurnTimes = field(default_factory=TurnTimes)
    next_partial: int = _FIRST_PARTIAL_FRAMES
    is_partial_under_way: bool = False
    payment: asyncio.Future[None] | None = None
    hearing: asyncio.Task[None] | None = None  # the last LISTEN
    text: str | None = None  # what it understood
    early: Response | None = None
    early_text: str = ""

    @property
    def audio(self) -> Floats:
        return np.concatenate(self.frames)


@dataclass(frozen=True)
class Abilities:
    """What the server has; without a `transcriber` it does not hear, without a `speaker` it does not speak."""

    transcriber: Transcriber | None
    speaker: Speaker | None


class Counts:
    """What a session tells its metrics; the gateway's counts, tests ignore them."""

    def turn(self, times: TurnTimes) -> None: ...

    def decide(self, what: str) -> None: ...


class Session:
    """For one event loop. `receive` takes one event at a time; `close` when the client is gone."""

    def __init__(
        self,
        engines: Engines,
        abilities: Abilities,
        outlet: Outlet,
        model: str = "auto",
        *,
        counts: Counts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.id = f"sess_{uuid.uuid4().hex[:24]}"
        self._engines = engines
        self._abilities = abilities
        self._outlet = outlet
        self._counts = counts or Counts()
        self._clock = clock
        self._config = SessionConfig(
            model=model,
            instructions=INSTRUCTIONS,
            output_modalities=["audio"] if abilities.speaker is not None else ["text"],
        )
        self._conversation = Conversation()
        self._conversation_id = f"conv_{uuid.uuid4().hex[:24]}"
        self._inlet = Inlet(self._config.audio.input.format.rate)
        self._person = engines.meet() if abilities.transcriber is not None else None
        self._taking = TurnTaking(self._policy())
        self._turn: _Turn | None = None
        self._before: list[Floats] = []  # frames before a turn; without turn detection, all that waits for a commit
        self._response: Response | None = None  # the one that is being dealt out
        self._is_owed = False  # an answer, when that one is over
        self._committed = TurnTimes()  # of what was committed last, and is not answered yet
        self._transcribing: set[asyncio.Task[None]] = set()  # what answers wait for
        self._tasks: set[asyncio.Task[None]] = set()
        self._responses: set[Response] = set()

    # --- the client's events ---

    def begin(self) -> None:
        self._emit("session.created", session=self._describe())

    async def receive(self, text: str) -> None:
        """One message. What is wrong with it is told the client, and ends nothing."""
        fields: dict[str, Any] = {}
        try:
            fields = read_json(text)
            await self._handle(parse_event(fields))
        except ApiError as error:
            event_id = fields.get("event_id")
            self.tell_error(error, event_id if isinstance(event_id, str) else None)

    def tell_error(self, error: ApiError, event_id: str | None = None) -> None:
        self._emit("error", error={**error.body()["error"], "event_id": event_id and event_id[:512]})

    async def close(self) -> None:
        """Ends all that is under way, in the engines too."""
        for response in list(self._responses):
            response.cancel("client_cancelled")
        for task in (*self._tasks, *self._transcribing):
            if task.get_name() != "response":
                task.cancel()
        await asyncio.gather(*self._tasks, *self._transcribing, return_exceptions=True)

    async def _handle(self, event: ClientEvent) -> None:
        if isinstance(event, AppendAudio):
            await self._append(event)
        elif isinstance(event, UpdateSession):
            self._update(event)
        elif isinstance(event, CommitAudio):
            self._commit()
        elif isinstance(event, ClearAudio):
            self._clear()
        elif isinstance(event, CreateItem):
            self._create_item(event)
        elif isinstance(event, TruncateItem):
            self._truncate(event)
        elif isinstance(event, CreateResponse):
            self._create_response(event.response)
        elif isinstance(event, CancelResponse):
            self._cancel_response(event)
        elif isinstance(event, OneItem):
            self._look_at_item(event)

    def _update(self, event: UpdateSession) -> None:
        old, abilities = self._config, self._abilities
        self._config = config = old.update(event.session, abilities.transcriber, abilities.speaker)
        if config.audio.input.format != old.audio.input.format:
            self._inlet = Inlet(config.audio.input.format.rate)
        if config.audio.input.turn_detection != old.audio.input.turn_detection:
            self._drop_turn()
            self._before = []
            num_frames, self._taking = self._taking.num_frames, TurnTaking(self._policy())
            self._taking.num_frames = num_frames
        self._emit("session.updated", session=self._describe())

    def _create_item(self, event: CreateItem) -> None:
        new = event.item
        if new.role == "user" and not new.text:
            raise refused("item.content[0].text", "must not be empty")
        item = Item(
            new.id or _new_item_id(), new.role, "output_text" if new.role == "assistant" else "input_text", new.text
        )
        self._add_item(item, event.previous_item_id)

    def _look_at_item(self, event: OneItem) -> None:
        item = self._conversation.find(event.item_id)
        if event.type == "conversation.item.retrieve":
            self._emit("conversation.item.retrieved", item=item.describe())
            return
        if self._response is not None and item is self._response.item:
            raise refused("item_id", "is an answer under way; cancel it first")
        self._conversation.delete(event.item_id)
        self._emit("conversation.item.deleted", item_id=event.item_id)

    def _truncate(self, event: TruncateItem) -> None:
        item = self._conversation.find(event.item_id)
        if item.kind != "output_audio":
            raise refused("item_id", "is no spoken answer; only those can be truncated")
        if self._response is not None and item is self._response.item:
            self._interrupt("client_cancelled", event.audio_end_ms)
            return
        said_ms = item.marks[-1].end_sample * 1000 // item.rate_hz if item.marks else 0
        if event.audio_end_ms > said_ms + 1000:  # a player's clock is not ours
            raise refused("audio_end_ms", f"the answer has {said_ms} ms of sound (got {event.audio_end_ms})")
        item.truncate(event.audio_end_ms)
        self._emit_truncated(item, event.audio_end_ms)

    def _emit_truncated(self, item: Item, audio_end_ms: int) -> None:
        self._emit("conversation.item.truncated", item_id=item.id, content_index=0, audio_end_ms=audio_end_ms)

    def _add_item(self, item: Item, previous_id: str | None = None) -> None:
        before = self._conversation.add(item, previous_id)
        for name in ("conversation.item.added", "conversation.item.done"):
            self._emit(name, item=item.describe(), previous_item_id=before)

    # --- sound ---

    async def _append(self, event: AppendAudio) -> None:
        if self._person is None:
            raise refused("type", f"no model of this server hears ({event.type}); target cpu-voice has one")
        for frame in self._inlet.push(decode_pcm(event.audio, "audio")):
            if self._config.audio.input.turn_detection is None:
                self._keep(frame)
            else:
                silent = float(np.abs(frame).max()) < _SILENT
                self._hear(frame, 0.0 if silent else await self._person.hear(frame))

    def _keep(self, frame: Floats) -> None:
        self._taking.num_frames += 1
        if len(self._before) * FRAME_MS >= MAX_TURN_S * 1000:
            raise RequestTooLargeError(
                f"audio: the buffer holds {MAX_TURN_S} s, which is the limit; send input_audio_buffer.commit or .clear",
                param="audio",
            )
        self._before.append(frame)

    def _hear(self, frame: Floats, probability: float) -> None:
        response = self._response
        answering: Answering = "no" if response is None else "ending" if response.is_ending else "yes"
        if self._turn is None:
            self._before.append(frame)
        else:
            self._turn.frames.append(frame)
        self._carry_out(self._taking.hear(probability, answering))
        turn = self._turn
        if turn is None:
            detection = self._config.audio.input.turn_detection
            num_kept = 0 if detection is None else detection.prefix_padding_ms // FRAME_MS + 1
            self._before = self._before[-num_kept - self._taking.policy.onset_frames :]
            return
        if self._taking.silence_frames == 0:
            turn.times.speech_end_s = self._clock()
            self._hear_partial(turn)
        if len(turn.frames) * FRAME_MS >= MAX_TURN_S * 1000:
            self._taking.end()
            self._carry_out([Act.END])

    def _carry_out(self, acts: list[Act]) -> None:
        for act in acts:
            if act is Act.START:
                self._start_turn()
            elif act is Act.HUSH:
                self._hush()
            elif act is Act.LISTEN:
                self._listen()
            elif act is Act.PREPARE:
                self._prepare()
            elif act is Act.GO_ON:
                self._go_on()
            elif act is Act.INTERRUPT:
                self._counts.decide("interrupted")
                self._interrupt("turn_detected")
            elif act is Act.RESUME:
                self._resume()
            elif act is Act.END:
                self._end_turn()

    def _start_turn(self) -> None:
        start_ms = max(self._taking.now_ms - len(self._before) * FRAME_MS, 0)
        self._turn = _Turn(_new_item_id(), start_ms, self._before)
        self._turn.times.speech_end_s = self._clock()
        self._before = []
        self._emit("input_audio_buffer.speech_started", audio_start_ms=start_ms, item_id=self._turn.item_id)

    def _hush(self) -> None:
        if self._response is not None:
            self._response.hush()

    def _resume(self) -> None:
        """The turn was none: noise, or a little word."""
        self._counts.decide("resumed")
        self._emit_stopped()
        self._forget_turn()
        if (response := self._response) is not None:
            audio_ms = response.resume()
            self._emit("rt.output_audio.resumed", response_id=response.id, item_id=response.item.id, audio_ms=audio_ms)

    def _emit_stopped(self) -> None:
        assert self._turn is not None
        end_ms = self._taking.now_ms - self._taking.silence_frames * FRAME_MS
        self._emit("input_audio_buffer.speech_stopped", audio_end_ms=end_ms, item_id=self._turn.item_id)

    def _drop_turn(self) -> None:
        """Whatever is being said, it is not heard; an answer that was silent for it goes on."""
        if self._taking.is_hushed:
            self._resume()
        else:
            self._forget_turn()

    def _forget_turn(self) -> None:
        if self._turn is not None:
            self._drop_early()
            self._turn = None
            self._taking.end()
            self._emit("input_audio_buffer.cleared")

    def _go_on(self) -> None:
        """What was understood in the silence was not all."""
        self._drop_early()
        if self._turn is not None:
            self._turn.hearing = self._turn.text = None

    def _drop_early(self) -> None:
        if self._turn is not None and (early := self._turn.early) is not None:
            self._counts.decide("early_dropped")
            early.cancel("turn_detected")
            self._turn.early = None

    # --- understanding ---

    def _hear_partial(self, turn: _Turn) -> None:
        """Now and then, while the person speaks, if nobody else's turn is being heard."""
        if len(turn.frames) < turn.next_partial or turn.is_partial_under_way or self._engines.is_transcribing():
            return
        turn.next_partial = len(turn.frames) + _PARTIAL_FRAMES
        turn.is_partial_under_way = True
        self._spawn(self._understand_partial(turn))

    async def _understand_partial(self, turn: _Turn) -> None:
        try:
            await self._pay(turn)
            audio, offset_s = _tail(turn)
            segments = await self._engines.transcribe(audio, offset_s)
        except ApiError:
            return  # the turn's last hearing tells it
        finally:
            turn.is_partial_under_way = False
        new = turn.partial.update(segments).new
        if new and turn is self._turn:
            self._emit(
                "conversation.item.input_audio_transcription.delta",
                item_id=turn.item_id,
                content_index=0,
                delta="".join(word.text for word in new),
            )

    def _listen(self) -> None:
        assert self._turn is not None
        self._turn.text = None
        self._turn.hearing = self._spawn(self._understand(self._turn, self._taking.number))

    async def _understand(self, turn: _Turn, number: int) -> None:
        """What was said so far, and whether the person is done."""
        audio, done = turn.audio, 0.0
        try:
            await self._pay(turn)
            text = await self._transcribe(turn)
            if turn.hearing is asyncio.current_task():  # the person has not gone on since
                turn.text, turn.times.transcript_s = text, self._clock()
            self._start_if_likely(turn, number, text, done)
            if turn is self._turn and self._taking.policy.needs_judge(text):
                done = await self._engines.judge(audio)
        except ApiError as error:
            if turn is self._turn:
                self.tell_error(error)
                self._drop_turn()
            return
        if turn is self._turn:
            self._carry_out(self._taking.understand(number, text, done))
            self._start_if_likely(turn, number, text, done)

    def _start_if_likely(self, turn: _Turn, number: int, text: str, done: float) -> None:
        """Unless somebody has gone on since."""
        if turn is self._turn and number == self._taking.number and self._taking.policy.may_be_done(text, done):
            self._start_early(turn, text)

    def _prepare(self) -> None:
        if self._turn is not None and self._turn.text is not None:
            self._start_early(self._turn, self._turn.text)

    async def _transcribe(self, turn: _Turn) -> str:
        audio, offset_s = _tail(turn)
        certain = "".join(word.text for word in turn.partial.certain) if offset_s else ""
        segments = await self._engines.transcribe(audio, offset_s)
        return said_once((certain + "".join(segment.text for segment in segments)).strip())

    async def _pay(self, turn: _Turn) -> None:
        """Once a turn, however often it is heard; raises the `ApiError` that refuses each time."""
        if turn.payment is None:
            turn.payment = asyncio.ensure_future(self._engines.charge("stt"))
        await asyncio.shield(turn.payment)

    def _start_early(self, turn: _Turn, text: str) -> None:
        """An answer for a turn that may be over."""
        detection = self._config.audio.input.turn_detection
        wants_answer = detection is not None and detection.create_response and self._config.rt.early_start
        if wants_answer and self._response is None and turn.early is None and text:
            turn.early_text = text
            turn.early = self._make_response(ResponseOptions(), turn.times, text)

    # --- the end of a turn ---

    def _end_turn(self) -> None:
        turn = self._turn
        if turn is None:
            return
        self._emit_stopped()
        self._turn = None
        turn.times.turn_end_s = self._clock()
        self._taking.end()
        if turn.text is not None:
            self._take_turn(turn, turn.text)
            return
        task = self._spawn(self._take_turn_when_understood(turn))
        self._transcribing.add(task)
        task.add_done_callback(self._transcribing.discard)

    async def _take_turn_when_understood(self, turn: _Turn) -> None:
        """The silence was over before the transcript was there."""
        if turn.hearing is not None:
            await asyncio.wait([turn.hearing])
        text = turn.text
        if text is None:
            try:
                await self._pay(turn)
                text = await self._transcribe(turn)
            except ApiError as error:
                self.tell_error(error)
                self._emit("input_audio_buffer.cleared")
                return
            turn.times.transcript_s = self._clock()
        self._take_turn(turn, text)

    def _take_turn(self, turn: _Turn, text: str) -> None:
        """What was said, as an item, and its answer."""
        detection = self._config.audio.input.turn_detection
        early, turn.early = turn.early, None
        if not text:
            self._counts.decide("nothing_said")
            if early is not None:
                early.cancel("turn_detected")
            self._emit("input_audio_buffer.cleared")
            return
        self._add_spoken(turn, text)
        if detection is None or not detection.create_response:
            return
        if self._response is not None:
            self._is_owed = True
        elif early is not None and turn.early_text == text:
            self._deal(early)
        else:
            if early is not None:
                early.cancel("turn_detected")
            self._deal(self._make_response(ResponseOptions(), turn.times))

    def _add_spoken(self, turn: _Turn, text: str) -> None:
        previous_id = self._conversation.last_id
        self._emit("input_audio_buffer.committed", item_id=turn.item_id, previous_item_id=previous_id)
        self._add_item(Item(turn.item_id, "user", "input_audio", text))
        seconds = round(len(turn.frames) * FRAME_MS / 1000, 3)
        self._emit(
            "conversation.item.input_audio_transcription.completed",
            item_id=turn.item_id,
            content_index=0,
            transcript=text,
            usage={"type": "duration", "seconds": seconds},
        )

    def _commit(self) -> None:
        """What is in the buffer is a turn, whatever the turn detection says; an empty one too."""
        if self._turn is not None:
            self._taking.end()
            self._end_turn()
            return
        is_by_hand = self._config.audio.input.turn_detection is None
        if not is_by_hand or len(self._before) * FRAME_SAMPLES < MIN_COMMIT_S * SAMPLE_RATE_HZ:
            raise InvalidRequestError(
                f"the buffer has less than {MIN_COMMIT_S * 1000:.0f} ms of sound to commit; append more",
                param="type",
            )
        turn = _Turn(_new_item_id(), 0, self._before)
        turn.times.speech_end_s = turn.times.turn_end_s = self._clock()
        self._before = []
        task = self._spawn(self._take_committed(turn))
        self._transcribing.add(task)
        task.add_done_callback(self._transcribing.discard)

    async def _take_committed(self, turn: _Turn) -> None:
        try:
            await self._pay(turn)
            text = await self._transcribe(turn)
        except ApiError as error:
            self.tell_error(error)
            return
        turn.times.transcript_s = self._clock()
        self._committed = turn.times
        self._add_spoken(turn, text)

    def _clear(self) -> None:
        self._drop_turn()
        self._before = []
        self._emit("input_audio_buffer.cleared")

    # --- answers ---

    def _create_response(self, options: ResponseOptions) -> None:
        if self._response is not None:
            raise refused("type", "an answer is under way; wait for response.done, or send response.cancel")
        speaks = self._config.speaks if options.output_modalities is None else options.output_modalities == ["audio"]
        if speaks and self._abilities.speaker is None:
            raise refused("response.output_modalities", "no model of this server speaks; use ['text']")
        if not self._transcribing and not self._messages(options):
            raise refused("type", "there is nothing to answer; send conversation.item.create first")
        times, self._committed = self._committed, TurnTimes()
        self._deal(self._make_response(options, times))

    def _messages(self, options: ResponseOptions, said: str = "") -> list[dict[str, str]]:
        """Without what says who answers, if there is nothing else."""
        instructions = self._config.instructions if options.instructions is None else options.instructions
        extra = [Item("", "user", "input_audio", said)] if said else []
        if options.input is not None:
            alone = Conversation()
            for number, each in enumerate(options.input):
                alone.add(Item(str(number), each.role, "input_text", each.text))
            messages = alone.messages(instructions)
        else:
            messages = self._conversation.messages(instructions, extra)
        return messages if any(each["role"] != "system" for each in messages) else []

    def _make_response(self, options: ResponseOptions, times: TurnTimes, said: str | None = None) -> Response:
        """One that is under way; with `said`, an early one, which is held until its turn is over."""
        config = self._config
        max_tokens = config.max_output_tokens if options.max_output_tokens is None else options.max_output_tokens

        def shorten() -> list[dict[str, str]] | None:
            if options.input is not None or not self._conversation.forget_half():
                return None
            return self._messages(options, (said or "") if response.is_held else "")

        order = Order(
            messages=self._messages(options, said or ""),
            model=config.model,
            speaks=config.speaks if options.output_modalities is None else options.output_modalities == ["audio"],
            rate_hz=config.audio.output.format.rate,
            speed=config.audio.output.speed,
            max_tokens=max_tokens,
            metadata=options.metadata,
        )
        is_in_conversation = options.conversation == "auto"
        response = Response(order, self._engines, self._outlet, times, is_held=True, shorten=shorten, clock=self._clock)
        response.conversation_id = self._conversation_id if is_in_conversation else None
        self._responses.add(response)
        self._spawn(self._run_response(response, options), "response")
        return response

    async def _run_response(self, response: Response, options: ResponseOptions) -> None:
        while self._transcribing:  # what was committed before is to be answered
            await asyncio.wait(self._transcribing)
            response.ask(self._messages(options))
        await response.run()
        self._responses.discard(response)
        if response is self._response:
            self._response = None
            self._counts.turn(response.times)
            self._deal_owed()

    def _deal_owed(self) -> None:
        """What was said during an answer that is over now is answered."""
        if self._is_owed:
            self._deal(self._make_response(ResponseOptions(), TurnTimes()))

    def _deal(self, response: Response) -> None:
        """The answer is wanted, and answers all that was said."""
        self._response, self._is_owed = response, False
        if response.conversation_id is not None:
            response.previous_item_id = self._conversation.add(response.item)
        response.release()

    def _interrupt(self, reason: Reason, audio_end_ms: int | None = None) -> None:
        """The answer ends; of it stays what was heard, as far as the client says it, else by the clock."""
        response, self._response = self._response, None
        self._taking.is_hushed = False
        if response is None:
            return
        heard_ms = response.cancel(reason, audio_end_ms)
        self._counts.turn(response.times)
        if response.item.kind == "output_audio":
            self._emit_truncated(response.item, heard_ms)
        if reason == "client_cancelled":
            self._deal_owed()

    def _cancel_response(self, event: CancelResponse) -> None:
        if self._response is None or event.response_id not in (None, self._response.id):
            raise refused("response_id" if event.response_id else "type", "there is no such answer under way")
        self._interrupt("client_cancelled")

    # --- the rest ---

    def _policy(self) -> TurnPolicy:
        detection: TurnDetection | None = self._config.audio.input.turn_detection
        return TurnPolicy() if detection is None else detection.policy()

    def _describe(self) -> dict[str, Any]:
        """OpenAI's object."""
        return {"id": self.id, "object": "realtime.session", **self._config.model_dump()}

    def _spawn(self, work: Any, name: str | None = None) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _emit(self, name: str, **fields: Any) -> None:
        self._outlet.emit({"type": name, **fields})


def _tail(turn: _Turn) -> tuple[Floats, float]:
    """What of a turn is to be heard, and where in it that begins: all of it, but of a long one what is not certain."""
    audio = turn.audio
    if len(audio) <= _HEARD_WHOLE_S * SAMPLE_RATE_HZ or not turn.partial.certain:
        return audio, 0.0
    begin = int(turn.partial.certain_until_s * SAMPLE_RATE_HZ)
    return audio[begin:], begin / SAMPLE_RATE_HZ


def _new_item_id() -> str:
    return f"item_{uuid.uuid4().hex[:24]}"
