"""Sound in, what was said out. The work is in the package `orchestrator`."""

from orchestrator.triton.speech_models import SttModel
from orchestrator.voice.whisper import Whisper


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._model = SttModel(args, Whisper)

    def execute(self, requests: list) -> list:
        return self._model.execute(requests)
