"""Images for the tests of OCR: drawn ones, a photograph, and files that are wrong in some way."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO

from PIL import Image, ImageDraw, ImageFont

from build.fetch import cache_folder, fetch
from build.model_rows import PackagedFile

# A page photographed at an angle, unevenly lit: scikit-image's `data.page()` (BSD-3-Clause).
PHOTO = PackagedFile(
    package="scikit-image",
    version="0.25.2",
    folder="skimage/data",
    file="page.png",
    sha256="341a6f0a61557662b02734a9b6e56ec33a915b2c41886b97509dedf2a43b47a3",
)
PHOTO_TEXT = (
    "Region-based segmentation",
    "Let us first determine markers of the coins and the",
    "background. These markers are pixels that we can label",
    "unambiguously as either object or background. Here,",
    "the markers are found at the two extreme parts of the",
    "histogram of grey values:",
    ">>> markers = np.zeros_like(coins)",
)
LETTER = (
    "Dear customer,",
    "we thank you for your order 4711.",
    "The amount of 1,299.50 EUR is due",
    "within 30 days of delivery.",
    "69 parcels left us on 2024-05-17.",
)


def photo() -> bytes:
    return fetch(PHOTO, cache_folder()).read_bytes()


def encode(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    packed = BytesIO()
    image.save(packed, kind, **options)
    return packed.getvalue()


def draw(
    texts: tuple[str, ...] = LETTER, size: int = 24, ink: object = "black", paper: object = "white"
) -> Image.Image:
    """Lines of text below each other, in Pillow's own font; RGBA, so that ink and paper may be transparent."""
    font = ImageFont.load_default(size)
    margin, step = size, round(size * 1.7)
    width = max(round(font.getlength(text)) for text in texts) + 2 * margin
    image = Image.new("RGBA", (width, step * len(texts) + 2 * margin), paper)
    pen = ImageDraw.Draw(image)
    for row, text in enumerate(texts):
        pen.text((margin, margin + row * step), text, ink, font)
    return image


def letter(size: int = 24) -> Image.Image:
    return draw(size=size).convert("RGB")


def png_of_size(width: int, height: int) -> bytes:
    """A PNG that says it is so large, of few bytes, and damaged behind its header."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100_000))) + chunk(b"IEND", b"")


def error_rate(found: object, expected: object) -> float:
    """Characters to change, add or leave out ÷ characters expected, spaces aside."""
    one, other = ("".join("".join(map(str, texts)).split()) for texts in (found, expected))  # type: ignore[call-overload]
    costs = list(range(len(other) + 1))
    for row, left in enumerate(one, 1):
        above, costs[0] = costs[0], row
        for column, right in enumerate(other, 1):
            above, costs[column] = costs[column], min(costs[column] + 1, costs[column - 1] + 1, above + (left != right))
    return costs[-1] / len(other)
