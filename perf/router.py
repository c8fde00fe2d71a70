"""The product's own classifier, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from orchestrator.contracts import COMPLEXITY_MODEL, PROBABILITIES
from orchestrator.embedding.encoder import Encoder
from orchestrator.routing.complexity import Complexity, read_probabilities
from orchestrator.routing.conversation import ConversationReader, Turn
from orchestrator.routing.follow_up import find_ask


class ArtifactRouter:
    """What `artifact` holds for the Triton model `complexity`."""

    def __init__(self, artifact: Path) -> None:
        folder = artifact / "model_repository" / COMPLEXITY_MODEL / "1"
        self._reader = ConversationReader(folder / "tokenizer.json")
        self._encoder = Encoder(folder / "model.onnx", num_threads=1, output=PROBABILITIES)

    def read(self, turns: Sequence[Turn]) -> npt.NDArray[np.int32]:
        """The token ids of a conversation, INT32 [length]."""
        return self._reader.read(find_ask(turns))

    def judge(self, input_ids: npt.NDArray[np.int32]) -> Complexity:
        """What the model says of these ids."""
        row = input_ids[None]
        return read_probabilities(self._encoder.encode(row, np.ones_like(row))[0].tolist())
