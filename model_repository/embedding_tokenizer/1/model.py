"""Texts in, word pieces out. The work is in the package `orchestrator`."""

from orchestrator.triton.embedding_models import EmbeddingTokenizerModel


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._model = EmbeddingTokenizerModel(args)

    def execute(self, requests: list) -> list:
        return self._model.execute(requests)
