"""What a client of `/v1/realtime` may send: a subset of OpenAI's events, every field checked, nothing ignored."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from orchestrator.config import Speaker, Transcriber
from orchestrator.contracts import STT_MODEL
from orchestrator.errors import InvalidRequestError, shorten
from orchestrator.request import Strict, explain
from orchestrator.voice.speaking import MAX_SPEED, MIN_SPEED
from orchestrator.voice.turn_taking import TurnPolicy

MAX_EVENT_BYTES = 1 << 20
MAX_INSTRUCTIONS = 32 << 10
ITEM_ID = r"^[A-Za-z0-9_-]{1,64}$"

Modalities = Annotated[list[Literal["text", "audio"]], Field(min_length=1, max_length=1)]
MaxTokens = Annotated[int, Field(ge=1, le=4096)] | Literal["inf"]
Nothing = Annotated[list[Any], Field(max_length=0)]
Instructions = Annotated[str, Field(max_length=MAX_INSTRUCTIONS)]


# --- the session -------------------------------------------------------------------------------------------


class AudioFormat(Strict):
    """PCM16, little-endian, one channel. OpenAI has it at 24 kHz alone."""

    type: Literal["audio/pcm"] = "audio/pcm"
    rate: Literal[16000, 24000] = 24000


class ServerVad(Strict):
    """A turn ends with a silence of fixed length."""

    type: Literal["server_vad"]
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5
    prefix_padding_ms: Annotated[int, Field(ge=0, le=1000)] = 300
    silence_duration_ms: Annotated[int, Field(ge=100, le=5000)] = 500
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: None = None

    def policy(self) -> TurnPolicy:
        return TurnPolicy(
            threshold=self.threshold,
            interrupts=self.interrupt_response,
            fixed_silence_ms=self.silence_duration_ms,
        )


# How much silence ends the turn of who is done, may be, and is not, by `eagerness`.
_SILENCES_MS = {
    "low": (1000, 1500, 3000),
    "medium": (TurnPolicy.done_silence_ms, TurnPolicy.unsure_silence_ms, TurnPolicy.unfinished_silence_ms),
    "high": (224, 600, 900),
}


class SemanticVad(Strict):
    """A turn ends when the person is judged to be done."""

    type: Literal["semantic_vad"]
    eagerness: Literal["low", "medium", "high", "auto"] = "auto"
    create_response: bool = True
    interrupt_response: bool = True

    @property
    def prefix_padding_ms(self) -> int:
        return 300

    def policy(self) -> TurnPolicy:
        done_ms, unsure_ms, unfinished_ms = _SILENCES_MS.get(self.eagerness, _SILENCES_MS["medium"])
        return TurnPolicy(
            interrupts=self.interrupt_response,
            done_silence_ms=done_ms,
            unsure_silence_ms=unsure_ms,
            unfinished_silence_ms=unfinished_ms,
        )


TurnDetection = ServerVad | SemanticVad


class Transcription(Strict):
    """What is said is always transcribed: the language model reads. OpenAI's other models and fields are not had."""

    model: str = STT_MODEL
    language: str | None = None


class InputAudio(Strict):
    format: AudioFormat = AudioFormat()
    turn_detection: Annotated[TurnDetection, Field(discriminator="type")] | None = SemanticVad(type="semantic_vad")
    transcription: Transcription | None = Transcription()
    noise_reduction: None = None


class OutputAudio(Strict):
    format: AudioFormat = AudioFormat()
    voice: str | None = None
    speed: Annotated[float, Field(ge=MIN_SPEED, le=MAX_SPEED)] = 1.0


class Audio(Strict):
    input: InputAudio = InputAudio()
    output: OutputAudio = OutputAudio()


class OwnOptions(Strict):
    """Ours: with `early_start` an answer is begun when the person is likely to be done, and dropped if he goes on."""

    early_start: bool = True


class SessionConfig(Strict):
    """A session's settings. `model` is a tier, an engine model or "auto"."""

    type: Literal["realtime"] = "realtime"
    model: str = "auto"
    output_modalities: Modalities = Field(default=["audio"])
    instructions: Instructions = ""
    max_output_tokens: MaxTokens = "inf"
    audio: Audio = Audio()
    tools: Nothing = Field(default=[])
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: bool | None = None
    include: Nothing | None = None
    prompt: None = None
    reasoning: None = None
    tracing: None = None
    truncation: Literal["auto"] = "auto"
    rt: OwnOptions = OwnOptions()

    @property
    def speaks(self) -> bool:
        return self.output_modalities == ["audio"]

    def update(
        self, changes: dict[str, Any], transcriber: Transcriber | None, speaker: Speaker | None
    ) -> SessionConfig:
        """With `changes` in the places of what they name. Raises `InvalidRequestError` naming the field."""
        try:
            config = SessionConfig.model_validate(_merge(self.model_dump(), changes))
        except ValidationError as error:
            raise _in_session(error) from error
        if "type" not in changes:
            raise refused("session.type", 'required; it is "realtime"')
        if config.model != self.model:
            raise refused("session.model", f"cannot change; connect with ?model={config.model[:80]}")
        wants_sound = config.speaks and "output_modalities" in changes
        if speaker is None and (wants_sound or "output" in (changes.get("audio") or {})):
            raise refused("session.output_modalities", "no model of this server speaks; use ['text']")
        voice = config.audio.output.voice
        if speaker is not None and voice not in (None, speaker.voice):
            raise refused("session.audio.output.voice", f"there is one, {speaker.voice!r} (got {shorten(voice)})")
        heard = config.audio.input.transcription
        if transcriber is not None and heard is not None:
            if heard.model not in (STT_MODEL, transcriber.name):
                name = "session.audio.input.transcription.model"
                raise refused(name, f"one of {STT_MODEL}, {transcriber.name} (got {shorten(heard.model)})")
            if heard.language not in (None, transcriber.language):
                name = "session.audio.input.transcription.language"
                raise refused(name, f"must be {transcriber.language!r} (got {shorten(heard.language)})")
        return config


