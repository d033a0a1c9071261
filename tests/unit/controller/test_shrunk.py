"""Replicas that are lost while others hold the state, and changes in living processes that do not come about."""

import json

import pytest

from pollux.controller import (
    Controller,
    GenerationEnded,
    GenerationShrunk,
    JobLimitsChanged,
    JobReported,
    JobRunning,
    JobState,
    NodeRemoved,
    ResizeJob,
    StartJob,
    StopJob,
)
from pollux.controller.machine.retries import MOST_LOSSES
from pollux.core import NOWHERE, InvalidInput, JobLimits
from pollux.testing import place


@pytest.fixture
def running(desk):
    """Job a on four GPUs, generation 1."""
    desk.submit(0, "a", max_gpus=8, min_gpus=2)
    desk.decide(60, a="n0:4")
    desk(JobRunning(61, "a", 1))
    desk(JobReported(62, "a", live=True))
    return desk


def shrunk(desk, at, where, generation=None, detail="replica 3 was killed"):
    now = desk.controller.jobs["a"].generation if generation is None else generation
    return desk(GenerationShrunk(at, "a", now, place(where), detail))


def test_the_others_go_on_where_they_are(running):
    assert shrunk(running, 100, "n0:3") == [ResizeJob("a", 2, place("n0:4"), place("n0:3"))]
    record = running.controller.jobs["a"]
    assert (record.state, record.placement, record.detail) == (JobState.RESIZING, place("n0:3"), "replica 3 was killed")
    assert (record.reason.code, record.reason.numbers["gpus_after"]) == ("replicas-lost", 3.0)
    assert (record.crashes, record.losses, record.failed_moves) == (0, 1, 0)
    running(JobRunning(101, "a", 2))
    assert record.state is JobState.RUNNING


def test_too_few_are_stopped_and_come_back(running):
    commands = shrunk(running, 100, "n0:1")
    assert commands[0] == StopJob("a", 2, place("n0:4"), "lost")
    record = running.controller.jobs["a"]
    assert (record.state, record.placement) == (JobState.QUEUED, NOWHERE)


def test_a_decision_follows_under_events(make_desk):
    desk = make_desk(trigger="events")
    desk.submit(0, "a", max_gpus=4)
    desk.decide(1, a="n0:4")
    shrunk(desk, 100, "n0:3")
    assert desk.controller.next_decision_at == 100


@pytest.mark.parametrize("generation", [0, 2])
def test_other_generations_are_echoes(running, generation):
    assert shrunk(running, 100, "n0:3", generation) == []
    assert running(GenerationShrunk(100, "nobody", 1, place("n0:1"))) == []
    assert shrunk(running, 100, "n0:4") == []


def test_what_grows_has_not_shrunk(running):
    revision = running.controller.revision
    with pytest.raises(InvalidInput, match="not a part of"):
        shrunk(running, 100, "n1:2")
    assert running.controller.revision == revision


def test_losses_without_progress_end_the_job(running):
    record = running.controller.jobs["a"]
    record.losses = MOST_LOSSES - 1
    record.remaining = record.remaining_at_loss = 10.0
    assert StopJob("a", 2, place("n0:4"), "failed") in shrunk(running, 100, "n0:3")
    assert record.state is JobState.FAILED


def live_through(desk, losses, report):
    """Reports every 30 s and a loss every 9 minutes, each survived in living processes; the number of facts."""
    at, record, facts = 62.0, desk.controller.jobs["a"], 0
    for step in range(18 * losses):
        at += 30.0
        told = JobReported(at, "a", live=True, **report(at))
        if desk.controller.is_news(told):
            facts += 1
            desk(told)
        if step % 18 == 8:
            desk.decide(at, a="n0:4")
        if step % 18 == 17:
            shrunk(desk, at, "n0:3")
        if record.state is JobState.FAILED:
            break
        if record.state is JobState.RESIZING:
            desk(JobRunning(at + 1, "a", record.generation, 0.2, "recover"))
    return facts


