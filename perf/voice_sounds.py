"""What is said in `perf voice`: questions spoken by Piper, real speech with pauses; where speech begins and ends."""

from __future__ import annotations

import http.client
import itertools
import json
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from build.fetch import cache_folder, fetch
from build.model_rows import PackagedFile
from orchestrator.contracts import SAMPLE_RATE_HZ
from orchestrator.voice.recording import Recording
from perf.errors import PerfError
from perf.speech import as_wav, speak

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "How many days does a leap year have?",
    "Can you tell me who wrote Romeo and Juliet?",
    "What is the largest planet of our solar system?",
    "How do I boil an egg?",
    "Which language is spoken in Brazil?",
    "Please tell me something about the city of London.",
    "What does a dentist do?",
    "How far is it from the earth to the moon?",
    "Who was the first president of the United States?",
    "Could you explain to me what a computer is?",
    "What should I wear when it is raining?",
    "Give me a good name for a small brown dog.",
    "When did the second world war end?",
    "What is the difference between a cat and a dog?",
    "I have a headache. What can I do about it?",
    "How many legs does a spider have?",
    "What is a good recipe for pancakes?",
    "Tell me why people need to sleep at night.",
)
STORIES = (
    "Tell me a long story about a dog who lives by the sea.",
    "Please explain how bread is made, from the field to the table.",
    "Describe what a day on a farm is like, from morning to evening.",
)
INTERRUPTIONS = (
    "Wait, stop. I wanted to hear something else.",
    "No, hold on a second, please.",
    "Stop it now. What about the cat?",
)
# A Tale of Two Cities, chapter 1, read by a person: one sentence of 44 s.
TWO_CITIES = PackagedFile(
    package="moonshine-voice",
    version="0.1.5",
    folder="moonshine_voice/assets",
    file="two_cities.wav",
    sha256="f3348494d77cb74a02862f5e685ed09faf3e75832c5cc5c80703282c2cd8b52e",
)
NOISE = 10 ** (-60 / 20)  # of the rooms in which it is said, RMS
_WINDOW = SAMPLE_RATE_HZ // 100
_BREATH_S = 0.2
_BOUNDARY = "sound-follows"

Floats = npt.NDArray[np.float32]


def spoken(url: str, text: str) -> Floats:
    """`text` as `tts` says it, in a quiet room: FP32 at 16 kHz."""
    pcm = speak(url, text)[2]
    return in_a_room(decode(as_wav(pcm)))


def decode(file: bytes) -> Floats:
    return np.concatenate(list(Recording(file, "file").read()))


def in_a_room(samples: Floats, seed: int = 0) -> Floats:
    noise = np.random.default_rng(seed).normal(0, NOISE, len(samples))
    return (samples + noise).astype(np.float32)


def speech_bounds(samples: Floats) -> tuple[int, int]:
    """The first and the last sample of speech: of the 10 ms that are at most 40 dB below the loudest."""
    levels = _levels(samples)
    loud = np.flatnonzero(levels >= levels.max() / 100)
    return int(loud[0]) * _WINDOW, (int(loud[-1]) + 1) * _WINDOW


class Paused(NamedTuple):
    """FP32 at 16 kHz, and the pauses in it: first sample, and first sample behind."""

    samples: Floats
    pauses: list[tuple[int, int]]


