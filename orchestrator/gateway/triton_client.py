"""The gateway's way to Triton: one shared gRPC channel, a stream a completion."""

from __future__ import annotations

import contextlib
import random
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from grpc import aio
from tritonclient.grpc import service_pb2

from orchestrator import contracts
from orchestrator.errors import from_message
from orchestrator.infer_streams import InferStreams, Responses
from orchestrator.limits.client import LimitsClient, answer_headers_of
from orchestrator.readiness import find_not_ready
from orchestrator.wire import (
    add_floats,
    add_number,
    add_row,
    add_string,
    add_values,
    find_output,
    new_request,
    read_float,
    read_outputs,
)

# Shorter than model_repository/vad's `max_sequence_idle_microseconds`, 5 s: a person of whom nothing was heard for so
# long begins anew.
_FORGOTTEN_S = 4.0


class TritonClient:
    """For one event loop; `close` it there."""

    def __init__(self, url: str, *, with_keys: bool) -> None:
        """`url` is host:port of Triton's gRPC service; nothing is sent before the first request.

        `with_keys` says that the orchestrator has keys.
        """
        self._streams = InferStreams(url)
        self.limits = LimitsClient(self._streams, with_keys=with_keys)

    async def close(self) -> None:
        await self._streams.close()

    def open(self, body: bytes, headers: Iterable[tuple[str, str]]) -> EventStream:
        """A chat completion of `body` (OpenAI's JSON), to be read; `headers` become request parameters."""
        request = new_request(contracts.ORCHESTRATOR_MODEL, uuid.uuid4().hex)
        add_string(request, contracts.REQUEST, body)
        for name, value in headers:
            request.parameters[name].string_param = value
        return EventStream(Responses(self._streams, request))

    async def embed_text(self, text: str) -> tuple[bytes, int]:
        """The embedding of `text` as little-endian FP32, and its number of tokens.

        Raises the `ApiError` that the embedder answered with, or `EngineError` when Triton itself failed.
        """
        request = service_pb2.ModelInferRequest(model_name=contracts.EMBEDDING_MODEL)
        add_string(request, contracts.TEXT, text.encode(), (1, 1))
        outputs = await self._infer(request)
        return outputs[contracts.EMBEDDING.name], int.from_bytes(outputs[contracts.NUM_TOKENS.name], "little")

    async def embed_ids(self, input_ids: Sequence[int], attention_mask: Sequence[int]) -> bytes:
        """The embedding of padded token ids; raises like `embed_text`."""
        request = service_pb2.ModelInferRequest(model_name=contracts.EMBEDDING_ENCODER_MODEL)
        add_row(request, contracts.EMBEDDING_INPUT_IDS, *input_ids)
        add_row(request, contracts.ATTENTION_MASK, *attention_mask)
        return (await self._infer(request))[contracts.EMBEDDING.name]

    async def read_image(self, image: bytes) -> bytes:
        """The text of an image as JSON; raises like `embed_text`."""
        request = service_pb2.ModelInferRequest(model_name=contracts.OCR_MODEL)
        add_string(request, contracts.IMAGE, image)
        raw = (await self._infer(request))[contracts.OCR_RESULT.name]
        return raw[4:]  # one STRING element: a length of 4 bytes, then the text

    async def transcribe(self, audio: bytes, temperature: float, *, is_partial: bool = False) -> bytes:
        """What is said in `audio`, little-endian FP32 at 16 kHz, as `voice.transcript` encodes it; as `embed_text`.

        `is_partial` is quicker, and never tries twice.
        """
        request = service_pb2.ModelInferRequest(model_name=contracts.STT_MODEL)
        add_floats(request, contracts.AUDIO, audio)
        add_number(request, contracts.TEMPERATURE, temperature)
        if is_partial:
            add_values(request, contracts.PARTIAL, True)
        return (await self._infer(request))[contracts.SEGMENTS.name][4:]  # behind the length of the one element

    async def judge_turn(self, audio: bytes) -> float:
        """How probably the person whose turn is `audio` (as for `transcribe`) is done; raises like `embed_text`."""
        request = service_pb2.ModelInferRequest(model_name=contracts.TURN_MODEL)
        add_floats(request, contracts.AUDIO, audio)
        return read_float((await self._infer(request))[contracts.DONE_PROBABILITY.name])

    def listen(self) -> Listening:
        """To one person."""
        return Listening(self._infer)

    def speak(self, text: str, speed: float) -> Sound:
        """`text`, spoken."""
        request = new_request(contracts.TTS_MODEL, uuid.uuid4().hex)
        add_string(request, contracts.TEXT, text.encode())
        add_number(request, contracts.SPEED, speed)
        return Sound(Responses(self._streams, request))

    async def _infer(self, request: Any) -> dict[str, bytes]:
        try:
            return read_outputs(await self._streams.stub.ModelInfer(request))
        except aio.AioRpcError as error:
            raise from_message(error.details() or error.code().name) from error

    async def find_not_ready(self, engines: Mapping[str, str]) -> list[str]:
        """As `orchestrator.readiness.find_not_ready`."""
        return await find_not_ready(self._streams.stub, engines)


