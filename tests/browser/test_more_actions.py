"""Buttons that are pressed seldom, jobs that do not run, and what is seen of a replay while it is under way."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect
from tests.browser.stage import PATIENCE_SECONDS, wait_for
from tests.replaying import held_child

from pollux.service.replay.replays import Replays
from pollux.service.server import app
from pollux.testing.servers.service import result_of

pytestmark = pytest.mark.browser


@pytest.fixture
def running(stage):
    """A job that runs and has reported."""
    stage.submit("alpha", 1, 4)
    stage.wait_state("alpha", "running")
    stage.train("alpha", 3)
    return stage


def state(page):
    return page.locator("#job-state")


def resize(page, gpus):
    page.get_by_role("button", name="Resize…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("GPUs").fill(gpus)
    dialog.get_by_role("button", name="Resize").click()


def cancel(page):
    page.get_by_role("button", name="Cancel job").click()
    page.get_by_role("button", name="Cancel the job").click()


def test_a_command_is_copied(running, operator):
    operator.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = operator.open("/jobs/alpha").page
    expect(page.locator("#next-step code")).to_have_text(re.compile("^pollux "))
    command = page.locator("#next-step code").inner_text()
    page.get_by_role("button", name="Copy the command").click()
    expect(page.locator("#toasts")).to_contain_text("Copied.")
    assert page.evaluate("navigator.clipboard.readText()") == command


def test_a_browser_that_does_not_let_copy_is_told(running, operator):
    operator.page.add_init_script("navigator.clipboard.writeText = () => Promise.reject(new Error('no'))")
    page = operator.open("/jobs/alpha").page
    page.get_by_role("button", name="Copy the command").click()
    expect(page.locator(".toast.bad")).to_contain_text("select the command instead")


def test_every_span_of_the_timeline_and_the_way_there(running, operator):
    page = operator.page
    hint = page.locator("#timeline-hint")
    spans = {"15 min": "15 min", "6 h": "6 h", "24 h": "24 h", "1 h": "60 min"}
    for name, told in spans.items():
        button = page.get_by_role("button", name=name, exact=True)
        button.click()
        expect(hint).to_contain_text(re.compile(rf"in {told}\b"))
        for other in spans:
            pressed = "true" if other == name else "false"
            expect(page.get_by_role("button", name=other, exact=True)).to_have_attribute("aria-pressed", pressed)
    page.get_by_role("button", name="Zoom out").click()
    expect(hint).to_contain_text(re.compile(r"in 2 h\b"))
    for _ in range(3):
        page.get_by_role("button", name="Earlier").click()
    expect(hint).to_have_text("Nothing ran in this time.")
    later = page.get_by_role("button", name="Later")
    later.click()
    expect(hint).to_have_text("Nothing ran in this time.")
    later.click()
    later.click()
    expect(hint).to_contain_text(re.compile(r"in 2 h\b"))


def test_nodes_are_found_by_the_jobs_that_they_serve(stage, operator):
    stage.submit("alpha", 3, 3)
    stage.submit("beta", 4, 4)
    for name in ("alpha", "beta"):
        stage.wait_state(name, "running")
    page = operator.open("/").page
    expect(page.locator(".node")).to_have_count(3)
    for name in ("alpha", "beta"):
        held = stage.engine.job(name).placement
        assert len(held) < 3
        page.get_by_label("Find a node or job").fill(name)
        expect(page.locator(".node")).to_have_count(len(held))
        expect(page.locator("#nodes-hint")).to_have_text(f"{len(held)} of 3 nodes")
        for node in held:
            expect(page.locator(".node", has_text=node)).to_be_visible()


def test_a_log_that_is_not_followed_stays_as_it_is(running, operator):
    page = operator.open("/jobs/alpha").page
    log = page.locator("#log")
    expect(log).to_contain_text("step 2 loss 2.25")
    follow = page.get_by_role("button", name="Follow")
    follow.click()
    expect(follow).to_have_attribute("aria-pressed", "false")
    asked = []
    page.on("request", lambda request: asked.append(request.url))

    def read_again(times):
        running.report("alpha", progress=100.0 * times, step=20 * times)
        wait_for(lambda: page.wait_for_timeout(50) or sum(url.endswith("/jobs/alpha") for url in asked) >= times)

    # What was under way when the button was pressed is over by then.
    read_again(1)
    running.backend.log_text += "step 3 loss 2.20\n"
    asked.clear()
    # The page goes on reading the job with every report, for longer than it would wait with its log.
    for times in range(1, 5):
        read_again(times)
    assert not [url for url in asked if "/logs?" in url]
    assert "step 3" not in log.inner_text()
    follow.click()
    expect(log).to_contain_text("step 3 loss 2.20")


def test_what_the_service_says_of_a_size_that_does_not_fit_is_shown(running, operator):
    page = operator.open("/jobs/alpha").page
    with page.expect_response("**/v1/jobs/alpha/resize") as answered:
        resize(page, "32")
    note = answered.value.json()["note"]
    assert "32 GPUs" in note
    expect(page.locator("#toasts")).to_contain_text("may now hold 32 GPUs")
    expect(page.locator(".toast.bad")).to_have_text(f"alpha: {note}")


def test_a_paused_job_is_resized_and_runs_within_the_new_range(running, operator):
    result_of(running.engine.pause("alpha"))
    page = operator.open("/jobs/alpha").page
    expect(state(page)).to_have_text("paused")
    resize(page, "2")
    expect(page.locator("#toasts")).to_contain_text("alpha may now hold 2 GPUs")
    expect(page.locator("#facts")).to_contain_text("0 of 2")
    expect(state(page)).to_have_text("paused")
    page.get_by_role("button", name="Resume").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    expect(state(page)).to_have_text("running")
    expect(page.locator("#facts")).to_contain_text("2 of 2")


def test_a_paused_job_is_cancelled(running, operator):
    result_of(running.engine.pause("alpha"))
    page = operator.open("/jobs/alpha").page
    cancel(page)
    expect(state(page)).to_have_text("cancelled")
    expect(page.locator("#toasts")).to_contain_text("alpha is cancelled.")
    expect(page.locator("#actions button")).to_have_count(0)
    assert running.engine.job("alpha").state == "cancelled"


def test_a_queued_job_is_resized_and_starts(stage, operator):
    stage.submit("huge", 32, 64)
    page = operator.open("/jobs/huge").page
    expect(state(page)).to_have_text("queued")
    resize(page, "1..2")
    expect(state(page)).to_have_text("running")
    expect(page.locator("#facts")).to_contain_text(re.compile("[12] of 1–2"))
    expect(page.locator(".toast.bad")).to_have_count(0)


def test_a_queued_job_is_paused_resumed_and_cancelled(stage, operator):
    stage.submit("huge", 32, 64)
    page = operator.open("/jobs/huge").page
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("dialog")).to_contain_text("It will not be started until it is resumed.")
    page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    expect(state(page)).to_have_text("paused")
    page.get_by_role("button", name="Resume").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    expect(state(page)).to_have_text("queued")
    page.get_by_role("button", name="Cancel job").click()
    expect(page.get_by_role("dialog")).to_contain_text("It has not run yet.")
    page.get_by_role("button", name="Cancel the job").click()
    expect(state(page)).to_have_text("cancelled")
    operator.open("/")
    expect(page.locator("#queue")).to_contain_text("Nobody waits.")


def test_a_job_that_waits_after_it_has_reported_has_an_expected_end(stage, operator):
    stage.submit("alpha", 8, 8)
    stage.wait_state("alpha", "running")
    stage.report("alpha", progress=100.0, total_progress=1e6)
    result_of(stage.engine.pause("alpha"))
    stage.wait_state("alpha", "paused")
    stage.submit("beta", 8, 8)
    stage.wait_state("beta", "running")
    stage.report("beta", progress=100.0, total_progress=1e6)
    result_of(stage.engine.resume("alpha"))
    stage.submit("never", 8, 8)
    wait_for(lambda: stage.engine.job("alpha").eta is not None)
    assert stage.engine.job("alpha").state == "queued"
    page = operator.open("/").page
    queue = page.get_by_role("region", name="Jobs that wait")
    end = re.compile(r"\d\d:\d\d")
    for place in (queue, page.locator("#jobs")):
        row = place.get_by_role("row", name=re.compile("^alpha"))
        expect(row.get_by_role("cell").filter(has_text=end)).to_have_count(1)
        # One that has never run has told nobody how fast it is.
        row = place.get_by_role("row", name=re.compile("^never"))
        expect(row.get_by_role("cell").filter(has_text=end)).to_have_count(0)
    row = page.locator("#jobs").get_by_role("row", name=re.compile("^beta"))
    expect(row.get_by_role("cell").filter(has_text=end)).to_have_count(1)


def finished(stage, *names):
    for name in names:
        stage.submit(name, 1, 4)
        stage.wait_state(name, "running")
        stage.train(name, 4)
        stage.report(name, progress=1000.0, final=True, samples=1300, step=99)
        stage.backend.ended(name, "succeeded")
        stage.wait_state(name, "succeeded")


def test_the_bar_of_a_real_replay_moves(stage, visit, monkeypatch, tmp_path):
    go = tmp_path / "go"
    monkeypatch.setattr(app, "Replays", lambda history: Replays(history, held_child(go)))
    stage.down()
    stage.up()
    finished(stage, "alpha", "beta")
    page = visit(stage.url).sign_in(stage.tokens.operator).open("/policies").page
    page.get_by_role("textbox", name="Nodes").fill("+1")
    page.get_by_role("button", name="Replay", exact=True).click()
    bar = page.get_by_role("progressbar")
    # It waits between its two sizes: half of it is done.
    expect(bar).to_have_attribute("value", "0.5", timeout=3000 * PATIENCE_SECONDS)
    expect(page.locator("#bar-label")).to_have_text("Replaying, 50 %")
    go.touch()
    expect(page.get_by_role("heading", name="Side by side")).to_be_focused(timeout=3000 * PATIENCE_SECONDS)
    expect(bar).to_be_hidden()


def test_a_restart_is_survived_on_the_policies_page_also_in_a_replay(stage, operator, monkeypatch, tmp_path):
    finished(stage, "alpha", "beta")
    go = tmp_path / "go"
    monkeypatch.setattr(app, "Replays", lambda history: Replays(history, held_child(go)))
    stage.down()
    stage.up()
    page = operator.open("/policies").page
    live = page.locator("#live")
    expect(live).to_have_text("Live")
    replay = page.get_by_role("button", name="Replay", exact=True)
    replay.click()
    expect(page.get_by_role("progressbar")).to_be_visible()
    stage.down()
    expect(live).to_have_text("Reconnecting…")
    expect(page.locator("#bar-label")).to_have_text("The service does not answer; asking again")
    go.touch()
    stage.up()
    expect(live).to_have_text("Live")
    # The replay ended with the service that it was asked of; another can be begun.
    expect(page.get_by_role("alert")).to_have_text("The replay is gone: the service was started anew meanwhile.")
    replay.click()
    expect(page.get_by_role("heading", name="Side by side")).to_be_focused(timeout=3000 * PATIENCE_SECONDS)
    expect(page.get_by_role("alert")).to_have_count(0)
