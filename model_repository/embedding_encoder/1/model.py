"""Word pieces in, embeddings out. The work is in the package `orchestrator`."""

from orchestrator.triton.embedding_models import EmbeddingEncoderModel


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._model = EmbeddingEncoderModel(args)

    def execute(self, requests: list) -> None:
        self._model.execute(requests)
