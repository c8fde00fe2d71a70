"""The Triton models `ocr_detector` and `ocr_recognizer` on the python backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from orchestrator.contracts import TensorSpec
from orchestrator.errors import InvalidRequestError
from orchestrator.onnx_session import open_session
from orchestrator.triton.sender import Sender
from orchestrator.triton.tensors import fail, input_of, not_computed, read_arguments


class _Job(NamedTuple):
    """One request: its images are UINT8 [count, height, width, 3]."""

    sender: Sender
    images: npt.NDArray[np.uint8]


class NetworkModel:
    """What the model.py of `ocr_detector` and of `ocr_recognizer` delegate to; they differ in their tensors.

    Triton batches requests of any sizes (`allow_ragged_batch`). Those of equal size are computed together, as many as
    have `max_batch_pixels`; the smallest go first, and have their answers before the larger ones begin.
    """

    def __init__(self, args: dict[str, str], given: TensorSpec, found: Sequence[TensorSpec]) -> None:
        parameters, folder = read_arguments(args)
        self._given = given
        self._found = found
        self._max_batch_pixels = int(parameters["max_batch_pixels"])
        # Without an arena: its sizes are many, and it would keep what the largest of each took.
        self._session = open_session(
            folder / "model.onnx", num_threads=int(parameters["num_threads"]), keep_memory=False
        )

    def execute(self, requests: list[Any]) -> None:
        by_size: dict[tuple[int, ...], list[_Job]] = {}
        for request in requests:
            job = _Job(Sender(request), input_of(request, self._given))
            if 0 in job.images.shape:
                shape = list(job.images.shape)
                fail(
                    job.sender, InvalidRequestError(f"{self._given.name}: shape {shape}; must hold at least one pixel")
                )
                continue
            by_size.setdefault(job.images.shape[1:3], []).append(job)
        for (height, width), jobs in sorted(by_size.items(), key=lambda item: item[0][0] * item[0][1]):
            for part in _split(jobs, self._max_batch_pixels // (height * width)):
                self._answer(part)

    def _answer(self, jobs: Sequence[_Job]) -> None:
        names = [spec.name for spec in self._found]
        try:
            outputs = self._session.run(names, {self._given.name: np.concatenate([job.images for job in jobs])})
        except Exception:  # ONNX Runtime's own, of a size that the graph cannot take
            error = not_computed(self._given.name)
            for job in jobs:
                fail(job.sender, error)
            return
        ends = np.cumsum([len(job.images) for job in jobs])[:-1]
        for job, *arrays in zip(jobs, *(np.split(output, ends) for output in outputs)):
            tensors = [pb_utils.Tensor(name, array) for name, array in zip(names, arrays)]
            job.sender.send(pb_utils.InferenceResponse(tensors), final=True)


def _split(jobs: Sequence[_Job], max_images: int) -> Iterator[list[_Job]]:
    """In parts of at most `max_images` images, where a request has not more by itself."""
    part: list[_Job] = []
    for job in jobs:
        if part and sum(len(each.images) for each in (*part, job)) > max_images:
            yield part
            part = []
        part.append(job)
    if part:
        yield part
