"""A text in, its sound out, by Piper: GPL-3.0, so it is imported in this file alone. The rest is in `orchestrator`."""

import json
from collections.abc import Iterator
from pathlib import Path

from piper import PiperConfig, PiperVoice, SynthesisConfig

from orchestrator.onnx_session import open_session
from orchestrator.triton.speech_models import TtsModel


class PiperSpeaker:
    def __init__(self, folder: Path, *, num_threads: int) -> None:
        (graph,) = folder.glob("*.onnx")
        config = PiperConfig.from_dict(json.loads(graph.with_suffix(".onnx.json").read_text(encoding="utf-8")))
        self._voice = PiperVoice(session=open_session(graph, num_threads=num_threads), config=config)
        self.sample_rate_hz = config.sample_rate
        for _ in self.speak("Ready.", 1.0):  # the first inference is slow
            pass

    def speak(self, sentence: str, speed: float) -> Iterator:
        for chunk in self._voice.synthesize(sentence, SynthesisConfig(length_scale=1 / speed)):
            yield chunk.audio_int16_array


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._model = TtsModel(args, PiperSpeaker)

    def execute(self, requests: list) -> None:
        self._model.execute(requests)

    def finalize(self) -> None:
        self._model.finalize()
