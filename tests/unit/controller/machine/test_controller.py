"""Facts in, commands out: jobs, nodes, queues and the books that are kept of them."""

import math

import pytest

from pollux.controller import (
    Controller,
    ControllerSettings,
    Event,
    JobCancelled,
    JobFinished,
    JobLimitsChanged,
    JobPaused,
    JobReported,
    JobResumed,
    JobRunning,
    JobSpec,
    JobState,
    JobSubmitted,
    NodeAdded,
    NodeRemoved,
    QueueChanged,
    ResizeJob,
    StartJob,
    StopJob,
    require,
)
from pollux.core import NOWHERE, Cluster, IllegalTransition, InvalidInput, JobLimits, Node, Queue, UnknownName
from pollux.policies import create
from pollux.testing import FakeOracle, SaturatingGoodput, cluster, place


def work(commands):
    return [command for command in commands if isinstance(command, StartJob | ResizeJob | StopJob)]


# From decision to commands


def test_a_decision_starts_resizes_and_stops(desk):
    desk.submit(0, "a", "b")
    assert work(desk.decide(60, a="n0:2", b="n1:1")) == [
        StartJob("a", 1, place("n0:2")),
        StartJob("b", 1, place("n1:1")),
    ]
    assert work(desk.decide(120, a="n0:2 n1:2")) == [
        StopJob("b", 2, place("n1:1"), "preempted"),
        ResizeJob("a", 2, place("n0:2"), place("n0:2 n1:2")),
    ]
    states = {job_id: record.state for job_id, record in desk.controller.jobs.items()}
    assert states == {"a": JobState.RESIZING, "b": JobState.QUEUED}


def test_an_unchanged_placement_gives_no_command_and_no_generation(desk):
    desk.submit(0, "a")
    desk.decide(60, a="n0:2")
    assert work(desk.decide(120, a="n0:2")) == []
    assert desk.controller.jobs["a"].generation == 1


def test_running_ends_a_start_and_a_resize(desk):
    desk.submit(0, "a")
    desk.decide(60, a="n0:1")
    states = []
    for event in (JobRunning(90, "a", 1), None, JobRunning(121, "a", 1), JobRunning(150, "a", 2)):
        if event is None:
            desk.decide(120, a="n0:2")
        else:
            desk(event)
        states.append(str(desk.controller.jobs["a"].state))
    assert states == ["running", "resizing", "resizing", "running"], "news of generation 1 ended the resize"


def test_running_after_preemption_changes_nothing(desk):
    desk.submit(0, "a")
    desk.decide(60, a="n0:1")
    desk.decide(120)
    desk(JobRunning(121, "a", 1))
    assert desk.controller.jobs["a"].state is JobState.QUEUED


# The end of jobs


@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
def test_a_job_that_ends_gives_its_gpus_back(desk, outcome):
    desk.submit(0, "a")
    desk.decide(60, a="n0:2")
    assert desk(JobFinished(100, "a", outcome, "exit 1")) == []
    record = desk.controller.jobs["a"]
    assert (record.state, record.ended_at, record.placement, record.detail) == (
        outcome,
        100,
        NOWHERE,
        "exit 1",
    )
    assert desk.controller.snapshot(110).jobs == ()


def test_a_job_may_be_through_just_as_it_was_stopped(desk):
    desk.submit(0, "a", "b")
    desk.decide(60, a="n0:2", b="n0:2")
    desk.decide(120, b="n0:2")
    desk(JobFinished(121, "a"))
    assert desk.controller.jobs["a"].state is JobState.SUCCEEDED
    desk(JobPaused(130, "b"))
    desk(JobFinished(131, "b"))
    assert desk.controller.jobs["b"].state is JobState.SUCCEEDED


def test_a_cancelled_job_is_stopped_if_it_holds_anything(desk):
    desk.submit(0, "a", "b")
    desk.decide(60, a="n0:2")
    assert work(desk(JobCancelled(70, "a"))) == [StopJob("a", 2, place("n0:2"), "cancelled")]
    assert work(desk(JobCancelled(70, "b"))) == []
    assert [record.state for record in desk.controller.jobs.values()] == [JobState.CANCELLED] * 2


