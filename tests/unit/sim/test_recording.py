"""What a recorder hears of a simulation, and which reports are news."""

import math

import pytest

from pollux.controller import DecisionMade, JobFinished, JobReported, JobRunning, JobSubmitted, StartJob, StopJob
from pollux.policies import create
from pollux.sim.simulation.simulation import SimulationSettings, simulate
from pollux.sim.workloads.workload import Workload, WorkloadJob
from pollux.testing import FakeApplication

APPLICATIONS = {"fake": FakeApplication(progress=(9000.0, 18000.0, 27000.0), sync_seconds=0.1, grad_sqr=0.05)}
WORKLOAD = Workload("w", tuple(WorkloadJob(f"j{i}", 7.0 * i, "fake", 2, 20) for i in range(4)))


def run(trigger, record=None, only_news=False, policy="pollux"):
    settings = SimulationSettings(1, 4, trigger)
    return simulate(WORKLOAD, create(policy), APPLICATIONS, settings, record=record, only_news=only_news)


def recorded(trigger, **options):
    log = []
    outcome = run(trigger, lambda event, commands: log.append((event, list(commands))), **options)
    return log, outcome


@pytest.mark.parametrize("trigger", ["rounds", "events"])
def test_a_recorder_changes_nothing(trigger):
    _, outcome = recorded(trigger)
    assert outcome.jobs == run(trigger).jobs


@pytest.mark.parametrize("trigger", ["rounds", "events"])
def test_it_hears_every_fact_and_what_came_of_it(trigger):
    log, outcome = recorded(trigger, policy="fifo")
    kinds = [type(event) for event, _ in log]
    for kind in (JobSubmitted, JobRunning, JobFinished):
        assert kinds.count(kind) == len(WORKLOAD.jobs)
    assert kinds.count(DecisionMade) == len(outcome.decision_seconds)
    starts = {c.job_id: event.at for event, commands in log for c in commands if isinstance(c, StartJob)}
    assert starts == {job.name: job.started for job in outcome.jobs}
    assert not any(isinstance(command, StopJob) for _, commands in log for command in commands)


@pytest.mark.parametrize("trigger", ["rounds", "events"])
def test_without_what_is_no_news_there_are_fewer_reports(trigger):
    everything, _ = recorded(trigger)
    news, outcome = recorded(trigger, only_news=True)
    counts = [sum(isinstance(event, JobReported) for event, _ in log) for log in (everything, news)]
    assert len(WORKLOAD.jobs) <= counts[1] < counts[0]
    assert all(event.goodput is not None for event, _ in news if isinstance(event, JobReported))
    assert all(math.isfinite(job.finished) for job in outcome.jobs)
