"""Sizes, regions, crops and decoding: what is pure of OCR."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.vision import regions, sizes
from orchestrator.vision.crops import align, cut, lay_down, size_of, turn
from orchestrator.vision.ctc import decode, read_alphabet
from orchestrator.vision.regions import find_regions
from orchestrator.vision.sizes import PADDING

# --- sizes -------------------------------------------------------------------------------------------------

Side = st.integers(1, 20_000)


@given(Side, Side)
def test_an_image_fits_into_its_padding(width: int, height: int) -> None:
    fitted = sizes.fit(width, height)
    assert max(fitted) <= sizes.MAX_SIDE and min(fitted) >= 1
    assert fitted == (width, height) or max(fitted) == sizes.MAX_SIDE
    padded = sizes.choose_sides(*fitted)
    assert all(side <= to and to % 32 == 0 for side, to in zip(fitted, padded))


@given(st.integers(1, sizes.MAX_CROP_WIDTH))
def test_a_crop_fits_into_its_padding(width: int) -> None:
    padded = sizes.choose_crop_width(width)
    assert width <= padded <= max(64, width * 1.5) and padded % 8 == 0


def test_there_are_few_sizes() -> None:
    assert len(sizes.SIDES) <= 16 and len(sizes.CROP_WIDTHS) <= 20
    assert list(sizes.SIDES) == sorted(set(sizes.SIDES)) and list(sizes.CROP_WIDTHS) == sorted(set(sizes.CROP_WIDTHS))


# --- regions -----------------------------------------------------------------------------------------------


def text_map(*rectangles: tuple[tuple[float, float], tuple[float, float], float], value: float = 0.9) -> np.ndarray:
    """A detector's map with such cores: middle, size, angle."""
    made = np.zeros((320, 640), np.float32)
    for rectangle in rectangles:
        cv2.fillPoly(made, [cv2.boxPoints(rectangle).astype(np.int32)], value)
    return made


@pytest.mark.parametrize("angle", [0, 10, 30, 45, 80])
def test_a_core_is_grown_back(angle: float) -> None:
    (region,) = find_regions(text_map(((320, 160), (200, 20), angle)), 640, 320)
    growth = 1.6 * 200 * 20 / (2 * 220)
    width, height = sorted(size_of(region.corners), reverse=True)
    assert width == pytest.approx(200 + 2 * growth, abs=6) and height == pytest.approx(20 + 2 * growth, abs=6)
    np.testing.assert_allclose(region.corners.mean(axis=0), (320, 160), atol=1.5)
    assert region.score > 0.8


def test_what_is_faint_or_tiny_or_beyond_the_image_is_none() -> None:
    assert find_regions(text_map(((320, 160), (200, 20), 0), value=0.4), 640, 320) == []
    assert find_regions(text_map(((320, 160), (1, 1), 0)), 640, 320) == []
    assert find_regions(text_map(((500, 160), (100, 20), 0)), 400, 320) == []
    assert find_regions(np.zeros((64, 64), np.float32), 1, 1) == []


def test_no_more_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "MAX_REGIONS", 2)
    made = text_map(*(((100, 40 * row), (100, 10), 0) for row in range(1, 6)))
    assert len(find_regions(made, 640, 320)) == 2


@given(st.integers(0, 2**32 - 1), st.integers(1, 96), st.integers(1, 64), st.floats(0.05, 0.9))
def test_corners_lie_in_the_image_whatever_the_map(seed: int, width: int, height: int, share: float) -> None:
    chance = np.random.default_rng(seed)
    blotches = cv2.resize((chance.random((16, 24)) < share).astype(np.float32), (96, 64))
    for region in find_regions(blotches, width, height):
        assert region.corners.shape == (4, 2) and 0 <= region.score <= 1
        assert (region.corners >= 0).all() and (region.corners <= (width - 1, height - 1)).all()


# --- crops -------------------------------------------------------------------------------------------------

BOX = np.array([[10, 10], [110, 10], [110, 34], [10, 34]], np.float32)


def picture() -> np.ndarray:
    """Left half of `BOX` blue, right half red, its upper half darker."""
    made = np.full((60, 130, 3), 255, np.uint8)
    made[10:34, 10:60], made[10:34, 60:110] = (255, 0, 0), (0, 0, 255)
    made[10:22, 10:110] //= 2
    return made


