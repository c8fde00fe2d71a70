"""Pages to read: receipts as a till prints them, drawn from a seed with Pillow's own font, and what is on them."""

from __future__ import annotations

import random
from io import BytesIO
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

_GOODS = (
    *("Apples", "Bread", "Butter", "Coffee", "Eggs", "Flour", "Honey", "Lemons", "Milk", "Mustard", "Olive oil"),
    *("Pasta", "Pepper", "Potatoes", "Rice", "Salt", "Sugar", "Tea", "Tomatoes", "Vinegar", "Yoghurt"),
)
_STREETS = ("Harbour Street", "Station Road", "Mill Lane", "Church Walk", "Market Square")


# Where the goods of `draw_receipt` are, at its defaults: the rows, and their height in pixels.
GOODS_ROWS, ROW_PIXELS = range(5, 19), 36


class Page(NamedTuple):
    """`image` is a PNG; `texts` are what is written on it, from top to bottom and left to right."""

    image: bytes
    texts: tuple[str, ...]


def draw_receipt(seed: int, width: int = 560, num_items: int = 14, size: int = 20) -> Page:
    """A receipt of `num_items` goods with their prices, `width` pixels wide, letters of `size` pixels."""
    chance = random.Random(seed)
    step, margin = int(size * 1.8), 2 * size
    image = Image.new("L", (width, (num_items + 9) * step), 250)
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(size)
    texts: list[str] = []

    def write(row: int, left: str, right: str = "") -> None:
        pen.text((margin, row * step), left, 20, font)
        pen.text((width - margin - pen.textlength(right, font), row * step), right, 20, font)
        texts.extend(filter(None, (left, right)))

    write(1, "Corner Shop", f"No. {chance.randrange(1000, 9999)}")
    write(2, f"{chance.randrange(1, 99)} {chance.choice(_STREETS)}")
    write(3, f"2024-{chance.randrange(1, 13):02}-{chance.randrange(1, 29):02}", f"{chance.randrange(8, 20)}:30")
    total = 0
    for row in range(5, 5 + num_items):
        price = chance.randrange(50, 3000)
        total += price
        write(row, f"{chance.randrange(2, 9)} x {chance.choice(_GOODS)}", f"{price / 100:.2f}")
    write(num_items + 6, "Total EUR", f"{total / 100:.2f}")
    write(num_items + 7, "Thank you for your visit")
    packed = BytesIO()
    image.save(packed, "PNG")
    return Page(packed.getvalue(), tuple(texts))
