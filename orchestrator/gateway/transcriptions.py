"""`/v1/audio/transcriptions`: a file in a form, decoded here, chunk by chunk to the Triton model `stt`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from orchestrator.config import Transcriber
from orchestrator.contracts import SAMPLE_RATE_HZ, STT_MODEL
from orchestrator.errors import RequestTooLargeError
from orchestrator.gateway.errors import UnsupportedMediaTypeError
from orchestrator.gateway.forms import read_form
from orchestrator.gateway.messages import JSON, attended, forwarded_headers, quote
from orchestrator.gateway.places import Answer, Room, send_answer
from orchestrator.gateway.triton_client import TritonClient
from orchestrator.limits.client import Place
from orchestrator.voice.chunks import Chunk, cut_chunks
from orchestrator.voice.recording import Recording
from orchestrator.voice.request import TranscriptionRequest, check_model, parse_transcription_request
from orchestrator.voice.subtitles import to_srt, to_vtt
from orchestrator.voice.transcript import Segment, decode_segments, join, text_of

TRANSCRIPTIONS_PATH = "/v1/audio/transcriptions"
FILE_FIELD = "file"
MAX_FILE_BYTES = 25 << 20  # OpenAI's limit
MAX_BODY_BYTES = MAX_FILE_BYTES + (64 << 10)  # with what a form puts around it
NUM_BODIES = 8  # of this size that are held at a time, all requests together

FORM = b"multipart/form-data"
_MEDIA_TYPES = {"json": JSON, "verbose_json": JSON, "vtt": b"text/vtt; charset=utf-8"}
_PLAIN = b"text/plain; charset=utf-8"
_LANGUAGES = {"en": "english"}  # OpenAI names them here


class Transcriptions:
    """An ASGI endpoint. A request has one chunk at a time in Triton, so that others get in between; for a client that
    leaves no further one is begun.
    """

    def __init__(self, triton: TritonClient, transcriber: Transcriber | None) -> None:
        """Without a `transcriber` every request is refused."""
        self._triton = triton
        self._transcriber = transcriber
        self._room = Room(MAX_BODY_BYTES, NUM_BODIES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        place = Place()
        await send_answer(send, place, self._answer(scope, receive, place))

    async def _answer(self, scope: Scope, receive: Receive, place: Place) -> Answer:
        content_type = dict(scope["headers"]).get(b"content-type", b"")
        if content_type.partition(b";")[0].strip().lower() != FORM:
            raise UnsupportedMediaTypeError(
                f"content-type: {quote(content_type)} is not allowed; send a form, as {FORM.decode()}"
            )
        check_model(STT_MODEL, STT_MODEL, self._transcriber, "transcribes")
        headers = forwarded_headers(scope)
        await self._triton.check(STT_MODEL, headers)  # nobody without a key makes us hold a body
        async with self._room.read(scope, receive) as body:
            form = await read_form(body, content_type, FILE_FIELD)
            del body
            request = parse_transcription_request(form.fields, self._transcriber)
            if len(form.file) > MAX_FILE_BYTES:
                raise RequestTooLargeError(
                    f"{FILE_FIELD}: has {len(form.file)} bytes; at most {MAX_FILE_BYTES} are allowed", param=FILE_FIELD
                )
            async with attended(receive, place.cancel):
                duration_s, segments = await self._triton.serve(
                    place, STT_MODEL, (), headers, partial(self._transcribe, form.file, request.temperature, place)
                )
        assert self._transcriber is not None
        media_type = _MEDIA_TYPES.get(request.response_format, _PLAIN)
        return Answer(_format(request, duration_s, segments, self._transcriber.language).encode(), media_type)

    async def _transcribe(
        self, file: bytes, temperature: float, place: Place, triton: TritonClient
    ) -> tuple[float, list[Segment]]:
        """Seconds of sound, and what was said."""
        recording = await asyncio.to_thread(Recording, file, FILE_FIELD)
        chunks = cut_chunks(recording.read())
        segments: list[Segment] = []
        end_s = 0.0
        while (chunk := await asyncio.to_thread(_next, chunks)) is not None:
            place.raise_if_cancelled()
            text = await triton.transcribe(chunk.audio.tobytes(), temperature)
            segments = join(segments, decode_segments(text, chunk.start_s), chunk.start_s, end_s)
            end_s = chunk.start_s + len(chunk.audio) / SAMPLE_RATE_HZ
        return recording.duration_s, segments


def _next(chunks: Iterator[Chunk]) -> Chunk | None:
    return next(chunks, None)


def _format(request: TranscriptionRequest, duration_s: float, segments: list[Segment], language: str) -> str:
    text = text_of(segments)
    if request.response_format == "text":
        return text + "\n"
    if request.response_format == "srt":
        return to_srt(segments)
    if request.response_format == "vtt":
        return to_vtt(segments)
    answer: dict[str, Any] = {"text": text, "usage": {"type": "duration", "seconds": round(duration_s)}}
    if request.response_format == "verbose_json":
        wanted = request.timestamp_granularities or ("segment",)
        answer |= {
            "task": "transcribe",
            "language": _LANGUAGES.get(language, language),
            "duration": round(duration_s, 3),
        }
        if "segment" in wanted:
            answer["segments"] = [_segment(index, segment) for index, segment in enumerate(segments)]
        if "word" in wanted:
            answer["words"] = [
                {"word": word.text.strip(), "start": round(word.start_s, 3), "end": round(word.end_s, 3)}
                for segment in segments
                for word in segment.words
            ]
    return json.dumps(answer, ensure_ascii=False)


def _segment(index: int, segment: Segment) -> dict[str, Any]:
    """OpenAI's object. Token ids and the place in the spectrogram would be those of a chunk, so there are none."""
    return {
        "id": index,
        "seek": 0,
        "start": round(segment.start_s, 3),
        "end": round(segment.end_s, 3),
        "text": segment.text,
        "tokens": [],
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }
