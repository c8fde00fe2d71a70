"""Where the text is: the detector's map of an image as rotated rectangles.

The detector is a DB network (Liao et al., "Real-time Scene Text Detection with Differentiable Binarization", 2020): it
marks the shrunken cores of text lines, which are cut out by a threshold and grown back. The thresholds are those of
PP-OCR's own pipeline (rapidocr 3.10, config.yaml, `Det`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

Corners = npt.NDArray[
    np.float32
]  # [4, 2]: x and y of top left, top right, bottom right, bottom left, as the text reads

MAP_THRESHOLD = 0.3
SCORE_THRESHOLD = 0.5  # of a region: the mean of the map in it
GROWTH = 1.6
MIN_CORE_SIDE = 3.0  # pixels; smaller ones are noise
MIN_SIDE = 5.0
# A page of fine print has some 200. More are a texture, each of which would cost as much as a line.
MAX_REGIONS = 1000


class Region(NamedTuple):
    """A line of text: its `corners` in pixels of the map, and how certain the detector is."""

    corners: Corners
    score: float


def find_regions(text_map: npt.NDArray[np.float32], width: int, height: int) -> list[Region]:
    """The regions of `text_map`, FP32 [map height, map width], 0 to 1; beyond `width` and `height` it is padding."""
    text_map = text_map[:height, :width]
    core_mask = (text_map > MAP_THRESHOLD).astype(np.uint8)
    mask = cv2.dilate(core_mask, np.ones((2, 2), np.uint8))
    contours, _ = cv2.findContours(mask, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    regions = []
    for contour in contours[:MAX_REGIONS]:
        core = cv2.minAreaRect(contour)
        (core_width, core_height) = core[1]
        if min(core[1]) < MIN_CORE_SIDE:
            continue
        score = _mean_inside(text_map, _box(core))
        if score < SCORE_THRESHOLD:
            continue
        # The network was trained on lines shrunk by area x ratio / perimeter (section 3.3 of the paper).
        growth = GROWTH * core_width * core_height / (2 * (core_width + core_height))
        grown = (core_width + 2 * growth, core_height + 2 * growth)
        if min(grown) < MIN_SIDE:
            continue
        corners = _order(_box((core[0], grown, core[2])))
        corners[:, 0] = corners[:, 0].clip(0, width - 1)
        corners[:, 1] = corners[:, 1].clip(0, height - 1)
        regions.append(Region(corners, score))
    return regions


def _box(rectangle: Any) -> Corners:
    """The corners of a rotated rectangle as OpenCV describes it: its middle, its size, its angle."""
    return np.asarray(cv2.boxPoints(rectangle), np.float32)


def _mean_inside(text_map: npt.NDArray[np.float32], box: Corners) -> float:
    """The mean of the map inside a box."""
    height, width = text_map.shape
    left, top = np.floor(box.min(axis=0)).astype(int).clip(0, (width - 1, height - 1))
    right, bottom = np.ceil(box.max(axis=0)).astype(int).clip(0, (width - 1, height - 1))
    mask = np.zeros((bottom - top + 1, right - left + 1), np.uint8)
    cv2.fillPoly(mask, [(box - (left, top)).astype(np.int32)], (1,))
    return float(cv2.mean(text_map[top : bottom + 1, left : right + 1], mask)[0])


def _order(box: Corners) -> Corners:
    """The corners of a box, clockwise from the top left one: of the two leftmost ones the upper."""
    left, right = np.split(box[np.argsort(box[:, 0], kind="stable")], 2)
    top_left, bottom_left = left[np.argsort(left[:, 1], kind="stable")]
    top_right, bottom_right = right[np.argsort(right[:, 1], kind="stable")]
    return np.array([top_left, top_right, bottom_right, bottom_left], np.float32)
