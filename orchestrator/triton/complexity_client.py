"""The way from the orchestrator to the model `complexity` of the same server: gRPC on loopback.

The conversation is tokenised here, in bounded time however long it is.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from grpc import aio

from orchestrator import contracts
from orchestrator.routing.complexity import Complexity, read_probabilities
from orchestrator.routing.conversation import ConversationReader, Turn
from orchestrator.routing.follow_up import find_ask
from orchestrator.triton.encoder_client import EncoderClient

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
        self._encoder = EncoderClient(url, contracts.COMPLEXITY_MODEL, contracts.PROBABILITIES)
        self.close = self._encoder.close

    async def __call__(self, turns: Sequence[Turn]) -> Complexity | None:
        """What the model says of a conversation, `turns` from the first to the last; None when the model fails."""
        try:
            probabilities = await self._encoder.encode(self._reader.read(find_ask(turns)))
        except aio.AioRpcError as error:
            log.warning("the classifier failed; the router goes without: %s", error.details())
            return None
        return read_probabilities(probabilities.tolist())
