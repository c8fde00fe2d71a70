"""`/v1/ocr` and the Triton model `ocr`: drawn pages and a photograph, by every way in; target scripted with OCR."""

from __future__ import annotations

import contextlib
import io
import json
import re
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from images import LETTER, PHOTO_TEXT, draw, encode, error_rate, letter, photo, png_of_size
from PIL import Image
from serving import Stack, running

from build.compiler import build
from build.fetch import cache_folder
from build.rows import load_models, load_target
from orchestrator.__main__ import main
from perf.ocr import with_ocr
from perf.ocr_pages import draw_receipt

pytestmark = pytest.mark.timeout(240)  # the first one builds
PATH = "/v1/ocr"
# Spaces, and a letter here and there.
MAX_ERROR_RATE = 0.01


@pytest.fixture(scope="module")
def ocr_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ocr") / "artifact"
    target = with_ocr(load_target("scripted"))
    build(target, load_models(target), folder, cache=cache_folder(), progress=lambda _: nullcontext())
    return folder


@pytest.fixture(scope="module")
def stack(ocr_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(ocr_artifact, tmp_path_factory.mktemp("run")) as stack:
        yield stack


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=120) as client:
        yield client


def read(http: httpx.Client, image: bytes, kind: str = "png") -> Any:
    answer = http.post(PATH, content=image, headers={"content-type": f"image/{kind}"})
    assert answer.status_code == 200, answer.text
    return answer.json()


def texts(found: Any) -> list[str]:
    return [line["text"] for line in found["lines"]]


def refused(answer: httpx.Response, status: int, code: str = "invalid_value") -> Any:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), error
    return error


# --- what is read ------------------------------------------------------------------------------------------


def test_a_letter_in_three_formats(http: httpx.Client) -> None:
    for kind in ("png", "jpeg", "webp"):
        found = read(http, encode(letter(), kind.upper()), kind)
        assert error_rate(texts(found), LETTER) <= MAX_ERROR_RATE, (kind, texts(found))
        assert found["text"] == "\n".join(texts(found)) and found["object"] == "ocr" and found["model"] == "ocr"
        assert (found["width"], found["height"]) == letter().size
        assert all(0.9 < line["score"] <= 1 for line in found["lines"])
    box = np.array(found["lines"][0]["box"])
    np.testing.assert_allclose(box[0], (24, 24), atol=12)  # the margin at which it was drawn


def test_a_photograph(http: httpx.Client) -> None:
    """Its last line is cut off below; what is read of that may come or not."""
    found = texts(read(http, photo()))
    assert error_rate(found[: len(PHOTO_TEXT)], PHOTO_TEXT) <= 0.03, found


@pytest.mark.parametrize("size", [11, 14, 32, 90])
def test_letters_of_many_sizes(http: httpx.Client, size: int) -> None:
    found = texts(read(http, encode(letter(size))))
    assert error_rate(found, LETTER) <= MAX_ERROR_RATE, found


@pytest.mark.parametrize("angle", [4, 45, 90, 180, 270])
def test_rotated_pages(http: httpx.Client, angle: int) -> None:
    image = letter().rotate(angle, Image.Resampling.BICUBIC, expand=True, fillcolor="white")
    found = texts(read(http, encode(image)))
    assert error_rate(found, LETTER) <= MAX_ERROR_RATE, found


@pytest.mark.parametrize(("orientation", "angle"), [(3, 180), (6, 90), (8, 270)])
def test_a_photograph_that_lies_as_the_camera_was_held(http: httpx.Client, orientation: int, angle: int) -> None:
    exif = Image.Exif()
    exif[0x112] = orientation
    found = read(http, encode(letter().rotate(angle, expand=True), "JPEG", exif=exif), "jpeg")
    assert (found["width"], found["height"]) == letter().size
    assert error_rate(texts(found), LETTER) <= MAX_ERROR_RATE, texts(found)


def test_a_receipt_is_read_row_by_row(http: httpx.Client) -> None:
    page = draw_receipt(1)
    found = texts(read(http, page.image))
    assert [each.replace(" ", "") for each in found] == [each.replace(" ", "") for each in page.texts]


def test_signs(http: httpx.Client) -> None:
    """Bright on dark, large, and tightly cut."""
    for image in (
        draw(("EXIT 24",), 120, "white", "#004400"),
        draw(("EXIT 24",), 12, "yellow", "#202080"),
        draw(("EXIT 24",), 40).crop((38, 38, 190, 92)),
    ):
        assert texts(read(http, encode(image.convert("RGB")))) == ["EXIT 24"]


@pytest.mark.parametrize("ink", ["black", "white"])
def test_transparent_paper(http: httpx.Client, ink: str) -> None:
    assert texts(read(http, encode(draw(("Total 12.50",), ink=ink, paper=(0, 0, 0, 0))))) == ["Total 12.50"]


