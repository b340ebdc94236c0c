"""A report.html in headless Chromium, for the tests that read it and click through it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, sync_playwright

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
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Opened:
    """A page, and what went wrong in it so far."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()

    def column(self, table: str, number: int) -> list[str]:
        """The cells' numbers or texts of one column of a table, from 1."""
        return [text.strip() for text in self.texts(f"{table} tbody tr > :nth-child({number})")]

    def found(self) -> str:
        return self.text("#found")

    def listed(self) -> list[int]:
        """The `question_index` of all questions that the filters let through, in their order."""
        while self.page.locator("#more").is_visible():
            self.page.locator("#more").click()
        return self.page.locator("article:visible").evaluate_all("all => all.map(a => Number(a.dataset.index))")

    def open_programs(self) -> None:
        """Show the programs of all questions that are shown."""
        for summary in self.page.locator("article:visible summary", has_text="Program").all():
            summary.click()

    def check(self) -> None:
        """Nothing was said on the console, no error thrown, and nothing asked for but the file."""
        assert self.errors == []
        assert self.requests == []


@contextmanager
def opened(browser: Browser, path: Path) -> Iterator[Opened]:
    """The file in a new window without a network. When the block ends well, so did the page."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    try:
        page = context.new_page()
        page.set_default_timeout(20_000)
        shown = Opened(page)
        page.on("console", lambda message: shown.errors.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: shown.errors.append(str(error)))
        page.on("dialog", lambda dialog: (shown.errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))

        def guard(route: Route) -> None:
            url = route.request.url
            if url == path.resolve().as_uri() or url.startswith("data:"):
                route.continue_()
            else:
                shown.requests.append(url)
                route.abort()

        context.route("**/*", guard)
        page.goto(path.resolve().as_uri())
        yield shown
        shown.check()
    finally:
        context.close()
