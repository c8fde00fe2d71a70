"""The Triton models of OCR, in process: batches taken apart, refusals by themselves, pages side by side."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_pb_utils
import numpy as np
import pytest
from fake_pb_utils import InferenceResponse, Request, Tensor, TritonError
from images import encode, letter, photo, png_of_size
from test_embedding_models import arguments, only_response, outputs, refusal

from orchestrator.contracts import CERTAINTIES, CHARACTERS, CROP, IMAGE, PIXELS, TEXT_MAP
from orchestrator.errors import EngineError
from orchestrator.triton import ocr_model
from orchestrator.triton.image_model import ImagePreprocessModel
from orchestrator.triton.network_model import NetworkModel
from orchestrator.triton.ocr_model import OcrModel
from orchestrator.triton.tensors import to_triton_error


def images(*data: bytes, shape: tuple[int, ...] = (-1, 1)) -> Request:
    return Request([Tensor(IMAGE.name, np.array(data, dtype=np.object_).reshape(shape))])


# --- image_preprocess --------------------------------------------------------------------------------------


def test_an_image_is_padded_and_its_sizes_told() -> None:
    (found,) = map(outputs, ImagePreprocessModel().execute([images(photo())]))
    assert found["pixels"].shape == (1, 192, 416, 3) and found["pixels"].dtype == np.uint8
    assert found["page_size"].tolist() == [[384, 191, 384, 191]] and found["page_size"].dtype == np.int32
    assert (found["pixels"][0, 191:] == 127).all() and (found["pixels"][0, :, 384:] == 127).all()
    assert found["pixels"][0, :191, :384].std() > 20


def test_one_refusal_leaves_the_others_alone() -> None:
    requests = [images(b"x"), images(encode(letter())), images(png_of_size(10**5, 10**5)), images(photo(), photo())]
    damaged, fits, bomb, two = ImagePreprocessModel().execute(requests)
    assert refusal(damaged)["message"] == "image: is no PNG, JPEG, WEBP that can be read"
    assert refusal(bomb)["message"].startswith("image: has 100000 x 100000 pixels")
    assert outputs(fits)["pixels"].shape[0] == 1 and outputs(two)["pixels"].shape[0] == 2


# --- the networks ------------------------------------------------------------------------------------------


def crops(width: int, count: int = 1) -> Request:
    values = np.random.default_rng(width).integers(0, 255, (count, 48, width, 3), np.uint8)
    return Request([Tensor(CROP.name, values)])


@pytest.fixture(scope="module")
def recognizer(artifact: Callable[[str], Path]) -> NetworkModel:
    return NetworkModel(arguments(artifact("cpu"), "ocr_recognizer"), CROP, (CHARACTERS, CERTAINTIES))


def test_a_batch_gives_what_each_would_get(recognizer: NetworkModel) -> None:
    shapes = ((64, 1), (160, 1), (64, 2), (96, 3))
    together = [crops(*shape) for shape in shapes]
    recognizer.execute(together)
    for request, (width, count) in zip(together, shapes):
        found = outputs(only_response(request))
        assert found["characters"].shape == (count, width // 8) and found["characters"].dtype == np.int32
        alone = crops(width, count)
        recognizer.execute([alone])
        expected = outputs(only_response(alone))
        np.testing.assert_array_equal(found["characters"], expected["characters"])
        np.testing.assert_allclose(found["certainties"], expected["certainties"], atol=1e-4)


def test_batches_are_of_one_size_and_bounded(recognizer: NetworkModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest first, and each answered before the next is computed."""
    requests = [crops(320), crops(64), crops(320), crops(64), crops(320)]
    runs: list[tuple[tuple[int, ...], list[int]]] = []

    class FakeSession:
        def run(self, names: list[str], given: dict[str, np.ndarray]) -> list[np.ndarray]:
            (images,) = given.values()
            runs.append((images.shape[:3], [len(request.sender.sent) for request in requests]))
            return [np.zeros((len(images), 1)) for _ in names]

    monkeypatch.setattr(recognizer, "_session", FakeSession())
    monkeypatch.setattr(recognizer, "_max_batch_pixels", 2 * 48 * 320)
    recognizer.execute(requests)
    assert runs == [((2, 48, 64), [0] * 5), ((2, 48, 320), [0, 1, 0, 1, 0]), ((1, 48, 320), [1, 1, 1, 1, 0])]


def test_one_too_large_for_a_batch_is_computed_alone(recognizer: NetworkModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognizer, "_max_batch_pixels", 1)
    requests = [crops(64), crops(64, 2)]
    recognizer.execute(requests)
    assert [len(outputs(only_response(each))["characters"]) for each in requests] == [1, 2]


def test_what_cannot_be_computed_leaves_the_others_alone(artifact: Callable[[str], Path]) -> None:
    detector = NetworkModel(arguments(artifact("cpu"), "ocr_detector"), PIXELS, (TEXT_MAP,))
    odd, fits = (Request([Tensor(PIXELS.name, np.zeros((1, side, 64, 3), np.uint8))]) for side in (33, 64))
    detector.execute([odd, fits])
    error = only_response(odd).error()
    assert error is not None and "pixels: could not be computed" in error.message()
    assert outputs(only_response(fits))["text_map"].shape == (1, 64, 64)


