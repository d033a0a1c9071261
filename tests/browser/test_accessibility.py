"""axe-core over every page, in both themes, wide and narrow: nothing serious."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect
from tests.browser.stage import PATIENCE_SECONDS

from pollux.agent.reporting.receipt import Receipt
from pollux.agent.reporting.receipt_row import ReceiptRow
from pollux.wire.home_layout import receipt_folder

pytestmark = pytest.mark.browser

AXE = Path(__file__).resolve().parent / "vendor" / "axe" / "axe.min.js"


def violations(page):
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [
        f"{one['id']} ({one['impact']}): {node['html'][:160]}"
        for one in found
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"][:3]
    ]


WIDTHS = (1280, 390)


def leave_receipt(stage, job_id):
    """A receipt with configurations and events, as an agent leaves it."""
    receipt = Receipt(job_id, mode="adaptive", initial_batch=100, max_batch=1600, rule="adascale", dataset_size=10_000)
    for step in range(8):
        batch = 100 if step < 4 else 400
        if step == 4:
            receipt.event("batch-changed", step, 400.0, "batch 100 → 400: +40 % goodput")
        receipt.sample(
            ReceiptRow(step, 100.0 * step, 100 * step, 0.1 * step, 1, 1, batch, 0, batch, (1.0,), 0.9, loss=1.5)
        )
    folder = receipt_folder(stage.home, job_id)
    folder.mkdir(parents=True)
    (folder / "receipt.json").write_text(json.dumps(receipt.to_json()))


def look(page, where):
    """No fault at any width, with everything open that opens."""
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.add_script_tag(path=AXE)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        assert violations(page) == [], (where, width)
    page.set_viewport_size({"width": WIDTHS[0], "height": 900})


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_page_has_a_serious_fault(stage, visit, theme):
    assert AXE.is_file(), f"{AXE} is not there; run python tools/vendor_web.py --axe"
    stage.submit("done", 1, 4)
    stage.wait_state("done", "running")
    stage.train("done", 4)
    stage.report("done", progress=1000.0, final=True, samples=1300, step=99)
    stage.backend.ended("done", "succeeded")
    stage.wait_state("done", "succeeded")
    stage.submit("alpha", 1, 4)
    stage.wait_state("alpha", "running")
    stage.train("alpha", 4)
    leave_receipt(stage, "alpha")
    stage.submit("waits", 32, 64)
    visitor = visit(stage.url, color_scheme=theme, bypass_csp=True)
    page = visitor.page
    page.goto(f"{stage.url}/signin")
    look(page, "/signin")
    visitor.sign_in(stage.tokens.operator)
    for path in ("/", "/jobs/alpha", "/jobs/done", "/policies"):
        visitor.open(path)
        assert page.evaluate("document.documentElement.dataset.theme") == theme
        if path == "/jobs/alpha":
            expect(page.locator("#receipt")).to_contain_text("100 at first, 400 at last")
        look(page, path)
    page.get_by_role("button", name="Replay", exact=True).click()
    expect(page.get_by_role("heading", name="Side by side")).to_be_visible(timeout=3000 * PATIENCE_SECONDS)
    expect(page.get_by_role("region", name="Comparison").get_by_role("row")).to_have_count(3)
    look(page, "/policies with a result")
    visitor.open("/jobs/alpha")
    page.get_by_role("button", name="Resize…").click()
    look(page, "the question")


def test_the_theme_can_be_chosen_and_is_kept(stage, visit):
    visitor = visit(stage.url, color_scheme="light").sign_in(stage.tokens.operator)
    page = visitor.page
    for wanted, shown in (("light", "light"), ("dark", "dark")):
        page.get_by_role("button", name="Theme").click()
        expect(page.get_by_role("button", name=f"Theme: {wanted}. Change")).to_be_visible()
        assert page.evaluate("document.documentElement.dataset.theme") == shown
    visitor.open("/policies")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_every_number_is_explained_on_focus(stage, operator):
    button = operator.page.get_by_role("button", name="What is Median fairness?")
    button.focus()
    expect(operator.page.locator(".bubble")).to_contain_text("Finish-time fairness")
    operator.page.keyboard.press("Escape")
    expect(operator.page.locator(".bubble")).to_have_count(0)
