"""An encoder's ONNX graph: the embedder's, or the classifier's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from orchestrator.contracts import ATTENTION_MASK, EMBEDDING, EMBEDDING_INPUT_IDS, TensorSpec
from orchestrator.onnx_session import open_session


class Encoder:
    """`num_threads` compute one batch; `output` is the tensor that the graph gives."""

    def __init__(self, model: Path, *, num_threads: int, output: TensorSpec = EMBEDDING) -> None:
        self._output = output
        self._session = open_session(model, num_threads=num_threads)

    def encode(
        self, input_ids: npt.NDArray[np.int32], attention_mask: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.float32]:
        """[batch, length] twice -> the output, FP32 [batch, *dims]: embeddings of length 1, or probabilities.

        Padding that all rows have at their end is left out: it would cost as much as tokens do.
        """
        length = int(attention_mask.any(axis=0).nonzero()[0].max(initial=0)) + 1
        feeds = {EMBEDDING_INPUT_IDS.name: input_ids[:, :length], ATTENTION_MASK.name: attention_mask[:, :length]}
        (rows,) = self._session.run([self._output.name], feeds)
        found: npt.NDArray[np.float32] = rows
        return found
