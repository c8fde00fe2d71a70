"""The Triton model `ocr` on the python backend."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from orchestrator import contracts
from orchestrator.errors import ApiError, InternalError, OverloadedError, from_message
from orchestrator.triton.sender import Sender
from orchestrator.triton.tensors import fail, input_of, read_arguments
from orchestrator.vision.ctc import decode, read_alphabet
from orchestrator.vision.page import Detection, read_page
from orchestrator.vision.sizes import Pixels

log = logging.getLogger("orchestrator.ocr")

# Pages that `ocr` has in hand: each holds its pixels and its map, some 18 MB. The others are refused.
MAX_LIVE_PAGES = 32
# Requests to other models that wait for their answers, each on a thread.
MAX_ASKED = 64


class OcrModel:
    """What `ocr`'s model.py delegates to. `execute` returns at once; pages are read side by side on one event loop.

    It asks the other models by BLS, a line of text a request, and Triton makes batches of the lines of all pages.
    """

    def __init__(self, args: dict[str, str]) -> None:
        _, folder = read_arguments(args)
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
            image = input_of(request, contracts.IMAGE).reshape(-1)[0]
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
            fail(sender, OverloadedError(text, headers={"retry-after": "1"}))
            return
        task = self._loop.create_task(self._read(sender, image))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, sender: Sender, image: bytes) -> None:
        try:
            text = json.dumps(await read_page(image, self._detect, self._recognize), ensure_ascii=False)
        except ApiError as error:
            fail(sender, error)
        except Exception:
            log.exception("a page could not be read")
            fail(sender, InternalError("a page could not be read; the server's log says why"))
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
