"""`python -m orchestrator talk FILE.wav`: ask a recorded question over `/v1/realtime`, as a microphone would.

`VoiceClient` does what voice clients do: it sends sound in real time, plays what comes in real time, and falls silent
when somebody speaks. It needs the extras `gateway` (websockets) and, to read recordings, `voice`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
import wave
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.contracts import SAMPLE_RATE_HZ
from orchestrator.errors import ApiError
from orchestrator.voice.recording import Recording

ANSWER_RATE_HZ = 24_000
_CHUNK_S = 0.04  # what a browser sends at a time
_CHUNK = int(_CHUNK_S * SAMPLE_RATE_HZ)
_TIMEOUT_S = 60.0

Floats = npt.NDArray[np.float32]


class TalkError(Exception):
    """The server cannot be reached, refused, or did not answer; the text says which."""


@dataclass(frozen=True)
class Received:
    """An event, and when it came (monotonic)."""

    at_s: float
    event: dict[str, Any]

    @property
    def type(self) -> str:
        return str(self.event["type"])


class VoiceClient:
    """One session. Times are of `time.monotonic`."""

    def __init__(self, socket: Any) -> None:
        self.received: list[Received] = []
        self.audio = bytearray()  # PCM16 at 24 kHz: what a listener hears
        self.silent_s = 0.0  # when he has heard, or thrown away, all that came so far
        self.longest_gap_s = 0.0  # inside of an answer: he had heard all that came, and more was to come
        self._socket = socket
        self._playing = ""  # the id of the answer
        self._waiting: Floats = np.empty(0, np.float32)  # to be said
        self._num_sent = 0
        self._began_s = 0.0
        self._news = asyncio.Condition()
        self._failure: BaseException | None = None

    async def send(self, name: str, **fields: Any) -> None:
        await self._socket.send(json.dumps({"type": name, **fields}))

    def say(self, samples: Floats) -> float:
        """FP32 at 16 kHz, after what is being said; returns when its first sample is spoken."""
        begin = self._num_sent + len(self._waiting)
        self._waiting = np.concatenate([self._waiting, samples])
        return self._began_s + begin / SAMPLE_RATE_HZ

    async def wait_for(
        self, name: str, since: int = 0, timeout_s: float = _TIMEOUT_S, where: Callable[[Received], bool] | None = None
    ) -> Received:
        """The first such event from number `since` on. Raises `TalkError`."""

        def find() -> Received | None:
            found = (each for each in self.received[since:] if each.type == name and (where is None or where(each)))
            return next(found, None)

        try:
            async with self._news:
                await asyncio.wait_for(
                    self._news.wait_for(lambda: find() is not None or self._failure is not None), timeout_s
                )
        except asyncio.TimeoutError:
            raise TalkError(f"no {name} within {timeout_s:g} s; the last events: {self._last_types()}") from None
        if (got := find()) is None:
            raise TalkError(f"the session ended before {name}: {self._failure}")
        return got

    async def wait_for_any(self, *names: str) -> Received:
        """The first event, if it is one of these. Raises `TalkError`."""
        async with self._news:
            await asyncio.wait_for(self._news.wait_for(lambda: self.received or self._failure is not None), _TIMEOUT_S)
        if not self.received or self.received[0].type not in names:
            raise TalkError(f"the session did not begin: {self._failure or self.received[0].event}")
        return self.received[0]

    def _last_types(self) -> str:
        return ", ".join(each.type for each in self.received[-5:])

    def turn_on(self) -> None:
        """The microphone, which `feed` then reads."""
        self._began_s = time.monotonic()

    async def feed(self) -> None:
        """A chunk whenever its last sample would have been recorded; silence where nothing is said."""
        while True:
            chunk, self._waiting = self._waiting[:_CHUNK], self._waiting[_CHUNK:]
            chunk = np.pad(chunk, (0, _CHUNK - len(chunk)))
            self._num_sent += _CHUNK
            await asyncio.sleep(max(self._began_s + self._num_sent / SAMPLE_RATE_HZ - time.monotonic(), 0))
            pcm = (np.clip(chunk, -1, 1) * 32767).astype("<i2").tobytes()
            await self.send("input_audio_buffer.append", audio=base64.b64encode(pcm).decode())

    async def receive(self) -> None:
        try:
            async for message in self._socket:
                await self._take(Received(time.monotonic(), json.loads(message)))
            self._failure = TalkError("the server closed it")
        except Exception as error:
            self._failure = error
        async with self._news:
            self._news.notify_all()

    async def _take(self, received: Received) -> None:
        event = received.event
        if received.type == "response.output_audio.delta":
            pcm = base64.b64decode(event["delta"])
            if event["response_id"] == self._playing:
                self.longest_gap_s = max(self.longest_gap_s, received.at_s - self.silent_s)
            self._playing = event["response_id"]
            self.audio += pcm
            self.silent_s = max(self.silent_s, received.at_s) + len(pcm) / 2 / ANSWER_RATE_HZ
        elif received.type == "input_audio_buffer.speech_started":  # what was not played yet is thrown away
            num_unheard = int(max(self.silent_s - received.at_s, 0) * ANSWER_RATE_HZ)
            if num_unheard:
                del self.audio[-2 * num_unheard :]
            self.silent_s, self._playing = min(self.silent_s, received.at_s), ""
        async with self._news:
            self.received.append(received)
            self._news.notify_all()


@asynccontextmanager
async def talking(
    url: str, session: Mapping[str, Any] | None = None, *, model: str = "auto", key: str | None = None
) -> AsyncIterator[VoiceClient]:
    """A session with the gateway at `url` and the settings `session`, whose microphone is on. Raises `TalkError`."""
    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidStatus, WebSocketException

    address = f"{url.replace('http', 'ws', 1)}/v1/realtime?model={model}"
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        async with connect(address, additional_headers=headers, proxy=None, compression=None) as socket:
            client = VoiceClient(socket)
            running = [asyncio.create_task(client.receive())]
            try:
                began = await client.wait_for_any("session.created", "error")
                if began.type == "error":
                    raise TalkError(began.event["error"]["message"])
                formats = {
                    "input": {"format": {"type": "audio/pcm", "rate": SAMPLE_RATE_HZ}},
                    "output": {"format": {"type": "audio/pcm", "rate": ANSWER_RATE_HZ}},
                }
                settings = dict(session or {})
                audio = {name: {**formats[name], **settings.get("audio", {}).get(name, {})} for name in formats}
                await client.send("session.update", session={"type": "realtime", **settings, "audio": audio})
                await client.wait_for("session.updated")
                client.turn_on()
                running.append(asyncio.create_task(client.feed()))
                yield client
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
    except InvalidStatus as error:
        body = error.response.body or b""
        raise TalkError(f"HTTP {error.response.status_code}: {body.decode(errors='replace')}") from error
    except (OSError, WebSocketException) as error:
        raise TalkError(f"{url}: {error}") from error


def talk(url: str, question: Path, answer: Path, model: str, key: str | None = None) -> None:
    """Ask the question in the file `question`, write what is answered to `answer`, print what took how long.

    Raises `TalkError`, or `OSError` of the two files.
    """
    try:
        samples = np.concatenate(list(Recording(question.read_bytes(), str(question)).read()))
    except ImportError as error:
        raise TalkError(f"{error}; fix: pip install -c constraints.txt -e '.[gateway,voice]'") from error
    except ApiError as error:
        raise TalkError(error.message) from error
    answer.open("ab").close()  # raises before anything is asked; an older answer stays until there is a new one
    client = asyncio.run(_ask(url, samples, model, key))
    with answer.open("wb") as file, contextlib.closing(wave.open(file, "wb")) as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(ANSWER_RATE_HZ)
        sound.writeframes(bytes(client.audio))
    _print(client, answer)


async def _ask(url: str, samples: Floats, model: str, key: str | None) -> VoiceClient:
    async with talking(url, model=model, key=key) as client:
        client.say(samples)
        timeout_s = len(samples) / SAMPLE_RATE_HZ + _TIMEOUT_S
        done = await client.wait_for("response.done", timeout_s=timeout_s)
        response = done.event["response"]
        if response["status"] == "failed":
            raise TalkError(response["status_details"]["error"]["message"])
        return client


_STAGES = {
    "transcript_ms": "what was said is known",
    "turn_end_ms": "the person is taken for done",
    "asked_ms": "the language model is asked",
    "first_token_ms": "its first token",
    "first_piece_ms": "something to be spoken",
    "first_audio_ms": "its sound is sent",
}
_WIDTH = 40


def _print(client: VoiceClient, answer: Path) -> None:
    by_type = {each.type: each.event for each in client.received}
    heard = by_type.get("conversation.item.input_audio_transcription.completed", {}).get("transcript", "")
    said = by_type["response.output_audio_transcript.done"]["transcript"]
    turn = by_type["rt.turn"]
    times = {name: turn[name] for name in _STAGES if turn.get(name) is not None}
    longest_ms = max(times.values(), default=1)
    print(f"heard:    {heard}\nanswered: {said}\n\nfrom the end of speech until")
    for name, at_ms in times.items():
        print(f"  {_STAGES[name]:30} {at_ms:8.0f} ms  {'#' * max(round(at_ms / longest_ms * _WIDTH), 1)}")
    rt = turn["rt"]
    print(f"\n[tier {rt.get('tier')} | model {rt.get('model')} | {rt.get('tokens')} tokens | cache {rt.get('cache')}]")
    print(f"the answer: {answer}, {len(client.audio) / 2 / ANSWER_RATE_HZ:.1f} s")
    print(json.dumps({**times, "heard": heard, "answered": said}))
