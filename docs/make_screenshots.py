"""The pictures of the web page in the documentation, from a real run of the demonstration; takes about two minutes.

    python docs/make_screenshots.py [--output docs/images] [--all]

Needs Chromium and Playwright, see tools/install_chromium.sh. With --all both themes and a narrow screen as well.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples" / "demo"))

from cluster import WORKLOAD, Service, run  # noqa: E402

JOB = "long"
JOB_AT = 0.65
"""How far that job is when its picture is taken."""
DONE, ACTIVE = 1, 3
"""How many jobs have ended when the cluster's is taken, and how many are left at least: some history, some sharing."""


class Camera:
    """A signed-in browser in one theme and width."""

    def __init__(self, browser: Browser, service: Any, output: Path, theme: str, width: int, mark: str) -> None:
        self.output, self.url, self.mark = output, service.url, mark
        self.page: Page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme=theme, device_scale_factor=1.5
        )
        self.page.goto(f"{self.url}/signin")
        self.page.get_by_label("Token").fill(service.token)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.wait_for_url(f"{self.url}/")

    def take(self, name: str, path: str, last: str | None = None) -> None:
        """A picture of the page at a path, down to the end of the card that has the element `last`, or all of it."""
        self.page.goto(self.url + path)
        self.page.wait_for_selector("html[data-ready]", state="attached")
        # What was read at different moments agrees by then.
        self.page.wait_for_timeout(3500)
        end = f"document.querySelector('{last}').closest('.card').getBoundingClientRect().bottom + scrollY + 16"
        self.shoot(name, None if last is None else float(self.page.evaluate(end)))

    def shoot(self, name: str, height: float | None = None) -> None:
        """A picture of what is there."""
        self.page.mouse.move(0, 0)
        size = self.page.viewport_size or {"width": 1280, "height": 900}
        clip = None if height is None else {"x": 0.0, "y": 0.0, "width": float(size["width"]), "height": height}
        self.page.screenshot(path=self.output / f"page-{name}{self.mark}.png", full_page=True, clip=clip)

    def replay(self) -> None:
        """The policies page with a comparison."""
        self.page.goto(f"{self.url}/policies")
        self.page.wait_for_selector("html[data-ready]", state="attached")
        self.page.get_by_label("tiresias").check()
        self.page.get_by_role("button", name="Replay", exact=True).click()
        self.page.wait_for_selector("#result-card:not([hidden])", timeout=240_000)
        self.page.wait_for_timeout(500)
        self.shoot("policies")


def take_all(browser: Browser, output: Path, every: bool) -> None:
    """Run the demonstration's jobs, and look at them on the way."""
    with tempfile.TemporaryDirectory() as folder, Service(Path(folder) / "home", "pollux", 4) as service:
        kinds = [("light", 1280, "")]
        if every:
            kinds += [("dark", 1280, "-dark"), ("light", 420, "-narrow"), ("dark", 420, "-dark-narrow")]
        cameras = [Camera(browser, service, output, *kind) for kind in kinds]
        taken: set[str] = set()

        def show(seconds: float, statuses: list[dict[str, Any]]) -> None:
            done = next((status["progress"] or 0.0 for status in statuses if status["id"] == JOB), 0.0)
            ended = sum(status["ended_at"] is not None for status in statuses)
            is_full = ended >= DONE and (len(statuses) == len(WORKLOAD) or len(statuses) - ended >= ACTIVE)
            if is_full and "cluster" not in taken:
                taken.add("cluster")
                for camera in cameras:
                    camera.take("cluster", "/")
            if done > JOB_AT and "job" not in taken:
                taken.add("job")
                for camera in cameras:
                    camera.take("job", f"/jobs/{JOB}", "#events")

        run(service, WORKLOAD, show)
        for camera in cameras:
            camera.replay()


def main() -> None:
    """Take them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--all", action="store_true", help="both themes, and a narrow screen")
    chosen = parser.parse_args()
    program = shutil.which("chromium") or sys.exit("there is no Chromium; run tools/install_chromium.sh")
    chosen.output.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        take_all(browser, chosen.output, chosen.all)
        browser.close()


if __name__ == "__main__":
    main()