@pytest.mark.parametrize("kind", ["16 bits", "CMYK", "palette", "one bit"])
def test_odd_colours(http: httpx.Client, kind: str) -> None:
    grey = letter(32).convert("L")
    image = {
        "16 bits": encode(Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)),
        "CMYK": encode(grey.convert("CMYK"), "JPEG"),
        "palette": encode(grey.convert("P")),
        "one bit": encode(grey.convert("1")),
    }[kind]
    found = texts(read(http, image, "jpeg" if kind == "CMYK" else "png"))
    assert error_rate(found, LETTER) <= MAX_ERROR_RATE, found


def test_a_large_page_is_answered_in_its_own_pixels(http: httpx.Client) -> None:
    image = letter(110).resize((4000, 2200))
    found = read(http, encode(image, "JPEG", quality=80), "jpeg")
    assert (found["width"], found["height"]) == (4000, 2200)
    assert error_rate(texts(found), LETTER) <= MAX_ERROR_RATE
    assert max(x for line in found["lines"] for x, _ in line["box"]) > 3000


@pytest.mark.parametrize("size", [(1, 1), (1, 10000), (10000, 1), (600, 400)])
def test_nothing_to_read(http: httpx.Client, size: tuple[int, int]) -> None:
    found = read(http, encode(Image.new("RGB", size, "white")))
    assert (found["text"], found["lines"]) == ("", []) and (found["width"], found["height"]) == size


# --- ways in -----------------------------------------------------------------------------------------------


def infer(client: triton.InferenceServerClient, image: bytes) -> Any:
    tensor = triton.InferInput("image", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([image], dtype=np.object_))
    with client as connection:
        return json.loads(connection.infer("ocr", [tensor]).as_numpy("result")[0])


def test_every_way_in_gives_the_same(stack: Stack, http: httpx.Client) -> None:
    image = encode(letter())
    expected = read(http, image)
    form = http.post(PATH, files={"file": ("letter.png", image, "image/png")}, data={"model": "ocr"})
    plain = http.post(PATH, content=image, headers={"content-type": "application/octet-stream"})
    by_grpc = [
        infer(client, image) for client in (stack.triton_client(), triton.InferenceServerClient(stack.front_url))
    ]
    for found in (form.json(), plain.json(), *by_grpc):
        assert found == expected


def test_it_is_listed_and_described(http: httpx.Client) -> None:
    assert http.get("/v1/models").json()["data"][-1]["id"] == "ocr"
    described = http.get("/openapi.json").json()["paths"][PATH]["post"]
    assert {"multipart/form-data", "image/webp"} <= set(described["requestBody"]["content"])


def test_the_parts_are_not_public(stack: Stack) -> None:
    with (
        triton.InferenceServerClient(stack.front_url) as connection,
        pytest.raises(triton.InferenceServerException, match="one of orchestrator, embedding, ocr"),
    ):
        connection.get_model_metadata("ocr_recognizer")


@pytest.mark.own_target("it reads images")
def test_another_target_has_none(scripted_stack: Stack) -> None:
    answer = httpx.post(scripted_stack.url + PATH, content=b"x", headers={"content-type": "image/png"}, timeout=20)
    assert "this server has no model 'ocr'" in refused(answer, 404, "model_not_found")["message"]
    with pytest.raises(triton.InferenceServerException, match="one of orchestrator, embedding"):
        infer(triton.InferenceServerClient(scripted_stack.front_url), b"x")


# --- what is refused ---------------------------------------------------------------------------------------

FRAMES: Any = {"save_all": True, "append_images": [Image.new("RGB", (50, 50))]}


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (b"no image", "image: is no PNG, JPEG, WEBP that can be read"),
        (encode(letter(), "GIF"), "image: is no PNG, JPEG, WEBP that can be read"),
        (encode(letter(), "JPEG")[:-1000], "image: cannot be decoded, it is damaged or cut off"),
        (encode(letter())[:2000], "image: cannot be decoded, it is damaged or cut off"),
        (encode(Image.new("RGB", (50, 50), "red"), "WEBP", **FRAMES), "image: has 2 frames; send one of them"),
        (png_of_size(60_000, 60_000), "image: has 60000 x 60000 pixels; at most 40000000 are allowed"),
        (encode(Image.new("1", (8000, 8000))), "image: has 8000 x 8000 pixels; at most 40000000 are allowed"),
    ],
    ids=["text", "GIF", "JPEG cut off", "PNG cut off", "animated", "bomb in the header", "bomb"],
)
def test_what_cannot_be_read_is_refused(stack: Stack, http: httpx.Client, image: bytes, message: str) -> None:
    error = refused(http.post(PATH, content=image, headers={"content-type": "image/png"}), 400)
    assert error["message"].startswith(message) and error["param"] == "image"
    with pytest.raises(triton.InferenceServerException) as caught:
        infer(triton.InferenceServerClient(stack.front_url), image)
    assert json.loads(str(caught.value.message()))["error"]["message"].startswith(message)


