"""A telephone held upright: no page is wider than the screen, and everything that can be done can be reached."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

WIDTH = 390
WIDER = """() => {
    const wide = document.documentElement.scrollWidth > innerWidth;
    const clipped = (element) => {
        for (let up = element.parentElement; up; up = up.parentElement) {
            if (["auto", "scroll", "hidden", "clip"].includes(getComputedStyle(up).overflowX)) return true;
        }
        return false;
    };
    const beyond = [...document.body.querySelectorAll("*")].filter((one) => {
        const box = one.getBoundingClientRect();
        return box.width > 1 && box.right > innerWidth + 1 && !clipped(one);
    });
    return [wide && "the page", ...beyond.map((one) => `${one.tagName} ${one.id} ${one.className}`)].filter(Boolean);
}"""


@pytest.fixture
def narrow(stage, visit):
    """Jobs with long names and reasons, one that trains; and somebody who holds a telephone."""
    stage.submit("alpha", 1, 4)
    stage.wait_state("alpha", "running")
    stage.train("alpha", 6)
    stage.submit("a-name-that-is-as-long-as-the-names-of-jobs-can-be-in-this-world", 32, 64)
    visitor = visit(stage.url)
    visitor.page.set_viewport_size({"width": WIDTH, "height": 844})
    return visitor.sign_in(stage.tokens.operator)


def check_width(page):
    assert page.evaluate(WIDER) == []


def in_reach(page, locator):
    locator.scroll_into_view_if_needed()
    box = locator.bounding_box()
    assert box["x"] >= 0, box
    assert box["x"] + box["width"] <= WIDTH, box


def test_the_cluster_page(narrow):
    page = narrow.page
    expect(page.locator("#jobs tr[data-job=alpha]")).to_be_visible()
    check_width(page)
    for name in ("Sign out", "Zoom in", "Back to now", "24 h"):
        in_reach(page, page.get_by_role("button", name=name, exact=True))
    for name in ("Cluster", "Policies"):
        in_reach(page, page.get_by_role("navigation").get_by_role("link", name=name))
    in_reach(page, page.get_by_label("Show"))
    in_reach(page, page.get_by_label("Open a job"))
    # The list is wider than the screen: it scrolls by itself.
    view = page.get_by_role("region", name="All jobs")
    view.evaluate("view => { view.scrollLeft = 10000; }")
    in_reach(page, page.get_by_role("columnheader", name="Why", exact=True))
    check_width(page)


def test_a_jobs_page_and_what_is_done_there(stage, narrow):
    page = narrow.open("/jobs/alpha").page
    check_width(page)
    for name in ("Pause", "Resize", "Cancel job"):
        in_reach(page, page.get_by_role("button", name=name))
    page.get_by_role("button", name="Pause").click()
    in_reach(page, page.locator("#dialog-no"))
    in_reach(page, page.locator("#dialog-yes"))
    check_width(page)
    page.locator("#dialog-yes").click()
    expect(page.locator("#job-state")).to_have_text("paused")
    check_width(page)
    in_reach(page, page.get_by_role("button", name="Resume"))
    narrow.open("/jobs/a-name-that-is-as-long-as-the-names-of-jobs-can-be-in-this-world")
    check_width(page)
    in_reach(page, page.get_by_role("button", name="Cancel job"))


def test_the_policies_page_and_signing_in(narrow):
    page = narrow.open("/policies").page
    check_width(page)
    in_reach(page, page.get_by_role("button", name="Replay", exact=True))
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/signin")
    check_width(page)
    in_reach(page, page.get_by_label("Token"))
    in_reach(page, page.get_by_role("button", name="Sign in"))
