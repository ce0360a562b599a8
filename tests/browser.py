"""Debian's Chromium, for tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

PATIENCE_MS = 60_000


@contextmanager
def launched() -> Iterator[Browser]:
    """A browser; skips the test where there is none."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("extra: no browser is here; apt-get install chromium")
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


def opened(browser: Browser, url: str, ready: str, width: int = 1280, scheme: str = "light") -> tuple[Page, list[str]]:
    """The page at ``url``, which shows ``ready`` (a selector), and what it reports as wrong, as long as it is open."""
    page = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme).new_page()  # type: ignore[arg-type]
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url)
    page.wait_for_selector(ready, timeout=PATIENCE_MS)
    return page, errors


def all_is_reachable(page: Page, width: int) -> None:
    """Assert that nothing is cut off, that what scrolls is reached by keyboard, and that pictures have words."""
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("[...document.querySelectorAll('.scroll, ol')].every(e => e.tabIndex === 0)")
    assert page.evaluate("[...document.querySelectorAll('svg, meter')].every(e => e.getAttribute('aria-label'))")
