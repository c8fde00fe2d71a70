"""The way from the orchestrator to the model `complexity` of the same server: gRPC on loopback.

The conversation is tokenised here, in bounded time however long it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from grpc import aio
from tritonclient.grpc import service_pb2

from orchestrator import contracts
from orchestrator.infer_streams import InferStreams
from orchestrator.routing.complexity import Complexity, read_probabilities
from orchestrator.routing.conversation import ConversationReader, Turn
from orchestrator.wire import add_row, read_outputs

log = logging.getLogger("orchestrator.routing")


def create_classifier(root: Path, url: str) -> GrpcComplexity | None:
    """For the artifact at `root`; None if it has no classifier."""
    has_one = (root / "model_repository" / contracts.COMPLEXITY_MODEL).is_dir()
    return GrpcComplexity(root, url) if has_one else None


class GrpcComplexity:
    """Judges conversations, for one event loop."""

    def __init__(self, root: Path, url: str) -> None:
        """`root` is the artifact; `url` is host:port of Triton's gRPC service, not used before the first question."""
        folder = root / "model_repository" / contracts.COMPLEXITY_MODEL / "1"
        self._reader = ConversationReader(folder / "tokenizer.json")
        self._streams = InferStreams(url)
        self._running: set[asyncio.Task[Complexity]] = set()

    async def __call__(self, turns: Sequence[Turn]) -> Complexity | None:
        """What the model says of a conversation, `turns` from the first to the last; None when the model fails."""
        # Shielded: Triton leaks a request that is cancelled as it ends.
        task = asyncio.get_running_loop().create_task(self._infer(self._reader.read(turns)))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except aio.AioRpcError as error:
            log.warning("the classifier failed; the router goes without: %s", error.details())
            return None

    async def _infer(self, input_ids: npt.NDArray[np.int32]) -> Complexity:
        request = service_pb2.ModelInferRequest(model_name=contracts.COMPLEXITY_MODEL)
        add_row(request, contracts.EMBEDDING_INPUT_IDS, *input_ids)
        add_row(request, contracts.ATTENTION_MASK, *np.ones_like(input_ids))
        response = await self._streams.stub.ModelInfer(request)
        values = np.frombuffer(read_outputs(response)[contracts.PROBABILITIES.name], np.float32)
        return read_probabilities(values.tolist())

    async def close(self) -> None:
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._streams.close()
