"""What perf_analyzer gives each model: real prompts, drawn receipts, recorded speech, as a file of its `--input-data`.

A request is a dictionary of tensors; bytes stand for one string. A model of sequences gets lists of requests, each list
a sequence. What reaches a model inside of the product is made by the product's own code.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from build.errors import BuildError
from orchestrator import contracts
from orchestrator.config import Embedder, load_tiers, read_toml
from orchestrator.embedding.tokenizer import WordPieces
from orchestrator.engines import EngineRequest
from orchestrator.routing.conversation import ConversationReader, Turn
from orchestrator.streaming.tokenizer import ChatTokenizer
from orchestrator.triton.engine_client import build_request
from perf.errors import PerfError
from perf.prompts import QUESTIONS, fresh_question
from perf.sse import chat_body

Tensor = npt.NDArray[Any] | bytes
Request = Mapping[str, Tensor]

NUM_TOKENS = 16  # of each answer of a language model: a level is there to be measured in seconds
_NUM_REQUESTS = 500  # of a file; perf_analyzer begins anew when it has sent them all
_NUM_PAGES = 8
_SOUND_S = 4.0  # of each recording
_FRAMES = 62  # of a sequence: two seconds


def write_inputs(model: str, artifact: Path, path: Path, first_number: int = 0) -> None:
    """Write the requests of `model`, as served from `artifact`, to `path`; `first_number` makes its prompts fresh.

    Raises `PerfError` for a model that is not known here.
    """
    if model == contracts.VAD_MODEL:
        data: list[Any] = [[_as_json(request) for request in sequence] for sequence in _frames()]
    else:
        data = [_as_json(request) for request in islice(_requests(model, artifact, first_number), _NUM_REQUESTS)]
    path.write_text(json.dumps({"data": data}), encoding="utf-8")


def _requests(model: str, artifact: Path, first_number: int) -> Iterator[Request]:
    makers: Mapping[str, Callable[[], Iterator[Request]]] = {
        contracts.ORCHESTRATOR_MODEL: lambda: _chats(first_number),
        contracts.EMBEDDING_MODEL: lambda: _texts(first_number),
        contracts.EMBEDDING_TOKENIZER_MODEL: lambda: _texts(first_number),
        contracts.EMBEDDING_ENCODER_MODEL: lambda: _word_pieces(artifact, first_number),
        contracts.COMPLEXITY_MODEL: lambda: _conversations(artifact, first_number),
        contracts.OCR_MODEL: _images,
        contracts.OCR_DETECTION_MODEL: _images,
        contracts.IMAGE_PREPROCESS_MODEL: _images,
        contracts.OCR_DETECTOR_MODEL: _pixels,
        contracts.OCR_RECOGNIZER_MODEL: _crops,
        contracts.STT_MODEL: _sounds,
        contracts.TURN_MODEL: _sounds,
        contracts.TTS_MODEL: lambda: ({contracts.TEXT.name: question.encode()} for question in QUESTIONS),
    }
    if model in makers:
        return makers[model]()
    for tier in load_tiers(artifact / "tiers.toml").tier:
        if tier.model == model and tier.tokenizer is not None:
            return _token_ids(model, artifact / tier.tokenizer, first_number)
    raise PerfError(f"model {model!r}: no inputs are made for it here (perf/analyzer_inputs.py)")


def _questions(first_number: int) -> Iterator[str]:
    return (fresh_question(number, number) for number in range(first_number, first_number + _NUM_REQUESTS))


def _chats(first_number: int) -> Iterator[Request]:
    for question in _questions(first_number):
        yield {contracts.REQUEST.name: chat_body(question, NUM_TOKENS)}


def _token_ids(model: str, tokenizer_folder: Path, first_number: int) -> Iterator[Request]:
    """What the orchestrator sends an engine."""
    tokenizer = ChatTokenizer.load(tokenizer_folder)
    for question in _questions(first_number):
        ids = tokenizer.encode_chat([{"role": "user", "content": question}])
        message = build_request(model, EngineRequest("perf", ids, NUM_TOKENS))
        types = {"INT32": np.int32, "BOOL": np.bool_, "FP32": np.float32, "UINT64": np.uint64}
        yield {
            each.name: np.frombuffer(raw, types[each.datatype]).reshape(list(each.shape)[1:])  # without the batch
            for each, raw in zip(message.inputs, message.raw_input_contents)
        }


def _texts(first_number: int) -> Iterator[Request]:
    for question in _questions(first_number):
        yield {contracts.TEXT.name: question.encode()}


def _word_pieces(artifact: Path, first_number: int) -> Iterator[Request]:
    row = read_toml(artifact / "embedder.toml", Embedder)
    file = artifact / "model_repository" / contracts.EMBEDDING_TOKENIZER_MODEL / "1" / "tokenizer.json"
    word_pieces = WordPieces(file, max_input_tokens=row.max_input_tokens, pad_id=row.pad_id)
    for question in _questions(first_number):
        encoded = word_pieces.encode([question.encode()], contracts.TEXT.name)
        yield {
            contracts.EMBEDDING_INPUT_IDS.name: encoded.input_ids[0],
            contracts.ATTENTION_MASK.name: encoded.attention_mask[0],
        }


def _conversations(artifact: Path, first_number: int) -> Iterator[Request]:
    folder = artifact / "model_repository" / contracts.COMPLEXITY_MODEL / "1"
    reader = ConversationReader(folder / "tokenizer.json")
    for question in _questions(first_number):
        ids = reader.read([Turn("user", question)])
        yield {contracts.EMBEDDING_INPUT_IDS.name: ids, contracts.ATTENTION_MASK.name: np.ones_like(ids)}


def _images() -> Iterator[Request]:
    from perf.ocr_pages import draw_receipt  # Pillow, which a server of text alone does not need

    for seed in range(_NUM_PAGES):
        yield {contracts.IMAGE.name: draw_receipt(seed).image}


def _pixels() -> Iterator[Request]:
    """Padded, as `image_preprocess` gives them."""
    from orchestrator.vision.images import read_image
    from orchestrator.vision.sizes import PADDING, choose_sides

    for request in _images():
        image = request[contracts.IMAGE.name]
        assert isinstance(image, bytes)
        shown = read_image(image).pixels
        width, height = choose_sides(shown.shape[1], shown.shape[0])
        pixels = np.full((height, width, 3), PADDING, np.uint8)
        pixels[: shown.shape[0], : shown.shape[1]] = shown
        yield {contracts.PIXELS.name: pixels}


def _crops() -> Iterator[Request]:
    """The goods and prices of the receipts, line by line."""
    from orchestrator.vision.crops import cut
    from perf.ocr_pages import GOODS_ROWS, ROW_PIXELS

    for request in _pixels():
        pixels = request[contracts.PIXELS.name]
        assert isinstance(pixels, np.ndarray)
        for row in GOODS_ROWS:
            top, left, right = row * ROW_PIXELS - 4, 32, 300
            corners = np.array([[left, top], [right, top], [right, top + 32], [left, top + 32]], np.float32)
            yield {contracts.CROP.name: cut(pixels, corners)}


def _speech() -> npt.NDArray[np.float32]:
    from perf.voice_sounds import two_cities  # the extra `voice`

    try:
        return two_cities()
    except BuildError as error:
        raise PerfError(f"recorded speech: {error}") from error


def _sounds() -> Iterator[Request]:
    speech, length = _speech(), int(_SOUND_S * contracts.SAMPLE_RATE_HZ)
    for begin in range(0, len(speech) - length + 1, length):
        yield {contracts.AUDIO.name: speech[begin : begin + length]}


def _frames() -> Iterator[Sequence[Request]]:
    """Each sequence begins somewhere else in the speech."""
    speech = _speech()
    length = _FRAMES * contracts.FRAME_SAMPLES
    for begin in range(0, len(speech) - length + 1, length):
        frames = speech[begin : begin + length].reshape(_FRAMES, contracts.FRAME_SAMPLES)
        yield [{contracts.FRAME.name: frame} for frame in frames]


def _as_json(request: Request) -> dict[str, Any]:
    return {name: _tensor(tensor) for name, tensor in request.items()}


def _tensor(tensor: Tensor) -> dict[str, Any]:
    """As `--input-data` takes it: the bytes on the wire, so a string has its length in front."""
    if isinstance(tensor, bytes):
        raw, shape = struct.pack("<I", len(tensor)) + tensor, [1]
    else:
        raw, shape = tensor.tobytes(), list(tensor.shape)
    return {"content": {"b64": base64.b64encode(raw).decode()}, "shape": shape}
