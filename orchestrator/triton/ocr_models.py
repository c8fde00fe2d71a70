"""The Triton models `image_preprocess`, `ocr_detector`, `ocr_recognizer` and `ocr` on the python backend."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from orchestrator import contracts
from orchestrator.errors import ApiError, InternalError, OverloadedError, from_message
from orchestrator.onnx_session import open_session
from orchestrator.triton.sender import Sender
from orchestrator.triton.tensors import to_triton_error
from orchestrator.vision.crops import PADDING
from orchestrator.vision.ctc import decode, read_alphabet
from orchestrator.vision.images import Pixels, read_image
from orchestrator.vision.page import Detection, read_page
from orchestrator.vision.sizes import choose_sides

log = logging.getLogger("orchestrator.ocr")

# Pages that `ocr` has in hand: each holds its pixels and its map, some 18 MB. The others are refused.
MAX_LIVE_PAGES = 32
# Requests to other models that wait for their answers, each on a thread.
MAX_ASKED = 64


class ImagePreprocessModel:
    """What `image_preprocess`'s model.py delegates to."""

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            pictures = [read_image(data) for data in _input(request, contracts.IMAGE).reshape(-1)]
        except ApiError as error:
            return pb_utils.InferenceResponse(error=to_triton_error(error))
        shown = [picture.pixels.shape[1::-1] for picture in pictures]
        width, height = choose_sides(*(max(sides) for sides in zip(*shown)))
        pixels = np.full((len(pictures), height, width, 3), PADDING, np.uint8)
        sizes = np.zeros((len(pictures), 4), np.int32)
        for index, (picture, (shown_width, shown_height)) in enumerate(zip(pictures, shown)):
            pixels[index, :shown_height, :shown_width] = picture.pixels
            sizes[index] = picture.width, picture.height, shown_width, shown_height
        tensors = zip((contracts.PIXELS, contracts.PAGE_SIZE), (pixels, sizes))
        return pb_utils.InferenceResponse([pb_utils.Tensor(spec.name, array) for spec, array in tensors])


class _Job(NamedTuple):
    """One request: its images are UINT8 [count, height, width, 3]."""

    sender: Sender
    images: Pixels


class NetworkModel:
    """What the model.py of `ocr_detector` and of `ocr_recognizer` delegate to; they differ in their tensors.

    Triton batches requests of any sizes (`allow_ragged_batch`). Those of equal size are computed together, as many as
    have `max_batch_pixels`; the smallest go first, and have their answers before the larger ones begin.
    """

    def __init__(
        self, args: dict[str, str], given: contracts.TensorSpec, found: Sequence[contracts.TensorSpec]
    ) -> None:
        parameters, folder = _read(args)
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
            job = _Job(Sender(request), _input(request, self._given))
            by_size.setdefault(job.images.shape[1:3], []).append(job)
        for (height, width), jobs in sorted(by_size.items(), key=lambda item: item[0][0] * item[0][1]):
            for part in _split(jobs, self._max_batch_pixels // (height * width)):
                self._answer(part)

    def _answer(self, jobs: Sequence[_Job]) -> None:
        names = [spec.name for spec in self._found]
        try:
            outputs = self._session.run(names, {self._given.name: np.concatenate([job.images for job in jobs])})
        except Exception:  # ONNX Runtime's own, of a size that the graph cannot take
            log.exception("%s could not be computed", self._given.name)
            error = InternalError(f"{self._given.name}: could not be computed; the server's log says why")
            for job in jobs:
                _fail(job.sender, error)
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


class OcrModel:
    """What `ocr`'s model.py delegates to. `execute` returns at once; pages are read side by side on one event loop.

    It asks the other models by BLS, a line of text a request, and Triton makes batches of the lines of all pages.
    """

    def __init__(self, args: dict[str, str]) -> None:
        _, folder = _read(args)
        cv2.setNumThreads(1)  # the cores are the networks'
        self._alphabet = read_alphabet(folder / "characters.txt")
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds tasks only weakly
        self._loop = asyncio.new_event_loop()
        self._asking = ThreadPoolExecutor(MAX_ASKED, "ask")
        self._loop.set_default_executor(ThreadPoolExecutor(2, "cut"))
        self._thread = threading.Thread(target=self._loop.run_forever, name="pages", daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            image = _input(request, contracts.IMAGE).reshape(-1)[0]
            self._loop.call_soon_threadsafe(self._start, Sender(request), image)

    def finalize(self) -> None:
        """Let live pages finish (Triton unloads a model when its requests are done)."""
        asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._asking.shutdown()

    async def _finish(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._loop.shutdown_default_executor()

    def _start(self, sender: Sender, image: bytes) -> None:
        if len(self._tasks) >= MAX_LIVE_PAGES:
            text = f"{MAX_LIVE_PAGES} pages are being read, which is the limit; try again later"
            _fail(sender, OverloadedError(text, headers={"retry-after": "1"}))
            return
        task = self._loop.create_task(self._read(sender, image))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, sender: Sender, image: bytes) -> None:
        try:
            text = json.dumps(await read_page(image, self._detect, self._recognize), ensure_ascii=False)
        except ApiError as error:
            _fail(sender, error)
        except Exception:
            log.exception("a page could not be read")
            _fail(sender, InternalError("a page could not be read; the server's log says why"))
        else:
            result = pb_utils.Tensor(contracts.OCR_RESULT.name, np.array([text.encode()], dtype=np.object_))
            sender.send(pb_utils.InferenceResponse([result]), final=True)

    async def _detect(self, image: bytes) -> Detection:
        given = {contracts.IMAGE: np.array([[image]], dtype=np.object_)}
        found = contracts.PIXELS, contracts.TEXT_MAP, contracts.PAGE_SIZE
        pixels, text_map, (size,) = await self._ask(contracts.OCR_DETECTION_MODEL, given, found)
        return Detection(pixels[0], text_map[0], *size.tolist())

    async def _recognize(self, crop: Pixels) -> tuple[str, float]:
        found = contracts.CHARACTERS, contracts.CERTAINTIES
        (characters,), (certainties,) = await self._ask(
            contracts.OCR_RECOGNIZER_MODEL, {contracts.CROP: crop[None]}, found
        )
        return decode(characters, certainties, self._alphabet)

    async def _ask(
        self, model: str, given: dict[contracts.TensorSpec, npt.NDArray[Any]], found: Sequence[contracts.TensorSpec]
    ) -> list[npt.NDArray[Any]]:
        """What `model` answers, raised if it is an error."""
        names = [spec.name for spec in found]

        def ask() -> list[npt.NDArray[Any]]:
            tensors = [pb_utils.Tensor(spec.name, array) for spec, array in given.items()]
            request = pb_utils.InferenceRequest(model_name=model, requested_output_names=names, inputs=tensors)
            response = request.exec()
            if response.has_error():
                raise from_message(response.error().message())
            return [pb_utils.get_output_tensor_by_name(response, name).as_numpy() for name in names]

        return await self._loop.run_in_executor(self._asking, ask)


def _fail(sender: Sender, error: ApiError) -> None:
    sender.send(pb_utils.InferenceResponse(error=to_triton_error(error)), final=True)


def _read(args: dict[str, str]) -> tuple[dict[str, str], Path]:
    """The model's parameters and its version folder."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parameters = json.loads(args["model_config"])["parameters"]
    folder = Path(args["model_repository"]) / args["model_version"]
    return {key: value["string_value"] for key, value in parameters.items()}, folder


def _input(request: Any, spec: contracts.TensorSpec) -> Any:
    return pb_utils.get_input_tensor_by_name(request, spec.name).as_numpy()