@pytest.mark.parametrize(
    "report",
    [
        lambda at: {"remaining": 360000.0 - at, "progress": at},
        lambda at: {"remaining": 360000.0 - at},
        lambda at: {"progress": at},
    ],
    ids=["both", "remaining", "progress"],
)
def test_a_job_that_goes_on_after_every_loss_outlives_any_number(running, report):
    """100 hours of work: between two losses it moves by far less than what is news otherwise."""
    running(JobReported(62, "a", live=True, **report(62)))
    facts = live_through(running, 60, report)
    record = running.controller.jobs["a"]
    assert (record.state, record.losses) == (JobState.RUNNING, 1)
    assert facts <= 60, "a sign of progress a loss, and no more"
    again = running.fresh()
    for event in running.events:
        again(event)
    assert again.commands == running.commands


@pytest.mark.parametrize("told", [{"remaining": 1000.0, "progress": 5.0}, {}])
def test_one_that_gets_no_further_between_losses_is_given_up(running, told):
    running(JobReported(62, "a", live=True, **told))
    live_through(running, 100, lambda at: told)
    record = running.controller.jobs["a"]
    assert (record.state, record.losses) == (JobState.FAILED, MOST_LOSSES)


def test_the_same_way_from_one_checkpoint_again_and_again_is_no_progress(running):
    """It starts where it was saved, at 100, and is lost at 110; where that was is known for the first of them only."""
    record, at = running.controller.jobs["a"], 100.0
    for _ in range(30):
        for progress in (101.0, 105.0, 110.0):
            told = JobReported(at, "a", progress=progress, local_batch=int(progress))
            if running.controller.is_news(told):
                running(told)
            at += 30.0
        running(GenerationEnded(at, "a", record.generation, "lost"))
        if record.state is JobState.FAILED:
            break
        running.decide(at, a="n0:4")
        running(JobRunning(at, "a", record.generation))
    assert record.state is JobState.FAILED


def test_a_withdrawn_change_is_no_loss(running):
    record = running.controller.jobs["a"]
    record.losses, record.remaining = MOST_LOSSES - 1, 10.0
    running.decide(120, a="n0:4 n1:4")
    told = GenerationShrunk(125, "a", 2, place("n0:4"), "joining replica 5 ended", withdrawn=True)
    assert running(told) == [ResizeJob("a", 3, place("n0:4 n1:4"), place("n0:4"))]
    assert (record.state, record.losses, record.remaining_at_loss) == (JobState.RESIZING, MOST_LOSSES - 1, None)
    assert record.failed_moves == 1


def test_a_withdrawn_change_of_a_job_that_must_have_more_is_no_loss_either(running):
    record = running.controller.jobs["a"]
    running.decide(120, a="n0:4 n1:4")
    running(JobLimitsChanged(121, "a", JobLimits(min_gpus=8, max_gpus=8)))
    record.losses = MOST_LOSSES - 1
    commands = running(GenerationShrunk(125, "a", 2, place("n0:4"), withdrawn=True))
    assert isinstance(commands[0], StopJob)
    assert (record.state, record.losses) == (JobState.QUEUED, MOST_LOSSES - 1)


def test_a_joiner_that_never_came_counts_as_a_failed_move(running):
    running.decide(120, a="n0:4 n1:4")
    assert shrunk(running, 125, "n0:4") == [ResizeJob("a", 3, place("n0:4 n1:4"), place("n0:4"))]
    assert running.controller.jobs["a"].failed_moves == 1


def test_a_change_that_was_given_up_starts_anew_in_its_place(running):
    running.decide(120, a="n0:2")
    commands = running(GenerationEnded(130, "a", 2, "lost", "it cannot travel"))
    assert commands == [StartJob("a", 3, place("n0:2"))]
    record = running.controller.jobs["a"]
    assert (record.state, record.placement, record.detail) == (JobState.RESIZING, place("n0:2"), "it cannot travel")
    assert (record.failed_moves, record.moves_live, record.num_starts) == (1, True, 3)
    running(JobRunning(131, "a", 3))
    assert record.state is JobState.RUNNING


