"""PP-OCR's graphs as changed for Triton: they compute what the originals do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from build.errors import BuildError
from build.fetch import cache_folder, fetch
from build.model_rows import OcrRow
from build.ocr_onnx import write_alphabet, write_detector_onnx, write_recognizer_onnx
from build.rows import HERE
from orchestrator.config import read_toml
from orchestrator.contracts import CERTAINTIES, CHARACTERS, CROP, PIXELS, TEXT_MAP
from orchestrator.onnx_session import open_session
from orchestrator.vision.ctc import read_alphabet

ROW = read_toml(HERE / "models" / "pp-ocrv6-small.toml", OcrRow)
IMAGES = np.random.default_rng(7).integers(0, 256, (2, 48, 96, 3), np.uint8)


@pytest.fixture(scope="module")
def sources() -> tuple[Path, Path]:
    detector = fetch(ROW.detector, cache_folder(), ROW.recognizer)
    return detector, fetch(ROW.recognizer, cache_folder())


def run_original(path: Path, images: np.ndarray = IMAGES) -> np.ndarray:
    """On floats as rapidocr makes them."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    floats = ((images.astype(np.float32) / 255 - 0.5) / 0.5).transpose(0, 3, 1, 2)
    (found,) = session.run(None, {session.get_inputs()[0].name: floats})
    return np.asarray(found)


def model_of(artifact: Path, name: str) -> Path:
    return artifact / "model_repository" / name / "1" / "model.onnx"


def test_the_detector_computes_the_same(artifact: Callable[[str], Path], sources: tuple[Path, Path]) -> None:
    session = open_session(model_of(artifact("cpu"), "ocr_detector"), num_threads=1)
    images = np.concatenate([IMAGES, IMAGES[:, :16]], axis=1)  # the detector takes multiples of 32
    (found,) = session.run([TEXT_MAP.name], {PIXELS.name: images})
    assert found.shape == (2, 64, 96)
    np.testing.assert_allclose(found, run_original(sources[0], images)[:, 0], atol=1e-4)


def test_the_recognizer_chooses_the_same(artifact: Callable[[str], Path], sources: tuple[Path, Path]) -> None:
    session = open_session(model_of(artifact("cpu"), "ocr_recognizer"), num_threads=1)
    characters, certainties = session.run([CHARACTERS.name, CERTAINTIES.name], {CROP.name: IMAGES})
    original = run_original(sources[1])
    assert characters.dtype == np.int32 and characters.shape == (2, 12)
    np.testing.assert_array_equal(characters, original.argmax(axis=2))
    np.testing.assert_allclose(certainties, original.max(axis=2), atol=1e-4)


def test_the_alphabet_is_the_recognizers(sources: tuple[Path, Path], tmp_path: Path) -> None:
    write_alphabet(sources[1], ROW, tmp_path / "characters.txt")
    alphabet = read_alphabet(tmp_path / "characters.txt")
    assert len(alphabet) == run_original(sources[1]).shape[2] == ROW.num_characters + 2
    assert alphabet[0] == "" and alphabet[-1] == " " and {"a", "Z", "€", "ß", "é", "中"} <= set(alphabet)


def test_another_model_s_row_is_refused(sources: tuple[Path, Path], tmp_path: Path) -> None:
    row = ROW.model_copy(update={"num_characters": 96})
    with pytest.raises(BuildError, match="has 18708 characters, the row of 'pp-ocrv6-small' says 96; fix the row"):
        write_alphabet(sources[1], row, tmp_path / "characters.txt")
    with pytest.raises(BuildError, match="tells 18710 classes apart, the row of 'pp-ocrv6-small' has 96 characters"):
        write_recognizer_onnx(sources[1], row, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_graph_of_theirs_is_refused(sources: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no graph")
    with pytest.raises(BuildError, match=r"bad\.onnx: not an ONNX model that can be read"):
        write_detector_onnx(tmp_path / "bad.onnx", tmp_path / "model.onnx")
    other = onnx.load(sources[0])
    other.graph.output.append(other.graph.output[0])
    onnx.save(other, tmp_path / "two.onnx")
    with pytest.raises(BuildError, match=r"two\.onnx: has not one input and one output"):
        write_detector_onnx(tmp_path / "two.onnx", tmp_path / "model.onnx")
