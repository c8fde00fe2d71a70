"""A page read through fake networks: order, what stands on its head, failures; and how sure the real recogniser is."""

from __future__ import annotations

import asyncio
from typing import Any

import cv2
import numpy as np
import pytest

from orchestrator.errors import EngineError
from orchestrator.vision import page
from orchestrator.vision.page import Detection, Line, find_direction, in_reading_order, read_page
from orchestrator.vision.sizes import Pixels

# --- fakes: a page whose regions are boxes of one grey each, which the recogniser knows ---------------------


class FakePage:
    """`boxes` are x, y, width, height and a grey by which the recogniser knows the box."""

    def __init__(self, *boxes: tuple[int, int, int, int, int], quarters: int = 0) -> None:
        self._pixels = np.zeros((400, 600, 3), np.uint8)
        self._map = np.zeros((400, 600), np.float32)
        for x, y, width, height, grey in boxes:
            self._pixels[y : y + height, x : x + width] = grey
            self._pixels[y : y + height, x : x + width // 2] = grey // 2  # its left end, if it is the right way up
            cv2.rectangle(self._map, (x + 4, y + 4), (x + width - 5, y + height - 5), 0.9, -1)
        self._pixels = np.ascontiguousarray(np.rot90(self._pixels, quarters))
        self._map = np.ascontiguousarray(np.rot90(self._map, quarters))
        self.num_live = self.most_live = 0
        self.crops: list[Pixels] = []

    async def detect(self, image: bytes) -> Detection:
        height, width = self._map.shape
        return Detection(self._pixels, self._map, 2 * width, 2 * height, width, height)

    async def recognize(self, crop: Pixels) -> tuple[str, float]:
        """The box's grey as text; surely if it is the right way up, else as something else."""
        self.num_live += 1
        self.most_live = max(self.most_live, self.num_live)
        await asyncio.sleep(0)
        self.num_live -= 1
        self.crops.append(crop)
        row = crop[24, :, 0].astype(int)
        inside = row[(row != 127) & (row > 20)]
        first, last = inside[len(inside) // 4], inside[3 * len(inside) // 4]
        is_upright = last > first
        return f"{'text' if is_upright else 'xxxx'} {round(int(max(first, last)), -1)}", 0.98 if is_upright else 0.6


def read(fake: FakePage) -> dict[str, Any]:
    return asyncio.run(read_page(b"", fake.detect, fake.recognize))


BOXES = ((20, 20, 200, 30, 100), (300, 22, 200, 30, 110), (20, 90, 240, 30, 120), (300, 88, 160, 30, 130))
ORDER = ["text 100", "text 110", "text 120", "text 130"]


@pytest.mark.parametrize("quarters", range(4))
def test_lines_come_in_reading_order_however_the_page_lies(quarters: int) -> None:
    found = read(FakePage(*BOXES, quarters=quarters))
    assert [line["text"] for line in found["lines"]] == ORDER
    assert found["text"] == "\n".join(ORDER)
    assert (found["width"], found["height"]) == ((1200, 800) if quarters % 2 == 0 else (800, 1200))
    # The first corner of the first line is its top left one, as it reads, in pixels of the upright image.
    x, y = found["lines"][0]["box"][0]
    corner = {0: (40, 40), 1: (40, 1160), 2: (1160, 760), 3: (760, 40)}[quarters]
    assert np.abs(np.subtract((x, y), corner)).max() <= 30  # regions are a little larger than their text


def test_what_reads_well_upside_down_is_read_as_the_others_lie() -> None:
    """Surely wrong as it was found: as "69" on a page that stands on its head."""
    fake = FakePage(*BOXES, quarters=2)
    real = fake.recognize

    async def recognize(crop: Pixels) -> tuple[str, float]:
        text, score = await real(crop)
        return (text, 0.97) if text == "xxxx 130" else (text, score)

    found = asyncio.run(read_page(b"", fake.detect, recognize))
    assert [line["text"] for line in found["lines"]] == ORDER


def test_what_is_right_is_read_once() -> None:
    fake = FakePage(*BOXES)
    read(fake)
    assert len(fake.crops) == len(BOXES)


def test_the_unreadable_and_the_blank_are_left_out() -> None:
    fake = FakePage(*BOXES)

    async def recognize(crop: Pixels) -> tuple[str, float]:
        text, score = await FakePage.recognize(fake, crop)
        blank, faint = ("  ", 0.99), ("#", 0.49)
        return {"100": ("", 0.0), "110": blank, "120": faint}.get(text.split()[1], (text, score))

    found = asyncio.run(read_page(b"", fake.detect, recognize))
    assert [line["text"] for line in found["lines"]] == ["text 130"]


def test_an_empty_page_has_no_lines() -> None:
    found = read(FakePage())
    assert found == {"object": "ocr", "model": "ocr", "width": 1200, "height": 800, "text": "", "lines": []}


def test_a_page_has_few_lines_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_CROPS_IN_FLIGHT", 2)
    fake = FakePage(*BOXES)
    read(fake)
    assert fake.most_live <= 2


@pytest.mark.parametrize("part", ["detect", "recognize"])
def test_a_network_that_fails_fails_the_page(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakePage(*BOXES)

    async def fail(_: Any) -> Any:
        raise EngineError("broken")

    monkeypatch.setattr(fake, part, fail)
    with pytest.raises(EngineError, match="broken"):
        read(fake)


# --- order -------------------------------------------------------------------------------------------------


def line(text: str, x: float, y: float, width: float, height: float, score: float = 0.99) -> Line:
    corners = np.array([[x, y], [x + width, y], [x + width, y + height], [x, y + height]], np.float32)
    return Line(text, score, corners)


def test_a_price_lower_by_a_few_pixels_is_of_the_same_line() -> None:
    lines = [line("2.00", 400, 54, 60, 20), line("Eggs", 20, 50, 80, 20), line("Milk", 20, 80, 80, 20)]
    assert [each.text for each in in_reading_order(lines)] == ["Eggs", "2.00", "Milk"]


def test_the_direction_is_that_of_most_long_lines() -> None:
    along = line("along", 0, 0, 300, 20)
    up = Line("up", 0.99, np.array([[0, 100], [0, 20], [20, 20], [20, 100]], np.float32))
    short = line("7", 0, 0, 10, 20)
    np.testing.assert_allclose(find_direction([up, along, short]), (1, 0))
    np.testing.assert_allclose(find_direction([up, short]), (0, -1))
    np.testing.assert_allclose(find_direction([short]), (1, 0))
    np.testing.assert_allclose(find_direction([]), (1, 0))


def test_a_tilted_page_is_ordered_along_its_text() -> None:
    """Tilted by 20 degrees, the right end of the first row is lower than the left of the second."""
    angle = np.deg2rad(20)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    rows = [
        line("a", 0, 0, 100, 20),
        line("b", 300, 0, 100, 20),
        line("c", 0, 40, 100, 20),
        line("d", 300, 40, 100, 20),
    ]
    tilted = [each._replace(corners=(each.corners @ turn).astype(np.float32)) for each in rows]
    assert tilted[1].corners[0, 1] > tilted[2].corners[0, 1]
    assert [each.text for each in in_reading_order(tilted[::-1])] == ["a", "b", "c", "d"]
