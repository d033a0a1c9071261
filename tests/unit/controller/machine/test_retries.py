"""The end of replicas: done, again at once, again later, or never; and what time limits and pauses do."""

import pytest

from pollux.controller import (
    GenerationEnded,
    JobCancelled,
    JobPaused,
    JobReported,
    JobResumed,
    JobRunning,
    JobState,
    TimerFired,
)
from pollux.controller.machine.retries import MOST_LOSSES, backoff_seconds
from pollux.controller.messages.commands import StopJob
from pollux.core import NOWHERE
from pollux.testing import goodput_model, place


def stops(commands):
    return [command for command in commands if isinstance(command, StopJob)]


def ended(desk, at, outcome, job_id="a", generation=None, detail="exit 1"):
    now = desk.controller.jobs[job_id].generation if generation is None else generation
    return desk(GenerationEnded(at, job_id, now, outcome, detail))


@pytest.fixture
def started(desk):
    desk.submit(0, "a", retries=2)
    desk.decide(60, a="n0:2")
    return desk


# Success


def test_replicas_that_are_through_end_their_job(started):
    assert ended(started, 100, "succeeded", detail="exit 0") == []
    record = started.controller.jobs["a"]
    assert (record.state, record.ended_at, record.placement, record.detail) == ("succeeded", 100, NOWHERE, "exit 0")


def test_a_job_that_was_through_before_it_noticed_its_new_place_is_stopped_there(started):
    started.decide(90, a="n1:4")
    assert stops(ended(started, 91, "succeeded", generation=1)) == [StopJob("a", 3, place("n1:4"), "finished")]
    assert started.controller.jobs["a"].state is JobState.SUCCEEDED


@pytest.mark.parametrize("event", [JobPaused, None])
def test_a_job_that_was_through_when_told_to_stop_has_succeeded(started, event):
    if event is None:
        started.decide(90)
    else:
        started(event(90, "a"))
    assert stops(ended(started, 91, "succeeded", generation=1)) == []
    assert started.controller.jobs["a"].state is JobState.SUCCEEDED


# What changes nothing


@pytest.mark.parametrize("outcome", ["succeeded", "crashed", "out-of-memory", "stopped", "lost"])
def test_news_of_unknown_and_ended_jobs_is_ignored(started, outcome):
    started(JobCancelled(70, "a"))
    assert ended(started, 80, outcome, generation=1) == []
    assert started(GenerationEnded(80, "nobody", 1, outcome)) == []
    assert started.controller.jobs["a"].state is JobState.CANCELLED


@pytest.mark.parametrize("outcome", ["crashed", "out-of-memory", "stopped", "lost"])
def test_how_an_older_generation_ended_does_not_matter(started, outcome):
    started.decide(90, a="n0:4")
    assert ended(started, 91, outcome, generation=1) == []
    record = started.controller.jobs["a"]
    assert (record.state, record.crashes, record.placement) == (JobState.RESIZING, 0, place("n0:4"))


def test_a_generation_that_was_never_given_out_is_ignored(started):
    assert ended(started, 91, "succeeded", generation=9) == []
    assert started.controller.jobs["a"].state is JobState.STARTING


# Crashes


def test_a_crash_is_forgiven_after_a_pause(make_desk):
    desk = make_desk(trigger="events")
    desk.submit(0, "a", retries=2)
    desk.decide(10, a="n0:2")
    ended(desk, 100, "crashed")
    record = desk.controller.jobs["a"]
    assert (record.state, record.crashes, record.eligible_at, record.detail) == ("queued", 1, 102, "exit 1")
    assert (record.placement, record.reason.code, record.reason_at) == (NOWHERE, "backoff", 100)
    assert desk.controller.snapshot(101).jobs == ()
    assert desk.controller.next_timer_at == 102
    desk.decide(100)
    assert desk(TimerFired(101)) == [], "nothing is due yet"
    assert record.eligible_at == 102
    desk(TimerFired(102))
    assert [job.id for job in desk.controller.snapshot(102).jobs] == ["a"]
    assert (desk.controller.next_timer_at, desk.controller.next_decision_at) == (None, 102)


def test_a_job_in_its_pause_is_not_started_by_a_late_answer(started):
    asked = started.controller.revision
    ended(started, 100, "crashed")
    assert stops(started.decide(101, revision=asked, a="n0:2")) == []
    assert started.controller.jobs["a"].placement == NOWHERE


def test_the_budget_of_crashes_ends(started):
    at = 100.0
    for crash in range(3):
        assert started.controller.jobs["a"].crashes == crash
        ended(started, at, "crashed", detail="Segmentation fault")
        if crash < 2:
            at = started.controller.next_timer_at
            started(TimerFired(at))
            started.decide(at, a="n0:2")
            at += 1.0
    record = started.controller.jobs["a"]
    assert (record.state, record.crashes) == (JobState.FAILED, 3)
    assert record.detail == "crashed 3 times, 2 forgiven: Segmentation fault"
    assert (record.reason.code, dict(record.reason.numbers)) == ("crashed", {"crashes": 3.0, "retries": 2.0})


def test_pauses_double_up_to_five_minutes():
    assert [backoff_seconds(streak) for streak in (1, 2, 3, 8, 9, 500)] == [2, 4, 8, 256, 300, 300]


