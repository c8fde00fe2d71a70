"""An encoder's ONNX graph in ONNX Runtime, on CPU: the embedder's, or the classifier's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime

from orchestrator.contracts import ATTENTION_MASK, EMBEDDING, EMBEDDING_INPUT_IDS, TensorSpec

_ERRORS_ONLY = 3  # ONNX Runtime warns of machines whose devices it cannot list


class Encoder:
    """`num_threads` compute one batch; `output` is the tensor that the graph gives."""

    def __init__(self, model: Path, *, num_threads: int, output: TensorSpec = EMBEDDING) -> None:
        self._output = output
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.log_severity_level = _ERRORS_ONLY
        # Threads that spin while they wait would take the cores from the language model.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])

    def encode(
        self, input_ids: npt.NDArray[np.int32], attention_mask: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.float32]:
        """[batch, length] twice -> the output, FP32 [batch, *dims]: embeddings of length 1, or probabilities."""
        feeds = {EMBEDDING_INPUT_IDS.name: input_ids, ATTENTION_MASK.name: attention_mask}
        (rows,) = self._session.run([self._output.name], feeds)
        found: npt.NDArray[np.float32] = rows
        return found