def test_the_detector_marks_the_lines(artifact: Callable[[str], Path]) -> None:
    detector = NetworkModel(arguments(artifact("cpu"), "ocr_detector"), PIXELS, (TEXT_MAP,))
    (prepared,) = map(outputs, ImagePreprocessModel().execute([images(photo())]))
    request = Request([Tensor(PIXELS.name, prepared["pixels"])])
    detector.execute([request])
    found = outputs(only_response(request))["text_map"]
    assert found.shape == (1, 192, 416) and found.dtype == np.float32
    assert 0.05 < (found > 0.3).mean() < 0.5


# --- ocr ---------------------------------------------------------------------------------------------------


class FakeServer:
    """Answers what `ocr` asks of other models by the models themselves."""

    def __init__(self, artifact: Path) -> None:
        self.error: Exception | None = None
        self.waits = threading.Event()
        self.waits.set()
        self._preprocess = ImagePreprocessModel()
        self._detector = NetworkModel(arguments(artifact, "ocr_detector"), PIXELS, (TEXT_MAP,))
        self._recognizer = NetworkModel(arguments(artifact, "ocr_recognizer"), CROP, (CHARACTERS, CERTAINTIES))

    def answer(self, model_name: str, requested_output_names: list[str], inputs: list[Tensor]) -> InferenceResponse:
        self.waits.wait(10)
        if self.error is not None:
            raise self.error
        if model_name == "ocr_recognizer":
            return self._run(self._recognizer, inputs)
        assert model_name == "ocr_detection"
        (prepared,) = self._preprocess.execute([Request(inputs)])
        if prepared.has_error():
            error = prepared.error()
            raise_as = TritonError(f"in ensemble 'ocr_detection', {error.message()}", error.code())
            return InferenceResponse(error=raise_as)
        pixels = [tensor for tensor in prepared.output_tensors() if tensor.name() == PIXELS.name]
        detected = self._run(self._detector, pixels)
        return InferenceResponse([*prepared.output_tensors(), *detected.output_tensors()])

    @staticmethod
    def _run(network: NetworkModel, inputs: list[Tensor]) -> InferenceResponse:
        request = Request(inputs)
        network.execute([request])
        return only_response(request)


@pytest.fixture
def server(artifact: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    server = FakeServer(artifact("cpu"))

    class InferenceRequest:
        def __init__(self, **fields: Any) -> None:
            self._fields = fields

        def exec(self) -> InferenceResponse:
            return server.answer(**self._fields)

    def find(response: InferenceResponse, name: str) -> Tensor:
        return next(tensor for tensor in response.output_tensors() if tensor.name() == name)

    monkeypatch.setattr(fake_pb_utils, "InferenceRequest", InferenceRequest)
    monkeypatch.setattr(fake_pb_utils, "get_output_tensor_by_name", find, raising=False)
    return server


@pytest.fixture
def model(artifact: Callable[[str], Path], server: FakeServer) -> Iterator[OcrModel]:
    model = OcrModel(arguments(artifact("cpu"), "ocr"))
    yield model
    server.waits.set()
    model.finalize()


def finished(model: OcrModel, *requests: Request) -> list[InferenceResponse]:
    model.execute(list(requests))
    while any(not request.sender.sent for request in requests):
        threading.Event().wait(0.01)
    return [only_response(request) for request in requests]


def test_pages_are_read_side_by_side(model: OcrModel) -> None:
    requests = [images(encode(letter(20)), shape=(1,)), images(photo(), shape=(1,))]
    texts = [json.loads(outputs(each)["result"][0])["text"] for each in finished(model, *requests)]
    assert "The amount of 1,299.50 EUR is due" in texts[0] and "Region-based segmentation" in texts[1]


def test_what_another_model_refuses_is_refused_in_its_words(model: OcrModel) -> None:
    (response,) = finished(model, images(b"no image", shape=(1,)))
    assert refusal(response) == {
        "message": "image: is no PNG, JPEG, WEBP that can be read",
        "type": "invalid_request_error",
        "param": "image",
        "code": "invalid_value",
    }


def test_an_unforeseen_failure_is_ours(model: OcrModel, server: FakeServer) -> None:
    server.error = RuntimeError("secret detail")
    (response,) = finished(model, images(photo(), shape=(1,)))
    error = response.error()
    assert error is not None and error.code() == TritonError.INTERNAL and "secret" not in error.message()


def test_an_engine_that_failed_is_told(model: OcrModel, server: FakeServer) -> None:
    server.error = EngineError("the model broke")
    (response,) = finished(model, images(photo(), shape=(1,)))
    error = response.error()
    assert error is not None and json.loads(error.message())["error"]["code"] == "engine_error"
    assert error.code() == to_triton_error(server.error).code()


def test_beyond_the_limit_pages_are_refused(
    model: OcrModel, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ocr_model, "MAX_LIVE_PAGES", 2)
    server.waits.clear()
    live = [images(photo(), shape=(1,)) for _ in range(2)]
    model.execute(live)
    (response,) = finished(model, images(photo(), shape=(1,)))
    assert response.error() is not None and "2 pages are being read" in response.error().message()
    server.waits.set()
    while any(not request.sender.sent for request in live):
        threading.Event().wait(0.01)
    assert all(not only_response(request).has_error() for request in live)
