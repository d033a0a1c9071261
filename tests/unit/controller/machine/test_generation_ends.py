"""Ends of replicas that are no success, applied to the state of a cluster alone."""

import pytest

from pollux.controller import GenerationEnded, GenerationShrunk, JobSpec, JobState, ResizeJob, StartJob, StopJob
from pollux.controller.machine import generation_ends
from pollux.controller.state.cluster_state import ClusterState
from pollux.core import NOWHERE, InvalidInput, JobLimits
from pollux.testing import cluster, place


@pytest.fixture
def state():
    return ClusterState(cluster(4))


@pytest.fixture
def record(state):
    """Job a, which runs on four GPUs and needs two."""
    record = state.draft(JobSpec("a", JobLimits(min_gpus=2, max_gpus=4), retries=1), 0.0)
    state.add(record)
    state.place(record, place("n0:4"), 1.0)
    record.state, record.live = JobState.RUNNING, True
    return record


def ended(outcome, at=10.0):
    return GenerationEnded(at, "a", 1, outcome, "exit 1")


def test_a_crash_is_forgiven_and_the_next_is_not(state, record):
    assert generation_ends.failed(state, record, ended("crashed")) == []
    assert (record.state, record.placement, record.crashes, record.eligible_at) == (JobState.QUEUED, NOWHERE, 1, 12.0)
    state.place(record, place("n0:4"), 20.0)
    record.state = JobState.RUNNING
    assert generation_ends.failed(state, record, ended("crashed", 30.0)) == []
    assert (record.state, record.crashes) == (JobState.FAILED, 2)


def test_a_live_resize_that_failed_starts_again_on_the_same_gpus(state, record):
    record.state = JobState.RESIZING
    assert generation_ends.failed(state, record, ended("lost")) == [StartJob("a", 2, place("n0:4"))]
    assert (record.placement, record.reason.code) == (place("n0:4"), "fell-back")


def test_a_refused_placement_is_stopped_and_the_job_waits(state, record):
    assert generation_ends.failed(state, record, ended("refused")) == [StopJob("a", 2, place("n0:4"), "refused")]
    assert (record.state, record.refusals, record.eligible_at) == (JobState.QUEUED, 1, 11.0)


def test_enough_replicas_go_on(state, record):
    commands = generation_ends.shrunk(state, GenerationShrunk(10.0, "a", 1, place("n0:3"), "killed"))
    assert commands == [ResizeJob("a", 2, place("n0:4"), place("n0:3"))]
    assert (record.state, record.losses, record.reason.code) == (JobState.RESIZING, 1, "replicas-lost")


def test_too_few_replicas_are_stopped(state, record):
    commands = generation_ends.shrunk(state, GenerationShrunk(10.0, "a", 1, place("n0:1"), "killed"))
    assert commands == [StopJob("a", 2, place("n0:4"), "lost")]
    assert (record.state, record.placement) == (JobState.QUEUED, NOWHERE)


@pytest.mark.parametrize(("job_id", "generation", "where"), [("a", 0, "n0:3"), ("b", 1, "n0:3"), ("a", 1, "n0:4")])
def test_what_is_old_unknown_or_no_news_changes_nothing(state, record, job_id, generation, where):
    assert generation_ends.shrunk(state, GenerationShrunk(10.0, job_id, generation, place(where), "killed")) is None
    assert (record.placement, record.generation) == (place("n0:4"), 1)


def test_what_is_no_part_of_the_placement_is_refused(state, record):
    with pytest.raises(InvalidInput, match="not a part of its"):
        generation_ends.shrunk(state, GenerationShrunk(10.0, "a", 1, place("n0:5"), "killed"))
    assert (record.state, record.losses) == (JobState.RUNNING, 0)
