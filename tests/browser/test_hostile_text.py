"""Names, lines and answers that try to be more than text."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

EVIL = '<img src=x onerror="window.hurt=1"><script>window.hurt=2</script>'


def unhurt(page):
    return page.evaluate("window.hurt") is None and page.locator("img[src=x]").count() == 0


def test_a_name_with_markup_is_not_taken(stage, operator):
    answer = operator.page.evaluate(
        """async (name) => {
            const session = await (await fetch('/v1/session')).json();
            const headers = {'X-Pollux-CSRF': session.csrf, 'Content-Type': 'application/json'};
            const body = JSON.stringify({name, run: 'sleep 1', workdir: '/tmp'});
            return (await fetch('/v1/jobs', {method: 'POST', headers, body})).status;
        }""",
        EVIL,
    )
    assert answer == 422


def test_a_name_with_markup_that_got_in_all_the_same_stays_text(stage, operator):
    name = "<img src=x onerror=window.hurt=1>"
    stage.submit(name, 1, 4)
    stage.wait_state(name, "running")
    stage.train(name, 3)
    stage.submit("later", 1, 2, after=(name,))
    page = operator.open("/").page
    expect(page.locator("#jobs tbody th").get_by_role("link", name=name)).to_be_visible()
    expect(page.locator("#timeline-legend")).to_contain_text(name)
    expect(page.locator("#queue")).to_contain_text(f"runs after {name}")
    assert unhurt(page)
    page.locator("#jobs tbody th").get_by_role("link", name=name).click()
    operator.ready()
    expect(page.get_by_role("heading", level=1)).to_have_text(name)
    assert unhurt(page)


def test_log_lines_metrics_and_details_stay_text(stage, operator):
    stage.submit("alpha", 1, 4)
    stage.wait_state("alpha", "running")
    stage.backend.log_text = f"{EVIL}\n"
    stage.report("alpha", metrics={EVIL: 1.0})
    stage.backend.ended("alpha", "failed", EVIL)
    page = operator.open("/jobs/alpha").page
    expect(page.locator("#log")).to_contain_text(EVIL)
    expect(page.locator("#learning figcaption", has_text="onerror")).to_be_visible()
    expect(page.locator("#events")).to_contain_text(EVIL)
    assert unhurt(page)


@pytest.mark.parametrize("path", ["/", "/jobs/alpha"])
def test_even_names_that_the_service_would_never_give_stay_text(stage, visit, path):
    stage.submit("alpha", 1, 4)
    stage.wait_state("alpha", "running")
    stage.train("alpha", 3)
    stage.submit("waits", 32, 64)
    visitor = visit(stage.url)
    visitor.page.route("**/v1/**", lambda route: _poisoned(route))
    visitor.sign_in(stage.tokens.operator)
    page = visitor.open(path).page
    expect(page.get_by_text("onerror").first).to_be_visible()
    assert unhurt(page)


def _poisoned(route):
    if "/v1/events" in route.request.url:
        route.continue_()
        return
    answer = route.fetch()
    try:
        body = json.loads(answer.text())
    except ValueError:
        route.fulfill(response=answer)
        return
    route.fulfill(response=answer, json=_evil(body))


def _evil(value, key=""):
    if isinstance(value, dict):
        return {(EVIL if name == "alpha" else name): _evil(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_evil(item) for item in value]
    named = key in ("id", "name", "text", "reason", "job", "next_step", "detail", "queue", "version", "policy")
    return EVIL if isinstance(value, str) and named else value


def test_what_is_not_from_here_is_blocked(operator):
    blocked = operator.page.evaluate(
        """() => {
            const script = document.createElement('script');
            script.textContent = 'window.hurt = 3';
            document.body.append(script);
            return window.hurt === undefined;
        }"""
    )
    assert blocked
    operator.faults.clear()
