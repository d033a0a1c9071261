"""The stream of events: a restart of the service is seen, survived and caught up with."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


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
    stage.engine.pause("alpha")
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