def test_after_three_it_is_moved_by_restarts(running):
    record = running.controller.jobs["a"]
    for number in range(3):
        assert record.moves_live
        running.decide(120 + 10 * number, a=f"n{number % 2}:2")
        running(GenerationEnded(125 + 10 * number, "a", record.generation, "lost"))
    assert not record.moves_live


def test_an_hour_later_living_processes_are_tried_again(running):
    record = running.controller.jobs["a"]
    for number in range(3):
        running.decide(120 + 10 * number, a=f"n0:{2 + number}")
        running(GenerationEnded(125 + 10 * number, "a", record.generation, "lost"))
        running(JobRunning(126 + 10 * number, "a", record.generation))
    running.decide(145 + 3590, a="n0:2")
    assert not record.moves_live
    running(JobRunning(3750, "a", record.generation))
    running.decide(145 + 3600, a="n0:4")
    assert (record.moves_live, record.failed_moves) == (True, 0)


def test_without_a_live_agent_a_loss_waits_for_a_decision(running):
    running(JobReported(110, "a", live=False))
    running.decide(120, a="n0:2")
    assert running(GenerationEnded(130, "a", 2, "lost")) == []
    assert running.controller.jobs["a"].state is JobState.QUEUED


def test_all_of_it_is_in_the_saved_state_and_the_log(running):
    running(JobReported(90, "a", resize_cost_seconds=0.3, resize_kind="grow", live=True, generation=2))
    shrunk(running, 100, "n0:3")
    saved = json.loads(json.dumps(running.controller.state()))
    restored = Controller.restored(saved, running.controller.settings)
    assert restored.jobs["a"] == running.controller.jobs["a"]
    for job in saved["jobs"]:
        for name in ("live", "failed_moves", "costs", "last_pause", "refusals", "capped_until", "failed_move_at",
                     "progress", "progress_at_loss", "paused_generation"):  # fmt: skip
            del job[name]
    older = Controller.restored(saved, running.controller.settings).jobs["a"]
    assert (older.live, older.failed_moves, older.costs, older.last_pause) == (None, 0, {}, None)
    assert (older.refusals, older.capped_until, older.failed_move_at) == (0, None, None)
    assert (older.progress, older.progress_at_loss, older.paused_generation) == (None, None, None)
    again = running.fresh()
    for event in running.events:
        again(event)
    assert again.commands == running.commands


# Nodes that leave


@pytest.fixture
def spread(running):
    """Job a on three GPUs of the first node and one of the second, generation 2."""
    running.decide(70, a="n0:3 n1:1")
    running(JobRunning(71, "a", 2))
    return running


def test_a_live_job_leaves_a_node_that_goes_and_runs_on_elsewhere(spread):
    commands = spread(NodeRemoved(100, "n1"))
    assert commands == [ResizeJob("a", 3, place("n0:3 n1:1"), place("n0:3"))]
    record = spread.controller.jobs["a"]
    assert (record.state, record.placement, record.reason.code) == (JobState.RESIZING, place("n0:3"), "left-node")
    assert "'n1'" in record.detail
    assert (record.losses, record.failed_moves) == (0, 0)


def test_a_loss_that_was_told_before_its_node_is_not_told_twice(spread):
    shrunk(spread, 100, "n0:3")
    assert spread(NodeRemoved(101, "n1")) == []


def test_too_few_elsewhere_are_stopped_with_the_rest(spread):
    assert spread(NodeRemoved(100, "n0"))[0] == StopJob("a", 3, place("n0:3 n1:1"), "node-lost")
    assert spread.controller.jobs["a"].state is JobState.QUEUED


def test_who_cannot_change_while_it_runs_is_stopped(spread):
    spread(JobReported(90, "a", live=False))
    assert isinstance(spread(NodeRemoved(100, "n1"))[0], StopJob)
