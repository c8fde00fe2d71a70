"""The requests of `/v1/audio`, every field checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, get_args

from pydantic import Field, ValidationError

from orchestrator.config import Speaker, Transcriber
from orchestrator.contracts import STT_MODEL, TTS_MODEL
from orchestrator.errors import InvalidRequestError, ModelNotFoundError, shorten
from orchestrator.request import Strict, check_size, explain, validate
from orchestrator.voice.speaking import MAX_SPEED, MAX_TEXT_CHARACTERS, MIN_SPEED, can_be_said
from orchestrator.voice.transcript import MAX_TEMPERATURE

TranscriptFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
Granularity = Literal["word", "segment"]
GRANULARITIES_FIELD = "timestamp_granularities[]"


class SpeechRequest(Strict):
    """One `/v1/audio/speech` body. OpenAI's own default format is MP3, which is not made here: left out, it is WAV."""

    input: Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARACTERS)]
    model: str
    voice: str
    response_format: Literal["wav", "pcm"] = "wav"
    speed: Annotated[float, Field(ge=MIN_SPEED, le=MAX_SPEED)] = 1.0
    stream_format: Literal["audio"] = "audio"


class TranscriptionRequest(Strict):
    """The fields of one `/v1/audio/transcriptions` form beside its file.

    `temperature` 0 rises by itself where the words are improbable, as OpenAI's does.
    """

    model: str
    language: str | None = None
    response_format: TranscriptFormat = "json"
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] = 0.0
    timestamp_granularities: tuple[Granularity, ...] = ()
    stream: Literal[False] = False


def parse_speech_request(body: bytes, speaker: Speaker | None) -> SpeechRequest:
    """Raises `InvalidRequestError` naming the field, `ModelNotFoundError` or `RequestTooLargeError`."""
    check_size(body)
    request = validate(SpeechRequest, body)
    check_model(request.model, TTS_MODEL, speaker, "speaks")
    if speaker is not None and request.voice != speaker.voice:
        raise _refused("voice", f"there is one, {speaker.voice!r} (got {shorten(request.voice)})")
    if not can_be_said(request.input):
        raise _refused("input", "has nothing that can be said: no letter and no digit")
    return request


def parse_transcription_request(
    fields: Mapping[str, Sequence[str]], transcriber: Transcriber | None
) -> TranscriptionRequest:
    """Of a form's `fields`, by name. Raises `InvalidRequestError` naming the field, or `ModelNotFoundError`."""
    given: dict[str, object] = {}
    for name, values in fields.items():
        if name == GRANULARITIES_FIELD:
            given["timestamp_granularities"] = tuple(values)
        elif len(values) > 1:
            raise _refused(name, f"sent {len(values)} times; once is allowed")
        else:
            given[name] = values[0]
    # A form's values are texts.
    if "temperature" in given:
        given["temperature"] = _number("temperature", str(given["temperature"]))
    if given.get("stream") == "false":
        given["stream"] = False
    if not given.get("language"):
        given.pop("language", None)
    try:
        request = TranscriptionRequest.model_validate(given)
    except ValidationError as error:
        raise explain(error) from error
    check_model(request.model, STT_MODEL, transcriber, "transcribes")
    if transcriber is not None and request.language not in (None, transcriber.language):
        raise _refused("language", f"must be {transcriber.language!r} (got {shorten(request.language)})")
    if request.timestamp_granularities and request.response_format != "verbose_json":
        raise _refused(GRANULARITIES_FIELD, "needs response_format 'verbose_json'")
    return request


def check_model(asked: str, name: str, model: Transcriber | Speaker | None, does: str) -> None:
    """Raises `ModelNotFoundError` unless `asked` is the Triton model `name`, or the `model` behind it."""
    if model is None:
        raise ModelNotFoundError(f"model: no model of this server {does}; target cpu-voice has one", param="model")
    if asked not in (name, model.name):
        raise ModelNotFoundError(
            f"model: {shorten(asked)} is none that {does}; one of {name}, {model.name}", param="model"
        )


def transcript_formats() -> tuple[str, ...]:
    return get_args(TranscriptFormat)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise _refused(name, f"must be a number (got {shorten(text)})") from error


def _refused(field: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {reason}", param=field)