def _merge(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Tables are merged, all else is replaced; the table `turn_detection` too, whose fields depend on its type."""
    merged = dict(settings)
    for name, value in changes.items():
        old = settings.get(name)
        is_table = isinstance(value, dict) and isinstance(old, dict) and name != "turn_detection"
        merged[name] = _merge(old, value) if is_table else value  # type: ignore[arg-type]
    return merged


# --- items and responses -----------------------------------------------------------------------------------


class Content(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str


class NewItem(Strict):
    """A message of text. Sound comes by `input_audio_buffer.append`."""

    type: Literal["message"]
    role: Literal["system", "user", "assistant"]
    content: Annotated[list[Content], Field(min_length=1, max_length=16)]
    id: Annotated[str, Field(pattern=ITEM_ID)] | None = None
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class ResponseOptions(Strict):
    """What one answer has in the place of the session's; `input` in the place of the conversation."""

    output_modalities: Modalities | None = None
    instructions: Instructions | None = None
    max_output_tokens: MaxTokens | None = None
    conversation: Literal["auto", "none"] = "auto"
    input: Annotated[list[NewItem], Field(min_length=1, max_length=100)] | None = None
    metadata: dict[str, str] | None = None
    tools: Nothing = Field(default=[])
    tool_choice: Literal["auto", "none"] = "auto"


# --- events ------------------------------------------------------------------------------------------------


class ClientEvent(Strict):
    type: str
    event_id: Annotated[str, Field(max_length=512)] | None = None


class UpdateSession(ClientEvent):
    session: dict[str, Any]


class AppendAudio(ClientEvent):
    audio: str


class CommitAudio(ClientEvent):
    pass


class ClearAudio(ClientEvent):
    pass


class CreateItem(ClientEvent):
    item: NewItem
    previous_item_id: str | None = None


class OneItem(ClientEvent):
    item_id: str


class TruncateItem(ClientEvent):
    item_id: str
    content_index: Literal[0]
    audio_end_ms: Annotated[int, Field(ge=0, lt=1 << 31)]


class CreateResponse(ClientEvent):
    response: ResponseOptions = ResponseOptions()


class CancelResponse(ClientEvent):
    response_id: str | None = None


EVENTS: dict[str, type[ClientEvent]] = {
    "session.update": UpdateSession,
    "input_audio_buffer.append": AppendAudio,
    "input_audio_buffer.commit": CommitAudio,
    "input_audio_buffer.clear": ClearAudio,
    "conversation.item.create": CreateItem,
    "conversation.item.retrieve": OneItem,
    "conversation.item.delete": OneItem,
    "conversation.item.truncate": TruncateItem,
    "response.create": CreateResponse,
    "response.cancel": CancelResponse,
}


def read_json(text: str) -> dict[str, Any]:
    """A client's message. Raises `InvalidRequestError`."""
    if len(text) > MAX_EVENT_BYTES:
        raise InvalidRequestError(f"the event has {len(text)} characters; at most {MAX_EVENT_BYTES} are allowed")
    try:
        fields = json.loads(text)
        if "\\u" in text:
            json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # much of it is told the client again, as UTF-8
        raise InvalidRequestError("the event holds half of a surrogate pair, which no text can hold") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the event is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"the event must be a JSON object (got {shorten(fields)})")
    return fields


def parse_event(fields: dict[str, Any]) -> ClientEvent:
    """Raises `InvalidRequestError` naming the field."""
    name = fields.get("type")
    if not isinstance(name, str) or name not in EVENTS:
        raise refused("type", f"{shorten(name)} is no event of a client; one of {', '.join(EVENTS)}")
    try:
        return EVENTS[name].model_validate(fields)
    except ValidationError as error:
        raise explain(error) from error
    except RecursionError as error:
        raise InvalidRequestError("the event is nested too deeply") from error


def refused(field: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {reason}", param=field)


def _in_session(error: ValidationError) -> InvalidRequestError:
    found = explain(error)
    field = f"session.{found.param}" if found.param else "session"
    return InvalidRequestError(f"session.{found.message}" if found.param else found.message, param=field)
