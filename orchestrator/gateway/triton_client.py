"""The gateway's way to the Tritons: one shared gRPC channel to each, a stream a completion."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from grpc import aio
from tritonclient.grpc import service_pb2

from orchestrator import contracts
from orchestrator.errors import ConnectionLostError, from_message
from orchestrator.infer_streams import InferStreams, Responses
from orchestrator.limits.client import Headers, Place, answer_headers_of
from orchestrator.readiness import find_not_ready
from orchestrator.replicas import Replica, Replicas
from orchestrator.request import prefix_key
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

T = TypeVar("T")


class TritonClient:
    """For one event loop. Each call goes to one of `replicas`, or all go to the same `pinned` one."""

    def __init__(self, replicas: Replicas, pinned: Replica | None = None) -> None:
        self.replicas = replicas
        self._pinned = pinned

    def open(
        self, body: bytes, headers: Iterable[tuple[str, str]], fields: Mapping[str, Any] | None = None
    ) -> EventStream:
        """A chat completion of `body` (OpenAI's JSON), to be read; `headers` become request parameters.

        With the body's `fields` it goes where the beginning of its conversation has been before.
        """
        request = new_request(contracts.ORCHESTRATOR_MODEL, uuid.uuid4().hex)
        add_string(request, contracts.REQUEST, body)
        caller = ""
        for name, value in headers:
            request.parameters[name].string_param = value
            if name == "authorization":
                caller = value
        if self._pinned is not None:
            return EventStream(Responses(self._pinned.streams, request))
        replicas, key = self.replicas, None
        if fields is not None and len(replicas.serving) > 1:
            key = prefix_key(fields, caller)
        replica = replicas.choose(key)

        def instead() -> InferStreams | None:
            other = replicas.another(replica, key)
            return None if other is None else other.streams

        return EventStream(Responses(replica.streams, request, instead))

    async def check(self, right: str, headers: Headers) -> None:
        """As `LimitsClient.check`."""
        await self.replicas.check(right, headers)

    async def serve(
        self,
        place: Place,
        model: str,
        lengths: Sequence[int],
        headers: Headers,
        work: Callable[[TritonClient], Coroutine[Any, Any, T]],
    ) -> T:
        """As `LimitsClient.serve`: `work` is done by the Triton whose place it is."""
        replicas = self.replicas
        return await replicas.serve(
            place, model, lengths, headers, lambda replica: work(TritonClient(replicas, replica))
        )

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
        return Listening(self.replicas)

    def speak(self, text: str, speed: float) -> Sound:
        """`text`, spoken."""
        request = new_request(contracts.TTS_MODEL, uuid.uuid4().hex)
        add_string(request, contracts.TEXT, text.encode())
        add_number(request, contracts.SPEED, speed)
        return Sound(Responses((self._pinned or self.replicas.choose()).streams, request))

    async def _infer(self, request: Any) -> dict[str, bytes]:
        replica = self._pinned or self.replicas.choose()
        try:
            return await _infer(replica, request)
        except ConnectionLostError:
            other = None if self._pinned else self.replicas.another(replica)
            if other is None:
                raise
        return await _infer(other, request)

    async def find_not_ready(self, engines: Mapping[str, str]) -> list[str]:
        """As `orchestrator.readiness.find_not_ready`; empty when one Triton is ready, else what each lacks."""
        replicas = self.replicas.serving
        found = await asyncio.gather(*(find_not_ready(each.streams.stub, engines) for each in replicas))
        if len(replicas) == 1:
            return found[0]
        if not all(found):
            return []
        return [f"{replica.name}: {name}" for replica, names in zip(replicas, found) for name in names]


async def _infer(replica: Replica, request: Any) -> dict[str, bytes]:
    try:
        return read_outputs(await replica.streams.infer(request))
    except aio.AioRpcError as error:
        raise from_message(error.details() or error.code().name) from error


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
    """A person's sound, frame by frame, through `vad`: one sequence. For one caller at a time.

    It stays with one Triton while that is well and takes requests; another one begins anew, as after a pause.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._replica: Replica | None = None
        self._sequence_id = 0
        self._heard_s: float | None = None  # when the last frame was; None: nothing was yet, or it failed

    async def hear(self, frame: bytes) -> float:
        """Little-endian FP32 [512], how probably he speaks; raises as `TritonClient.embed_text`."""
        replica, replicas = self._replica, self._replicas
        if replica is None or replica not in replicas.serving or not (replica.is_up or len(replicas.serving) == 1):
            replica, self._heard_s = replicas.choose(), None
        try:
            return await self._hear(replica, frame)
        except ConnectionLostError:
            other = replicas.another(replica)
            if other is None:
                raise
            return await self._hear(other, frame)

    async def _hear(self, replica: Replica, frame: bytes) -> float:
        now_s = time.monotonic()
        starts = self._heard_s is None or now_s - self._heard_s > _FORGOTTEN_S
        self._replica = replica
        self._heard_s = None
        if starts:
            self._sequence_id = random.getrandbits(62) + 1
        request = service_pb2.ModelInferRequest(model_name=contracts.VAD_MODEL)
        add_floats(request, contracts.FRAME, frame)
        request.inputs[-1].shape[:] = [1, contracts.FRAME_SAMPLES]
        request.parameters["sequence_id"].int64_param = self._sequence_id
        request.parameters["sequence_start"].bool_param = starts
        request.parameters["sequence_end"].bool_param = False
        probability = read_float((await _infer(replica, request))[contracts.SPEECH_PROBABILITY.name])
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
