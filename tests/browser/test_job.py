"""The page of a job: why, over time, speed-up, what happened, log, receipt."""

from __future__ import annotations

import json
import math
import re

import pytest
from playwright.sync_api import expect
from tests.browser.stage import wait_for

from pollux.agent.reporting.receipt import Receipt
from pollux.agent.reporting.receipt_row import ReceiptRow
from pollux.testing.servers.service import result_of
from pollux.wire.home_layout import receipt_folder

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
    # The second time it was trained it began anew.
    expect(chart(page, "Loss").get_by_role("row")).to_have_count(9)
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
    lines = trained.engine.events_of("alpha")
    assert any(line.kind == "placed" for line in lines)
    for line in lines:
        expect(events).to_contain_text(line.text)
    marks = page.evaluate(
        "fetch('/v1/jobs/alpha/series?kind=decision').then((answer) => answer.json()).then((found) => found.rows)"
    )
    assert marks
    # The first of them is where the chart begins.
    over(page, "GPUs").hover(position={"x": 1, "y": 40})
    expect(chart(page, "GPUs").locator(".tip")).to_contain_text(marks[0]["values"]["text"])
    over(page, "Efficiency").hover(position={"x": 1, "y": 40})
    expect(chart(page, "Efficiency").locator(".tip")).to_contain_text(marks[0]["values"]["text"])


def test_gpus_that_are_lost_are_drawn_and_marked(trained, operator):
    result_of(trained.engine.pause("alpha"))
    page = operator.open("/jobs/alpha").page
    expect(page.locator("#facts")).to_contain_text("0 of 1–8")
    expect(chart(page, "GPUs").locator(".latest")).to_have_text("0")
    expect(chart(page, "GPUs").locator(".plot")).to_have_attribute(
        "aria-label", re.compile("now 0, between 0 and [1-9]")
    )
    marks = page.evaluate(
        "fetch('/v1/jobs/alpha/series?kind=decision').then((answer) => answer.json()).then((found) => found.rows)"
    )
    assert (marks[-1]["values"]["to"], marks[-1]["values"]["text"]) == (0, "paused by its user")
    result_of(trained.engine.resume("alpha"))
    trained.wait_state("alpha", "running")
    expect(chart(page, "GPUs").locator(".latest")).to_have_text(re.compile("[1-9]"))
    trained.backend.ended("alpha", "succeeded")
    expect(chart(page, "GPUs").locator(".latest")).to_have_text("0")


def test_charts_go_on_after_a_zoom_and_the_way_back(trained, operator):
    page = operator.open("/jobs/alpha").page
    for way_back in ("double-click", "button"):
        box = over(page, "GPUs").bounding_box()
        page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 40, steps=3)
        page.mouse.up()
        whole = page.get_by_role("button", name="Whole time")
        expect(whole).to_be_visible()
        if way_back == "button":
            whole.click()
        else:
            over(page, "Total batch").dblclick()
        expect(whole).to_be_hidden()
        # By whole seconds, as the charts tell the time.
        last = newest_shown(page, "Accumulation")
        wait_for(lambda last=last: newest_shown(page, "Accumulation") > last)
        wait_for(lambda last=last: newest_shown(page, "GPUs") > last)


def over(page, name):
    plot = chart(page, name).locator(".u-over")
    plot.scroll_into_view_if_needed()
    return plot


def newest_shown(page, name):
    """The time of day at the right end of a chart."""
    shown = []

    def is_shown():
        plot = over(page, name)
        plot.hover(position={"x": plot.bounding_box()["width"] - 1, "y": 60})
        # Nothing while the chart is drawn anew.
        shown.append(chart(page, name).locator(".tip").inner_text().split("\n")[0])
        return shown[-1]

    wait_for(is_shown)
    return shown[-1]


def test_a_job_that_went_back_is_drawn_over(stage, operator):
    stage.submit("alpha", 1, 2)
    stage.wait_state("alpha", "running")
    for samples, loss in ((100, 3.0), (200, 2.5), (300, 2.0), (200, 2.4), (250, 2.2)):
        stage.report("alpha", samples=samples, step=samples, loss=loss)
    page = operator.open("/jobs/alpha").page
    chart(page, "Loss").get_by_text("Numbers").click()
    cells = chart(page, "Loss").locator("tbody :is(th, td)")
    expect(cells).to_have_text(["250", "2.2", "200", "2.4", "100", "3"])


def test_why_is_the_text_of_explain_with_links(trained, operator):
    trained.submit("later", 1, 2, after=("alpha", "beta"))
    page = operator.open("/jobs/later").page
    why = page.locator("#why")
    told = page.evaluate("fetch('/v1/jobs/later/explain').then((answer) => answer.json())")
    expect(why).to_have_text(told["text"])
    expect(why.get_by_role("link")).to_have_text(["alpha", "beta"])
    expect(page.locator("#next-step code")).to_have_text(told["next_step"])
    why.get_by_role("link", name="beta").click()
    page.wait_for_url("**/jobs/beta")


