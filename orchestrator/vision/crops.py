"""Lines of text cut out of an image, straight and of one height."""

from __future__ import annotations

import cv2
import numpy as np
import numpy.typing as npt

from orchestrator.vision.regions import Corners
from orchestrator.vision.sizes import CROP_HEIGHT, MAX_CROP_WIDTH, PADDING, Pixels, choose_crop_width

# Of one this much higher than wide the text runs up or down.
UPRIGHT_RATIO = 1.5


def lay_down(corners: Corners) -> Corners:
    """The corners of a region, those of one that is high in the order in which text reads that runs down.

    It may as well run up: then it is read upside down, and turned when that is seen.
    """
    width, height = size_of(corners)
    return np.roll(corners, -1, axis=0) if height >= UPRIGHT_RATIO * width else corners


def turn(corners: Corners) -> Corners:
    """The corners in the order in which they are read upside down."""
    return np.roll(corners, -2, axis=0)


def align(corners: Corners, direction: npt.NDArray[np.float64]) -> Corners:
    """The corners in the order in which they read along `direction`: `corners` itself, if there is no better one.

    Text in a long region runs along it, forward or backward.
    """
    width, height = size_of(corners)
    is_long = max(width, height) >= UPRIGHT_RATIO * min(width, height)
    turns = [0, -2] if is_long else [0, -1, -2, -3]
    sides = [np.roll(corners, each, axis=0) for each in turns]
    best = int(np.argmax([(side[1] - side[0]) @ direction / size_of(side)[0] for side in sides]))
    return sides[best] if best else corners


def size_of(corners: Corners) -> tuple[float, float]:
    """Width and height of a region, along its text and across."""
    top_left, top_right, bottom_right, bottom_left = corners
    width = max(np.linalg.norm(top_left - top_right), np.linalg.norm(bottom_right - bottom_left))
    height = max(np.linalg.norm(top_left - bottom_left), np.linalg.norm(top_right - bottom_right))
    return max(1.0, float(width)), max(1.0, float(height))


def cut(pixels: Pixels, corners: Corners) -> Pixels:
    """What is between `corners`, as a crop [CROP_HEIGHT, a width of `sizes`, 3], padded on the right."""
    width, height = size = [int(side) for side in size_of(corners)]
    box = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    straight = cv2.warpPerspective(
        pixels,
        cv2.getPerspectiveTransform(corners.astype(np.float32), box),
        size,
        flags=cv2.INTER_CUBIC,
        borderMode=cv2.BORDER_REPLICATE,
    )
    crop_width = min(MAX_CROP_WIDTH, max(1, round(CROP_HEIGHT * width / height)))
    way = cv2.INTER_AREA if height > CROP_HEIGHT else cv2.INTER_LINEAR
    crop = np.full((CROP_HEIGHT, choose_crop_width(crop_width), 3), PADDING, np.uint8)
    crop[:, :crop_width] = cv2.resize(straight, (crop_width, CROP_HEIGHT), interpolation=way)
    return crop
