"""An LLM engine behind NVIDIA's tensor contract. The work is in the package `orchestrator`."""

from orchestrator.triton.engine_model import EngineModel


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._model = EngineModel(args)

    def execute(self, requests: list) -> None:
        self._model.execute(requests)

    def finalize(self) -> None:
        self._model.finalize()