def test_jobs_that_have_ended_are_linked_too(stage, operator):
    stage.submit("first", 1, 2)
    stage.wait_state("first", "running")
    stage.submit("second", 1, 2, after=("first",))
    result_of(stage.engine.cancel("first"))
    stage.wait_state("second", "failed")
    page = operator.open("/jobs/second").page
    expect(page.locator("#why")).to_contain_text("first")
    page.locator("#why").get_by_role("link", name="first", exact=True).click()
    page.wait_for_url("**/jobs/first")


def test_jobs_that_the_service_names_are_links_whatever_they_are_called(trained, operator):
    told = {
        "text": "node waits for share.v2, share and its share.",
        "next_step": "",
        "jobs": ["share", "share.v2"],
    }
    operator.page.route("**/v1/jobs/alpha/explain", lambda route: route.fulfill(json=told))
    page = operator.open("/jobs/alpha").page
    expect(page.locator("#why")).to_have_text(told["text"])
    expect(page.locator("#why").get_by_role("link")).to_have_text(["share.v2", "share", "share"])


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


def test_a_receipt_of_the_agent_tells_whether_a_change_hurt(trained, operator):
    folder = receipt_folder(trained.home, "alpha")
    folder.mkdir(parents=True)
    (folder / "receipt.json").write_text(json.dumps(receipt_of_a_change().to_json()))
    place = operator.open("/jobs/alpha").page.locator("#receipt")
    expect(place).to_contain_text(re.compile(r"Realised by the loss.*1\.0\d \(0\.\d\d to 1\.\d\d\) at step 100"))
    expect(place).to_contain_text("100 at first, 400 at last")
    expect(place).to_contain_text("batch 100 → 400")
    expect(place.get_by_role("button", name=re.compile("^What is Useful samples"))).to_be_visible()


def receipt_of_a_change():
    """A run whose batch is quadrupled on the way, and whose loss goes on as predicted."""
    receipt = Receipt("alpha", mode="adaptive", initial_batch=100, max_batch=1600, rule="adascale", dataset_size=10_000)
    progress, samples = 0.0, 0
    for step in range(400):
        batch, efficiency = (100, 1.0) if step < 100 else (400, 0.5)
        if step == 100:
            receipt.event("batch-changed", step, progress, "batch 100 → 400: +40 % goodput")
        loss = 0.2 + 2.0 * math.exp(-progress / 15_000) + 0.01 * math.sin(7.0 * step)
        receipt.sample(
            ReceiptRow(step, progress, samples, 0.1 * step, 1, 1, batch, 0, batch, (1.0,), efficiency, loss=loss)
        )
        progress, samples = progress + batch * efficiency, samples + batch
    return receipt


def test_a_command_says_what_it_is_for(trained, operator):
    page = operator.page
    told = {"text": "grew 1→2", "next_step": "", "jobs": []}
    page.route("**/v1/jobs/alpha/explain", lambda route: route.fulfill(json=told))
    held = trained.engine.job("alpha").gpus
    for step, purpose in (
        (f"pollux resize alpha --gpus 1..{held - 1}", f"To keep it at {held - 1} GPU"),
        (f"pollux resize alpha --gpus {held + 2}..16", f"To hold at least {held + 2} GPUs; it may have to wait"),
        ("pollux logs alpha", "To see what it wrote"),
    ):
        told["next_step"] = step
        operator.open("/jobs/alpha")
        expect(page.locator("#next-step")).to_contain_text(purpose)
        expect(page.locator("#next-step code")).to_have_text(step)


def test_figures_from_before_are_marked(trained, operator):
    page = operator.open("/jobs/alpha").page
    expect(page.locator("#facts")).to_contain_text("65/s")
    expect(page.locator("#facts")).to_contain_text("600 samples (450 to 820)")
    expect(page.locator("#facts")).not_to_contain_text("before")
    result_of(trained.engine.pause("alpha"))
    expect(page.locator("#facts")).to_contain_text("75 % before")
    expect(page.locator("#outdated")).to_contain_text("when it last held GPUs")
    result_of(trained.engine.resume("alpha"))
    trained.wait_state("alpha", "running")
    expect(page.locator("#outdated")).to_contain_text("before it was given these GPUs")
    trained.report("alpha", progress=800.0)
    expect(page.locator("#outdated")).to_be_hidden()
    expect(page.locator("#facts")).not_to_contain_text("before")


def test_the_log_of_another_replica_comes_also_while_one_is_read(stage, operator):
    stage.submit("pair", 2, 2)
    stage.wait_state("pair", "running")
    page = operator.page
    late = []
    page.route("**/v1/jobs/pair/logs?replica=0&*", lambda route: late.append(route))
    page.goto(f"{stage.url}/jobs/pair")
    wait_for(lambda: page.wait_for_timeout(20) or late)
    page.locator("#log-replica").select_option("1")
    late[0].fulfill(json={"text": "of the first\n", "offset": 13, "at_end": True})
    expect(page.locator("#log")).to_contain_text("step 2 loss 2.25")
    assert "of the first" not in page.locator("#log").inner_text()


def test_a_job_that_is_not_there(stage, operator):
    operator.page.goto(f"{stage.url}/jobs/nobody")
    expect(operator.page.get_by_role("alert")).to_contain_text("nobody")
    expect(operator.page.locator("main .card:visible")).to_have_count(0)
