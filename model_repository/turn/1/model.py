"""The sound of a turn in, whether it is over out. The work is in the package `orchestrator`."""

from orchestrator.triton.speech_models import TurnModel


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._model = TurnModel(args)

    def execute(self, requests: list) -> list:
        return self._model.execute(requests)
