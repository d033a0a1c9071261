from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from tests.browser.stage import PATIENCE_SECONDS, Stage

expect.set_options(timeout=1000 * PATIENCE_SECONDS)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, one for all tests of a process."""
    program = os.environ.get("POLLUX_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("there is no Chromium: run tools/install_chromium.sh, or name one with POLLUX_CHROMIUM")
    with sync_playwright() as playwright:
        # CI runs as root in a container, where Chromium has no sandbox to go into.
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield found
        found.close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A service with a fake backend, over HTTP."""
    made = Stage(tmp_path)
    yield made
    made.down()


class Visitor:
    """A browser of its own that visits a stage; collects what goes wrong in the page's scripts."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        context.set_default_timeout(1000 * PATIENCE_SECONDS)
        self.context, self.url = context, url
        self.page: Page = context.new_page()
        self.faults: list[str] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", lambda told: self.faults.append(told.text) if "Content Security" in told.text else None)

    def sign_in(self, token: str) -> Visitor:
        self.page.goto(f"{self.url}/signin")
        self.page.get_by_label("Token").fill(token)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.wait_for_url(f"{self.url}/")
        self.ready()
        return self

    def open(self, path: str) -> Visitor:
        self.page.goto(self.url + path)
        self.ready()
        return self

    def ready(self) -> None:
        """Everything that the page asks for at first is there."""
        self.page.wait_for_selector("html[data-ready]", state="attached")


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visitor]]:
    """Makes visitors; each test ends with no error in any page's scripts and nothing that the policy had to block."""
    visitors: list[Visitor] = []

    def make(url: str, **options: object) -> Visitor:
        context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        visitors.append(Visitor(context, url))
        return visitors[-1]

    yield make
    faults = [fault for visitor in visitors for fault in visitor.faults]
    for visitor in visitors:
        visitor.context.close()
    assert faults == []


@pytest.fixture
def operator(stage: Stage, visit: Callable[..., Visitor]) -> Visitor:
    """Signed in with the operator's token, on the cluster page."""
    return visit(stage.url).sign_in(stage.tokens.operator)
