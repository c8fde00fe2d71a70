"""`/v1/realtime`: the WebSocket of a voice or text session (`orchestrator.voice.session`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import uuid
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send

from orchestrator.errors import ApiError, InternalError, InvalidRequestError, ModelNotFoundError, shorten
from orchestrator.gateway.errors import SessionLimitError
from orchestrator.gateway.messages import forwarded_headers, refuse
from orchestrator.gateway.metrics import DECISIONS, SESSIONS, TURN_S
from orchestrator.gateway.request_id import REQUEST_ID_HEADER, new_request_id
from orchestrator.gateway.triton_client import EventStream, Listening, Sound, TritonClient
from orchestrator.limits.client import Place, look_at
from orchestrator.request import read_fields
from orchestrator.voice.chunks import Floats
from orchestrator.voice.engines import Engines
from orchestrator.voice.response import TurnTimes
from orchestrator.voice.session import Abilities, Counts, Session
from orchestrator.voice.transcript import Segment, decode_segments

REALTIME_PATH = "/v1/realtime"
PROTOCOL = "realtime"
# OpenAI's way for browsers, which cannot set headers, to send a key.
_KEY_PROTOCOL = "openai-insecure-api-key."
# Sessions at a time, by gateway process. Ten that hear and speak are what two cores serve in time; text costs less.
SESSIONS_PER_CORE = 5
TEXT_SESSIONS_PER_CORE = 50
# Who sends nothing at all for so long is gone, whatever his connection says. Silence is something.
IDLE_S = 900.0
# Events that wait for a client who does not read. Of sound no more is sent while any waits.
MAX_WAITING = 1000
_TRY_AGAIN_LATER, _INTERNAL_ERROR, _POLICY, _GOING_AWAY = 1013, 1011, 1008, 1001

T = TypeVar("T")


class Realtime:
    """An ASGI endpoint. A client that leaves ends all that runs for him, in the engines too."""

    def __init__(
        self,
        triton: TritonClient,
        abilities: Abilities,
        models: Sequence[str],
        *,
        idle_s: float = IDLE_S,
    ) -> None:
        """`models` may be asked for in the address: ``/v1/realtime?model=auto``."""
        self._triton = triton
        self._abilities = abilities
        self._models = models
        self._idle_s = idle_s
        self._num_sessions = 0
        self.max_sessions = max_sessions(abilities)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        try:
            model = self._find_model(scope)
            headers = caller_headers(scope)
            await self._triton.check("models", headers)
        except ApiError as error:
            await refuse(send, error)
            return
        subprotocol = PROTOCOL if PROTOCOL in scope["subprotocols"] else None
        await send({"type": "websocket.accept", "subprotocol": subprotocol, "headers": []})
        if self._num_sessions >= self.max_sessions:
            full = SessionLimitError(
                f"{self._num_sessions} sessions are open, which is what this server takes at a time; try again later"
            )
            outbox = Outbox(send)
            outbox.emit({"type": "error", "error": {**full.body()["error"], "event_id": None}})
            await outbox.flush()
            await send({"type": "websocket.close", "code": _TRY_AGAIN_LATER, "reason": full.code})
            return
        self._num_sessions += 1
        SESSIONS.inc()
        try:
            await self._serve(receive, send, model, headers)
        finally:
            self._num_sessions -= 1
            SESSIONS.dec()

    def _find_model(self, scope: Scope) -> str:
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        for name, _ in query:
            if name != "model":
                raise InvalidRequestError(f"{shorten(name)}: not supported in the address; remove it", param=name[:80])
        model = query[-1][1] if query else self._models[0]
        if model not in self._models:
            known = ", ".join(self._models)
            raise ModelNotFoundError(f"model: {shorten(model)} does not exist; one of {known}", param="model")
        return model

    async def _serve(self, receive: Receive, send: Send, model: str, headers: list[tuple[str, str]]) -> None:
        outbox = Outbox(send)
        session = Session(self._make_engines(headers), self._abilities, outbox, model, counts=_PrometheusCounts())
        writing = asyncio.create_task(outbox.run())
        close: tuple[int, str] | None = None
        try:
            session.begin()
            close = await self._relay(receive, session, outbox)
        except Exception:
            session.tell_error(InternalError("internal error; the server's log tells it"))
            close = _INTERNAL_ERROR, "internal_error"
            raise
        finally:
            outbox.close()
            await asyncio.shield(session.close())
            writing.cancel()
            await asyncio.wait([writing])
            look_at(writing)
            if close is not None:
                with contextlib.suppress(Exception):  # the client is gone
                    await asyncio.wait_for(outbox.flush(), 1.0)
                    await send({"type": "websocket.close", "code": close[0], "reason": close[1]})

    def _make_engines(self, headers: list[tuple[str, str]]) -> Engines:
        return TritonEngines(self._triton, headers)

    async def _relay(self, receive: Receive, session: Session, outbox: Outbox) -> tuple[int, str] | None:
        """Until the client leaves (None), or the connection is to be closed: with which code and reason."""
        while True:
            try:
                message = await asyncio.wait_for(receive(), self._idle_s)
            except asyncio.TimeoutError:
                session.tell_error(InvalidRequestError(f"nothing was sent for {self._idle_s:g} s; the session ends"))
                return _GOING_AWAY, "idle"
            if message["type"] == "websocket.disconnect":
                return None
            if outbox.is_closed:
                return _POLICY, "the events are not read"
            if message.get("text") is None:
                session.tell_error(
                    InvalidRequestError(
                        "binary frames are not taken; send events as JSON in text frames, and sound as base64 in "
                        "input_audio_buffer.append"
                    )
                )
            else:
                await session.receive(message["text"])


class Outbox:
    """A session's events on their way to the client, in order. The session never waits for a client to read."""

    def __init__(self, send: Send) -> None:
        self.is_closed = False
        self._send = send
        self._waiting: deque[dict[str, Any]] = deque()
        self._has_some = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def emit(self, event: dict[str, Any]) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self.close()  # he does not read, and his events have a gap now
        if not self.is_closed:
            self._waiting.append(event)
            self._has_some.set()
            self._is_empty.clear()

    async def drain(self) -> None:
        """Until all was taken by the connection, whose own buffer is 64 KiB."""
        if not self.is_closed:
            await self._is_empty.wait()

    def close(self) -> None:
        """What comes from now on is for nobody."""
        self.is_closed = True
        self._is_empty.set()

    async def run(self) -> None:
        """Ends when the client is gone."""
        try:
            while True:
                await self._has_some.wait()
                self._has_some.clear()
                await self.flush()
        finally:
            self.close()

    async def flush(self) -> None:
        while self._waiting:
            event = self._waiting.popleft()
            text = json.dumps({"event_id": f"event_{uuid.uuid4().hex[:24]}", **event}, ensure_ascii=False)
            await self._send({"type": "websocket.send", "text": text})
        self._is_empty.set()


