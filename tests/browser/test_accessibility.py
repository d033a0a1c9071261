"""axe-core over every page, in both themes: nothing serious."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

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


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_page_has_a_serious_fault(stage, visit, theme):
    assert AXE.is_file(), f"{AXE} is not there; run python tools/vendor_web.py --axe"
    stage.submit("alpha", 1, 4)
    stage.wait_state("alpha", "running")
    stage.train("alpha", 4)
    stage.submit("waits", 32, 64)
    visitor = visit(stage.url, color_scheme=theme, bypass_csp=True)
    page = visitor.page
    page.goto(f"{stage.url}/signin")
    page.add_script_tag(path=AXE)
    assert violations(page) == []
    visitor.sign_in(stage.tokens.operator)
    for path in ("/", "/jobs/alpha", "/policies"):
        visitor.open(path)
        assert page.evaluate("document.documentElement.dataset.theme") == theme
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        page.add_script_tag(path=AXE)
        assert violations(page) == [], path
    visitor.open("/jobs/alpha")
    page.get_by_role("button", name="Resize…").click()
    page.add_script_tag(path=AXE)
    assert violations(page) == []


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
