"""Frames of sound in, whether somebody speaks out. The work is in the package `orchestrator`."""

from orchestrator.triton.speech_models import VadModel


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._model = VadModel(args)

    def execute(self, requests: list) -> list:
        return self._model.execute(requests)
