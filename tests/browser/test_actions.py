"""Everything that can be done to a job: asked first, and seen afterwards."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


@pytest.fixture
def page(stage, operator):
    stage.submit("alpha", 1, 4)
    stage.wait_state("alpha", "running")
    return operator.open("/jobs/alpha").page


def state(page):
    return page.locator("#job-state")


def test_nothing_happens_without_the_second_yes(stage, page):
    for name in ("Pause", "Resize…", "Cancel job"):
        page.get_by_role("button", name=name).click()
        page.get_by_role("button", name="Back").click()
        expect(page.get_by_role("dialog")).to_have_count(0)
    page.get_by_role("button", name="Cancel job").click()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert stage.engine.job("alpha").state == "running"
    assert stage.engine.job("alpha").max_gpus == 4


def test_pause_and_resume(stage, page):
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("dialog")).to_contain_text("Pause alpha?")
    page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    expect(state(page)).to_have_text("paused")
    expect(page.locator("#toasts")).to_contain_text("alpha is paused.")
    expect(page.locator("#why")).to_contain_text("paused by its user")
    expect(page.get_by_role("button", name="Pause")).to_have_count(0)
    page.get_by_role("button", name="Resume").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    expect(state(page)).to_have_text("running")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()


def test_resize(stage, page):
    page.get_by_role("button", name="Resize…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label("GPUs")).to_have_value("1..4")
    dialog.get_by_label("GPUs").fill("2..8")
    dialog.get_by_role("button", name="Resize").click()
    expect(page.locator("#facts")).to_contain_text("of 2–8")
    expect(page.locator("#toasts")).to_contain_text("may now hold 2..8 GPUs")
    job = stage.engine.job("alpha")
    assert (job.min_gpus, job.max_gpus) == (2, 8)


def test_only_what_is_known_to_be_kept_is_promised(stage, page):
    question = page.get_by_role("dialog")
    page.get_by_role("button", name="Pause").click()
    expect(question).to_contain_text("It has not reported: a script that does not use pollux.init begins anew")
    page.get_by_role("button", name="Back").click()
    stage.report("alpha")
    expect(page.locator("#facts")).to_contain_text("1.5")
    page.get_by_role("button", name="Pause").click()
    expect(question).to_contain_text("it has told of no checkpoint yet")
    page.get_by_role("button", name="Back").click()
    stage.report("alpha", progress=200.0, checkpoint_age_seconds=12.0)
    expect(page.locator("#facts")).to_contain_text("12 s old")
    page.get_by_role("button", name="Pause").click()
    expect(question).to_contain_text("goes on from its last checkpoint")
    page.get_by_role("button", name="Back").click()
    page.get_by_role("button", name="Cancel job").click()
    expect(question).to_contain_text("Files that it wrote are left as they are")


def test_a_refusal_is_told_in_the_words_of_the_service(stage, page):
    page.get_by_role("button", name="Resize…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("GPUs").fill("8..2")
    dialog.get_by_role("button", name="Resize").click()
    expect(page.locator(".toast.bad")).to_contain_text("gpus")
    assert stage.engine.job("alpha").max_gpus == 4


def test_cancel(stage, page):
    page.get_by_role("button", name="Cancel job").click()
    expect(page.get_by_role("dialog")).to_contain_text("It ends for good.")
    page.get_by_role("button", name="Cancel the job").click()
    expect(state(page)).to_have_text("cancelled")
    expect(page.locator("#actions button")).to_have_count(0)
    assert stage.engine.job("alpha").state == "cancelled"


def test_by_keyboard_alone(stage, page):
    page.get_by_role("button", name="Pause").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Back")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(state(page)).to_have_text("paused")
    expect(page.get_by_role("button", name="Resume")).to_be_focused()
