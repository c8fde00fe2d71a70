"""The sentence encoder without a server: its ONNX graph and its tokenizer, from a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime
from tokenizers import Tokenizer

from perf.errors import PerfError

_MAX_TOKENS = 256  # all-MiniLM-L6-v2's window, as sentence-transformers sets it; [CLS] and [SEP] included


class OnnxEmbedder:
    """`folder` holds model.onnx (input_ids, attention_mask → embedding, of unit length) and tokenizer.json."""

    def __init__(self, folder: Path) -> None:
        for name in ("model.onnx", "tokenizer.json"):
            if not (folder / name).is_file():
                raise PerfError(f"{folder / name}: no such file; --embedder names a folder that holds it")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self._dtype = np.int32 if "int32" in self._session.get_inputs()[0].type else np.int64

    def embed(self, text: str) -> npt.NDArray[np.float32] | None:
        ids = self._tokenizer.encode(text).ids
        if len(ids) > _MAX_TOKENS:
            return None
        tokens = np.array([ids], self._dtype)
        (embedding,) = self._session.run(["embedding"], {"input_ids": tokens, "attention_mask": np.ones_like(tokens)})
        return np.asarray(embedding[0], np.float32)
