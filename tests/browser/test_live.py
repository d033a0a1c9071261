"""The stream of events: shared by all pages of a browser, and a break of it is seen, survived and caught up with."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect
from tests.browser.stage import wait_for

from pollux.testing.servers.service import result_of

pytestmark = pytest.mark.browser

SEEN = """(seen) => {
    Object.defineProperty(document, 'hidden', {value: !seen, configurable: true});
    document.dispatchEvent(new Event('visibilitychange'));
}"""


@pytest.mark.parametrize("path", ["/", "/jobs/alpha"])
def test_a_restart_is_seen_and_survived(stage, operator, path):
    stage.submit("alpha", 1, 4)
    stage.wait_state("alpha", "running")
    page = operator.open(path).page
    live = page.locator("#live")
    expect(live).to_have_text("Live")
    stage.down()
    expect(live).to_have_text("Reconnecting…")
    stage.up()
    result_of(stage.engine.pause("alpha"))
    expect(live).to_have_text("Live")
    place = page.locator("#jobs tr[data-job=alpha]") if path == "/" else page.locator("#job-state")
    expect(place).to_contain_text("paused")


def test_a_session_that_is_over_leads_to_signing_in(stage, operator):
    expect(operator.page.locator("#live")).to_have_text("Live")
    # In this order: a service that is about to end would still send to a page that it does not serve any more.
    stage.down()
    operator.context.clear_cookies()
    stage.up()
    expect(operator.page).to_have_url(f"{stage.url}/signin?next=%2F")


def test_more_pages_than_a_browser_has_connections_are_all_alive(stage, operator):
    stage.submit("alpha", 1, 4)
    stage.wait_state("alpha", "running")
    pages = [operator.page, *(operator.context.new_page() for _ in range(7))]
    for page in pages[1:]:
        page.goto(f"{stage.url}/jobs/alpha")
        page.wait_for_selector("html[data-ready]", state="attached")
    for page in pages:
        expect(page.locator("#live")).to_have_text("Live")
    assert stage.engine.views.feed.num_listeners == 1
    last = pages[-1]
    last.get_by_role("button", name="Pause").click()
    last.get_by_role("dialog").get_by_role("button", name="Pause").click()
    expect(pages[0].locator("#jobs tr[data-job=alpha]")).to_contain_text("paused")
    for page in pages[1:]:
        expect(page.locator("#job-state")).to_have_text("paused")
    for page in pages[1:]:
        page.close()
    stage.submit("beta", 1, 2)
    expect(pages[0].locator("#jobs tr[data-job=beta]")).to_be_visible()


def test_a_browser_without_shared_workers_has_a_stream_for_each_page_that_is_seen(stage, visit):
    visitor = visit(stage.url)
    visitor.page.add_init_script("delete window.SharedWorker")
    page = visitor.sign_in(stage.tokens.operator).page
    expect(page.locator("#live")).to_have_text("Live")
    assert stage.engine.views.feed.num_listeners == 1
    page.evaluate(SEEN, False)
    wait_for(lambda: stage.engine.views.feed.num_listeners == 0)
    stage.submit("alpha", 1, 4)
    page.evaluate(SEEN, True)
    expect(page.locator("#jobs tr[data-job=alpha]")).to_be_visible()
    assert stage.engine.views.feed.num_listeners == 1


def test_a_page_that_is_gone_back_to_is_alive_again(stage, operator):
    page = operator.page
    expect(page.locator("#live")).to_have_text("Live")
    page.evaluate("dispatchEvent(new PageTransitionEvent('pagehide', {persisted: true}))")
    wait_for(lambda: stage.engine.views.feed.num_listeners == 0)
    stage.submit("alpha", 1, 4)
    page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true}))")
    expect(page.locator("#jobs tr[data-job=alpha]")).to_be_visible()
    stage.submit("beta", 1, 4)
    expect(page.locator("#jobs tr[data-job=beta]")).to_be_visible()


def test_what_changed_while_the_service_refused_is_caught_up_with(stage, visit):
    visitor = visit(stage.url)
    # What a worker asks for cannot be refused here.
    visitor.page.add_init_script("delete window.SharedWorker")
    page = visitor.sign_in(stage.tokens.operator).page
    expect(page.locator("#live")).to_have_text("Live")
    stage.submit("alpha", 1, 4)
    expect(page.locator("#changes")).to_contain_text("submitted for 1 to 4 GPUs")
    # A stream that is refused is not opened again by the browser itself.
    page.route("**/v1/events", lambda route: route.fulfill(status=503))
    stage.down()
    expect(page.locator("#live")).to_have_text("Reconnecting…")
    stage.up()
    stage.submit("beta", 2, 3)
    with page.expect_response(lambda answer: answer.url.endswith("/v1/events") and answer.status == 503):
        pass
    page.unroute("**/v1/events")
    expect(page.locator("#live")).to_have_text("Live")
    expect(page.locator("#changes")).to_contain_text("submitted for 2 to 3 GPUs")
