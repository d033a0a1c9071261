"""Places that could not be had: nothing was started, so nothing failed, and the job waits as long as that lasts."""

import json

import pytest

from pollux.controller import (
    Controller,
    GenerationEnded,
    GenerationShrunk,
    JobReported,
    JobRunning,
    JobState,
    ResizeJob,
    StopJob,
    TimerFired,
)
from pollux.controller.explanations.explain import explain
from pollux.controller.machine.retries import refusal_seconds
from pollux.core import NOWHERE
from pollux.testing import place

WHY = "other Ray jobs hold the GPUs of node 'n0'"


def refused(desk, at):
    return desk(GenerationEnded(at, "a", desk.controller.jobs["a"].generation, "refused", WHY))


def not_lent(desk, at, where):
    return desk(GenerationShrunk(at, "a", desk.controller.jobs["a"].generation, place(where), WHY, refused=True))


@pytest.fixture
def waiting(make_desk):
    desk = make_desk(trigger="events")
    desk.submit(0, "a", retries=0, max_gpus=8, min_gpus=2)
    return desk


@pytest.fixture
def running(waiting):
    """Job a on two GPUs, generation 1; it can change while it runs."""
    waiting.decide(10, a="n0:2")
    waiting(JobRunning(11, "a", 1))
    waiting(JobReported(12, "a", live=True, remaining=100.0))
    return waiting


def test_a_job_that_merely_waits_never_fails(waiting):
    record, at, pauses = waiting.controller.jobs["a"], 10.0, []
    for _ in range(50):
        waiting.decide(at, a="n0:2")
        refused(waiting, at + 5.0)
        assert (record.state, record.placement) == (JobState.QUEUED, NOWHERE)
        assert waiting.controller.snapshot(at + 5.0).jobs == (), "not asked again at once"
        pauses.append(waiting.controller.next_timer_at - at - 5.0)
        at = waiting.controller.next_timer_at
        waiting(TimerFired(at))
        assert [job.id for job in waiting.controller.snapshot(at).jobs] == ["a"]
    assert pauses[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert (record.crashes, record.streak, record.losses, record.failed_moves) == (0, 0, 0, 0)


def test_pauses_double_up_to_a_minute():
    assert [refusal_seconds(count) for count in (1, 2, 3, 7, 500)] == [1, 2, 4, 60, 60]


def test_why_is_shown_with_the_pause(waiting):
    waiting.decide(10, a="n0:2")
    refused(waiting, 15.0)
    record = waiting.controller.jobs["a"]
    text, _ = explain(record.reason, record)
    assert text == (
        "waits: the GPUs that it was given were not available (1 time in a row); asks again after a pause of 1 s: "
        + WHY
    )
    assert record.detail == WHY


def test_a_start_that_works_makes_the_next_pause_short_again(waiting):
    record = waiting.controller.jobs["a"]
    for at in (10.0, 30.0):
        waiting.decide(at, a="n0:2")
        refused(waiting, at + 1.0)
        waiting(TimerFired(at + 10.0))
    assert record.refusals == 2
    waiting.decide(50.0, a="n0:2")
    waiting(JobRunning(51.0, "a", record.generation))
    assert record.refusals == 0


def test_what_may_still_run_of_an_earlier_generation_is_stopped(running):
    running.decide(20, a="n1:2")
    commands = refused(running, 21)
    assert [command for command in commands if isinstance(command, StopJob)] == [
        StopJob("a", 3, place("n1:2"), "refused")
    ]


def test_a_change_that_was_not_lent_leaves_the_job_as_it_runs(running):
    running.decide(20, a="n0:2 n1:2")
    commands = not_lent(running, 25, "n0:2")
    record = running.controller.jobs["a"]
    assert commands[0] == ResizeJob("a", 3, place("n0:2 n1:2"), place("n0:2"))
    assert (record.losses, record.failed_moves, record.moves_live, record.detail) == (0, 0, True, WHY)
    text, _ = explain(record.reason, record)
    assert text == (
        "goes on with 2 of the 4 GPUs that it was given: the others were not available (1 time in a row); asks for "
        "more after a pause of 1 s: " + WHY
    )


def test_it_is_not_offered_more_until_the_pause_is_over(running):
    for number, pause in enumerate((1.0, 2.0, 4.0)):
        at = 100.0 * (number + 1)
        running.decide(at, a="n0:2 n1:2")
        not_lent(running, at + 5.0, "n0:2")
        running(JobRunning(at + 5.1, "a", running.controller.jobs["a"].generation))
        (view,) = running.controller.snapshot(at + 5.2).jobs
        assert view.limits.max_gpus == 2
        assert running.controller.next_timer_at == at + 5.0 + pause
        running(TimerFired(at + 5.0 + pause))
        (view,) = running.controller.snapshot(at + 10.0).jobs
        assert view.limits.max_gpus == 8
        assert running.controller.next_timer_at is None
    running.decide(400.0, a="n0:2 n1:2")
    running(JobRunning(401.0, "a", running.controller.jobs["a"].generation))
    assert running.controller.jobs["a"].refusals == 0


def test_too_few_places_stop_it_without_counting(running):
    running.decide(20, a="n0:1 n1:2")
    commands = not_lent(running, 25, "n0:1")
    record = running.controller.jobs["a"]
    assert commands[0] == StopJob("a", 3, place("n0:1 n1:2"), "refused")
    assert (record.state, record.eligible_at, record.losses) == (JobState.QUEUED, 26, 0)


def test_a_time_limit_goes_on_beside_the_pause(make_desk):
    desk = make_desk()
    desk.submit(0, "a", max_gpus=8, time_limit_seconds=100.0)
    desk.decide(10, a="n0:2")
    desk(JobRunning(10, "a", 1))
    desk.decide(20, a="n0:2 n1:2")
    not_lent(desk, 20, "n0:2")
    desk(JobRunning(20, "a", 3))
    assert desk.controller.next_timer_at == 21
    desk(TimerFired(21))
    assert desk.controller.jobs["a"].state == "running"
    assert desk.controller.next_timer_at == 110
    desk(TimerFired(110))
    assert desk.controller.jobs["a"].state == "failed"


def test_all_of_it_is_in_the_saved_state_and_the_log(running):
    running.decide(20, a="n0:2 n1:2")
    not_lent(running, 25, "n0:2")
    saved = json.loads(json.dumps(running.controller.state()))
    restored = Controller.restored(saved, running.controller.settings)
    assert restored.jobs["a"] == running.controller.jobs["a"]
    assert restored.next_timer_at == running.controller.next_timer_at == 26
