"""Headless Chromium from the PATH, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BINARY = next((found for name in _NAMES if (found := shutil.which(name))), None)
DESKTOP, PHONE = ViewportSize(width=1280, height=900), ViewportSize(width=390, height=844)
WAIT_MS = 30_000

needs_chromium = pytest.mark.skipif(BINARY is None, reason="no Chromium in the PATH: apt-get install chromium")


@contextmanager
def open_browser(binary: str | None = BINARY) -> Iterator[Browser]:
    """A browser without a window."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watched:
    """A page, and the errors in its console. `refusals`: whether answers with an error status are expected. Chromium
    reports each of them as an error in the console."""

    page: Page
    refusals: bool = False
    errors: list[str] = field(default_factory=list)

    def check(self) -> None:
        """AssertionError if the console has an error."""
        shown = [error for error in self.errors if not (self.refusals and "Failed to load resource" in error)]
        assert not shown, shown


@contextmanager
def open_page(
    browser: Browser, url: str, *, size: ViewportSize = DESKTOP, dark: bool = False, refusals: bool = False
) -> Iterator[Page]:
    """A tab with a profile of its own. At its end the console must have no error."""
    context = browser.new_context(viewport=size, color_scheme="dark" if dark else "light")
    context.set_default_timeout(WAIT_MS)
    watched = Watched(context.new_page(), refusals)
    watched.page.on("console", lambda said: watched.errors.append(said.text) if said.type == "error" else None)
    watched.page.on("pageerror", lambda error: watched.errors.append(str(error)))
    try:
        watched.page.goto(url)
        yield watched.page
        watched.check()
    finally:
        context.close()
