"""How fast speech is heard and spoken over HTTP: what the server speaks, it is given to hear."""

from __future__ import annotations

import http.client
import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from orchestrator.voice.speaking import wav_header
from perf.errors import PerfError
from perf.report import format_table, say
from perf.stack import find_artifact, running_stack
from perf.stats import percentile

# Questions as people ask them, of one sentence and of several.
TEXTS = (
    "What is the capital of France?",
    "Could you tell me, in one sentence, why the sky is blue?",
    "I would like to move my appointment. It was on Monday at nine. Is there still room on Thursday afternoon?",
)
_BYTES_A_S = 24_000 * 2  # of `pcm`
_BOUNDARY = "sound-follows"
_TIMEOUT_S = 120


def speech(artifacts: Path, rounds: int) -> tuple[str, dict[str, Any]]:
    """Each of `TEXTS`, `rounds` times, one request at a time, after one that warms up."""
    spoken: dict[str, list[float]] = {"first_sound_ms": [], "whole_ms": [], "real_time_factor": []}
    heard: dict[str, list[float]] = {"whole_ms": [], "real_time_factor": []}
    with running_stack(find_artifact(artifacts, "cpu-voice")) as stack:
        for number in range(rounds + 1):
            say(f"round {number} of {rounds}" if number else "warming up")
            for text in TEXTS:
                first_ms, spoken_ms, pcm = speak(stack.gateway_url, text)
                sound_ms = len(pcm) / _BYTES_A_S * 1000
                heard_ms = _hear(stack.gateway_url, as_wav(pcm))
                if number:
                    spoken["first_sound_ms"].append(first_ms)
                    spoken["whole_ms"].append(spoken_ms)
                    spoken["real_time_factor"].append(spoken_ms / sound_ms)
                    heard["whole_ms"].append(heard_ms)
                    heard["real_time_factor"].append(heard_ms / sound_ms)
    summaries = {"tts": _summary(spoken), "stt": _summary(heard)}
    rows = [
        (f"{model} {name}", points["p50"], points["p95"])
        for model, summary in summaries.items()
        for name, points in summary.items()
    ]
    return format_table(("", "p50", "p95"), rows), {"command": "speech", **summaries, "rounds": rounds}


def _summary(values: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        name: {f"p{percent}": round(percentile(each, percent), 3) for percent in (50, 95)}
        for name, each in values.items()
    }


def speak(url: str, text: str) -> tuple[float, float, bytes]:
    """Milliseconds to the first sound and to the last, and the sound."""
    body = {"model": "tts", "voice": "joe", "input": text, "response_format": "pcm"}
    connection = _connect(url)
    started_s = time.monotonic()
    connection.request("POST", "/v1/audio/speech", json.dumps(body), {"content-type": "application/json"})
    answer = _check(connection.getresponse())
    first = answer.read1(1 << 16)
    first_s = time.monotonic()
    pcm = first + answer.read()
    ended_s = time.monotonic()
    connection.close()
    return (first_s - started_s) * 1000, (ended_s - started_s) * 1000, pcm


def _hear(url: str, wav: bytes) -> float:
    """Milliseconds to the transcript."""
    parts = (
        f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="model"\r\n\r\nstt\r\n--{_BOUNDARY}\r\n'
        'content-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'.encode(),
        wav,
        f"\r\n--{_BOUNDARY}--\r\n".encode(),
    )
    connection = _connect(url)
    started_s = time.monotonic()
    headers = {"content-type": f"multipart/form-data; boundary={_BOUNDARY}"}
    connection.request("POST", "/v1/audio/transcriptions", b"".join(parts), headers)
    text = json.loads(_check(connection.getresponse()).read())["text"]
    ended_s = time.monotonic()
    connection.close()
    if not text:
        raise PerfError("a question was spoken, and nothing was heard")
    return (ended_s - started_s) * 1000


def _connect(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)


def _check(answer: http.client.HTTPResponse) -> http.client.HTTPResponse:
    if answer.status != 200:
        raise PerfError(f"HTTP {answer.status}: {answer.read().decode(errors='replace')}")
    return answer


def as_wav(pcm: bytes, rate_hz: int = _BYTES_A_S // 2) -> bytes:
    return wav_header(rate_hz) + pcm
