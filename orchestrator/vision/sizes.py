"""To what sizes images and crops are brought: few of them, since Triton batches requests of equal shapes only.

What the sizes cost is padding: neighbours differ by about a sixth, so an image of any size has 14 % of it on average,
and a crop 9 %.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]  # [height, width, 3], BGR as the networks were trained
PADDING = 127  # grey, which the networks take for nothing

# The long side of an image. Lines of 8 points on an A4 page are then 15 pixels high, which the recogniser still reads;
# the detector's time grows with the square (1.2 s of one core for 1,600 x 1,120).
MAX_SIDE = 1600
# Multiples of 32, by which the detector shrinks.
SIDES = (64, 128, 192, 256, 320, 416, 512, 640, 800, 960, 1120, 1280, 1440, MAX_SIDE)

# What the recogniser was trained on.
CROP_HEIGHT = 48
# Multiples of 8, by which it shrinks. A longer line is squeezed.
CROP_WIDTHS = (64, 96, 128, 160, 192, 224, 272, 320, 384, 448, 544, 640, 768, 928, 1120, 1344, 1600, 1920, 2304, 2784)
MAX_CROP_WIDTH = CROP_WIDTHS[-1]


def fit(width: int, height: int) -> tuple[int, int]:
    """Width and height with the long side at most `MAX_SIDE`; nothing is enlarged, and no side is below 1."""
    scale = min(1.0, MAX_SIDE / max(width, height))
    return max(1, round(width * scale)), max(1, round(height * scale))


def choose_sides(width: int, height: int) -> tuple[int, int]:
    """What an image that fits is padded to: width and height."""
    return _choose(width, SIDES), _choose(height, SIDES)


def choose_crop_width(width: int) -> int:
    """What a crop is padded to."""
    return _choose(width, CROP_WIDTHS)


def _choose(size: int, allowed: tuple[int, ...]) -> int:
    return next((each for each in allowed if size <= each), allowed[-1])