def with_pauses(samples: Floats, words: list[tuple[float, float]], num: int, pause_s: float) -> Paused:
    """`num` pauses of `pause_s` put between words, evenly; fewer if there is no room.

    `words` are begin and end of each in seconds. Not before the second word and not behind the last but one: what is
    left would not be missed. A pause comes where it is quietest between two words.
    """
    gaps = list(itertools.pairwise(words))[1:-1]
    chosen = [gaps[len(gaps) * (2 * number + 1) // (2 * num)] for number in range(num)] if gaps else []
    chosen = sorted(set(chosen))
    parts, at = [], 0
    pauses: list[tuple[int, int]] = []
    length = int(pause_s * SAMPLE_RATE_HZ)
    for (begin_s, end_s), (next_begin_s, next_end_s) in chosen:
        cut = _quietest(
            samples, (begin_s + end_s) / 2 if next_begin_s - end_s < 0.05 else end_s - 0.05, next_begin_s + 0.08
        )
        cut = max(min(cut, int(next_end_s * SAMPLE_RATE_HZ)), at)
        pauses.append((cut + len(pauses) * length, cut + (len(pauses) + 1) * length))
        parts += [samples[at:cut], in_a_room(np.zeros(length, np.float32), seed=cut)]
        at = cut
    return Paused(np.concatenate([*parts, samples[at:]]), pauses)


def gaps_of(samples: Floats, least_s: float = 0.12) -> list[tuple[int, int]]:
    """Silences inside of real speech, as samples: where a reader paused. A breath between two is part of them."""
    quiet = _levels(samples) < _levels(samples).max() / 20
    edges = np.flatnonzero(np.diff(np.concatenate([[0], quiet.astype(np.int8), [0]])))
    runs: list[tuple[int, int]] = []
    for begin, end in edges.reshape(-1, 2).tolist():
        if end - begin < least_s * 100:
            continue
        if runs and begin - runs[-1][1] < _BREATH_S * 100:
            begin = runs.pop()[0]
        runs.append((begin, end))
    return [(begin * _WINDOW, end * _WINDOW) for begin, end in runs if begin > 50 and end < len(quiet) - 50]


def with_equal_gaps(samples: Floats, pause_s: float) -> Paused:
    """Each gap of real speech made `pause_s` long."""
    parts, at, pauses, num_added = [], 0, [], 0
    length = int(pause_s * SAMPLE_RATE_HZ)
    for begin, end in gaps_of(samples):
        pauses.append((begin + num_added, begin + num_added + length))
        missing = length - (end - begin)
        middle = (begin + end) // 2
        if missing > 0:
            parts += [samples[at:middle], np.tile(samples[begin:end], missing // (end - begin) + 1)[:missing]]
            at = middle
        else:
            parts.append(samples[at : middle + missing // 2])
            at = middle + missing // 2 - missing
        num_added += missing
    return Paused(np.concatenate([*parts, samples[at:]]), pauses)


def two_cities() -> Floats:
    return decode(fetch(TWO_CITIES, cache_folder()).read_bytes())


def words_of(url: str, samples: Floats) -> list[tuple[float, float]]:
    """Begin and end of each word in seconds, as `stt` hears it."""
    pcm = (np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()
    fields = {"model": "stt", "response_format": "verbose_json", "timestamp_granularities[]": "word"}
    parts = [
        f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    head = f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'.encode()
    body = b"".join([*parts, head, as_wav(pcm, SAMPLE_RATE_HZ), f"\r\n--{_BOUNDARY}--\r\n".encode()])
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    headers = {"content-type": f"multipart/form-data; boundary={_BOUNDARY}"}
    connection.request("POST", "/v1/audio/transcriptions", body, headers)
    response = connection.getresponse()
    answer: dict[str, Any] = json.loads(response.read())
    connection.close()
    if response.status != 200:
        raise PerfError(f"/v1/audio/transcriptions: {answer}")
    return [(word["start"], word["end"]) for word in answer["words"]]


def _levels(samples: Floats) -> npt.NDArray[np.float32]:
    """RMS of each 10 ms."""
    count = len(samples) // _WINDOW
    levels: npt.NDArray[np.float32] = np.sqrt(np.mean(samples[: count * _WINDOW].reshape(count, _WINDOW) ** 2, axis=1))
    return levels


def _quietest(samples: Floats, begin_s: float, end_s: float) -> int:
    """The middle of the quietest 10 ms between two times."""
    begin = max(int(begin_s * 100), 0)
    levels = _levels(samples)[begin : max(int(end_s * 100), begin + 1)]
    return (begin + (int(levels.argmin()) if len(levels) else 0)) * _WINDOW + _WINDOW // 2
