"""The cluster page: what is shown, and that it stays true while things happen."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect
from tests.browser.stage import PATIENCE_SECONDS

from pollux.testing.servers.service import result_of
from pollux.wire.job import JobRequest

pytestmark = pytest.mark.browser


@pytest.fixture
def busy(stage):
    """Two jobs that train, one that can never start, one that waits for another."""
    for name in ("alpha", "beta"):
        stage.submit(name, 1, 4)
        stage.wait_state(name, "running")
        stage.train(name, 3)
    stage.submit("huge", 32, 64)
    stage.submit("later", 1, 2, after=("alpha",))
    return stage


def test_the_figures_and_who_holds_what(busy, operator):
    page = operator.page
    tiles = page.locator("#tiles")
    used = sum(job.gpus for job in busy.engine.jobs())
    expect(tiles).to_contain_text("GPUs in use")
    expect(tiles).to_contain_text(f"{used} of 10")
    expect(tiles).to_contain_text("2 running")
    expect(tiles).to_contain_text(re.compile(r"Goodput vs\. static.*\d×"))
    expect(tiles).to_contain_text(re.compile(r"Median fairness.*\d\.\d\d"))
    nodes = page.get_by_role("region", name="Nodes and who holds their GPUs")
    for name in ("node-a", "node-b", "node-c"):
        expect(nodes).to_contain_text(name)
    held = busy.engine.job("alpha").placement
    for node, count in held.items():
        link = nodes.get_by_role("link", name=re.compile(rf"^alpha holds {count} GPUs? of {node}$"))
        link.hover()
        expect(nodes.locator(".tip")).to_contain_text(f"on {node}")
    nodes.get_by_role("link", name=re.compile("^beta holds")).first.focus()
    expect(nodes.locator(".tip")).to_contain_text("beta")


def test_nodes_are_found_by_name_and_by_job(busy, operator):
    page = operator.page
    page.get_by_label("Find a node or job").fill("node-c")
    expect(page.locator(".node")).to_have_count(1)
    expect(page.locator("#nodes-hint")).to_have_text("1 of 3 nodes")
    page.get_by_label("Find a node or job").fill("nothing-of-this-name")
    expect(page.locator(".node")).to_have_count(0)


def test_who_waits_and_why_with_links(busy, operator):
    queue = operator.page.get_by_role("region", name="Jobs that wait")
    expect(queue.get_by_role("row", name=re.compile("^huge"))).to_contain_text("it needs 32 GPUs")
    row = queue.get_by_role("row", name=re.compile("^later"))
    expect(row).to_contain_text("runs after alpha")
    row.get_by_role("link", name="alpha", exact=True).click()
    operator.page.wait_for_url("**/jobs/alpha")


def test_the_timeline_zooms_pans_and_reads_aloud(busy, operator):
    page = operator.page
    canvas = page.get_by_role("img", name=re.compile("GPUs by job over time"))
    expect(canvas).to_have_accessible_name(re.compile("alpha .*GPU-s"))
    hint = page.locator("#timeline-hint")
    expect(hint).to_contain_text(re.compile(r"in \d+ (s|min)$"))
    page.get_by_role("button", name="1 h", exact=True).click()
    expect(hint).to_contain_text("in 60 min")
    expect(page.get_by_role("button", name="1 h", exact=True)).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="Zoom in").click()
    expect(hint).to_contain_text("in 30 min")
    canvas.focus()
    page.keyboard.press("-")
    expect(hint).to_contain_text("in 60 min")
    page.get_by_role("button", name="Earlier").click()
    page.get_by_role("button", name="Earlier").click()
    page.get_by_role("button", name="Earlier").click()
    expect(hint).to_have_text("Nothing ran in this time.")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Back to now").click()
    expect(hint).to_contain_text("GPU-s in 60 min")
    page.locator("#timeline summary").click()
    expect(
        page.get_by_role("region", name="GPU-time by job").get_by_role("row", name=re.compile("^alpha"))
    ).to_be_visible()


def test_pointing_at_the_timeline_names_the_job_and_pressing_opens_it(busy, operator):
    page = operator.page
    expect(page.locator("#timeline-legend a").first).to_be_visible()
    tip = page.locator("#timeline .tip")
    page.locator("#timeline canvas").scroll_into_view_if_needed()
    box = page.locator("#timeline canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 8, box["y"] + box["height"] - 34)
    expect(tip).to_contain_text(re.compile("alpha|beta"))
    page.mouse.click(box["x"] + box["width"] - 8, box["y"] + box["height"] - 34)
    page.wait_for_url(re.compile("/jobs/(alpha|beta)"))


def test_what_happens_is_shown_without_asking(busy, operator):
    page = operator.page
    expect(page.get_by_role("status").filter(has_text="Live")).to_be_visible()
    busy.submit("newcomer", 1, 2)
    expect(page.locator("#jobs").get_by_role("link", name="newcomer")).to_be_visible()
    expect(page.locator("#changes")).to_contain_text("submitted for 1 to 2 GPUs")
    result_of(busy.engine.cancel("newcomer"))
    expect(page.locator("#jobs").get_by_role("link", name="newcomer")).to_have_count(0)


def test_what_happened_before_is_told_in_words_with_links(busy, operator):
    result_of(busy.engine.cancel("alpha"))
    busy.wait_state("later", "failed")
    page = operator.open("/").page
    changes = page.get_by_role("region", name="Changes, newest first")
    expect(changes).to_contain_text("submitted for 32 to 64 GPUs")
    expect(changes).to_contain_text("cancelled by its user")
    told = changes.locator("tbody tr").all_inner_texts()
    assert len(told) == len(set(told)), "nothing is told twice"
    result_of(busy.engine.cancel("beta"))
    expect(changes.locator("tbody tr", has_text="cancelled by its user")).to_have_count(2)


def test_what_happens_before_the_stream_begins_is_told_once_it_does(busy, operator):
    page, held = operator.page, []
    # A stream of the page's own can be held up; one of a worker's cannot.
    page.add_init_script("delete window.SharedWorker")
    page.route(re.compile(r"/v1/events$"), lambda route: held.append(route))
    operator.open("/")
    changes = page.get_by_role("region", name="Changes, newest first")
    expect(changes).to_contain_text("submitted for 32 to 64 GPUs")
    result_of(busy.engine.cancel("beta"))
    busy.wait_state("beta", "cancelled")
    for route in held:
        route.continue_()
    expect(changes.locator("tbody tr", has_text="cancelled by its user")).to_have_count(1)
    expect(changes.locator("tbody tr").first).to_contain_text("beta")


def test_what_is_degraded_is_told_above_everything_else(stage, operator):
    warnings = page_warnings(operator.page)
    expect(warnings).to_have_count(0)
    stage.backend.warnings = lambda: ("node-a was last heard of 40 s ago.", "<img src=x onerror=window.hurt=1> is odd.")
    stage.submit("alpha", 1, 2)
    expect(warnings).to_have_text(["node-a was last heard of 40 s ago.", "<img src=x onerror=window.hurt=1> is odd."])
    assert operator.page.evaluate("window.hurt") is None
    stage.backend.warnings = tuple
    stage.submit("beta", 1, 2)
    expect(warnings).to_have_count(0)


def page_warnings(page):
    return page.get_by_role("status", name="What is degraded").locator("p")


def test_figures_from_before_are_marked_in_the_list(busy, operator):
    result_of(busy.engine.pause("alpha"))
    result_of(busy.engine.resume("alpha"))
    busy.wait_state("alpha", "running")
    expect(operator.page.locator("#jobs tr[data-job=alpha]")).to_contain_text("~ 75 %")
    busy.train("alpha", 3)
    expect(operator.page.locator("#jobs tr[data-job=alpha]")).not_to_contain_text("~")


def test_fairness_is_the_same_in_list_figure_and_on_the_jobs_page(busy, operator):
    """After others came and went, without anything happening to the job itself."""
    result_of(busy.engine.cancel("beta"))
    page = operator.page
    fairness = page.locator("#jobs tr[data-job=alpha] td").nth(6)
    tile = page.locator(".tile", has_text="Median fairness").locator(".figure")

    def shown_everywhere():
        """What it is, and on how many GPUs: the next decision may give it some of those that are free now."""
        job = busy.engine.job("alpha")
        told = f"{job.fairness:.2f}"
        expect(fairness).to_have_text(told)
        expect(tile).to_have_text(told)
        return told, job.gpus

    # Little time has passed against what is left, so that two digits stay as they are while this looks.
    busy.report("alpha", progress=1.0, total_progress=1e9)
    few, held = shown_everywhere()
    for number in range(6):
        busy.submit(f"more-{number}", 32, 64)
    crowded, _ = shown_everywhere()
    assert crowded != few
    other = operator.context.new_page()
    other.goto(f"{busy.url}/jobs/alpha")
    expect(other.locator("#facts div", has_text="Fairness").locator("dd")).to_have_text(crowded)
    other.close()
    for number in range(6):
        result_of(busy.engine.cancel(f"more-{number}"))
    again, holds = shown_everywhere()
    assert again == few or holds != held


def test_a_reason_that_has_no_room_is_shown_in_full(busy, operator):
    page = operator.page
    view = page.get_by_role("region", name="All jobs")
    tip = page.locator("#jobs .tip")
    reason = busy.engine.job("huge").reason.text
    row = page.locator("#jobs tr[data-job=huge]")
    cell = row.locator("td").last
    # For who reads by ear, the cell has it all.
    expect(row.get_by_role("cell", name=reason)).to_have_count(1)
    # Where there is room, which with wide fonts there is not by itself, nothing is laid over the list.
    view.evaluate("view => view.querySelector('col').style.setProperty('width', '2%')")
    cell.hover()
    expect(tip).to_be_hidden()
    page.mouse.move(0, 0)
    view.evaluate("view => view.querySelector('col').style.setProperty('width', '30%')")
    cell.hover()
    expect(tip).to_have_text(reason)
    assert_inside(tip.bounding_box(), page.locator("#jobs").bounding_box())
    page.mouse.move(0, 0)
    expect(tip).to_be_hidden()
    row.get_by_role("link", name="huge").focus()
    expect(tip).to_have_text(reason)
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def assert_inside(box, outer):
    assert outer["x"] <= box["x"]
    assert box["x"] + box["width"] <= outer["x"] + outer["width"] + 1


def test_jobs_are_chosen_by_state_and_opened_by_name(busy, operator):
    page = operator.page
    result_of(busy.engine.cancel("huge"))
    page.get_by_label("Show").select_option("ended")
    expect(page.locator("#jobs tbody tr[data-job]")).to_have_count(1)
    expect(page.locator("#jobs")).to_contain_text("cancelled")
    page.get_by_label("Show").select_option("failed")
    expect(page.get_by_text("No jobs here.")).to_be_visible()
    page.get_by_label("Open a job").fill("beta")
    page.get_by_label("Open a job").press("Enter")
    page.wait_for_url("**/jobs/beta")


def many(stage, count):
    """So many jobs that pages of them have to be read."""
    requests = [
        JobRequest(name=f"job-{index}", run=("sleep", "1"), min_gpus=1, max_gpus=1, workdir=str(stage.home))
        for index in range(count)
    ]
    for taken in [stage.engine.submit(request) for request in requests]:
        taken.result(PATIENCE_SECONDS)


def names_in_sight(page):
    return page.locator("#jobs tbody tr[data-job]").evaluate_all("rows => rows.map((row) => row.dataset.job)")


@pytest.mark.parametrize("forgotten", [False, True])
def test_jobs_that_leave_the_list_leave_no_doubles(stage, visit, forgotten):
    many(stage, 130)
    page = visit(stage.url).sign_in(stage.tokens.operator).page
    expect(page.locator("#jobs-hint")).to_have_text("130 of 130")
    page.locator("#jobs-view").evaluate("view => { view.scrollTop = 95 * 38; }")
    expect(page.locator("#jobs tr[data-job=job-104]")).to_be_attached()
    if forgotten:
        page.route("**/v1/jobs?*after=*", lambda route: route.fulfill(status=404, json={}), times=1)
    for name in ("job-50", "job-51", "job-60"):
        result_of(stage.engine.cancel(name))
    expect(page.locator("#jobs-hint")).to_have_text("127 of 130")
    expect(page.locator("#jobs table")).to_have_attribute("aria-rowcount", "128")
    names = names_in_sight(page)
    assert len(names) == len(set(names))
    assert "job-104" in names


def test_fairness_is_told_of_every_job(busy, visit):
    def told(route):
        answer = route.fetch()
        body = answer.json()
        for job in body["jobs"]:
            job["fairness"] = 1.234
        route.fulfill(response=answer, json=body)

    visitor = visit(busy.url)
    visitor.page.route("**/v1/jobs?active=*", told)
    page = visitor.sign_in(busy.tokens.operator).page
    expect(page.locator("#jobs tr[data-job=huge]")).to_contain_text("1.23")


def test_of_many_jobs_only_those_in_sight_are_elements(stage, visit):
    many(stage, 450)
    page = visit(stage.url).sign_in(stage.tokens.operator).page
    expect(page.locator("#jobs-hint")).to_have_text("450 of 450")
    seen = set()
    for _ in range(60):
        names = names_in_sight(page)
        assert len(names) < 60
        seen |= set(names)
        if len(seen) == 450:
            break
        page.locator("#jobs-view").evaluate("view => { view.scrollTop += 12 * 38; }")
        page.evaluate("() => new Promise(requestAnimationFrame)")
        expect(page.locator("#jobs tbody td.muted")).to_have_count(0)
    assert len(seen) == 450
    expect(page.locator("#jobs table")).to_have_attribute("aria-rowcount", "451")
