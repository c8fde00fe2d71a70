"""Word pieces in, embeddings out. The work is in the package `orchestrator`."""

from orchestrator.contracts import EMBEDDING
from orchestrator.triton.embedding_models import EncoderModel


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._model = EncoderModel(args, EMBEDDING)

    def execute(self, requests: list) -> None:
        self._model.execute(requests)
