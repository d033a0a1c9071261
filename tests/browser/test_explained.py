"""Each number that a page shows can be explained where it stands: by pointer, by keyboard and by ear."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import expect
from tests.browser.stage import wait_for
from tests.browser.test_job import receipt_of_a_change

from pollux.service.presenters.receipts import receipt_folder
from pollux.testing.servers.service import result_of

pytestmark = pytest.mark.browser

# Texts with a digit that no explanation stands beside: in its cell's column head, its figure, its fact, its chart or
# behind its line. Names, times of the clock, sentences, logs, files and what a person can choose need none.
UNEXPLAINED = r"""() => {
    const free = ["script", "header", "footer", "h1", "h2", "option", "button", "a", "pre", "code", "p.sub",
        "p.why", "p.empty", "#next-step", "#outdated", "#job-problem", "#warnings", "summary", ".part",
        "#metrics-left-out", ".choice", "#sizes-hint", ".legend", ".sr-only", ".bubble", ".tip", ".left-out",
        "form label"].join(", ");
    const wordy = /^(Job|Policy|What|What happened, and why|When|Why|Why it waits|In words|In words, and why)$/;
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const text = walker.currentNode.textContent.trim();
        const element = walker.currentNode.parentElement;
        if (!/\d/.test(text) || element.closest(free) || !element.checkVisibility()) continue;
        const has = (place) => Boolean(place?.querySelector(".info"));
        const cell = element.closest("td, th");
        if (cell) {
            if (cell.closest("figure") && has(cell.closest("figure"))) continue;
            const head = cell.closest("table").tHead.rows[0].cells[cell.cellIndex];
            if (cell.closest("thead") || has(head) || wordy.test(head.textContent)) continue;
        } else if (has(element.closest(".tile, dl.facts > div, figure, .progress-line, #running"))) continue;
        else if (element.closest(".hint")?.nextElementSibling?.classList.contains("info")) continue;
        else if (element.closest(".node") && has(element.closest(".card").querySelector(".head"))) continue;
        found.push(`${element.tagName} ${element.id || element.className}: ${text}`);
    }
    return found;
}"""


@pytest.fixture
def told(stage):
    """A job with reports and a receipt, and two that wait."""
    stage.submit("alpha", 1, 4)
    stage.wait_state("alpha", "running")
    stage.train("alpha", 6)
    stage.submit("huge", 32, 64)
    stage.submit("later", 1, 2, after=("alpha",))
    folder = receipt_folder(stage.home, "alpha")
    folder.mkdir(parents=True)
    (folder / "receipt.json").write_text(json.dumps(receipt_of_a_change().to_json()))
    return stage


def open_all(page):
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")


def test_every_number_of_the_cluster_page_is(told, operator):
    page = operator.page
    expect(page.locator("#changes tbody tr").first).to_be_visible()
    open_all(page)
    expect(page.get_by_role("region", name="GPU-time by job").locator("tbody tr").first).to_be_visible()
    assert page.evaluate(UNEXPLAINED) == []
    # It sees what has no explanation.
    page.evaluate("document.querySelector('#jobs thead .info, #queue-hint ~ .info').remove()")
    page.evaluate("document.querySelector('#queue thead .info').remove()")
    page.evaluate("document.querySelector('#jobs-hint ~ .info').remove()")
    found = " ".join(page.evaluate(UNEXPLAINED))
    assert "32–64" in found
    assert "jobs-hint" in found


def test_every_number_of_a_jobs_page_is(told, operator):
    page = operator.open("/jobs/alpha").page
    open_all(page)
    expect(page.locator("#receipt")).to_contain_text("From step")
    assert page.evaluate(UNEXPLAINED) == []
    page.evaluate("document.querySelectorAll('#receipt thead .info').forEach((one) => one.remove())")
    assert page.evaluate(UNEXPLAINED) != []


def replayed():
    """What a replay came to: two policies that do the same."""
    jobs = [{"name": "a", "submitted": 0.0, "finished": 60.0}, {"name": "b", "submitted": 0.0, "finished": 90.0}]
    row = {"avg_jct_hours": 1.0, "p99_jct_hours": 1.0, "makespan_hours": 2.0, "utilization": 0.5, "gpu_hours": 3.0,
           "restarts_per_job": 0.5, "worst_ftf": 1.1, "num_jobs": 2, "jobs": jobs}  # fmt: skip
    results = [{**row, "policy": name} for name in ("pollux", "fifo")]
    return {"runs": [{"nodes": 3, "config": {"gpus_per_node": 4}, "results": results, "left_out": []}], "left_out": []}


def test_every_number_of_the_policies_page_is_and_equal_lines_are_told_apart(stage, operator):
    page = operator.page
    shown = {"id": "r1", "state": "running", "progress": 0.25, "detail": "", "result": None}
    page.route("**/v1/whatif", lambda route: route.fulfill(json={"replays": [shown]}))
    page.route("**/v1/whatif/r1", lambda route: route.fulfill(json=shown))
    operator.open("/policies")
    expect(page.locator("#bar-label")).to_have_text("Replaying, 25 %")
    assert page.evaluate(UNEXPLAINED) == []
    shown.update(state="done", progress=1.0, result=replayed())
    expect(page.get_by_role("region", name="Comparison").get_by_role("row")).to_have_count(3)
    open_all(page)
    assert page.evaluate(UNEXPLAINED) == []
    keys = page.locator("#plots figure").first.locator(".legend .key")
    expect(keys).to_have_count(2)
    expect(keys.nth(0)).not_to_have_class(re.compile("dashed"))
    expect(keys.nth(1)).to_have_class(re.compile("dashed"))


def test_the_columns_of_a_receipt_are_explained_on_focus(told, operator):
    page = operator.open("/jobs/alpha").page
    page.locator("#receipt summary").first.click()
    configurations = page.get_by_role("region", name="Configurations")
    expect(configurations.get_by_role("columnheader")).to_have_count(9)
    expect(configurations.get_by_role("row").nth(2)).to_have_text(re.compile("^100.*400$"))
    for button in configurations.get_by_role("button").all():
        button.focus()
        expect(page.locator(".bubble")).to_have_count(1)
        assert_whole(page)


def test_the_columns_of_the_list_are_explained_on_focus_and_named_shortly(told, operator):
    page = operator.page
    view = page.get_by_role("region", name="All jobs")
    # Who moves through cells by ear does not hear the explanation in each.
    expect(view.get_by_role("columnheader", name="Goodput", exact=True)).to_have_count(1)
    button = view.get_by_role("button", name=re.compile("^What is Goodput"))
    button.focus()
    expect(page.locator(".bubble")).to_contain_text("useful samples per second")
    assert_whole(page)
    page.keyboard.press("Tab")
    expect(page.locator(".bubble")).to_contain_text("Statistical efficiency")
    page.keyboard.press("Escape")
    expect(page.locator(".bubble")).to_have_count(0)


def test_an_explanation_stays_while_the_table_goes_on(told, operator):
    page = operator.page
    queue = page.get_by_role("region", name="Jobs that wait")
    queue.get_by_role("button", name=re.compile("^What is Asks for")).focus()
    expect(page.locator(".bubble")).to_have_count(1)
    page.evaluate("window.kept = document.querySelector('.bubble')")
    told.submit("another", 33, 64)
    expect(queue.get_by_role("row", name=re.compile("^another"))).to_be_visible()
    assert page.evaluate("window.kept.isConnected")
    expect(page.locator(".bubble")).to_have_count(1)


def assert_whole(page):
    """Nothing cuts the explanation off or lies above it."""
    seen = page.locator(".bubble").evaluate(
        """bubble => {
            const box = bubble.getBoundingClientRect();
            bubble.style.pointerEvents = "auto";
            const [left, right, top, bottom] = [box.left + 9, box.right - 9, box.top + 4, box.bottom - 4];
            const corners = [[left, top], [right, top], [left, bottom], [right, bottom]];
            const over = corners.map(([x, y]) => document.elementFromPoint(x, y) === bubble);
            bubble.style.pointerEvents = "";
            return [box.left >= 0 && box.right <= innerWidth && box.top >= 0 && box.bottom <= innerHeight, ...over];
        }"""
    )
    assert all(seen), seen


def test_where_a_job_runs_is_written(told, operator):
    page = operator.open("/jobs/alpha").page
    where = page.locator("#facts div", has=page.locator("dt", has_text=re.compile("^Where"))).locator("dd")
    for node, count in told.engine.job("alpha").placement.items():
        expect(where).to_contain_text(f"{count} on {node}")
    result_of(told.engine.pause("alpha"))
    expect(where).to_have_text("–")


def test_numbers_of_a_chart_say_how_many_they_are(told, operator):
    page = operator.open("/jobs/alpha").page
    chart = page.locator("figure", has_text="Efficiency").first
    chart.locator("summary").click()
    expect(chart.locator(".part")).to_have_count(0)

    def many(route):
        answer = route.fetch()
        row = answer.json()["rows"][-1]
        rows = [{**row, "at": row["at"] + index} for index in range(150)]
        route.fulfill(response=answer, json={"rows": rows})

    page.route("**/series?kind=report*", many)
    operator.open("/jobs/alpha")
    chart.locator("summary").click()
    expect(chart.locator(".part")).to_have_text("One in 3 of 152 points, the newest first.")
    assert chart.locator("tbody tr").count() <= 61


def test_metrics_that_are_not_drawn_are_counted(told, operator):
    page = operator.open("/jobs/alpha").page
    note = page.locator("#metrics-left-out")
    expect(note).to_be_hidden()
    told.report("alpha", samples=5000, metrics={f"metric-{index:02}": 1.0 for index in range(26)})
    # With `accuracy` there are 27.
    expect(note).to_have_text("3 more metrics are not drawn: the page has room for the first 24 by name.")
    expect(page.locator("#learning figure")).to_have_count(25)


def test_jobs_that_were_cancelled_are_counted(told, operator):
    result_of(told.engine.cancel("huge"))
    expect(operator.page.locator(".tile", has_text="Jobs").first).to_contain_text("1 waiting, 0 done, 1 cancelled")


def test_the_list_and_who_waits_have_the_words_of_explain(told, operator):
    generation_cost = {"resize_seconds": 6.0, "resize_kind": "restart"}
    told.report("alpha", **generation_cost)
    cell = operator.page.locator("#jobs tr[data-job=alpha] td.cause")
    expect(cell).to_contain_text("As of now, a change of its GPUs costs it about 6 s, with a restart")
    shown = cell.inner_text()
    waits = operator.page.locator("#queue tbody tr", has_text="runs after alpha").locator("td").last.inner_text()
    page = operator.open("/jobs/alpha").page
    expect(page.locator("#why")).to_have_text(shown)
    operator.open("/jobs/later")
    expect(page.locator("#why")).to_have_text(waits)


def test_an_axis_of_gpus_has_whole_numbers(told, operator):
    page = operator.open("/jobs/alpha").page
    expect(page.locator("figure", has_text="Speed-up").locator("canvas")).to_be_visible()
    ticks = page.evaluate(
        """async () => {
            const drawn = [];
            const write = CanvasRenderingContext2D.prototype.fillText;
            CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
                if (this.canvas.closest("figure")?.textContent.startsWith("Speed-up")) drawn.push(text);
                return write.call(this, text, ...rest);
            };
            dispatchEvent(new Event("pollux-theme"));
            // All of a chart is drawn at once; when, is the browser's business.
            while (drawn.length === 0) await new Promise(requestAnimationFrame);
            return drawn;
        }"""
    )
    # Those of the other axis have the sign ×.
    counts = [tick for tick in ticks if re.fullmatch(r"[\d.]+", tick)]
    assert len(counts) > 1, ticks
    assert [tick for tick in counts if "." in tick] == []


def test_a_card_is_as_tall_as_what_it_has_and_names_stay_whole(stage, operator):
    page = operator.page
    stage.submit("a-name-with-hyphens", 1, 2)
    stage.wait_state("a-name-with-hyphens", "running")
    link = page.locator("#changes").get_by_role("link", name="a-name-with-hyphens").first
    expect(link).to_be_visible()
    wait_for(lambda: link.evaluate("link => link.getClientRects().length") == 1)
    for index in range(8):
        result_of(stage.engine.pause("a-name-with-hyphens"))
        result_of(stage.engine.resume("a-name-with-hyphens"))
        stage.wait_state("a-name-with-hyphens", "running")
        expect(page.locator("#changes tbody tr")).not_to_have_count(index)
    expect(page.locator("#queue .empty")).to_be_visible()
    height = "card => card.closest('.card').getBoundingClientRect().height"
    wait_for(lambda: page.locator("#queue").evaluate(height) < 0.6 * page.locator("#changes").evaluate(height))