def test_a_long_run_shortens_the_next_pause_but_not_the_budget(make_desk):
    desk = make_desk()
    desk.submit(0, "a", retries=9)
    pauses, at = [], 100.0
    for ran in (1.0, 1.0, 601.0, 1.0):
        desk.decide(at, a="n0:2")
        ended(desk, at + ran, "crashed")
        pauses.append(desk.controller.next_timer_at - at - ran)
        at = desk.controller.next_timer_at
        desk(TimerFired(at))
    assert pauses == [2, 4, 2, 4]
    assert desk.controller.jobs["a"].crashes == 4


def test_a_pause_may_end_while_the_job_is_paused_by_its_user(started):
    ended(started, 100, "crashed")
    started(JobPaused(101, "a"))
    started(TimerFired(102))
    assert started.controller.snapshot(103).jobs == ()
    started(JobResumed(104, "a"))
    assert [job.id for job in started.controller.snapshot(104).jobs] == ["a"]


def test_nothing_is_due_for_a_job_that_was_cancelled_in_its_pause(started):
    ended(started, 100, "crashed")
    started(JobCancelled(101, "a"))
    assert started.controller.next_timer_at is None


# Memory


def test_running_out_of_memory_halves_the_local_batch(started):
    started(JobReported(80, "a", goodput_model(), local_batch=100))
    ended(started, 100, "out-of-memory")
    record = started.controller.jobs["a"]
    assert (record.local_batch_max, record.crashes, record.reason.code) == (50, 1, "backoff-memory")
    assert record.goodput.limits.local_max == 50, "policies would go on counting on the larger one"
    started(TimerFired(102))
    started.decide(103, a="n0:2")
    ended(started, 104, "out-of-memory")
    assert record.local_batch_max == 25, "without a report in between, half of what was allowed"


def test_without_any_known_batch_memory_teaches_nothing(started):
    ended(started, 100, "out-of-memory")
    assert started.controller.jobs["a"].local_batch_max is None


# Losses


def test_lost_replicas_start_again_at_once_and_are_no_failure(started):
    ended(started, 100, "lost")
    record = started.controller.jobs["a"]
    assert (record.state, record.crashes, record.losses, record.eligible_at) == ("queued", 0, 1, None)
    assert [job.id for job in started.controller.snapshot(100).jobs] == ["a"]


def lose(desk, at, times):
    for i in range(times):
        desk.decide(at + i, a="n0:2")
        commands = ended(desk, at + i + 0.5, "lost", detail="shim gone")
    return commands


def test_ten_losses_without_progress_are_enough(desk):
    desk.submit(0, "a")
    lose(desk, 10, MOST_LOSSES - 1)
    assert desk.controller.jobs["a"].state is JobState.QUEUED
    commands = lose(desk, 50, 1)
    record = desk.controller.jobs["a"]
    assert (record.state, record.detail) == (
        "failed",
        "its replicas were lost 10 times without progress: shim gone",
    )
    assert stops(commands) == [StopJob("a", record.generation, place("n0:2"), "failed")]


def test_progress_forgives_losses(desk):
    desk.submit(0, "a")
    desk(JobReported(5, "a", remaining=100.0))
    lose(desk, 10, MOST_LOSSES - 1)
    desk(JobReported(30, "a", remaining=90.0))
    lose(desk, 50, 1)
    record = desk.controller.jobs["a"]
    assert (record.state, record.losses) == (JobState.QUEUED, 1)


def test_replicas_stopped_by_nobody_here_start_again(started):
    ended(started, 100, "stopped")
    record = started.controller.jobs["a"]
    assert (record.state, record.crashes, record.losses, record.placement) == ("queued", 0, 0, NOWHERE)


# Time limits


def test_a_time_limit_counts_while_replicas_run(desk):
    desk.submit(0, "a", time_limit_seconds=100.0)
    assert desk.controller.next_timer_at is None
    desk.decide(20, a="n0:2")
    assert desk.controller.next_timer_at is None, "whoever held its GPUs has to leave first"
    desk(JobRunning(60, "a", 1))
    assert desk.controller.next_timer_at == 160
    desk.decide(90, a="n0:4")
    assert desk.controller.next_timer_at is None
    desk(JobRunning(95, "a", 1))
    assert desk.controller.next_timer_at is None, "replicas that are on their way out"
    desk(JobRunning(100, "a", 2))
    assert desk.controller.next_timer_at == 170, "seconds, not GPU-seconds"
    desk.decide(130)
    assert desk.controller.next_timer_at is None
    desk.decide(400, a="n0:1")
    desk(JobRunning(500, "a", 4))
    assert desk.controller.next_timer_at == 540
    assert desk(TimerFired(539)) == []
    assert stops(desk(TimerFired(540))) == [StopJob("a", 5, place("n0:1"), "time-limit")]
    record = desk.controller.jobs["a"]
    assert (record.state, record.ended_at, record.detail) == ("failed", 540, "time limit of 100 s reached")
    assert record.running_seconds(1000) == record.held_seconds == 100
    assert desk.controller.next_timer_at is None


def test_one_timer_serves_all_that_is_due(desk):
    desk.submit(0, "a", "b", time_limit_seconds=50.0)
    desk.submit(0, "c", retries=1)
    desk.decide(60, a="n0:1", b="n0:1", c="n0:1")
    for job_id in ("a", "b"):
        desk(JobRunning(60, job_id, 1))
    ended(desk, 109, "crashed", "c")
    assert len(stops(desk(TimerFired(112)))) == 2
    assert [job.id for job in desk.controller.snapshot(112).jobs] == ["c"]
