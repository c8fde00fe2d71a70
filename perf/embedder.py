"""The product's own sentence embedder, without a server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from orchestrator.config import Embedder, read_toml
from orchestrator.contracts import EMBEDDING_ENCODER_MODEL, EMBEDDING_TOKENIZER_MODEL, TEXT
from orchestrator.embedding.encoder import Encoder
from orchestrator.embedding.tokenizer import WordPieces
from orchestrator.errors import InvalidRequestError


class ArtifactEmbedder:
    """An `orchestrator.cache.lookup.Embedder` of what `artifact` holds for the Triton model `embedding`."""

    def __init__(self, artifact: Path) -> None:
        row = read_toml(artifact / "embedder.toml", Embedder)
        models = artifact / "model_repository"
        self._word_pieces = WordPieces(
            models / EMBEDDING_TOKENIZER_MODEL / "1" / "tokenizer.json",
            max_input_tokens=row.max_input_tokens,
            pad_id=row.pad_id,
        )
        self._encoder = Encoder(models / EMBEDDING_ENCODER_MODEL / "1" / "model.onnx", num_threads=1)

    def embed(self, text: str) -> npt.NDArray[np.float32] | None:
        """The unit vector of `text`, FP32 [dimensions]; None for one longer than the embedder's window."""
        try:
            encoded = self._word_pieces.encode([text.encode()], TEXT.name)
        except InvalidRequestError:
            return None
        vector: npt.NDArray[np.float32] = self._encoder.encode(encoded.input_ids, encoded.attention_mask)[0]
        return vector
