"""Images in, their text out. The work is in the package `orchestrator`."""

from orchestrator.triton.ocr_model import OcrModel


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._model = OcrModel(args)

    def execute(self, requests: list) -> None:
        self._model.execute(requests)

    def finalize(self) -> None:
        self._model.finalize()
