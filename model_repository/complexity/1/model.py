"""A conversation's token ids in, the tiers' probabilities out. The work is in the package `orchestrator`."""

from orchestrator.contracts import PROBABILITIES
from orchestrator.triton.embedding_models import EncoderModel


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._model = EncoderModel(args, PROBABILITIES)

    def execute(self, requests: list) -> None:
        self._model.execute(requests)
