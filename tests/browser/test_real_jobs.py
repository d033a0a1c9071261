"""One look at real jobs: a service in a process of its own that runs commands on this machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from playwright.sync_api import expect
from tests.browser.stage import wait_for

from pollux.testing.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.browser

SERVE = """
import sys
from pathlib import Path
from pollux.service import ServiceSettings, serve
options = {"slots": 2, "warm": False}
serve(ServiceSettings(home=Path(sys.argv[1]), port=0, backend_options=options, min_gap_seconds=0.1))
"""


@pytest.fixture
def home(tmp_path):
    """The folder of a running service with two CPU slots."""
    folder = tmp_path / "home"
    process = subprocess.Popen([sys.executable, "-c", SERVE, str(folder)], stdin=subprocess.DEVNULL)
    try:
        wait_for(lambda: (folder / "service.json").exists() or process.poll() is not None)
        assert process.poll() is None
        yield folder
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(PATIENCE_SECONDS)


def test_a_command_is_watched_and_cancelled(home, tmp_path, visit):
    url = json.loads((home / "service.json").read_text())["url"]
    token = (home / "token").read_text().strip()
    visitor = visit(url).sign_in(token)
    page = visitor.page
    script = "echo 'the first line'; exec sleep 600"
    answer = page.evaluate(
        """async (job) => {
            const session = await (await fetch('/v1/session')).json();
            const headers = {'X-Pollux-CSRF': session.csrf, 'Content-Type': 'application/json'};
            return (await fetch('/v1/jobs', {method: 'POST', headers, body: JSON.stringify(job)})).status;
        }""",
        {"name": "real", "run": ["sh", "-c", script], "gpus": 1, "workdir": str(tmp_path), "grace": "1s"},
    )
    assert answer == 201
    row = page.locator("#jobs tr[data-job=real]")
    expect(row).to_contain_text("running")
    expect(page.locator("#tiles")).to_contain_text("1 of 2")
    row.get_by_role("link", name="real").click()
    visitor.ready()
    expect(page.locator("#log")).to_contain_text("the first line")
    expect(page.locator("#spec")).to_contain_text("sleep 600")
    page.get_by_role("button", name="Cancel job").click()
    page.get_by_role("button", name="Cancel the job").click()
    expect(page.locator("#job-state")).to_have_text("cancelled")
    expect(page.locator("#why")).to_contain_text("cancelled by its user")
