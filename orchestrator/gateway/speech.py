"""`/v1/audio/speech`: a text to the Triton model `tts`; its sound as a file that streams, sentence by sentence."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import numpy as np
from starlette.types import Message, Receive, Scope, Send

from orchestrator.config import Speaker
from orchestrator.contracts import TTS_MODEL
from orchestrator.errors import ApiError, CancelledError, EngineError
from orchestrator.gateway.messages import (
    ClientLeft,
    attended,
    encode_headers,
    forwarded_headers,
    send_error,
)
from orchestrator.gateway.places import json_body
from orchestrator.gateway.triton_client import Sound, TritonClient
from orchestrator.limits.client import Place
from orchestrator.voice.request import SpeechRequest, parse_speech_request
from orchestrator.voice.speaking import wav_header

SPEECH_PATH = "/v1/audio/speech"
PCM_RATE_HZ = 24_000  # of OpenAI's `pcm`, which says nothing of it in the file
_MEDIA_TYPES = {"wav": b"audio/wav", "pcm": b"audio/pcm"}


class Speaking:
    """An ASGI endpoint. For a client that leaves, what is being spoken ends after its sentence."""

    def __init__(self, triton: TritonClient, speaker: Speaker | None) -> None:
        """Without a `speaker` every request is refused."""
        self._triton = triton
        self._speaker = speaker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        place, has_begun = Place(), False

        async def send_noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            async with json_body(scope, receive, self._triton) as body:
                request = parse_speech_request(body, self._speaker)
            async with attended(receive, place.cancel):
                await self._triton.serve(
                    place, TTS_MODEL, (), forwarded_headers(scope), partial(self._speak, request, place, send_noted)
                )
        except (ClientLeft, CancelledError):  # nobody reads on
            return
        except ApiError as error:
            if has_begun:
                raise  # the connection is cut, so that the file does not look whole
            await send_error(send, error)

    async def _speak(self, request: SpeechRequest, place: Place, send: Send, triton: TritonClient) -> None:
        """Headers wait for the first sound, so that an error before it has its own status."""
        sound = triton.speak(request.input, request.speed)
        place.on_cancel(sound.cancel)
        has_begun = False
        async with contextlib.aclosing(_encode(request.response_format, sound)) as encoding:
            async for part in encoding:
                if not has_begun:
                    has_begun = True
                    head = [(b"content-type", _MEDIA_TYPES[request.response_format]), *encode_headers(place.headers)]
                    await send({"type": "http.response.start", "status": 200, "headers": head})
                await send({"type": "http.response.body", "body": part, "more_body": True})
        if not has_begun:
            raise EngineError("tts ended without a sound")
        await send({"type": "http.response.body", "body": b""})


async def _encode(response_format: str, sound: Sound) -> AsyncGenerator[bytes, None]:
    """The parts of the file."""
    resampler: Any = None
    num_parts = 0
    async with contextlib.aclosing(sound.read()) as reading:
        async for pcm, rate_hz in reading:
            num_parts += 1
            if response_format == "wav":
                yield (wav_header(rate_hz) if num_parts == 1 else b"") + pcm
                continue
            if resampler is None:
                import soxr  # of the extra `voice`

                resampler = soxr.ResampleStream(rate_hz, PCM_RATE_HZ, 1, "int16")
            yield resampler.resample_chunk(np.frombuffer(pcm, "<i2")).tobytes()
    if resampler is not None:
        yield resampler.resample_chunk(np.empty(0, np.int16), last=True).tobytes()
