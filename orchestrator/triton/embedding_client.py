"""The way from the orchestrator to the embedder of the same server: gRPC on loopback.

Questions are tokenised here, and the ids sent to `embedding_encoder`: the ensemble `embedding` would tokenise them
alike, one process further away, and pad them. The vector is the same without padding, and comes sooner.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import numpy as np
import numpy.typing as npt
from grpc import aio
from tritonclient.grpc import service_pb2

from orchestrator import contracts
from orchestrator.config import Embedder, read_toml
from orchestrator.embedding.tokenizer import WordPieces
from orchestrator.errors import InvalidRequestError
from orchestrator.infer_streams import InferStreams
from orchestrator.wire import add_row, read_outputs

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
        self._streams = InferStreams(url)
        self._running: set[asyncio.Task[npt.NDArray[np.float32]]] = set()

    async def __call__(self, text: str) -> npt.NDArray[np.float32] | None:
        """The unit vector of `text`, FP32 [dimensions].

        None for one longer than the embedder's window, and when the embedder fails.
        """
        try:
            encoded = self._word_pieces.encode([text.encode()], contracts.TEXT.name)
        except (InvalidRequestError, UnicodeEncodeError):
            return None
        # Shielded: Triton leaks a request that is cancelled as it ends.
        num_tokens = int(encoded.num_tokens[0, 0])
        task = asyncio.get_running_loop().create_task(self._infer(encoded.input_ids[0, :num_tokens]))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except aio.AioRpcError as error:
            log.warning("the embedder failed; the cache goes without: %s", error.details())
            return None

    async def _infer(self, input_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        request = service_pb2.ModelInferRequest(model_name=contracts.EMBEDDING_ENCODER_MODEL)
        add_row(request, contracts.EMBEDDING_INPUT_IDS, *input_ids)
        add_row(request, contracts.ATTENTION_MASK, *np.ones_like(input_ids))
        response = await self._streams.stub.ModelInfer(request)
        return np.frombuffer(read_outputs(response)[contracts.EMBEDDING.name], np.float32)

    async def close(self) -> None:
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._streams.close()
