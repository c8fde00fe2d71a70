"""Image files as pixels: every kind that is taken, and what is refused before and while it is decoded."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from images import draw, encode, letter, png_of_size
from PIL import Image

from orchestrator.errors import InvalidRequestError
from orchestrator.vision import images
from orchestrator.vision.images import MAX_PIXELS, read_image
from orchestrator.vision.sizes import MAX_SIDE

RED = Image.new("RGB", (30, 20), (200, 10, 30))
BGR = [30, 10, 200]


def mean(data: bytes) -> list[int]:
    return np.asarray(read_image(data).pixels.mean(axis=(0, 1))).round().astype(int).tolist()


@pytest.mark.parametrize(
    ("image", "kind", "expected"),
    [
        (RED, "PNG", BGR),
        (RED, "JPEG", BGR),
        (RED, "WEBP", BGR),
        (RED, "MPO", BGR),
        (RED.convert("RGBA"), "PNG", BGR),
        (RED.convert("P"), "PNG", BGR),
        (RED.convert("CMYK"), "JPEG", BGR),
        (RED.convert("L"), "PNG", [69] * 3),
        (Image.fromarray(np.full((20, 30), 0xA000, np.uint16)), "PNG", [160] * 3),
        (Image.new("1", (30, 20), 1), "PNG", [255] * 3),
        (Image.new("1", (30, 20), 0), "PNG", [0] * 3),
    ],
    ids=lambda value: f"{value.mode}" if isinstance(value, Image.Image) else None,
)
def test_every_kind_of_colours(image: Image.Image, kind: str, expected: list[int]) -> None:
    picture = read_image(encode(image, kind))
    assert picture.pixels.dtype == np.uint8 and picture.pixels.shape == (20, 30, 3)
    assert (picture.width, picture.height) == (30, 20)
    assert np.abs(np.subtract(mean(encode(image, kind)), expected)).max() <= 2


@pytest.mark.parametrize(
    ("ink", "paper", "expected"),
    [("black", "white", 255), ("white", "black", 0)],
)
def test_behind_what_is_transparent_is_what_it_stands_out_from(ink: str, paper: str, expected: int) -> None:
    pixels = read_image(encode(draw(("Total 12.50",), ink=ink, paper=(0, 0, 0, 0)))).pixels
    assert pixels[0, 0].tolist() == [expected] * 3
    plain = read_image(encode(draw(("Total 12.50",), ink=ink, paper=paper))).pixels
    assert np.abs(pixels.astype(int) - plain).max() <= 2


def test_what_is_all_transparent_is_white() -> None:
    assert mean(encode(Image.new("RGBA", (5, 5), (0, 0, 0, 0)))) == [255] * 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_it_is_turned_as_exif_says(orientation: int) -> None:
    upright = Image.new("RGB", (40, 20), "white")
    upright.paste("black", (0, 0, 10, 5))  # marks the top left corner
    back = {method: undo for undo, method in ((6, 8), (8, 6), (2, 2), (3, 3), (4, 4), (5, 5), (7, 7))}
    stored = upright
    if orientation > 1:
        stored = upright.transpose(images._UPRIGHT[back[orientation]])
    exif = Image.Exif()
    exif[0x112] = orientation
    picture = read_image(encode(stored, exif=exif))
    assert (picture.width, picture.height) == (40, 20)
    np.testing.assert_array_equal(picture.pixels, np.asarray(upright)[:, :, ::-1])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_large_one_is_shrunk_and_its_own_size_told(kind: str) -> None:
    picture = read_image(encode(Image.new("RGB", (4000, 3000), "white"), kind))
    assert picture.pixels.shape == (1200, MAX_SIDE, 3)
    assert (picture.width, picture.height) == (4000, 3000)


@pytest.mark.parametrize(
    ("width", "height", "shape"), [(1, 1, (1, 1, 3)), (1, 10000, (1600, 1, 3)), (10000, 1, (1, 1600, 3))]
)
def test_the_thinnest_ones(width: int, height: int, shape: tuple[int, ...]) -> None:
    assert read_image(encode(Image.new("RGB", (width, height)))).pixels.shape == shape


FRAMES: dict[str, Any] = {
    "save_all": True,
    "append_images": [Image.new("RGB", (30, 20), each) for each in ("blue", "green")],
    "duration": 40,
}
NOISE = Image.effect_noise((100, 100), 80)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "image: is no PNG, JPEG, WEBP that can be read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image: is no PNG, JPEG, WEBP that can be read"),
        (encode(RED, "GIF"), "image: is no PNG, JPEG, WEBP that can be read"),
        (encode(RED, "TIFF"), "image: is no PNG, JPEG, WEBP that can be read"),
        (encode(RED, "WEBP", **FRAMES), "image: has 3 frames; send one of them"),
        (encode(RED, "PNG", **FRAMES), "image: has 3 frames; send one of them"),
        *(
            (encode(NOISE, kind)[:-200], "image: cannot be decoded, it is damaged or cut off")
            for kind in ("PNG", "JPEG", "WEBP")
        ),
        (png_of_size(50_000, 50_000), f"image: has 50000 x 50000 pixels; at most {MAX_PIXELS} are allowed"),
        (png_of_size(2**31 - 1, 2**31 - 1), "image: has 2147483647 x 2147483647 pixels"),
        (png_of_size(100, 100_000_000), "image: has 100 x 100000000 pixels"),
        (png_of_size(0, 5), "image: "),
    ],
    ids=range(13),
)
def test_what_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(message)) as caught:
        read_image(data)
    assert caught.value.param == "image" and caught.value.status == 400


def test_a_bomb_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are those of a whole image: it would decode."""
    data = encode(Image.new("1", (8000, 5001)))
    assert len(data) < 20_000
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("decoded"))
    with pytest.raises(InvalidRequestError, match="has 8000 x 5001 pixels"):
        read_image(data)


def test_the_largest_that_is_allowed() -> None:
    assert read_image(encode(Image.new("1", (8000, 5000)))).pixels.shape == (1000, 1600, 3)


def test_a_huge_canvas_of_webp_is_refused_by_its_header() -> None:
    data = bytearray(encode(RED, "WEBP", lossless=True))
    begin = data.index(b"VP8L") + 9  # 14 bits of width - 1, 14 of height - 1
    data[begin : begin + 4] = (16382 | 16382 << 14).to_bytes(4, "little")
    with pytest.raises(InvalidRequestError, match="has 16383 x 16383 pixels"):
        read_image(bytes(data))


SAMPLES = [
    encode(letter(10), "PNG"),
    encode(letter(10), "JPEG"),
    encode(letter(10), "WEBP"),
    encode(draw(size=10), "WEBP", lossless=True),
    encode(RED.convert("P"), "PNG", transparency=3),
]


@given(
    st.sampled_from(SAMPLES),
    st.lists(st.tuples(st.integers(0, 2000), st.binary(min_size=1, max_size=8)), max_size=6),
    st.integers(0, 5000),
)
def test_a_damaged_file_is_read_or_refused(data: bytes, changes: list[tuple[int, bytes]], cut: int) -> None:
    damaged = bytearray(data)
    for place, value in changes:
        damaged[place : place + len(value)] = value
    if cut < 4000:
        del damaged[cut:]
    try:
        picture = read_image(bytes(damaged))
    except InvalidRequestError:
        return
    assert picture.pixels.ndim == 3 and picture.pixels.dtype == np.uint8
