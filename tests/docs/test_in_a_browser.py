"""The pages as a reader has them: they render, they can be searched, read on a phone, and in the dark."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "google-chrome-stable")
WIDTHS = {"phone": 390, "desk": 1280}

BROKEN_WORDS = """
[...document.querySelectorAll("math *")].filter(token => !token.children.length).filter(token => {
    const range = document.createRange()
    range.selectNodeContents(token)
    const seen = [...range.getClientRects()].reduce((sum, box) => sum + box.width, 0)
    return seen < 0.9 * token.getBoundingClientRect().width && !token.hasAttribute("lspace") && token.textContent.length > 1
}).map(token => token.textContent)
"""
"""Words in formulas of which less is seen than they have room for; an operator with space around it is not asked."""

SHRUNK = """
[...document.querySelectorAll("article img")].filter(img => img.naturalWidth == 0 || img.width < img.naturalWidth)
    .map(img => img.src)
"""
"""Pictures that are not there, or smaller than they were drawn."""

pytestmark = pytest.mark.browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"there is no browser here: none of {', '.join(NAMES)} is on the path")
    with api.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=program)
        yield opened
        opened.close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="session")
def address(site: Any) -> Iterator[str]:
    """The site behind a server of this machine."""
    handler = functools.partial(_Quiet, directory=str(site.folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_every_page_renders_without_an_error_and_without_scrolling_sideways(
    width: int, site: Any, browser: Any, address: str
) -> None:
    wrong: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.on("console", lambda message: wrong.append(f"{page.url}: {message.text}") if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(f"{page.url}: {error}"))
    page.on("requestfailed", lambda request: wrong.append(f"{page.url}: {request.url} failed"))
    for name in site.pages:
        page.goto(f"{address}/{name}.html")
        reach = page.evaluate("document.documentElement.scrollWidth")
        if reach > width:
            wrong.append(f"{name}: {reach} pixels wide on a screen of {width}")
        if name != "search" and not page.locator("h1").first.is_visible():
            wrong.append(f"{name}: no heading is seen")
        wrong += [f"{name}: {picture} cannot be read" for picture in page.evaluate(SHRUNK) if width == WIDTHS["phone"]]
    page.close()
    assert wrong == []


def test_the_search_finds_the_sinks(browser: Any, address: str) -> None:
    page = browser.new_page()
    page.goto(f"{address}/search.html?q=sinks")
    page.wait_for_selector("#search-results li a")
    found = page.locator("#search-results li a").all_text_contents()
    page.close()
    assert any("contract" in title for title in found)


def luminance(page: Any, what: str) -> float:
    """0 is black, 1 is white."""
    colour = page.evaluate(f"getComputedStyle(document.body).{what}")
    red, green, blue = (int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_colours_are_those_that_the_reader_prefers(scheme: str, browser: Any, address: str) -> None:
    page = browser.new_page(color_scheme=scheme)
    page.goto(f"{address}/design.html")
    paper, ink = luminance(page, "backgroundColor"), luminance(page, "color")
    line = page.evaluate("getComputedStyle(document.querySelector('svg.design rect')).stroke")
    text = page.evaluate("getComputedStyle(document.body).color")
    page.close()
    assert (paper < 0.2 and ink > 0.6) if scheme == "dark" else (paper > 0.9 and ink < 0.2)
    assert line == text  # the picture follows


def test_the_words_in_the_design_can_be_read_on_a_phone(browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": WIDTHS["phone"], "height": 900})
    page.goto(f"{address}/design.html")
    sizes = page.evaluate(
        "[...document.querySelectorAll('svg.design text')].map(t => t.getBoundingClientRect().height)"
    )
    page.close()
    assert len(sizes) >= 10
    assert min(sizes) >= 11  # pixels


def test_formulas_have_a_size_and_code_a_button_to_copy_it(browser: Any, address: str) -> None:
    page = browser.new_page()
    page.goto(f"{address}/contract.html")
    boxes = page.evaluate(
        "[...document.querySelectorAll('math[display=block]')].map(m => m.getBoundingClientRect().height)"
    )
    page.screenshot(full_page=True)  # lays the page out anew, as printing does
    broken = page.evaluate(BROKEN_WORDS)
    page.goto(f"{address}/start.html")
    page.wait_for_selector("button.copybtn", state="attached")
    buttons = page.locator("button.copybtn").count()
    page.close()
    assert len(boxes) >= 8
    assert min(boxes) > 15
    assert broken == []
    assert buttons >= 5


def test_the_browser_is_looked_for_where_systems_put_it() -> None:
    assert all(Path(name).name == name for name in NAMES)
