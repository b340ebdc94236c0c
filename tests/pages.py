"""Headless Chromium, for the tests of pages."""

import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; the test is skipped where none is installed."""
    executable = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if executable is None:
        pytest.skip("no Chromium or Chrome found; install one, on Debian: apt-get install chromium")
    options = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]  # for containers, for root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, headless=True, args=options)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, path: Path) -> Iterator[Page]:
    """A file in a new window, which must write nothing on the console, open no dialog and fetch no other file."""
    problems: list[str] = []
    address = path.resolve().as_uri()
    with closing(browser.new_page(viewport={"width": 1400, "height": 900})) as page:
        page.set_default_timeout(20_000)
        for event in ("console", "pageerror", "dialog"):
            page.on(event, lambda problem: problems.append(str(problem)))
        page.on("request", lambda request: problems.append(request.url))
        page.goto(address)
        yield page
    assert [each for each in problems if each != address and not each.startswith("data:")] == []
