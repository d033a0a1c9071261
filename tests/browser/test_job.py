"""The page of a job: why, over time, speed-up, what happened, log, receipt."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import expect

from pollux.wire.places import receipt_folder

pytestmark = pytest.mark.browser


@pytest.fixture
def trained(stage):
    """A job that has reported for a while, and another that took GPUs from it."""
    stage.submit("alpha", 1, 8)
    stage.wait_state("alpha", "running")
    stage.train("alpha", 6)
    stage.submit("beta", 2, 8)
    stage.wait_state("beta", "running")
    stage.train("alpha", 8)
    return stage


def chart(page, name):
    return page.locator("figure.chart").filter(has=page.locator("figcaption", has_text=re.compile(rf"^{name}")))


def test_every_series_is_drawn_and_told_in_words(trained, operator):
    page = operator.open("/jobs/alpha").page
    gpus = trained.engine.job("alpha").gpus
    words = {
        "GPUs": rf"now {gpus}",
        "Total batch": "on one GPU now 128",
        "Accumulation": "now 1",
        "Learning-rate factor": "now 2.00×",
        "Throughput": r"throughput now 80/s.*goodput now 65/s",
        "Efficiency": "now 75 %",
        "Progress": "now 70 %",
        "Noise scale": "noise scale now 600",
        "Step time": r"measured now 220 ms.*predicted now \d+",
        "Loss": r"now 0\.\d+",
        "accuracy": "now 0.8",
    }
    for name, told in words.items():
        plot = chart(page, name).locator(".plot")
        expect(plot).to_have_attribute("aria-label", re.compile(told))
        expect(plot.locator("canvas")).to_be_attached()
    chart(page, "Loss").get_by_text("Numbers").click()
    expect(chart(page, "Loss").get_by_role("row")).to_have_count(13)
    expect(chart(page, "Loss").get_by_role("columnheader").first).to_have_text("samples")


def test_the_speed_up_curve_has_the_present_point(trained, operator):
    page = operator.open("/jobs/alpha").page
    gpus = trained.engine.job("alpha").gpus
    curve = chart(page, "Speed-up")
    expect(curve.locator(".latest")).to_have_text(re.compile(rf"\d×.* with {gpus} GPUs?"))
    curve.get_by_text("Numbers").click()
    expect(curve.get_by_role("row", name=re.compile(f"^{gpus} GPUs? .*×.*×"))).to_be_visible()


def test_every_reallocation_is_there_with_its_reason(trained, operator):
    page = operator.open("/jobs/alpha").page
    events = page.get_by_role("region", name="Events, newest first")
    lines = trained.engine.story("alpha")
    assert any(line.kind == "placed" for line in lines)
    for line in lines:
        expect(events).to_contain_text(line.text)
    marks = page.evaluate(
        "fetch('/v1/jobs/alpha/series?kind=decision').then((answer) => answer.json()).then((found) => found.rows)"
    )
    assert marks
    plot = chart(page, "GPUs").locator(".u-over")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    plot.hover(position={"x": box["width"] / 2, "y": 40})
    expect(chart(page, "GPUs").locator(".tip")).to_contain_text(re.compile(r"\d\d:\d\d:\d\d"))


def test_why_is_the_text_of_explain_with_links(trained, operator):
    trained.submit("later", 1, 2, after=("alpha", "beta"))
    page = operator.open("/jobs/later").page
    why = page.locator("#why")
    told = page.evaluate("fetch('/v1/jobs/later/explain').then((answer) => answer.json())")
    expect(why).to_have_text(told["text"])
    assert why.get_by_role("link").all_inner_texts() == ["alpha", "beta"]
    expect(page.locator("#next-step code")).to_have_text(told["next_step"])
    why.get_by_role("link", name="beta").click()
    page.wait_for_url("**/jobs/beta")


def test_the_log_follows_until_told_not_to(trained, operator):
    page = operator.open("/jobs/alpha").page
    log = page.locator("#log")
    expect(log).to_contain_text("step 2 loss 2.25")
    trained.backend.log_text += "step 3 loss 2.20\n"
    expect(log).to_contain_text("step 3 loss 2.20")
    follow = page.get_by_role("button", name="Follow")
    follow.click()
    expect(follow).to_have_attribute("aria-pressed", "false")
    follow.click()
    trained.backend.log_text += "step 4 loss 2.10\n"
    expect(log).to_contain_text("step 4 loss 2.10")
    assert log.inner_text().count("step 3") == 1


def test_the_receipt_is_shown_however_odd_it_is(trained, operator):
    page = operator.open("/jobs/alpha").page
    expect(page.locator("#receipt")).to_contain_text("None yet")
    folder = receipt_folder(trained.home, "alpha")
    folder.mkdir(parents=True)
    receipt = {
        "mode": "adaptive", "exact": False, "not_exact_because": ["the batch was changed"], "initial_batch": 128,
        "final_batch": 512, "rule": "adascale", "totals": {"steps": 1234, "samples": "many"}, "configurations": "none",
        "events": [{"kind": "resized", "step": 7, "time": 1e9, "text": "<b>1→2</b>"}, None],
    }  # fmt: skip
    (folder / "receipt.json").write_text(json.dumps(receipt))
    page = operator.open("/jobs/alpha").page
    place = page.locator("#receipt")
    expect(place).to_contain_text("no: the batch was changed")
    expect(place).to_contain_text("128 at first, 512 at last")
    expect(place).to_contain_text("<b>1→2</b>")


def test_a_job_that_is_not_there(stage, operator):
    operator.page.goto(f"{stage.url}/jobs/nobody")
    expect(operator.page.get_by_role("alert")).to_contain_text("nobody")
    expect(operator.page.locator("main .card:visible")).to_have_count(0)
