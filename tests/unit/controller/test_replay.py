"""State is a fold over the log: the same events give the same state and commands, and no policy is asked."""

import pytest

from pollux.controller import (
    Command,
    Controller,
    ControllerSettings,
    Event,
    JobCancelled,
    JobFinished,
    JobLimitsChanged,
    JobPaused,
    JobResumed,
    JobSpec,
    JobSubmitted,
    NodeAdded,
    NodeRemoved,
    QueueChanged,
)
from pollux.core import JobLimits, Node, PolluxError, Queue
from pollux.policies import create
from pollux.testing import FakeDriver, FakeOracle, FakeWork, cluster


def story() -> tuple[list[Event], dict[str, FakeWork]]:
    events: list[Event] = [
        JobSubmitted(25.0 * i, JobSpec(f"j{i}", JobLimits(max_gpus=4), 1 + i % 3, oracle=FakeOracle(steps=99.0 * i)))
        for i in range(9)
    ]
    events += [
        QueueChanged(10.0, Queue("", gpu_quota=6)),
        NodeAdded(130.0, Node("n2", 4)),
        JobPaused(140.0, "j1"),
        JobLimitsChanged(150.0, "j2", JobLimits(max_gpus=1)),
        NodeRemoved(170.0, "n1"),
        JobResumed(200.0, "j1"),
        JobCancelled(220.0, "j4"),
    ]
    return events, {f"j{i}": FakeWork(200.0 + 77.0 * i) for i in range(9)}


def describe(controller: Controller, now: float) -> list[object]:
    """All that can be seen from outside."""
    records = [
        (
            record.spec.id, record.state, record.placement, record.generation, record.num_restarts,
            record.largest_gpus, record.started_at, record.ended_at, record.attained_gpu_seconds,
            record.remaining,
        )
        for record in controller.jobs.values()
    ]  # fmt: skip
    return [records, controller.snapshot(now), controller.next_decision_at, controller.revision]


@pytest.mark.parametrize("trigger", ["rounds", "events"])
@pytest.mark.parametrize("think_seconds", [0.0, 9.0])
@pytest.mark.parametrize("until", [100.0, 180.0, 100_000.0])
@pytest.mark.parametrize("policy", ["las", "optimus-oracle"])
def test_the_log_alone_gives_the_same_state_and_commands(trigger, think_seconds, until, policy):
    settings = ControllerSettings(trigger)
    live = Controller(cluster(4, 4), settings)
    events, work = story()
    log = FakeDriver(live, create(policy), events, work, think_seconds).run(until)

    again = Controller(cluster(4, 4), settings)
    commands: list[tuple[float, Command]] = [(0.0, command) for command in again.start(0.0)]
    for event in log.events:
        commands += [(event.at, command) for command in again.apply(event)]

    assert commands == log.commands
    assert describe(again, until) == describe(live, until)
    if until > 1000:
        assert {record.state for record in live.jobs.values()} == {"succeeded", "cancelled"}


def test_events_that_were_refused_are_not_missed_in_a_replay(desk):
    """They bump no revision: an answer that was current stays current, a late one late."""

    def refuse() -> None:
        with pytest.raises(PolluxError):
            desk(JobFinished(1.0, "nobody"))

    desk.submit(0, "a", "b")
    asked_at = desk.controller.revision
    refuse()
    desk.decide(60, revision=asked_at, a="n0:1")
    refuse()
    asked_at = desk.controller.revision
    desk.submit(61, "c")
    refuse()
    desk.decide(120, revision=asked_at, a="n0:1", b="n0:1")

    again = desk.fresh()
    for event in desk.events:
        again(event)
    assert again.commands == desk.commands
    assert describe(again.controller, 130) == describe(desk.controller, 130)
