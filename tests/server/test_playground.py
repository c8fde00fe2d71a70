"""The page at `/` in a real browser, by keyboard, mouse and drop, and on a narrow screen."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from debian import NotToBeHad, Program, find_program
from playwright.sync_api import Browser, Page, expect, sync_playwright
from serving import Stack, script
from speech import KEYS, as_file

from perf.ocr_pages import draw_receipt

pytestmark = pytest.mark.timeout(400)  # the first one downloads the browser, 115 MB

MARKUP = "<img src=x onerror=alert(1)> & <b>bold</b>"


def find_chromium() -> Program:
    try:
        return find_program("chromium", "chromium", "usr/lib/chromium/chromium")
    except NotToBeHad as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(f"{error}\nfix: apt-get install chromium")


@pytest.fixture(scope="module")
def question(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Chromium's microphone hears: a question, again and again."""
    return tmp_path_factory.mktemp("microphone") / "question.wav"


@pytest.fixture(scope="module")
def browser(question: Path) -> Iterator[Browser]:
    chromium = find_chromium()
    microphone = [
        "--use-fake-ui-for-media-stream",
        "--use-fake-device-for-media-stream",
        f"--use-file-for-fake-audio-capture={question}",
    ]
    with sync_playwright() as playwright:
        # As root there is no sandbox; what is opened is ours.
        browser = playwright.chromium.launch(
            executable_path=chromium.path, env=chromium.environment, chromium_sandbox=False, args=microphone
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that finds no fault with its own content policy, and has no error of its own."""
    page = browser.new_page()
    faults: list[str] = []
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: faults.append(dialog.message))
    yield page
    page.close()
    assert [fault for fault in faults if "Failed to load resource" not in fault] == []


def say(page: Page, messages: list[dict[str, str]]) -> None:
    page.get_by_label("Message").fill(messages[0]["content"])
    page.keyboard.press("Enter")


def test_chat_by_keyboard(page: Page, scripted_stack: Stack) -> None:
    page.goto(scripted_stack.url)
    expect(page.get_by_label("Message")).to_be_focused()
    page.get_by_label("Model").select_option("simple")
    assert "embedding" not in page.get_by_label("Model").inner_text().split()
    say(page, script(text=MARKUP))
    facts = page.get_by_text("tier simple")
    expect(facts).to_contain_text("ms to the first token")
    expect(page.get_by_text(MARKUP, exact=True)).to_be_visible()
    for stage in ("route", "queue", "prefill", "decode"):
        expect(page.get_by_text(f"{stage} ")).to_contain_text("ms")
    page.reload()
    expect(facts).to_have_count(0)
    say(page, script(text="Here again."))
    expect(page.get_by_text("Here again.", exact=True)).to_be_visible()


def test_stop(page: Page, scripted_stack: Stack) -> None:
    page.goto(scripted_stack.url)
    stop = page.get_by_role("button", name="Stop")
    for leave in (lambda: page.keyboard.press("Escape"), stop.click):
        say(page, script(text="word " * 2000, itl_ms=20))
        expect(page.get_by_text("word word word").last).to_be_visible()
        leave()
        expect(page.get_by_text("stopped", exact=True).last).to_be_visible()
        expect(stop).to_be_disabled()
        scripted_stack.wait_until_idle()


def test_an_error_is_told(page: Page, scripted_stack: Stack) -> None:
    page.goto(scripted_stack.url)
    say(page, script(text=7))
    expect(page.locator(".error")).to_contain_text("502: input_ids")


def test_a_narrow_screen(page: Page, scripted_stack: Stack) -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    page.goto(scripted_stack.url)
    say(page, script(text="long" * 200))
    expect(page.get_by_text("tier simple")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_the_numbers_move(page: Page, scripted_stack: Stack) -> None:
    page.goto(scripted_stack.url)
    answers = page.locator("dt", has_text="answers").locator("+ dd")
    before = answers.inner_text()
    say(page, script(text="One."))
    expect(answers).not_to_have_text(before, timeout=10_000)


def test_an_image_is_dropped(page: Page, cpu_stack: Stack) -> None:
    page.goto(cpu_stack.url)
    image = base64.b64encode(draw_receipt(1).image).decode()
    transfer = page.evaluate_handle(
        """(image) => {
          const transfer = new DataTransfer();
          const bytes = Uint8Array.from(atob(image), (each) => each.charCodeAt(0));
          transfer.items.add(new File([bytes], "receipt.png", {type: "image/png"}));
          return transfer;
        }""",
        image,
    )
    page.dispatch_event("#drop", "drop", {"dataTransfer": transfer})
    expect(page.locator("#read-facts")).to_contain_text("lines", timeout=30_000)
    assert page.locator("#picture polygon").count() >= 3


def test_a_call(page: Page, question: Path, speech_stack: Stack) -> None:
    """The browser's microphone is heard, and what is answered is played."""
    headers = {"authorization": f"Bearer {KEYS['all']}"}
    body = {"model": "tts", "voice": "joe", "input": "What is the capital of France?", "response_format": "pcm"}
    spoken = httpx.post(f"{speech_stack.url}/v1/audio/speech", json=body, headers=headers, timeout=60).content
    samples = np.frombuffer(spoken, "<i2").astype(np.float32) / 32768
    # Before anybody speaks he breathes in; Chromium hears a microphone from its first sample on.
    before, after = np.zeros(12_000, np.float32), np.zeros(6 * 24_000, np.float32)
    question.write_bytes(as_file(np.concatenate([before, samples, after]), 24_000))
    page.goto(speech_stack.url)
    expect(page.get_by_role("button", name="Talk")).to_be_hidden()
    page.get_by_label("Key").fill(KEYS["all"])
    page.keyboard.press("Tab")
    page.get_by_role("button", name="Talk").click()
    expect(page.locator(".user").first).to_contain_text("capital of France", timeout=30_000)
    expect(page.get_by_text("after the last word: ").first).to_contain_text("first sound", timeout=30_000)
    expect(page.get_by_text("tier ").first).to_be_visible()
    page.get_by_role("button", name="Hang up").click()
    expect(page.get_by_role("button", name="Talk")).to_be_visible()
    speech_stack.wait_until_idle()
