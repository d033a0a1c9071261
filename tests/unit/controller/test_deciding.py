"""When the policy is asked, and what becomes of its answer when the world has moved on."""

import pytest

from pollux.controller import (
    Decide,
    DecisionMade,
    Event,
    JobCancelled,
    JobFinished,
    JobLimitsChanged,
    JobPaused,
    JobReported,
    JobResumed,
    JobRunning,
    JobSpec,
    JobSubmitted,
    NodeAdded,
    NodeRemoved,
    QueueChanged,
    StartJob,
)
from pollux.core import BatchMode, BrokenDecision, Cluster, Decision, JobLimits, Node, Queue
from pollux.testing import FakeDriver, FakeWork, SaturatingGoodput, place


def due(commands):
    return [command.at for command in commands if isinstance(command, Decide)]


@pytest.fixture
def events_desk(make_desk):
    return make_desk(trigger="events")


# Rounds


def test_rounds_are_one_interval_apart(make_desk):
    desk = make_desk(interval_seconds=30.0)
    assert due(desk.controller.start(100.0)) == [130.0]
    assert due(desk.decide(130.0)) == [160.0]
    assert desk.controller.next_decision_at == 160.0


def test_in_rounds_nothing_else_asks_for_a_decision(desk):
    desk.controller.start(0)
    commands = desk.submit(1, "a", "b")
    commands += desk(NodeAdded(2, Node("n9", 4)))
    commands += desk(JobReported(3, "a", SaturatingGoodput()))
    commands += desk(QueueChanged(4, Queue("q")))
    commands += desk(JobFinished(5, "a"))
    assert due(commands) == []
    assert desk.controller.next_decision_at == 60


# Events


def test_with_events_nothing_is_due_until_something_happens(events_desk):
    assert events_desk.controller.start(0) == []
    assert events_desk.controller.next_decision_at is None


def happenings():
    return [
        lambda desk: desk.submit(100, "new"),
        lambda desk: desk(JobFinished(100, "a")),
        lambda desk: desk(JobFinished(100, "a", "failed")),
        lambda desk: desk(JobCancelled(100, "a")),
        lambda desk: desk(JobPaused(100, "a")),
        lambda desk: desk(JobLimitsChanged(100, "a", JobLimits(max_gpus=2))),
        lambda desk: desk(NodeAdded(100, Node("n9", 4))),
        lambda desk: desk(NodeRemoved(100, "n0")),
        lambda desk: desk(QueueChanged(100, Queue("q", gpu_quota=1))),
        lambda desk: desk(JobReported(100, "a", SaturatingGoodput())),
    ]


@pytest.mark.parametrize("happens", happenings())
def test_what_can_change_the_answer_asks_for_a_decision(events_desk, happens):
    events_desk.submit(0, "a")
    events_desk.decide(10, a="n0:1")
    assert events_desk.controller.next_decision_at is None
    assert due(happens(events_desk)) == [100]


def test_resuming_asks_for_a_decision(events_desk):
    events_desk.submit(0, "a")
    events_desk(JobPaused(1, "a"))
    events_desk.decide(10)
    assert due(events_desk(JobResumed(50, "a"))) == [50]


def test_what_cannot_change_the_answer_does_not(events_desk):
    events_desk.submit(0, "a")
    events_desk.decide(10, a="n0:1")
    assert events_desk(JobRunning(40, "a", 1)) == []
    assert events_desk(JobReported(50, "a", remaining=5.0)) == []


def test_decisions_are_two_seconds_apart(events_desk):
    assert due(events_desk.submit(10, "a")) == [10]
    events_desk.decide(10, a="n0:1")
    assert due(events_desk.submit(10.5, "b")) == [12]
    events_desk.decide(12, a="n0:1", b="n0:1")
    assert due(events_desk.submit(14, "c")) == [14]


def test_events_before_a_decision_share_it(events_desk):
    events_desk.submit(10, "a")
    events_desk.decide(10)
    assert due(events_desk.submit(10.5, "b")) == [12]
    assert due(events_desk.submit(11, "c")) == []
    assert due(events_desk.submit(11.5, "d")) == []
    assert events_desk.controller.next_decision_at == 12


@pytest.mark.parametrize(
    ("rate", "asked"), [(100.0, False), (104.9, False), (95.1, False), (105.1, True), (94.9, True)]
)
def test_a_model_counts_when_its_prediction_moves_by_five_percent(events_desk, rate, asked):
    events_desk.submit(0, "a")
    events_desk(JobReported(1, "a", SaturatingGoodput(rate=100.0)))
    events_desk.decide(10, a="n0:2")
    commands = events_desk(JobReported(100, "a", SaturatingGoodput(rate=rate)))
    assert due(commands) == ([100] if asked else [])


def test_drift_adds_up_from_the_last_decision(events_desk):
    events_desk.submit(0, "a")
    events_desk(JobReported(1, "a", SaturatingGoodput(rate=100.0)))
    events_desk.decide(10, a="n0:2")
    assert due(events_desk(JobReported(20, "a", SaturatingGoodput(rate=103.0)))) == []
    assert due(events_desk(JobReported(30, "a", SaturatingGoodput(rate=106.0)))) == [30]


