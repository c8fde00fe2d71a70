"""The orchestrator: OpenAI requests in, OpenAI events out. The work is in the package `orchestrator`."""

from orchestrator.triton.adapter import OrchestratorModel


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._model = OrchestratorModel(args)

    def execute(self, requests: list) -> None:
        self._model.execute(requests)

    def finalize(self) -> None:
        self._model.finalize()
