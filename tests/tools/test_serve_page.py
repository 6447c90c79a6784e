"""The live page in a real browser: Chromium, without a window."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_models
from playwright.sync_api import Browser, Page, expect, sync_playwright
from served import PROGRAM, served

from moepack.tools.serving.live import MAX_PAGES

KEY = "a key"
SHORT = tiny_models.text_of([5, 9, 40, 77])
ASKED = "**/v1/chat/completions"
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


def active(page: Page) -> str:
    """The id of what has the keyboard."""
    return str(page.evaluate("document.activeElement.id"))


@pytest.fixture(scope="module")
def open_url(q4_pack: Path) -> Iterator[str]:
    """A server of one pack, without a key."""
    with served(q4_pack, "--expert-cache", "floor", "--no-warm-start") as (url, _):
        yield url


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_a_stopped_answer_is_kept_as_far_as_it_came_and_the_keyboard_in_the_message(
    browser: Browser, open_url: str, way: str
) -> None:
    with opened(browser, open_url) as (page, wrong):
        expect(page.get_by_role("status")).to_have_text("ready")
        message = page.get_by_label("Message", exact=True)
        message.fill(SHORT)
        page.get_by_role("button", name="Send").focus()
        page.keyboard.press("Enter")
        answer = page.locator(".turn.assistant .text")
        until(lambda: len(answer.inner_text()) > 10)
        assert active(page) == "message"
        if way == "button":
            page.get_by_role("button", name="Stop").focus()
        page.keyboard.press("Enter" if way == "button" else way)
        expect(page.locator(".turn .about")).to_have_text("stopped")
        assert active(page) == "message"
        shown = answer.text_content()
        message.fill(SHORT)
        with page.expect_request(ASKED) as asked:
            page.keyboard.press("Enter")
        assert asked.value.post_data_json["messages"] == [
            {"role": "user", "content": SHORT},
            {"role": "assistant", "content": shown},
            {"role": "user", "content": SHORT},
        ]
        expect(page.locator(".dropped")).to_have_count(0)
        assert wrong == []


def test_what_failed_or_was_stopped_before_it_began_is_marked_and_not_sent(
    browser: Browser, open_url: str
) -> None:
    with opened(browser, open_url) as (page, _):

        def answer(route: Any) -> None:
            said = route.request.post_data_json["messages"][-1]["content"]
            if said == "first":
                route.fulfill(status=500, json={"error": {"message": "the disk is gone"}})
            elif said == SHORT:
                route.continue_()  # to "second" nothing comes until it is stopped

        page.route(ASKED, answer)
        expect(page.get_by_role("status")).to_have_text("ready")
        message = page.get_by_label("Message", exact=True)
        message.fill("first")
        page.keyboard.press("Enter")
        expect(page.locator(".turn .error")).to_have_text("the disk is gone")
        message.fill("second")
        with page.expect_request(ASKED):
            page.keyboard.press("Enter")
        page.keyboard.press("Escape")
        expect(page.locator(".dropped .about")).to_have_text(
            ["Not part of the conversation.", "stopped", "Not part of the conversation."]
        )
        expect(page.locator(".turn.user.dropped")).to_have_text(["first", "second"])
        message.fill(SHORT)
        with page.expect_request(ASKED) as asked:
            page.keyboard.press("Enter")
        assert asked.value.post_data_json["messages"] == [{"role": "user", "content": SHORT}]


def test_a_page_too_many_says_so_until_there_is_room(browser: Browser, open_url: str) -> None:
    with ExitStack() as others:
        streams = [
            others.enter_context(httpx.stream("GET", f"{open_url}/events")).iter_bytes()
            for _ in range(MAX_PAGES)
        ]
        for stream in streams:
            next(stream)  # it has begun
        with opened(browser, open_url) as (page, _):
            status = page.get_by_role("status")
            expect(status).to_have_text(f"{MAX_PAGES} pages look on already")
            others.close()
            expect(status).to_have_text("ready")


def test_another_server_in_the_place_of_the_first_is_noticed(
    browser: Browser, q4_pack: Path, float_pack: Path
) -> None:
    with served(q4_pack) as (url, first), opened(browser, url) as (page, _):
        expect(page.get_by_role("status")).to_have_text("ready")
        expect(page.locator("#model-name")).to_have_text("q4")
        first.kill()
        first.wait()
        expect(page.get_by_role("status")).to_have_text("connection lost")
        port = url.rpartition(":")[2]
        second = subprocess.Popen([*PROGRAM, "serve", str(float_pack), "--port", port])
        try:
            expect(page.get_by_role("status")).to_have_text("ready")
            expect(page.locator("#model-name")).to_have_text("float")
            page.get_by_label("Message", exact=True).fill(SHORT)
            page.keyboard.press("Enter")
            until(lambda: page.locator(".turn.assistant .text").inner_text())
        finally:
            second.kill()
            second.wait()