def test_the_first_model_of_a_running_job_counts(events_desk):
    events_desk.submit(0, "a")
    events_desk.decide(10, a="n0:1")
    assert due(events_desk(JobReported(100, "a", SaturatingGoodput()))) == [100]


def test_the_model_of_a_waiting_job_does_not_count(events_desk):
    events_desk.submit(0, "a")
    events_desk.decide(10)
    assert due(events_desk(JobReported(100, "a", SaturatingGoodput()))) == []


def test_drift_is_judged_on_the_type_where_the_job_runs(make_desk):
    nodes = Cluster.of([Node("n0", 4, "t4"), Node("n1", 4, "a100")])
    desk = make_desk(nodes, trigger="events")
    desk.submit(0, "a")
    desk(JobReported(1, "a", SaturatingGoodput(speed={"a100": 2.0})))
    desk.decide(10, a="n1:2")
    assert due(desk(JobReported(20, "a", SaturatingGoodput(speed={"a100": 2.0, "t4": 9.0})))) == []
    assert due(desk(JobReported(30, "a", SaturatingGoodput(speed={"a100": 3.0})))) == [30]


# Answers to an older question


def test_a_late_answer_counts_if_it_still_fits(desk):
    desk.submit(0, "a", "b")
    asked_at = desk.controller.revision
    desk(JobCancelled(50, "b"))
    desk.submit(51, "c")
    commands = desk.decide(60, revision=asked_at, a="n0:2", b="n0:2")
    assert [command for command in commands if isinstance(command, StartJob)] == [StartJob("a", 1, place("n0:2"))]


def test_a_late_answer_that_fits_no_more_is_dropped_and_asked_anew(desk):
    desk.submit(0, "a")
    asked_at = desk.controller.revision
    desk(NodeRemoved(50, "n0"))
    assert desk.decide(60, revision=asked_at, a="n0:2", memory="stale") == [Decide(60)]
    assert desk.controller.next_decision_at == 60
    assert desk.controller.snapshot(60).memory is None
    assert not desk.controller.jobs["a"].placement


def test_what_happened_while_the_policy_thought_is_decided_next(events_desk):
    events_desk.submit(0, "a")
    asked_at = events_desk.controller.revision
    assert events_desk.submit(1, "b") == [], "a decision is due already"
    assert due(events_desk.decide(5, revision=asked_at, a="n0:2")) == [7]
    assert events_desk.controller.next_decision_at == 7


def test_news_that_changes_no_answer_does_not_make_it_think_again(events_desk):
    events_desk.submit(0, "a", "b")
    events_desk.decide(1, b="n0:1")
    events_desk.submit(4, "c")
    asked_at = events_desk.controller.revision
    events_desk(JobRunning(5, "b", 1))
    assert due(events_desk.decide(6, revision=asked_at, b="n0:1", a="n0:1")) == []
    assert events_desk.controller.next_decision_at is None


def test_a_broken_decision_is_refused_whole(desk):
    desk.controller.start(0)
    desk.submit(0, "a", "b", min_gpus=2)
    revision = desk.controller.revision
    with pytest.raises(BrokenDecision, match=r"'a' got 1 GPUs.*node 'n1' has 4 GPUs and was given 5"):
        desk.decide(60, a="n0:1", b="n1:5")
    assert [record.state for record in desk.controller.jobs.values()] == ["queued", "queued"]
    assert desk.controller.revision == revision
    assert desk.controller.next_decision_at == 60, "the clock of rounds stopped"
    assert due(desk.decide(60, a="n0:2")) == [120]


def test_a_decision_about_a_paused_job_is_broken(desk):
    desk.submit(0, "a")
    desk(JobPaused(10, "a"))
    with pytest.raises(BrokenDecision, match="job 'a' is not in the snapshot"):
        desk.decide(60, a="n0:1")


class Slow:
    """A policy that packs everybody on the first node with room."""

    name = "slow"
    needs: frozenset[str] = frozenset()
    batch: BatchMode = "fixed"

    def allocate(self, snapshot):
        allocation = {}
        free = {node.id: node.num_gpus for node in snapshot.cluster.nodes}
        for job in snapshot.jobs:
            home = next((node for node, count in free.items() if count), None)
            if home is not None:
                allocation[job.id] = place(f"{home}:1")
                free[home] -= 1
        return Decision(allocation)


@pytest.mark.parametrize("trigger", ["rounds", "events"])
@pytest.mark.parametrize("think_seconds", [0.0, 7.0, 100.0])
def test_a_slow_policy_still_gets_every_job_done(make_desk, trigger, think_seconds):
    desk = make_desk(trigger=trigger)
    events: list[Event] = [JobSubmitted(3.0 * i, JobSpec(f"j{i}")) for i in range(6)]
    events += [NodeRemoved(20.0, "n0"), NodeAdded(30.0, Node("n2", 4))]
    work = {f"j{i}": FakeWork(50.0 + 40 * i) for i in range(6)}
    log = FakeDriver(desk.controller, Slow(), events, work, think_seconds).run()
    assert [record.state for record in desk.controller.jobs.values()] == ["succeeded"] * 6
    assert any(isinstance(event, DecisionMade) for event in log.events)
