"""The way from the orchestrator to the embedder of the same server: gRPC on loopback.

Questions are tokenised here, and the ids sent to `embedding_encoder`: the ensemble `embedding` would tokenise them
alike, one process further away, and pad them. The vector is the same without padding, and comes sooner.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import numpy.typing as npt
from grpc import aio

from orchestrator import contracts
from orchestrator.config import Embedder, read_toml
from orchestrator.embedding.tokenizer import WordPieces
from orchestrator.errors import InvalidRequestError
from orchestrator.triton.encoder_client import EncoderClient

log = logging.getLogger("orchestrator.cache")


class GrpcEmbedder:
    """An `orchestrator.cache.stage.Embed`, for one event loop."""

    def __init__(self, root: Path, url: str) -> None:
        """`root` is the artifact; `url` is host:port of Triton's gRPC service, not used before the first text."""
        row = read_toml(root / "embedder.toml", Embedder)
        folder = root / "model_repository" / contracts.EMBEDDING_TOKENIZER_MODEL / "1"
        self._word_pieces = WordPieces(
            folder / "tokenizer.json", max_input_tokens=row.max_input_tokens, pad_id=row.pad_id
        )
        self._encoder = EncoderClient(url, contracts.EMBEDDING_ENCODER_MODEL, contracts.EMBEDDING)
        self.close = self._encoder.close

    async def __call__(self, text: str) -> npt.NDArray[np.float32] | None:
        """The unit vector of `text`, FP32 [dimensions].

        None for one longer than the embedder's window, and when the embedder fails.
        """
        try:
            encoded = self._word_pieces.encode([text.encode()], contracts.TEXT.name)
        except (InvalidRequestError, UnicodeEncodeError):
            return None
        num_tokens = int(encoded.num_tokens[0, 0])
        try:
            return await self._encoder.encode(encoded.input_ids[0, :num_tokens])
        except aio.AioRpcError as error:
            log.warning("the embedder failed; the cache goes without: %s", error.details())
            return None
