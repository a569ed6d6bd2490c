"""The chat page in a real browser, headless: an answer streams in, thinking folds, calls are shown and answered."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve.live import Live, Scripted, serving, soon, written

from perilune.serve.request import Request

playwright = pytest.importorskip("playwright.sync_api")
# Debian's wrapper first looks for /etc/chromium.d, so the program itself comes first
CHROMIUM = next(filter(None, map(shutil.which, ("/usr/lib/chromium/chromium", "chromium", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
SHOTS = os.environ.get("PERILUNE_SHOTS")  # a directory for pictures to look at
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def script(request: Request) -> list[int]:
    """A call first, an answer with code once its result is there (the prompt is longer then)."""
    if len(request.prompt) < 700:
        return written(
            "The user wants weather, so I ask the tool. " * 4, "", {"name": "weather", "arguments": {"city": "Köln"}}
        )
    return written("Rain, says the tool.", "Take an umbrella 🌂:\n```python\nprint('<b>rain</b>')\n```\nGood luck.")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """Opens the page of a server; fails on any script error."""
    contexts: list[Any] = []
    wrong: list[str] = []

    def open_(live: Live, **how: Any) -> Any:
        contexts.append(browser.new_context(**how))
        page = contexts[-1].new_page()
        page.set_default_timeout(120_000)  # a shared machine may stand still for a minute
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(live.url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert wrong == []


def shoot(page: Any, name: str) -> None:
    if SHOTS:
        page.screenshot(path=Path(SHOTS) / f"{name}.png")


def test_a_conversation(open_page: Any) -> None:
    engine = Scripted(script, seconds=0.003)
    with serving(engine) as live:
        page = open_page(live, viewport={"width": 1280, "height": 800}, color_scheme="light")
        page.click("#settings summary")
        page.fill("[name=tools]", json.dumps(TOOLS))
        page.click("h1")
        page.select_option("#effort", "low")
        page.fill("#text", "What is the weather in Köln?")
        page.press("#text", "Enter")
        page.wait_for_selector(".thought[open]")
        shoot(page, "thinking")
        page.wait_for_selector(".call button, form button:has-text('Send results')")
        assert page.text_content(".call b") == "weather"
        assert json.loads(page.text_content(".call pre")) == {"city": "Köln"}
        assert page.get_attribute(".thought", "open") is None  # folded
        assert re.fullmatch(r"Thought for \d+\.\d s", page.text_content(".thought summary"))
        shoot(page, "call")
        page.fill("textarea.call", '{"sky": "rain"}')
        page.click("text=Send results")
        page.wait_for_function("document.querySelectorAll('.foot').length === 2")
        last = page.locator(".assistant").last
        assert last.locator(".text pre").text_content() == "print('<b>rain</b>')"
        assert "umbrella 🌂" in last.locator(".text").text_content()
        assert re.search(r"\d+ tokens in, \d+ out · first after \d", page.locator(".foot").last.text_content())
        shoot(page, "answer")
    second = engine.seen[1]
    assert len(engine.seen) == 2 and len(second.prompt) > len(engine.seen[0].prompt)


def test_stop_frees_the_request_and_an_error_is_told(open_page: Any) -> None:
    engine = Scripted(lambda _: [70] * 5000, seconds=0.003)
    with serving(engine, max_requests=1) as live:
        page = open_page(live)
        page.fill("#text", "go on")
        page.click("#send")
        page.wait_for_selector(".thought[open]")
        assert page.text_content("#send") == "Stop"
        other = open_page(live)
        other.fill("#text", "me too")
        other.click("#send")
        assert "Too many requests" in other.wait_for_selector(".error").text_content()
        page.click("#send")
        page.wait_for_selector("text=Stopped.")
        assert soon(lambda: not engine.busy) and len(engine.cancelled) == 1


def test_the_engine_beside_it_lives(open_page: Any) -> None:
    with serving(Scripted(lambda _: [70] * 150_000, seconds=0.003), context=200_000) as live:
        page = open_page(live, viewport={"width": 1280, "height": 800})
        page.fill("#text", "go on")
        page.click("#send")
        page.wait_for_function("document.getElementById('running').textContent === '1'")
        page.wait_for_function("document.querySelector('#batch path').getAttribute('d').length > 60")
        assert page.text_content("#model") == "toy" and page.text_content("#state") == "working"


def test_dark_and_on_a_phone(open_page: Any) -> None:
    with serving(Scripted(script, seconds=0.001)) as live:
        page = open_page(live, viewport={"width": 390, "height": 780}, color_scheme="dark", has_touch=True)
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert not page.is_visible("#live")
        page.fill("#text", "hello " + "long" * 80)
        page.click("#send")
        page.wait_for_selector(".foot")
        width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width[0] <= width[1]  # nothing makes a phone scroll sideways
        shoot(page, "phone")
        page.click("#panel")
        assert page.is_visible("#live")
        page.click("#theme")
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        page.reload()
        assert page.evaluate("document.documentElement.dataset.theme") == "light"  # remembered
        shoot(page, "phone-light")
