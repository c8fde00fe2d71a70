"""An image's text: detect, cut, recognise, turn what stands on its head, put in order.

The networks are behind `Detect` and `Recognize`: Triton models, or fakes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from orchestrator.contracts import OCR_MODEL
from orchestrator.vision.crops import align, cut, lay_down, size_of, turn
from orchestrator.vision.regions import Corners, find_regions
from orchestrator.vision.sizes import Pixels

# Below this a line is read upside down as well. Right way up, drawn and photographed lines have 0.9 to 1, upside down
# mostly 0.5 to 0.8 (tests/unit/test_ocr_page.py, on real networks).
SURE = 0.9
# A line is left out below this, as rapidocr does (config.yaml, `Global.text_score`).
MIN_SCORE = 0.5
# Lines so much wider than high tell which way the text runs.
LONG_RATIO = 2.0
# Of one page: enough to keep the recogniser's batches full, and few enough that a short page which comes next does not
# wait for 300 lines.
MAX_CROPS_IN_FLIGHT = 16


class Detection(NamedTuple):
    """The image as the detector had it, padded; the detector's map of it; the sizes that `pixels` stand for.

    `width` and `height` are the upright image's, `shown_width` and `shown_height` its part of `pixels`.
    """

    pixels: Pixels
    text_map: npt.NDArray[np.float32]
    width: int
    height: int
    shown_width: int
    shown_height: int


Detect = Callable[[bytes], Awaitable[Detection]]
Recognize = Callable[[Pixels], Awaitable[tuple[str, float]]]


class Line(NamedTuple):
    """A line of text; its corners in pixels of what was cut, in the order in which the text reads."""

    text: str
    score: float
    corners: Corners


async def read_page(image: bytes, detect: Detect, recognize: Recognize) -> dict[str, Any]:
    """What `/v1/ocr` answers: the lines in reading order, corners in pixels of the upright image.

    Raises what `detect` and `recognize` raise.
    """
    page = await detect(image)
    regions = await asyncio.to_thread(find_regions, page.text_map, page.shown_width, page.shown_height)
    shown = page.pixels[: page.shown_height, : page.shown_width]
    lines = await _read_lines(shown, [lay_down(region.corners) for region in regions], recognize)
    lines = in_reading_order([line for line in lines if line.text.strip() and line.score >= MIN_SCORE])
    scale = np.array([page.width / page.shown_width, page.height / page.shown_height])
    return {
        "object": "ocr",
        "model": OCR_MODEL,
        "width": page.width,
        "height": page.height,
        "text": "\n".join(line.text for line in lines),
        "lines": [
            {"text": line.text, "score": round(line.score, 4), "box": (line.corners * scale).round(1).tolist()}
            for line in lines
        ],
    }


async def _read_lines(pixels: Pixels, regions: Sequence[Corners], recognize: Recognize) -> list[Line]:
    slots = asyncio.Semaphore(MAX_CROPS_IN_FLIGHT)

    async def read(corners: Corners) -> Line:
        async with slots:
            crop = await asyncio.to_thread(cut, pixels, corners)
            return Line(*await recognize(crop), corners)

    async def read_all(all_corners: Sequence[Corners]) -> list[Line]:
        tasks = [asyncio.ensure_future(read(corners)) for corners in all_corners]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # a gathering that failed does not cancel the others
                task.cancel()

    lines = await read_all(regions)
    # What stands on its head.
    doubtful = [index for index, line in enumerate(lines) if line.score < SURE]
    for index, line in zip(doubtful, await read_all([turn(lines[index].corners) for index in doubtful])):
        lines[index] = max(line, lines[index], key=lambda each: each.score)
    # What reads well either way ("69"), or is too short to tell which way it lies: as most of the text does.
    direction = find_direction(lines)
    aligned = [align(line.corners, direction) for line in lines]
    others = [index for index, line in enumerate(lines) if aligned[index] is not line.corners]
    for index, line in zip(others, await read_all([aligned[index] for index in others])):
        if line.score >= SURE:
            lines[index] = line
    return lines


def find_direction(lines: Sequence[Line]) -> npt.NDArray[np.float64]:
    """The unit vector in which most of the text runs: to the right, if there is no line long enough to tell."""
    toward: dict[tuple[int, int], npt.NDArray[np.float64]] = {}  # right, down, left, up
    for line in lines:
        width, height = size_of(line.corners)
        if width >= LONG_RATIO * height:
            along = (line.corners[1] - line.corners[0]).astype(np.float64)
            x, y = along
            side = (int(np.sign(x)), 0) if abs(x) >= abs(y) else (0, int(np.sign(y)))
            toward[side] = toward.get(side, np.zeros(2)) + along * line.score
    longest = max(toward.values(), key=np.linalg.norm, default=np.array([1.0, 0.0]))
    return np.asarray(longest / np.linalg.norm(longest))


def in_reading_order(lines: Sequence[Line]) -> list[Line]:
    """From top to bottom, and side by side from left to right, in the direction in which most of the text runs.

    Side by side are those whose middles differ by less than half of the lower one's height.
    """
    x, y = find_direction(lines)
    upright = np.array([[x, -y], [y, x]])  # turns the page so that its text runs to the right
    middles = {id(line): line.corners.mean(axis=0) @ upright for line in lines}
    rows: list[list[Line]] = []
    for line in sorted(lines, key=lambda each: float(middles[id(each)][1])):
        first = rows[-1][0] if rows else None
        if first is not None:
            apart = middles[id(line)][1] - middles[id(first)][1]
            lower = min(size_of(line.corners)[1], size_of(first.corners)[1])
            if apart < lower / 2:
                rows[-1].append(line)
                continue
        rows.append([line])
    return [line for row in rows for line in sorted(row, key=lambda each: float(middles[id(each)][0]))]
