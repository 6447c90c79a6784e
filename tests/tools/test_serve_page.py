"""The live page in a real browser: Chromium, without a window."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from playwright.sync_api import Browser, Page, expect, sync_playwright
from served import served

KEY = "a key"
SHORT = tiny_models.text_of([5, 9, 40, 77])
WAIT_S = 30
OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# Of the map: how many pixels glow, being more red than blue by far.
COUNT_LIT = """() => {
  const { width, height } = heat;
  if (!height) return 0;
  const { data } = heat.getContext("2d").getImageData(0, 0, width, height);
  let n = 0;
  for (let i = 0; i < data.length; i += 4) n += data[i] - data[i + 2] > 90;
  return n;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium; without one the tests are skipped, and say so."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("NOT TESTED: the live page; no chromium on this machine")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=list(OPTIONS))
        expect.set_options(timeout=1000 * WAIT_S)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def url(q4_pack: Path, float_pack: Path) -> Iterator[str]:
    """A server of two packs, with a key."""
    options = ["--expert-cache", "floor", "--no-warm-start", "--api-key", KEY]
    with served(q4_pack, float_pack, *options) as (url, _):
        yield url


def until(holds: Callable[[], Any]) -> None:
    """Wait for it; fails after WAIT_S. (The page's own policy forbids playwright to wait there.)"""
    ends = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.05)


@contextmanager
def opened(browser: Browser, url: str, **options: Any) -> Iterator[tuple[Page, list[str]]]:
    """(the page, the errors it reports and the addresses elsewhere that it asks for)."""
    page = browser.new_page(**options)
    page.set_default_timeout(1000 * WAIT_S)
    wrong: list[str] = []
    page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith(url) else wrong.append(r.url))
    try:
        page.goto(f"{url}/")
        yield page, wrong
    finally:
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_message_is_answered_and_the_experts_light_up(
    browser: Browser, url: str, width: int, scheme: Any
) -> None:
    size: Any = {"width": width, "height": 840}
    with opened(browser, url, viewport=size, color_scheme=scheme) as (page, wrong):
        page.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        expect(page.get_by_role("status")).to_have_text("ready")
        expect(page.locator("#key-form")).to_be_hidden()
        page.get_by_label("Model", exact=True).select_option("q4")
        page.get_by_label("Message", exact=True).fill(SHORT)
        page.keyboard.press("Enter")
        stop = page.get_by_role("button", name="Stop")
        expect(stop).to_be_visible()
        answer = page.locator(".turn.assistant .text")
        until(lambda: len(answer.inner_text()) > 10)
        assert stop.is_visible()  # the text comes while more is made
        until(lambda: page.evaluate(COUNT_LIT) > 0)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        expect(page.locator("#memory-planned")).to_contain_text("planned")
        until(lambda: "%" in page.locator("#hit-rate strong").inner_text())
        page.screenshot()  # of what a person sees: it can be drawn
        stop.click()
        expect(page.locator(".turn .about")).to_have_text("stopped")
        expect(page.get_by_role("status")).to_have_text("ready")
        until(lambda: page.evaluate(COUNT_LIT) == 0)  # and cools down

        page.locator("#heat").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        expect(page.locator("#heat-cell")).to_contain_text("expert 1:")
        assert wrong == []


def test_a_wrong_key_is_said_and_another_model_can_be_asked(browser: Browser, url: str) -> None:
    with opened(browser, url, reduced_motion="reduce") as (page, wrong):
        page.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("wrong API key")
        assert [text for text in wrong if "401" not in text] == []  # the browser notes it itself
        page.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        page.get_by_label("Model", exact=True).select_option("float")
        page.get_by_label("Message", exact=True).fill("<b>" + SHORT)
        page.get_by_role("button", name="Send").click()
        until(lambda: page.locator(".turn.assistant .text").inner_text())
        assert page.locator(".turn.user b").count() == 0
        expect(page.locator("#model-name")).to_have_text("float is loaded")
        page.get_by_role("button", name="New conversation").click()
        expect(page.locator(".turn")).to_have_count(0)
