"""An ONNX graph in ONNX Runtime, on CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime

_ERRORS_ONLY = 3  # ONNX Runtime warns of machines whose devices it cannot list


def open_session(model: Path, *, num_threads: int, keep_memory: bool = True) -> Any:
    """An `onnxruntime.InferenceSession` of the graph at `model`, on `num_threads` threads.

    With `keep_memory` it keeps what its largest input has taken, for the next one.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.log_severity_level = _ERRORS_ONLY
    options.enable_cpu_mem_arena = keep_memory
    # Threads that spin while they wait would take the cores from the language model.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
