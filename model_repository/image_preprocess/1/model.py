"""Image files in, pixels out. The work is in the package `orchestrator`."""

from orchestrator.triton.image_model import ImagePreprocessModel


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._model = ImagePreprocessModel()

    def execute(self, requests: list) -> list:
        return self._model.execute(requests)
