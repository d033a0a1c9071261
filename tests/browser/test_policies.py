"""The policies page: the history of this cluster replayed, with progress, side by side."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


@pytest.fixture
def past(stage):
    """A cluster on which a few jobs have been trained to the end."""
    for name in ("alpha", "beta", "gamma"):
        stage.submit(name, 1, 4)
        stage.wait_state(name, "running")
        stage.train(name, 4)
        stage.report(name, progress=1000.0, final=True, samples=1300, step=99)
        stage.backend.ended(name, "succeeded")
        stage.wait_state(name, "succeeded")
    return stage


def test_a_replay_is_compared_side_by_side(past, operator):
    page = operator.open("/policies").page
    expect(page.get_by_label("pollux (runs here)")).to_be_checked()
    page.get_by_label("tiresias").check()
    page.get_by_label("Nodes").fill("+1")
    page.get_by_role("button", name="Replay", exact=True).click()
    expect(page.get_by_role("progressbar")).to_be_visible()
    expect(page.get_by_role("heading", name="Side by side")).to_be_focused()
    rows = page.get_by_role("region", name="Comparison").get_by_role("row")
    expect(rows).to_have_count(7)
    expect(rows.nth(0)).to_contain_text("Average completion")
    expect(rows.nth(1)).to_contain_text("pollux, 3 nodes")
    expect(rows.nth(4)).to_contain_text(re.compile(r"pollux, 4 nodes.*×"))
    expect(page.locator("#result-hint")).to_contain_text("3 jobs")
    expect(page.get_by_role("img", name=re.compile("Jobs through after"))).to_have_accessible_name(
        re.compile("fifo, 3 nodes now 100 %")
    )
    expect(page.get_by_role("progressbar")).to_be_hidden()
    expect(page.get_by_role("button", name="Replay", exact=True)).to_be_enabled()


def test_a_replay_can_be_stopped(past, operator):
    page = operator.open("/policies").page
    page.get_by_role("button", name="Replay", exact=True).click()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("alert")).to_have_text("The replay was stopped.")
    expect(page.get_by_role("button", name="Replay", exact=True)).to_be_enabled()


def test_what_cannot_be_replayed_is_told_in_words(stage, operator):
    page = operator.open("/policies").page
    page.get_by_label("Nodes").fill("many")
    page.get_by_role("button", name="Replay", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("give sizes such as +2, -1 or 6")
    page.get_by_label("Nodes").fill("")
    page.get_by_role("button", name="Replay", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("no job that can be replayed")
    for box in page.get_by_role("checkbox").all():
        box.uncheck()
    page.get_by_role("button", name="Replay", exact=True).click()
    expect(page.get_by_role("alert")).to_have_text("Choose at least one policy.")
