"""Time in which policies could not see a job: it is not late for what it waited then."""

import json

import numpy as np
import pytest

from pollux.controller import (
    Controller,
    GenerationEnded,
    JobFinished,
    JobPaused,
    JobResumed,
    JobRunning,
    TimerFired,
    TimeSkipped,
)
from pollux.policies.search.ranks import RankedWork, RankRule


def hidden(desk, at, job="a"):
    return next(view.hidden_seconds for view in desk.controller.snapshot(at).jobs if view.id == job)


def paused(desk):
    desk.submit(0, "a", "b")
    desk(JobPaused(100, "a"))
    desk(JobResumed(700, "a"))


def followed(desk):
    desk.submit(0, "b")
    desk.submit(100, "a", after=("b",))
    desk(JobFinished(700, "b"))


def crashed(desk):
    desk.submit(0, "a", "b", retries=3)
    desk.decide(10, a="n0:1")
    desk(JobRunning(10, "a", 1))
    desk(GenerationEnded(98, "a", 1, "crashed", "exit 1"))
    desk(TimerFired(698))


def paused_in_back_off(desk):
    desk.submit(0, "a", "b", retries=3)
    desk.decide(10, a="n0:1")
    desk(GenerationEnded(100, "a", 1, "crashed", "exit 1"))
    desk(JobPaused(101, "a"))
    desk(TimerFired(300))
    desk(JobResumed(700, "a"))


@pytest.mark.parametrize("life", [paused, followed, crashed, paused_in_back_off])
def test_time_in_which_policies_do_not_see_a_job_is_known_and_does_not_make_it_late(make_desk, life):
    desk = make_desk(trigger="events")
    life(desk)
    assert hidden(desk, 710) == 600.0
    view = desk.controller.snapshot(710)
    objective = RankedWork(view, RankRule())
    objective.prepare(np.zeros(len(view.jobs)))
    a = next(j for j, job in enumerate(view.jobs) if job.id == "a")
    visible = 710.0 - view.jobs[a].submitted_at - 600.0
    size = objective.accounts["a"].received + view.jobs[a].resize_cost_seconds
    assert objective.lateness[a] <= 1.0 + visible / size + 1e-9


def test_hidden_time_is_kept_in_states_and_old_states_load(make_desk):
    desk = make_desk(trigger="events")
    paused(desk)
    desk(JobPaused(800, "a"))
    state = json.loads(json.dumps(desk.controller.state(), allow_nan=False))
    again = Controller.restored(state, desk.controller.settings)
    again.apply(JobResumed(900, "a"))
    assert again.snapshot(900).jobs[0].hidden_seconds == 700.0
    for job in state["jobs"]:
        del job["hidden_since"], job["hidden_seconds"]
    old = Controller.restored(state, desk.controller.settings)
    old.apply(JobResumed(900, "a"))
    assert old.snapshot(900).jobs[0].hidden_seconds == 0.0


def test_time_that_the_clock_skips_is_not_hidden_time(make_desk):
    desk = make_desk(trigger="events")
    desk.submit(0, "a")
    desk(JobPaused(100, "a"))
    desk(TimeSkipped(1200, 1000.0))
    desk(JobResumed(1300, "a"))
    assert hidden(desk, 1300) == 200.0
