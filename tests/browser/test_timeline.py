"""The timeline under a pointer: the axis goes where the wheel and the hand move it, and comes back."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect
from tests.browser.stage import wait_for

pytestmark = pytest.mark.browser

AXIS = """async () => {
    const { Timeline } = await import("/static/js/timeline.js");
    const draw = Timeline.prototype.draw;
    Timeline.prototype.draw = function () {
        draw.call(this);
        const { since, until, span } = this;
        window.axis = { since, until, span, now: this.now(), held: this.end !== null };
        window.later ??= (seconds) => {
            const now = this.now;
            this.now = () => now() + seconds;
            this.draw();
        };
    };
}"""


class Axis:
    """What the timeline was drawn with last, and a hand on it."""

    def __init__(self, page):
        self.page = page
        self.canvas = page.locator("#timeline canvas")
        page.evaluate(AXIS)
        page.get_by_role("button", name="1 h", exact=True).click()
        self.wait("axis.span === 3600 && !axis.held")
        self.canvas.scroll_into_view_if_needed()
        box = self.canvas.bounding_box()
        self.left, self.width = box["x"] + 44, box["width"] - 48
        # The top, where no job is: pressing there opens none.
        self.y = box["y"] + 12

    def wait(self, condition):
        # Asked from here: the page's policy lets nobody evaluate texts inside it.
        wait_for(lambda: self.page.evaluate(f"Boolean(window.axis) && ({condition})"))

    @property
    def now(self):
        return self.page.evaluate("axis")

    def point(self, share):
        self.page.mouse.move(self.left + share * self.width, self.y)

    def wheel(self, delta, *keys):
        for key in keys:
            self.page.keyboard.down(key)
        self.page.mouse.wheel(0, delta)
        for key in keys:
            self.page.keyboard.up(key)

    def drag(self, start, stop):
        self.point(start)
        self.page.mouse.down()
        for step in range(1, 6):
            self.point(start + (stop - start) * step / 5)
        self.page.mouse.up()


@pytest.fixture
def axis(stage, operator):
    stage.submit("alpha", 1, 1)
    stage.wait_state("alpha", "running")
    return Axis(operator.page)


def test_the_wheel_zooms_around_the_pointer_with_ctrl_only(axis):
    axis.point(0.5)
    before = axis.now
    axis.wheel(-100, "Control")
    axis.wait("axis.span < 3600")
    closer = axis.now
    assert closer["span"] == pytest.approx(0.8 * 3600)
    middle = (before["since"] + before["until"]) / 2
    assert (closer["since"] + closer["until"]) / 2 == pytest.approx(middle, abs=30), "what is pointed at stays there"
    assert closer["held"]
    axis.wheel(100, "Control")
    axis.wheel(100, "Control")
    axis.wait("axis.span > 3600")
    # A plain wheel is the page's: it scrolls, and the axis stays.
    span, top = axis.now["span"], axis.page.evaluate("scrollY")
    axis.wheel(150)
    wait_for(lambda: axis.page.evaluate("scrollY") != top)
    assert axis.now["span"] == span


def test_dragging_moves_in_time_and_a_double_click_comes_back(axis):
    before = axis.now
    axis.drag(0.3, 0.8)
    axis.wait("axis.held")
    earlier = axis.now
    assert earlier["span"] == 3600
    assert before["until"] - earlier["until"] == pytest.approx(1800, abs=60)
    expect(axis.page.locator("#timeline-hint")).to_have_text("Nothing ran in this time.")
    axis.drag(0.8, 0.6)
    axis.wait(f"axis.until > {earlier['until'] + 600}")
    axis.point(0.5)
    axis.page.mouse.dblclick(axis.left + 0.5 * axis.width, axis.y)
    axis.wait("!axis.held && axis.span < 3600")
    expect(axis.page.locator("#timeline-hint")).to_contain_text("GPU-s in")
    assert axis.page.url.endswith("/"), "nothing was opened"


def test_dragging_into_the_future_ends_at_now_and_the_button_goes_there(axis):
    axis.drag(0.2, 0.7)
    axis.wait("axis.held")
    axis.drag(0.9, 0.1)
    axis.wait("!axis.held")
    axis.drag(0.2, 0.7)
    axis.wait("axis.held")
    axis.page.get_by_role("button", name="Back to now").click()
    axis.wait("!axis.held && axis.span === 3600")


def test_the_first_view_is_filled_with_what_ran_and_grows_with_it(axis, stage):
    axis.canvas.focus()
    axis.page.keyboard.press("0")
    axis.wait("!axis.held && axis.span < 3600")
    began = stage.engine.job("alpha").started_at
    # Half a minute is the least, so that a job that has just begun is no wide bar.
    assert axis.now["span"] >= 30
    axis.page.evaluate("(seconds) => window.later(seconds)", 400)
    axis.wait("axis.span > 300")
    ran = axis.now["now"] - began
    assert 0.85 < ran / axis.now["span"] < 0.95
    axis.page.get_by_role("button", name="Zoom in").click()
    span = axis.now["span"]
    axis.page.evaluate("(seconds) => window.later(seconds)", 900)
    assert axis.now["span"] == span, "a span that was chosen stays"
