"""A stranger's image file as pixels: PNG, JPEG or WebP, of any colours, upright, and no larger than reading needs.

Pillow and not OpenCV decodes: it tells an image's size before it decodes, can be held to three formats, and knows
palettes, transparency, CMYK and EXIF. What its size says is refused before anything is decoded.
"""

from __future__ import annotations

import warnings
from io import BytesIO
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from orchestrator.contracts import IMAGE
from orchestrator.errors import InvalidRequestError
from orchestrator.vision.sizes import Pixels, fit

FORMATS = ("PNG", "JPEG", "WEBP")
# A3 at 400 dots an inch has 31 million. Decoded and shrunk, with transparency, these take 400 MB, for a moment.
MAX_PIXELS = 40_000_000
_MEAN_GREY = 128

# Pillow's own limit is a warning and a later error; `read_image` has one that is an answer.
Image.MAX_IMAGE_PIXELS = None

_Transpose = Image.Transpose
# EXIF's orientation (CIPA DC-008, section 4.6.4): what brings the image upright.
_UPRIGHT = {
    2: _Transpose.FLIP_LEFT_RIGHT,
    3: _Transpose.ROTATE_180,
    4: _Transpose.FLIP_TOP_BOTTOM,
    5: _Transpose.TRANSPOSE,
    6: _Transpose.ROTATE_270,
    7: _Transpose.TRANSVERSE,
    8: _Transpose.ROTATE_90,
}
_LYING = (5, 6, 7, 8)  # whose width and height change places


class Picture(NamedTuple):
    """`pixels` show an upright image of `width` x `height`, shrunk where it was larger than `sizes.MAX_SIDE`."""

    pixels: Pixels
    width: int
    height: int


def read_image(data: bytes) -> Picture:
    """Decode an image file.

    Transparent parts get the background, white or black, that what is drawn stands out from. Raises
    `InvalidRequestError` for what is no such image, is damaged, has several frames, or too many pixels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd but readable files
            return _read(data)
    except InvalidRequestError:
        raise
    except UnidentifiedImageError as error:
        raise _refused(f"is no {', '.join(FORMATS)} that can be read") from error
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise whatever a damaged file leads them to
        raise _refused(f"cannot be decoded, it is damaged or cut off ({type(error).__name__})") from error


def _read(data: bytes) -> Picture:
    with Image.open(BytesIO(data), formats=FORMATS) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise _refused(
                f"has {width} x {height} pixels; at most {MAX_PIXELS} are allowed: send it smaller, or in parts"
            )
        # A camera's MPO is a JPEG with a second picture behind it, mostly a smaller one.
        if image.format != "MPO" and (num_frames := getattr(image, "n_frames", 1)) != 1:
            raise _refused(f"has {num_frames} frames; send one of them")
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        size = fit(width, height)
        image.draft(None, size)  # a JPEG is then decoded at 1/2, 1/4 or 1/8, if that is still large enough
        image.load()
        picture = _flatten(_shrink(_in_eight_bits(image), size))
    if orientation in _UPRIGHT:
        picture = picture.transpose(_UPRIGHT[orientation])
    if orientation in _LYING:
        width, height = height, width
    return Picture(np.ascontiguousarray(np.asarray(picture)[:, :, ::-1]), width, height)


def _in_eight_bits(image: Image.Image) -> Image.Image:
    """RGB, or RGBA if parts may be transparent."""
    if image.mode.startswith("I"):  # grey of 16 bits, which Pillow would cut at 255
        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8)).convert("RGB")
    mode = "RGBA" if image.has_transparency_data else "RGB"
    return image if image.mode == mode else image.convert(mode)  # which would copy


def _shrink(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    if image.size == size:
        return image
    return image.resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0)


def _flatten(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    opaque = np.asarray(image.getchannel("A"), np.float32)
    grey = np.asarray(image.convert("RGB").convert("L"), np.float32)
    is_dark = opaque.sum() == 0 or float((grey * opaque).sum() / opaque.sum()) < _MEAN_GREY
    page = Image.new("RGBA", image.size, "white" if is_dark else "black")
    return Image.alpha_composite(page, image).convert("RGB")


def _refused(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{IMAGE.name}: {reason}", param=IMAGE.name)