@pytest.mark.parametrize("event", [JobFinished, JobCancelled, JobPaused, JobResumed])
def test_an_ended_job_stays_so(desk, event):
    desk.submit(0, "a")
    desk(JobFinished(10, "a", "failed", "out of memory"))
    with pytest.raises(IllegalTransition, match="job 'a' is failed"):
        desk(event(20, "a"))
    record = desk.controller.jobs["a"]
    assert (record.state, record.ended_at, record.detail) == (JobState.FAILED, 10, "out of memory")


def test_late_news_of_an_ended_job_is_ignored(desk):
    desk.submit(0, "a")
    desk.decide(60, a="n0:1")
    desk(JobFinished(70, "a"))
    assert desk(JobReported(71, "a", SaturatingGoodput(), 5.0)) == []
    assert desk(JobRunning(72, "a", 1)) == []
    assert desk.controller.jobs["a"].goodput is None


# Pause


def test_a_paused_job_holds_nothing_and_is_not_shown_to_policies(desk):
    desk.submit(0, "a", "b")
    desk.decide(60, a="n0:2")
    assert work(desk(JobPaused(70, "a"))) == [StopJob("a", 2, place("n0:2"), "paused")]
    assert [job.id for job in desk.controller.snapshot(80).jobs] == ["b"]
    desk(JobResumed(90, "a"))
    assert [job.id for job in desk.controller.snapshot(90).jobs] == ["a", "b"]
    assert work(desk.decide(120, a="n1:1")) == [StartJob("a", 3, place("n1:1"))]


def test_a_waiting_job_can_be_paused(desk):
    desk.submit(0, "a")
    assert work(desk(JobPaused(10, "a"))) == []
    assert desk.controller.jobs["a"].state is JobState.PAUSED


@pytest.mark.parametrize("decided", [False, True])
def test_only_a_paused_job_can_be_resumed(desk, decided):
    desk.submit(0, "a")
    if decided:
        desk.decide(60, a="n0:1")
    before = desk.controller.jobs["a"].state
    with pytest.raises(IllegalTransition, match=f"job 'a' is {before}; only a paused job"):
        desk(JobResumed(70, "a"))
    assert desk.controller.jobs["a"].state is before


def test_a_paused_job_cannot_be_paused_again(desk):
    desk.submit(0, "a")
    desk(JobPaused(10, "a"))
    with pytest.raises(IllegalTransition):
        desk(JobPaused(20, "a"))


# Nodes and queues


def test_jobs_of_a_lost_node_wait_again(desk):
    desk.submit(0, "a", "b", "c")
    desk.decide(60, a="n0:2", b="n0:1 n1:1", c="n1:2")
    assert work(desk(NodeRemoved(70, "n0"))) == [
        StopJob("a", 2, place("n0:2"), "node-lost"),
        StopJob("b", 2, place("n0:1 n1:1"), "node-lost"),
    ]
    seen = desk.controller.snapshot(70)
    assert seen.running == {"c": place("n1:2")}
    assert [node.id for node in seen.cluster.nodes] == ["n1"]
    assert [record.state for record in desk.controller.jobs.values()] == ["queued", "queued", "starting"]


def test_even_a_pinned_job_loses_a_lost_node(desk):
    desk.submit(0, "a", pinned=True)
    desk.decide(60, a="n0:2")
    desk(NodeRemoved(70, "n0"))
    assert work(desk.decide(120, a="n1:2")) == [StartJob("a", 3, place("n1:2"))]


def test_a_node_can_join_and_change(desk):
    desk.submit(0, "a")
    desk.decide(60, a="n0:2")
    assert work(desk(NodeAdded(70, Node("n2", 8)))) == []
    assert work(desk(NodeAdded(71, Node("n0", 2, schedulable=False)))) == []
    nodes = desk.controller.cluster.nodes
    assert [(node.id, node.num_gpus, node.schedulable) for node in nodes] == [
        ("n0", 2, False),
        ("n1", 4, True),
        ("n2", 8, True),
    ]
    assert desk.controller.jobs["a"].placement == place("n0:2")


