"""Who is let in, who is not, and where it leads."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect
from tests.browser.stage import wait_for

pytestmark = pytest.mark.browser


def test_every_page_leads_to_signing_in_and_back(stage, visit):
    stage.submit("a")
    visitor = visit(stage.url)
    visitor.page.goto(f"{stage.url}/jobs/a")
    visitor.page.wait_for_url("**/signin?next=%2Fjobs%2Fa")
    visitor.page.get_by_label("Token").fill(stage.tokens.operator)
    visitor.page.get_by_role("button", name="Sign in").click()
    visitor.page.wait_for_url(f"{stage.url}/jobs/a")
    expect(visitor.page.get_by_role("heading", level=1)).to_have_text("a")
    assert visitor.page.evaluate("document.cookie") == ""
    [cookie] = visitor.context.cookies()
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"


def test_a_wrong_token_is_refused_in_words(stage, visit):
    visitor = visit(stage.url)
    visitor.page.goto(f"{stage.url}/signin")
    visitor.page.get_by_label("Token").fill("not-the-token")
    visitor.page.get_by_role("button", name="Sign in").click()
    expect(visitor.page.get_by_role("alert")).to_contain_text("This token is not known here")
    assert visitor.page.url == f"{stage.url}/signin"
    assert visitor.context.cookies() == []


def test_signing_in_never_leads_to_another_site(stage, visit):
    visitor = visit(stage.url)
    for place in ("https://example.org/", "//example.org/", "/\\example.org", "//"):
        visitor.page.goto(f"{stage.url}/signin?next={place}")
        visitor.page.get_by_label("Token").fill(stage.tokens.operator)
        visitor.page.get_by_role("button", name="Sign in").click()
        visitor.page.wait_for_url(f"{stage.url}/")


def test_signing_out_ends_it(stage, operator):
    operator.page.get_by_role("button", name="Sign out").click()
    expect(operator.page).to_have_url(f"{stage.url}/signin")
    operator.page.goto(f"{stage.url}/")
    expect(operator.page).to_have_url(f"{stage.url}/signin?next=%2F")


def test_signing_out_ends_what_other_tabs_still_hear(stage, operator):
    listening = operator.context.new_page()
    # A page without scripts of ours: nothing but the stream itself tells that it is over.
    listening.goto(f"{stage.url}/docs")
    listening.evaluate("""async () => {
        const reader = (await fetch("/v1/events")).body.getReader();
        window.heard = "";
        window.over = false;
        (async () => {
            for (;;) {
                const { done, value } = await reader.read();
                if (done) break;
                window.heard += new TextDecoder().decode(value);
            }
            window.over = true;
        })();
    }""")
    stage.submit("heard")
    wait_for(lambda: '"heard"' in listening.evaluate("window.heard"))
    watching = operator.context.new_page()
    watching.goto(f"{stage.url}/")
    expect(watching.locator("#live")).to_have_text("Live")
    operator.page.get_by_role("button", name="Sign out").click()
    expect(operator.page).to_have_url(f"{stage.url}/signin")
    wait_for(lambda: listening.evaluate("window.over"))
    expect(watching).to_have_url(f"{stage.url}/signin?next=%2F")
    stage.submit("unheard")
    assert "unheard" not in listening.evaluate("window.heard")


def test_a_viewer_sees_everything_and_can_change_nothing(stage, visit):
    stage.submit("a")
    stage.wait_state("a", "running")
    visitor = visit(stage.url).sign_in(stage.tokens.viewer)
    expect(visitor.page.get_by_text("Read only")).to_be_visible()
    visitor.open("/jobs/a")
    expect(visitor.page.locator("#job-state")).to_have_text("running")
    expect(visitor.page.locator("#actions button")).to_have_count(0)
    visitor.open("/policies")
    expect(visitor.page.get_by_role("button", name="Replay", exact=True)).to_be_disabled()
    expect(visitor.page.get_by_role("alert")).to_contain_text("reading only")