class EventStream:
    """The events of one call, for one reader. `cancel` ends the generation; it may be called at any time.

    `headers` are the answer's, known with the first event.
    """

    def __init__(self, responses: Responses) -> None:
        self.headers: dict[str, str] = {}
        self._responses = responses
        self.cancel = responses.cancel

    async def read(self) -> AsyncGenerator[bytes, None]:
        """Each event's JSON.

        Raises the `ApiError` that the orchestrator sent, or `EngineError` when Triton itself failed.
        """
        async with contextlib.aclosing(self._responses.read()) as reading:
            async for response in reading:
                if response.error_message:
                    raise from_message(response.error_message)
                if raw := find_output(response, contracts.EVENT):
                    self.headers = self.headers or answer_headers_of(response)
                    yield raw[4:]  # one STRING element: a length of 4 bytes, then the text


class Listening:
    """A person's sound, frame by frame, through `vad`: one sequence. For one caller at a time."""

    def __init__(self, infer: Callable[[Any], Awaitable[dict[str, bytes]]]) -> None:
        self._infer = infer
        self._sequence_id = 0
        self._heard_s: float | None = None  # when the last frame was; None: nothing was yet, or it failed

    async def hear(self, frame: bytes) -> float:
        """Little-endian FP32 [512], how probably he speaks; raises as `TritonClient.embed_text`."""
        now_s = time.monotonic()
        starts = self._heard_s is None or now_s - self._heard_s > _FORGOTTEN_S
        self._heard_s = None
        if starts:
            self._sequence_id = random.getrandbits(62) + 1
        request = service_pb2.ModelInferRequest(model_name=contracts.VAD_MODEL)
        add_floats(request, contracts.FRAME, frame)
        request.inputs[-1].shape[:] = [1, contracts.FRAME_SAMPLES]
        request.parameters["sequence_id"].int64_param = self._sequence_id
        request.parameters["sequence_start"].bool_param = starts
        request.parameters["sequence_end"].bool_param = False
        probability = read_float((await self._infer(request))[contracts.SPEECH_PROBABILITY.name])
        self._heard_s = now_s
        return probability


class Sound:
    """What `tts` speaks of one text, for one reader. `cancel` ends it; it may be called at any time."""

    def __init__(self, responses: Responses) -> None:
        self.cancel = responses.cancel
        self._responses = responses

    async def read(self) -> AsyncGenerator[tuple[bytes, int], None]:
        """PCM16 of one channel, little-endian, and its samples a second, by sentence; as `EventStream.read`."""
        async with contextlib.aclosing(self._responses.read()) as reading:
            async for response in reading:
                if response.error_message:
                    raise from_message(response.error_message)
                if pcm := find_output(response, contracts.PCM):
                    yield pcm, int.from_bytes(find_output(response, contracts.PCM_RATE) or b"", "little")