def test_bodies_that_are_none_of_ours(http: httpx.Client) -> None:
    refused(http.post(PATH, json={"image": "x"}), 415, "unsupported_media_type")
    refused(http.post(PATH, files={"picture": ("a.png", b"x")}), 400)
    refused(http.post(PATH, content=b"", headers={"content-type": "image/png"}), 400)
    refused(
        http.post(PATH, content=b"x", headers={"content-type": "image/png", "origin": "https://evil.example"}),
        403,
        "origin_not_allowed",
    )
    refused(
        http.post(PATH, content=b"x", headers={"content-type": "image/png", "host": "evil.example"}),
        421,
        "host_not_allowed",
    )
    refused(http.get(PATH), 405, "method_not_allowed")


def test_an_image_may_be_larger_than_other_requests_and_not_without_end(http: httpx.Client) -> None:
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 256, (1500, 2400, 3), np.uint8))
    image = encode(noise)
    assert 9 << 20 < len(image) < 16 << 20  # more than any other request's body, framed or not
    read(http, image)
    chunks = (image[begin : begin + 100_000] for begin in range(0, len(image), 100_000))
    assert http.post(PATH, content=chunks, headers={"content-type": "image/png"}).status_code == 200
    refused(
        http.post(PATH, content=bytes((16 << 20) + 1), headers={"content-type": "image/png"}), 413, "request_too_large"
    )
    body = json.dumps({"messages": [{"role": "user", "content": "x" * (2 << 20)}]})
    answer = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    refused(answer, 413, "request_too_large")


# --- under load --------------------------------------------------------------------------------------------


def executions(stack: Stack, model: str) -> tuple[float, float]:
    """How many requests `model` has answered, and in how many batches."""
    page = httpx.get(stack.facts["triton_metrics_url"], timeout=10).text
    names = ("nv_inference_count", "nv_inference_exec_count")
    found = [re.search(rf'^{name}{{model="{model}",[^}}]*}} (\S+)$', page, re.MULTILINE) for name in names]
    assert all(found), page
    requests, batches = (float(each[1]) for each in found if each)
    return requests, batches


def test_pages_share_batches_and_nobody_gets_another_s_text(stack: Stack) -> None:
    pages = [draw_receipt(seed, num_items=4) for seed in range(12)]
    before = executions(stack, "ocr_recognizer")
    found: dict[int, list[str]] = {}

    def ask(client: int) -> None:
        with httpx.Client(base_url=stack.url, timeout=200) as http:
            for index in range(client, len(pages), 6):
                found[index] = texts(read(http, pages[index].image))

    clients = [threading.Thread(target=ask, args=(client,)) for client in range(6)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    for index, page in enumerate(pages):
        assert error_rate(found[index], page.texts) <= MAX_ERROR_RATE
    lines, batches = np.subtract(executions(stack, "ocr_recognizer"), before)
    assert lines >= sum(len(page.texts) for page in pages)
    assert lines / batches > 1.5


# --- keys --------------------------------------------------------------------------------------------------


LATE = {(503, "overloaded"), (504, "deadline_exceeded")}  # not expected to be in time, or not in time


def test_keys_hold_here_too(ocr_artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"

    def add(tenant: str, *rights: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            assert main(["keys", "add", f"--keys={path}", "--tenant", tenant, *rights]) == 0
        return output.getvalue().strip()

    reads = add("reads", "--tier", "ocr", "--requests-per-minute", "3")
    writes = add("writes", "--tier", "simple", "--tier", "embedding")
    wrong = "rt-this-key-is-nobodys-0123456789abcdefghijklm"
    image = encode(letter(12))
    with running(ocr_artifact, tmp_path / "run", f"--keys={path}") as stack:

        def ask(key: str | None, body: bytes = image, **more: str) -> httpx.Response:
            headers = {"content-type": "image/png", **({"authorization": f"Bearer {key}"} if key else {}), **more}
            return httpx.post(stack.url + PATH, content=body, headers=headers, timeout=60)

        refused(ask(None), 401, "invalid_api_key")
        refused(ask(wrong), 401, "invalid_api_key")
        error = refused(ask(writes), 403, "not_allowed")
        assert error["message"] == "model: this key may not use 'ocr'; it may use simple, embedding"
        first = ask(reads)
        assert first.status_code == 200 and first.headers["x-ratelimit-remaining-requests"] == "2"
        late = ask(reads, **{"x-deadline-ms": "1"})  # refused, or given up: then it counts
        assert (late.status_code, late.json()["error"]["code"]) in LATE
        while (damaged := ask(reads, b"damaged")).status_code != 429:
            refused(damaged, 400)  # counts as well
        limited = ask(reads)
        refused(limited, 429, "rate_limit_exceeded")
        assert int(limited.headers["retry-after"]) > 0

        def infer_with(key: str) -> Any:
            tensor = triton.InferInput("image", [1], "BYTES")
            tensor.set_data_from_numpy(np.array([image], dtype=np.object_))
            with triton.InferenceServerClient(stack.front_url) as connection:
                return connection.infer("ocr", [tensor], headers={"authorization": f"Bearer {key}"})

        for key, code in ((wrong, "invalid_api_key"), (writes, "not_allowed"), (reads, "rate_limit_exceeded")):
            with pytest.raises(triton.InferenceServerException) as caught:
                infer_with(key)
            assert json.loads(str(caught.value.message()))["error"]["code"] == code
