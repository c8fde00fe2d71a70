"""The Triton models `embedding_tokenizer`, `embedding_encoder` and `complexity` on the python backend.

All get what Triton has batched as one list of requests, and answer each by itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import triton_python_backend_utils as pb_utils

from orchestrator import contracts
from orchestrator.embedding.encoder import Encoder
from orchestrator.embedding.tokenizer import Ints, WordPieces
from orchestrator.embedding.window import check_window
from orchestrator.errors import InvalidRequestError
from orchestrator.triton.sender import Sender
from orchestrator.triton.tensors import fail, input_of, not_computed, read_arguments, to_triton_error


class EmbeddingTokenizerModel:
    """What `embedding_tokenizer`'s model.py delegates to."""

    def __init__(self, args: dict[str, str]) -> None:
        parameters, folder = read_arguments(args)
        self._word_pieces = WordPieces(
            folder / "tokenizer.json",
            max_input_tokens=int(parameters["max_input_tokens"]),
            pad_id=int(parameters["pad_id"]),
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        texts = input_of(request, contracts.TEXT).reshape(-1)
        try:
            encoded = self._word_pieces.encode(texts, contracts.TEXT.name)
        except InvalidRequestError as error:
            return pb_utils.InferenceResponse(error=to_triton_error(error))
        specs = (contracts.EMBEDDING_INPUT_IDS, contracts.ATTENTION_MASK, contracts.NUM_TOKENS)
        return pb_utils.InferenceResponse([pb_utils.Tensor(spec.name, array) for spec, array in zip(specs, encoded)])


class EncoderModel:
    """What the model.py of `embedding_encoder` and of `complexity` delegate to; they differ in their `output`.

    Triton batches requests of any lengths (`allow_ragged_batch`). Those of equal length are one batch of the graph; the
    shortest go first, and have their answers before the longer ones begin. A graph in INT8 takes one after the other:
    its ranges are those of what it gets together, and a request is to get what it gets alone.
    """

    def __init__(self, args: dict[str, str], output: contracts.TensorSpec) -> None:
        parameters, folder = read_arguments(args)
        self._output = output
        self._max_input_tokens = int(parameters["max_input_tokens"])
        self._is_batched = parameters.get("precision") != "int8"
        self._encoder = Encoder(folder / "model.onnx", num_threads=int(parameters["num_threads"]), output=output)

    def execute(self, requests: list[Any]) -> None:
        by_length: dict[int, list[_Job]] = {}
        for request in requests:
            job = _Job(
                Sender(request),
                input_of(request, contracts.EMBEDDING_INPUT_IDS),
                input_of(request, contracts.ATTENTION_MASK),
            )
            if fault := _find_fault(job):
                fail(job.sender, InvalidRequestError(fault))
                continue
            by_length.setdefault(job.input_ids.shape[1], []).append(job)
        for length, jobs in sorted(by_length.items()):
            for together in [jobs] if self._is_batched else [[job] for job in jobs]:
                self._answer(length, together)

    def _answer(self, length: int, jobs: list[_Job]) -> None:
        try:
            check_window(length, self._max_input_tokens, contracts.EMBEDDING_INPUT_IDS.name)
        except InvalidRequestError as error:
            for job in jobs:
                fail(job.sender, error)
            return
        input_ids = np.concatenate([job.input_ids for job in jobs])
        try:
            rows = self._encoder.encode(input_ids, np.concatenate([job.attention_mask for job in jobs]))
        except Exception:  # ONNX Runtime's own, of an id that the graph has no row for
            if len(jobs) > 1:  # the others are well
                for job in jobs:
                    self._answer(length, [job])
                return
            fail(jobs[0].sender, not_computed(contracts.EMBEDDING_INPUT_IDS.name))
            return
        parts = np.split(rows, np.cumsum([len(job.input_ids) for job in jobs])[:-1])
        for job, part in zip(jobs, parts):
            tensor = pb_utils.Tensor(self._output.name, part)
            job.sender.send(pb_utils.InferenceResponse([tensor]), final=True)


class _Job(NamedTuple):
    """One request: its tensors are [texts, length]."""

    sender: Sender
    input_ids: Ints
    attention_mask: Ints


def _find_fault(job: _Job) -> str | None:
    """What is wrong with the shapes of a request, which would be its neighbours' in the batch too."""
    shape, name = list(job.input_ids.shape), contracts.EMBEDDING_INPUT_IDS.name
    if 0 in shape:
        return f"{name}: shape {shape}; must be [texts, tokens] with at least one of each"
    if job.attention_mask.shape != job.input_ids.shape:
        return (
            f"{contracts.ATTENTION_MASK.name}: shape {list(job.attention_mask.shape)}; must be that of {name}, {shape}"
        )
    return None
