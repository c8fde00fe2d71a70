"""Lines of text in, their characters out. The work is in the package `orchestrator`."""

from orchestrator.contracts import CERTAINTIES, CHARACTERS, CROP
from orchestrator.triton.network_model import NetworkModel


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._model = NetworkModel(args, CROP, (CHARACTERS, CERTAINTIES))

    def execute(self, requests: list) -> None:
        self._model.execute(requests)