def test_a_crop_has_one_height_and_is_padded() -> None:
    crop = cut(picture(), BOX)
    assert crop.shape == (48, 224, 3) and crop.dtype == np.uint8
    assert (crop[:, 200:] == PADDING).all() and (crop[:, :196] != PADDING).any(axis=(1, 2)).all()
    assert crop[40, 20].tolist() == [255, 0, 0] and crop[40, 180].tolist() == [0, 0, 255]
    assert crop[5, 20].tolist() == [127, 0, 0]


def test_turned_it_is_upside_down() -> None:
    crop, turned = cut(picture(), BOX)[:, :200].astype(int), cut(picture(), turn(BOX))[:, :200].astype(int)
    assert np.abs(crop[:, 10:-10] - turned[::-1, ::-1][:, 10:-10]).mean() < 12


@pytest.mark.parametrize("quarter", range(4))
def test_text_in_any_direction_is_cut_as_it_reads(quarter: int) -> None:
    """The page turned by quarters; the direction is that of the text on it."""
    page = np.ascontiguousarray(np.rot90(picture(), quarter))
    # Found by the detector, corners begin at the top left whatever the text does.
    points = _turned(BOX, picture().shape[1::-1], quarter)
    found = regions._order(points)
    direction = np.array([(1, 0), (0, -1), (-1, 0), (0, 1)][quarter], np.float64)
    crop = cut(page, align(lay_down(found), direction))
    assert crop[40, 20].tolist() == [255, 0, 0] and crop[40, 180].tolist() == [0, 0, 255]


def _turned(corners: np.ndarray, size: tuple[int, int], quarters: int) -> np.ndarray:
    """The corners on a page of `size` turned to the left."""
    width, height = size
    for _ in range(quarters):
        corners = np.stack([corners[:, 1], width - corners[:, 0]], axis=1)
        width, height = height, width
    return corners.astype(np.float32)


def test_corners_that_read_along_are_left_as_they_are() -> None:
    right, left = np.array([1.0, 0.0]), np.array([-1.0, 0.0])
    assert align(BOX, right) is BOX
    np.testing.assert_array_equal(align(BOX, left), turn(BOX))
    square = np.array([[0, 0], [10, 0], [10, 10], [0, 10]], np.float32)
    np.testing.assert_array_equal(align(square, np.array([0.0, 1.0]))[0], (10, 0))


@given(st.lists(st.tuples(st.integers(0, 129), st.integers(0, 59)), min_size=4, max_size=4))
def test_any_corners_make_a_crop(points: list[tuple[int, int]]) -> None:
    crop = cut(picture(), regions._order(np.array(points, np.float32)))
    assert crop.shape[0] == 48 and crop.shape[1] in sizes.CROP_WIDTHS and crop.shape[2] == 3


# --- decoding ----------------------------------------------------------------------------------------------

ALPHABET = ["", "a", "b", "c", " "]


@pytest.mark.parametrize(
    ("characters", "text"),
    [
        ([0, 0, 0], ""),
        ([1, 1, 0, 1, 2], "aab"),
        ([1, 2, 1], "aba"),
        ([0, 3, 3, 3, 0], "c"),
        ([1, 0, 4, 4, 2], "a b"),
    ],
)
def test_columns_make_text(characters: list[int], text: str) -> None:
    found, score = decode(np.array(characters, np.int32), np.full(len(characters), 0.5, np.float32), ALPHABET)
    assert found == text and score == (0.5 if text else 0.0)


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1, width=32)), min_size=1, max_size=40))
def test_decoding_is_what_the_paper_says(columns: list[tuple[int, float]]) -> None:
    characters, certainties = (np.array(each) for each in zip(*columns))
    text, score = decode(characters.astype(np.int32), certainties.astype(np.float32), ALPHABET)
    runs = [list(run) for _, run in groupby(columns, key=lambda column: column[0])]
    kept = [run[0] for run in runs if run[0][0]]
    assert text == "".join(ALPHABET[index] for index, _ in kept)
    assert score == pytest.approx(np.mean([certainty for _, certainty in kept]) if kept else 0, abs=1e-5)


def test_the_alphabet_keeps_odd_characters(tmp_path: Path) -> None:
    (tmp_path / "characters.txt").write_text("!\n\u3000\n#\n", encoding="utf-8")
    assert read_alphabet(tmp_path / "characters.txt") == ["", "!", "\u3000", "#", " "]
