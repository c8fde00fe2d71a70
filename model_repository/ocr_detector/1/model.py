"""Pixels in, a map of the text out. The work is in the package `orchestrator`."""

from orchestrator.contracts import PIXELS, TEXT_MAP
from orchestrator.triton.network_model import NetworkModel


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._model = NetworkModel(args, PIXELS, (TEXT_MAP,))

    def execute(self, requests: list) -> None:
        self._model.execute(requests)