def test_queues_are_told_to_policies(make_desk):
    desk = make_desk(queues=(Queue("q", gpu_quota=4), Queue("r")))
    before = desk.controller.snapshot(0).queues
    desk(QueueChanged(10, Queue("q", gpu_quota=1)))
    desk(QueueChanged(10, Queue("s", weight=2.0)))
    assert desk.controller.snapshot(20).queues == {
        "q": Queue("q", gpu_quota=1),
        "r": Queue("r"),
        "s": Queue("s", weight=2.0),
    }
    assert before["q"].gpu_quota == 4, "a snapshot that was given out changed"


def test_new_limits_are_shown_and_nothing_else_happens(desk):
    desk.submit(0, "a", requested_gpus=4)
    desk.decide(60, a="n0:4")
    assert desk.controller.snapshot(70).jobs[0].limits.max_gpus == 64
    assert work(desk(JobLimitsChanged(70, "a", JobLimits(max_gpus=2)))) == []
    (view,) = desk.controller.snapshot(70).jobs
    assert view.limits.max_gpus == 2
    assert desk.controller.jobs["a"].placement == place("n0:4")


# The books


def test_gpu_time_is_what_was_held(desk):
    desk.submit(0, "a")

    def attained(now: float) -> float:
        (view,) = desk.controller.snapshot(now).jobs
        return float(view.attained_gpu_seconds)

    assert attained(60) == 0
    desk.decide(60, a="n0:2")
    assert attained(100) == 80, "standing still counts"
    desk.decide(120, a="n0:4")
    assert attained(120) == 120
    assert attained(130) == 160
    desk.decide(180)
    assert attained(180) == attained(600) == 360
    desk.decide(600, a="n1:1")
    desk(JobFinished(610, "a"))
    assert desk.controller.jobs["a"].attained_gpu_seconds == 370
    assert desk.controller.jobs["a"].attained(10_000) == 370, "after the end nothing accrues"


def test_restarts_sizes_generations_and_the_first_start(desk):
    desk.submit(5, "a")
    record = desk.controller.jobs["a"]
    assert (record.num_restarts, record.largest_gpus, record.generation, record.started_at) == (0, 0, 0, None)
    desk.decide(60, a="n0:2")
    assert (record.num_restarts, record.largest_gpus, record.generation, record.started_at) == (0, 2, 1, 60)
    desk.decide(120, a="n0:4")
    assert (record.num_restarts, record.largest_gpus, record.generation) == (1, 4, 2)
    desk.decide(180)
    assert (record.num_restarts, record.largest_gpus, record.generation) == (1, 4, 3)
    desk.decide(240, a="n1:1")
    assert (record.num_restarts, record.largest_gpus, record.generation, record.started_at) == (2, 4, 4, 60)
    (view,) = desk.controller.snapshot(240).jobs
    assert (view.num_restarts, view.largest_gpus, view.submitted_at) == (2, 4, 5)


def test_reports_add_to_what_is_known(desk):
    oracle, model = FakeOracle(), SaturatingGoodput()
    desk.submit(0, "a", weight=2.0, queue="q", requested_gpus=3, resize_cost_seconds=10.0, oracle=oracle)
    (view,) = desk.controller.snapshot(0).jobs
    assert (view.weight, view.queue, view.requested_gpus, view.oracle) == (2.0, "q", 3, oracle)
    assert (view.goodput, view.remaining, view.resize_cost_seconds) == (None, None, 10.0)
    desk(JobReported(10, "a", model, 500.0))
    desk(JobReported(20, "a", resize_cost_seconds=2.5))
    (view,) = desk.controller.snapshot(20).jobs
    assert (view.goodput, view.remaining, view.resize_cost_seconds) == (model, 500.0, 2.5)


def test_views_of_unchanged_jobs_are_reused(desk):
    desk.submit(0, "a", "b")
    desk.decide(60, b="n0:1")
    first, second = (desk.controller.snapshot(60 + i).jobs for i in range(2))
    assert first[0] is second[0]
    assert first[1] is not second[1], "it attained something"


def test_a_snapshot_is_what_it_was_when_taken(desk):
    desk.submit(0, "a")
    desk.decide(60, a="n0:1")
    seen = desk.controller.snapshot(60)
    desk.submit(61, "b")
    desk(NodeRemoved(62, "n0"))
    assert [job.id for job in seen.jobs] == ["a"]
    assert seen.running == {"a": place("n0:1")}
    assert len(seen.cluster.nodes) == 2
    assert seen.revision == 2


