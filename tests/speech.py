"""Real speech for tests: recordings, what is said in them, and how far a transcript is from it."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from build.compiler import build
from build.fetch import cache_folder, fetch
from build.model_rows import PackagedFile
from build.rows import TargetRow, load_models, load_target
from orchestrator.__main__ import main

BECKETT = "Ever tried. Ever failed. No matter. Try again. Fail again. Fail better."
# A Tale of Two Cities, chapter 1, as far as it is read.
TWO_CITIES = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
    "it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of "
    "Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing "
    "before us, we were all going direct to Heaven, we were all going direct the other way--in short, the period was "
    "so far like the present period, that some of its noisiest authorities insisted on its being received, for good "
    "or for evil, in the superlative degree of comparison only."
)
_SHA256 = {
    "beckett.wav": "e5a26b3d29e5b0bc8dbd72c11d16a3808a4ec0ac45b21f12a27d2a2fe5c5ae61",
    "two_cities.wav": "f3348494d77cb74a02862f5e685ed09faf3e75832c5cc5c80703282c2cd8b52e",
}


def recording(name: str) -> Path:
    """beckett.wav (10 s, 16 kHz) or two_cities.wav (44 s, 48 kHz)."""
    source = PackagedFile(
        package="moonshine-voice",
        version="0.1.5",
        folder="moonshine_voice/assets",
        file=name,
        sha256=_SHA256[name],
    )
    return fetch(source, cache_folder())


def sound(name: str) -> tuple[np.ndarray, int]:
    """FP32 [samples], and how many of them are a second."""
    samples, rate_hz = soundfile.read(recording(name), dtype="float32")
    return samples, rate_hz


def as_file(samples: np.ndarray, rate_hz: int = 16_000, form: str = "WAV", **options: Any) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format=form, **options)
    return file.getvalue()


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def word_error_rate(heard: str, said: str) -> float:
    """Words to be changed, added and taken away, by the number of words that were said."""
    mine, theirs = words_of(heard), words_of(said)
    costs = list(range(len(theirs) + 1))
    for i, word in enumerate(mine, 1):
        before, costs[0] = costs[0], i
        for j, other in enumerate(theirs, 1):
            before, costs[j] = costs[j], min(costs[j] + 1, costs[j - 1] + 1, before + (word != other))
    return costs[-1] / len(theirs)


# Of the server with the speech models: "all" may use everything.
KEYS: dict[str, str] = {}


def make_key(keys: Path, tenant: str, *options: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(["keys", "add", f"--keys={keys}", "--tenant", tenant, *options]) == 0
    return output.getvalue().split()[-1]


def speech_target() -> TargetRow:
    """Target scripted with the speech models of target cpu-voice: all that `/v1/audio` needs, and no language model."""
    scripted, voice = load_target("scripted"), load_target("cpu-voice")
    models = {**scripted.models, **{name: voice.models[name] for name in voice.speech}}
    return scripted.model_copy(update={"name": "scripted-voice", "models": models})


def build_speech(artifacts: Path) -> Path:
    """Its artifact."""
    target = speech_target()
    folder = artifacts / target.name

    @contextlib.contextmanager
    def silent(_: str) -> Iterator[None]:
        yield

    build(target, load_models(target), folder, cache=cache_folder(), progress=silent)
    return folder
