"""Times that are reached, applied to the state of a cluster alone."""

import pytest

from pollux.controller import JobSpec, JobState, StopJob
from pollux.controller.machine import timers
from pollux.controller.state.cluster_state import ClusterState
from pollux.core import JobLimits
from pollux.testing import cluster, place


@pytest.fixture
def state():
    return ClusterState(cluster(4))


def job(state, **fields):
    record = state.draft(JobSpec("a", JobLimits(max_gpus=4), **fields), 0.0)
    state.add(record)
    return record


def test_nothing_is_due(state):
    job(state)
    assert timers.fired(state, 1e9) is None


def test_the_pause_after_a_failure_ends_in_its_time(state):
    record = job(state)
    record.eligible_at = 10.0
    state.note_due_time(record)
    assert timers.fired(state, 9.0) is None
    assert record.eligible_at == 10.0
    assert timers.fired(state, 10.0) == []
    assert (record.eligible_at, state.next_due) == (None, None)


def test_one_restriction_may_outlast_another(state):
    record = job(state)
    record.eligible_at, record.quiet_until = 10.0, 300.0
    state.note_due_time(record)
    assert timers.fired(state, 10.0) == []
    assert (record.eligible_at, record.quiet_until, record.reason.code) == (None, 300.0, "backoff-free-gpus")
    assert state.next_due == 300.0


def test_a_job_whose_time_is_up_fails_and_is_stopped(state):
    record = job(state, time_limit_seconds=60.0)
    state.place(record, place("n0:2"), 5.0)
    record.state = JobState.RUNNING
    state.run(record, 5.0)
    assert timers.fired(state, 64.0) is None
    assert timers.fired(state, 65.0) == [StopJob("a", 2, place("n0:2"), "time-limit")]
    assert (record.state, record.detail) == (JobState.FAILED, "time limit of 60 s reached")