def test_memory_comes_back_and_the_seed_is_told(make_desk):
    desk = make_desk(seed=7)
    assert desk.controller.snapshot(0).memory is None
    desk.decide(60, memory="remember")
    assert (desk.controller.snapshot(60).memory, desk.controller.snapshot(60).seed) == ("remember", 7)


# Refusals


def test_a_name_can_be_used_once(desk):
    desk.submit(0, "a")
    with pytest.raises(InvalidInput, match="job 'a' is known already"):
        desk.submit(10, "a")


@pytest.mark.parametrize("fields", [{"weight": 0.0}, {"weight": math.nan}, {"requested_gpus": 0}])
def test_a_job_that_no_snapshot_could_hold_is_refused_at_once(desk, fields):
    with pytest.raises(InvalidInput, match="job 'a'"):
        desk.submit(0, "a", **fields)
    assert desk.controller.jobs == {}
    assert desk.controller.snapshot(10).jobs == ()


@pytest.mark.parametrize("event", [JobFinished, JobCancelled, JobPaused, JobResumed, JobReported])
def test_an_unknown_job_is_named_with_the_closest(desk, event):
    desk.submit(0, "bert-1")
    with pytest.raises(UnknownName, match="unknown job 'bert-2': did you mean 'bert-1'"):
        desk(event(10, "bert-2"))


def test_an_event_of_no_known_kind_is_refused(desk):
    class Surprise(Event):
        pass

    with pytest.raises(InvalidInput, match="event Surprise is not known"):
        desk(Surprise(0.0))


def test_a_refused_event_leaves_no_trace(desk):
    desk.submit(0, "a")
    desk.decide(60, a="n0:1")
    revision, record = desk.controller.revision, repr(desk.controller.jobs["a"])
    for event in (JobResumed(70, "a"), JobCancelled(70, "x"), Event(70)):
        with pytest.raises((IllegalTransition, InvalidInput)):
            desk(event)
    assert (desk.controller.revision, repr(desk.controller.jobs["a"])) == (revision, record)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"trigger": "round"}, "unknown trigger 'round': did you mean 'rounds'"),
        ({"interval_seconds": 0.0}, "interval_seconds is 0"),
        ({"interval_seconds": math.inf}, "interval_seconds is inf"),
        ({"min_gap_seconds": -1.0}, "min_gap_seconds is -1"),
    ],
)
def test_impossible_settings_are_refused(settings, said):
    with pytest.raises(InvalidInput, match=said):
        ControllerSettings(**settings)


def test_a_policy_that_needs_more_than_is_offered_is_refused_at_set_up():
    require(create("optimus-oracle"), {"goodput", "oracle"})
    with pytest.raises(InvalidInput, match="policy 'optimus-oracle' needs oracle"):
        require(create("optimus-oracle"), {"goodput"})


def test_a_controller_begins_with_an_empty_book():
    controller = Controller(cluster(4))
    assert controller.jobs == {}
    assert controller.revision == 0
    assert controller.next_decision_at is None


@pytest.mark.parametrize("fields", [{"remaining": math.nan}, {"remaining": -1.0}, {"resize_cost_seconds": math.inf}])
def test_reports_that_no_policy_could_use_are_refused(fields):
    control = Controller(Cluster.uniform(1, 4))
    control.apply(JobSubmitted(0.0, JobSpec("j")))
    with pytest.raises(InvalidInput, match=f"job 'j' reports {next(iter(fields))}"):
        control.apply(JobReported(1.0, "j", **fields))
    assert control.snapshot(1.0).jobs[0].remaining is None


def test_limits_of_a_job_that_ended_stay():
    control = Controller(Cluster.uniform(1, 4))
    control.apply(JobSubmitted(0.0, JobSpec("j")))
    control.apply(JobCancelled(1.0, "j"))
    with pytest.raises(IllegalTransition, match="job 'j' has cancelled"):
        control.apply(JobLimitsChanged(2.0, "j", JobLimits(2, 4)))


def test_a_name_that_is_not_there_does_not_list_thousands(desk):
    for i in range(300):
        desk.submit(0, f"job-{i}")
    with pytest.raises(UnknownName) as error:
        desk(JobCancelled(1, "job-299x"))
    assert "did you mean 'job-299'" in str(error.value)
    assert str(error.value).count(",") < 100
