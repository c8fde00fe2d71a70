"""`python -m perf ocr`: the pages it draws, the targets it builds, and what it makes of its rounds."""

from __future__ import annotations

from io import BytesIO

from PIL import Image

from build.rows import OCR_MODELS, load_models, load_target
from perf.ocr import Round, describe, with_ocr
from perf.ocr_pages import Page, draw_receipt


def test_a_seed_makes_a_receipt() -> None:
    page = draw_receipt(3, num_items=5)
    assert page == draw_receipt(3, num_items=5) != draw_receipt(4, num_items=5)
    assert Image.open(BytesIO(page.image)).width == 560
    assert "Total EUR" in page.texts and len(page.texts) == 18


def test_both_targets_have_ocr_and_one_does_not_batch() -> None:
    for batches in (True, False):
        target = with_ocr(load_target("scripted"), batches=batches)
        assert {*target.models, *target.ensembles} >= OCR_MODELS
        assert "pp-ocrv6-small" in load_models(target)
        recognizer = target.models["ocr_recognizer"]
        assert (recognizer.max_queue_delay_microseconds is not None) == recognizer.allow_ragged_batch == batches


def test_what_it_tells() -> None:
    pages = [Page(b"", ("one", "two words")), Page(b"", ("three",))]
    read = [["one", "twowords"], ["thr3e"]]
    runs = {
        "batched": {
            1: [Round([100.0, 300.0], 0.4, 0.6, read, 3, 3)],
            4: [Round([200.0, 200.0], 0.2, 0.5, read, 3, 1), Round([200.0, 600.0], 0.6, 0.7, read, 3, 1)],
        },
        "unbatched": {
            1: [Round([100.0, 300.0], 0.4, 0.6, read, 3, 3)],
            4: [Round([200.0, 200.0], 0.4, 0.5, read, 3, 3), Round([200.0, 600.0], 0.6, 0.7, read, 3, 3)],
        },
        "rapidocr": {1: [Round([1.0, 1.0], 0.8, 1.0, read)], 4: [Round([1.0, 1.0], 0.8, 1.0, read)] * 2},
    }
    table, result = describe(pages, runs)
    assert (result["command"], result["batch_size"], result["batching_gain"]) == ("ocr", 3.0, 1.5)
    assert result["against_rapidocr"] == {"1": 2.0, "4": 2.0}
    assert result["batched"]["4"] == {
        "pages_per_s": 5.0,
        "ms": {"p50": 200.0, "p95": 540.0},
        "processor_s_per_page": 0.3,
        "batch_size": 3.0,
    }
    assert result["rapidocr"]["right_lines"] == round(2 / 3, 4) and "batch_size" not in result["rapidocr"]["1"]
    assert "batched / unbatched, 4 clients" in table
