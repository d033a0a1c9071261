import pytest

from pollux.controller import (
    Controller,
    ControllerSettings,
    Decide,
    DecisionMade,
    JobCancelled,
    JobFinished,
    JobReported,
    JobRunning,
    JobSpec,
    JobSubmitted,
    StartJob,
    StopJob,
)
from pollux.core import JobLimits
from pollux.policies import create
from pollux.testing import FakeDriver, FakeWork, SaturatingGoodput, cluster


def submitted(at: float, job_id: str, **fields) -> JobSubmitted:
    return JobSubmitted(at, JobSpec(job_id, JobLimits(), **fields))


@pytest.fixture
def controller():
    return Controller(cluster(4), ControllerSettings("events"))


def test_a_job_waits_for_its_resize_cost_then_works_off_gpu_seconds(controller):
    model = SaturatingGoodput()
    events = [submitted(5.0, "a", requested_gpus=2, resize_cost_seconds=10.0)]
    log = FakeDriver(controller, create("fifo"), events, {"a": FakeWork(100.0, goodput=model)}).run()
    kinds = [(type(event), event.at) for event in log.events]
    assert kinds[:4] == [(JobSubmitted, 5.0), (DecisionMade, 5.0), (JobRunning, 15.0), (JobReported, 15.0)]
    assert (JobFinished, 15.0 + 100.0 / 2) in kinds
    assert controller.jobs["a"].goodput is model
    assert [command.job_id for command in log.of(StartJob) if isinstance(command, StartJob)] == ["a"]


def test_work_done_before_a_preemption_counts(controller):
    """Under LAS the second preempts the first when that has had its quantum; both end on time."""
    events = [submitted(0.0, "a", requested_gpus=4), submitted(300.0, "b", requested_gpus=4)]
    work = {"a": FakeWork(2000.0), "b": FakeWork(400.0)}
    log = FakeDriver(controller, create("las", quantum_gpu_seconds=1000.0), events, work).run()
    assert [command.job_id for command in log.of(StopJob) if isinstance(command, StopJob)] == ["a"]
    assert controller.jobs["b"].ended_at == 300 + 30 + 100
    assert controller.jobs["a"].ended_at == 430 + 30 + (2000 - 4 * 270) / 4


def test_it_ends_when_nothing_is_left_or_the_time_is_up(controller):
    endless = FakeDriver(controller, create("fifo"), [submitted(0.0, "a"), JobCancelled(500.0, "a")])
    assert controller.jobs == {}
    endless.run(100.0)
    assert controller.jobs["a"].ended_at is None
    endless.run()
    assert controller.jobs["a"].ended_at == 500.0


def test_a_failure_is_told(controller):
    FakeDriver(controller, create("fifo"), [submitted(0.0, "a")], {"a": FakeWork(10.0, "failed")}).run()
    assert controller.jobs["a"].state == "failed"


def test_rounds_begin_by_themselves():
    controller = Controller(cluster(4))
    log = FakeDriver(controller, create("fifo"), [submitted(61.0, "a")], {"a": FakeWork(10.0)}).run()
    assert log.commands[0] == (0.0, Decide(60.0))
    assert controller.jobs["a"].started_at == 120.0


def test_thinking_takes_time(controller):
    FakeDriver(controller, create("fifo"), [submitted(0.0, "a")], {"a": FakeWork(10.0)}, think_seconds=8.0).run()
    assert controller.jobs["a"].started_at == 8.0