class TritonEngines:
    """The session's models, by Triton, in the name of one caller."""

    _num_transcribing = 0  # of all sessions of this process

    def __init__(self, triton: TritonClient, headers: list[tuple[str, str]]) -> None:
        self._triton = triton
        self._headers = [(name, value) for name, value in headers if name != REQUEST_ID_HEADER.decode()]

    def meet(self) -> TritonPerson:
        return TritonPerson(self._triton.listen())

    async def transcribe(self, audio: Floats, offset_s: float) -> list[Segment]:
        async def ask() -> bytes:
            TritonEngines._num_transcribing += 1
            try:
                return await self._triton.transcribe(audio.tobytes(), 0.0, is_partial=True)
            finally:
                TritonEngines._num_transcribing -= 1

        return decode_segments(await _finish(ask()), offset_s)

    def is_transcribing(self) -> bool:
        return TritonEngines._num_transcribing > 0

    async def judge(self, audio: Floats) -> float:
        return await _finish(self._triton.judge_turn(audio[-_JUDGED_SAMPLES:].tobytes()))

    def answer(self, body: bytes) -> EventStream:
        headers = [*self._headers, (REQUEST_ID_HEADER.decode(), new_request_id().decode())]
        return self._triton.open(body, headers, read_fields(body))

    def speak(self, text: str, speed: float) -> Sound:
        return self._triton.speak(text, speed)

    async def charge(self, model: Literal["stt", "tts"]) -> None:
        if self._triton.replicas.with_keys:
            await self._triton.serve(Place(), model, (), self._headers, _nothing)


class TritonPerson:
    def __init__(self, listening: Listening) -> None:
        self._listening = listening

    async def hear(self, frame: Floats) -> float:
        return await self._listening.hear(frame.tobytes())


class _PrometheusCounts(Counts):
    def turn(self, times: TurnTimes) -> None:
        if times.speech_end_s is None:
            return
        stages = {
            "transcript": times.transcript_s,
            "first_token": times.first_token_s,
            "first_audio": times.first_audio_s,
        }
        for stage, at_s in stages.items():
            if at_s is not None:
                TURN_S.labels(stage).observe(max(at_s - times.speech_end_s, 0))

    def decide(self, what: str) -> None:
        DECISIONS.labels(what).inc()


def max_sessions(abilities: Abilities) -> int:
    per_core = TEXT_SESSIONS_PER_CORE if abilities.transcriber is None else SESSIONS_PER_CORE
    return per_core * len(os.sched_getaffinity(0))


def caller_headers(scope: Scope) -> list[tuple[str, str]]:
    """The headers that the orchestrator reads; the key from the subprotocols, if it is there."""
    headers = forwarded_headers(scope)
    keys = [name.removeprefix(_KEY_PROTOCOL) for name in scope["subprotocols"] if name.startswith(_KEY_PROTOCOL)]
    if keys and not any(name == "authorization" for name, _ in headers):
        headers.append(("authorization", f"Bearer {keys[0]}"))
    return headers


async def _nothing(_: TritonClient) -> None:
    """What is charged for runs beside."""


# The last 8 s are all that smart-turn looks at.
_JUDGED_SAMPLES = 8 * 16_000


async def _finish(asked: Coroutine[Any, Any, T]) -> T:
    """Who waits may be cancelled. What Triton has begun goes on: it leaks a request that is cancelled as it ends."""
    task = asyncio.ensure_future(asked)
    task.add_done_callback(look_at)
    return await asyncio.shield(task)
