"""The policies page: the history of this cluster replayed, with progress, side by side."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect
from tests.browser.stage import PATIENCE_SECONDS

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
    page.get_by_role("textbox", name="Nodes").fill("+1")
    page.get_by_role("button", name="Replay", exact=True).click()
    expect(page.get_by_role("progressbar")).to_be_visible()
    expect(page.get_by_role("heading", name="Side by side")).to_be_focused(timeout=3000 * PATIENCE_SECONDS)
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


def test_a_replay_is_there_again_after_the_page_was_left(past, operator):
    page = operator.open("/policies").page
    shown = {"id": "r1", "state": "running", "progress": 0.25, "detail": "", "result": None}
    page.route("**/v1/whatif", lambda route: route.fulfill(json={"replays": [shown]}))
    page.route("**/v1/whatif/r1", lambda route: route.fulfill(json=shown))
    operator.open("/policies")
    expect(page.locator("#bar-label")).to_have_text("Replaying, 25 %")
    expect(page.get_by_role("button", name="Replay", exact=True)).to_be_disabled()
    # A service that does not answer for a moment is asked again.
    page.route("**/v1/whatif/r1", lambda route: route.abort(), times=1)
    shown["progress"] = 0.5
    expect(page.locator("#bar-label")).to_have_text("Replaying, 50 %")

    def stop(route):
        shown["state"] = "cancelled"
        route.fulfill(json=shown)

    page.route("**/v1/whatif/r1/cancel", stop)
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("alert")).to_have_text("The replay was stopped.")
    expect(page.get_by_role("button", name="Replay", exact=True)).to_be_enabled()


def test_what_a_replay_came_to_is_there_again(past, operator):
    page = operator.open("/policies").page
    page.get_by_role("button", name="Replay", exact=True).click()
    expect(page.get_by_role("heading", name="Side by side")).to_be_visible()
    page = operator.open("/policies").page
    expect(page.get_by_role("region", name="Comparison").get_by_role("row")).to_have_count(3)
    expect(page.get_by_role("button", name="Replay", exact=True)).to_be_enabled()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_jobs_that_are_left_out_are_told_and_not_compared(past, operator):
    page = operator.page
    jobs = [{"name": "a", "submitted": 0.0, "finished": 60.0}, {"name": "b", "submitted": 0.0, "finished": 90.0}]
    figures = {"policy": "pollux", "p99_jct_hours": 1.0, "makespan_hours": 2.0, "utilization": 0.5, "gpu_hours": 3.0,
               "restarts_per_job": 0.5, "worst_ftf": 1.1}  # fmt: skip
    whole = {**figures, "avg_jct_hours": 1.0, "num_jobs": 2, "jobs": jobs}
    part = {**figures, "avg_jct_hours": 0.5, "num_jobs": 1, "jobs": jobs[:1]}
    reason = "job 'b' needs 16 <b>GPUs</b>"
    runs = [
        {
            "nodes": 3,
            "config": {},
            "results": [whole, {**whole, "policy": "fifo", "avg_jct_hours": 0.8}],
            "left_out": [],
        },
        {"nodes": 2, "config": {}, "results": [part], "left_out": [reason]},
    ]
    result = {"runs": runs, "left_out": ["job 'c' never reported"]}
    shown = {"id": "r1", "state": "done", "progress": 1.0, "detail": "", "result": result}
    page.route("**/v1/whatif", lambda route: route.fulfill(json={"replays": [shown]}))
    page.route("**/v1/whatif/r1", lambda route: route.fulfill(json=shown))
    operator.open("/policies")
    rows = page.get_by_role("region", name="Comparison").get_by_role("row")
    expect(rows.nth(2).locator(".better")).to_have_text("0.80×")
    expect(rows.nth(3)).to_contain_text("0.50×, other jobs")
    expect(rows.nth(3).locator(".better")).to_have_count(0)
    expect(page.locator("#result-hint")).to_contain_text("1 to 2 jobs")
    left_out = page.locator("#left-out")
    expect(left_out).to_contain_text("Not every row replays the same jobs")
    expect(left_out.get_by_role("listitem")).to_have_text(["job 'c' never reported", f"With 2 nodes: {reason}"])


def test_what_cannot_be_replayed_is_told_in_words(stage, operator):
    page = operator.open("/policies").page
    page.get_by_role("textbox", name="Nodes").fill("many")
    page.get_by_role("button", name="Replay", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("give sizes such as +2, -1 or 6")
    page.get_by_role("textbox", name="Nodes").fill("")
    page.get_by_role("button", name="Replay", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("no job that can be replayed")
    for box in page.get_by_role("checkbox").all():
        box.uncheck()
    page.get_by_role("button", name="Replay", exact=True).click()
    expect(page.get_by_role("alert")).to_have_text("Choose at least one policy.")
