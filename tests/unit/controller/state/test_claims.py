"""What a job says of its group, deadline, losses and use of GPUs reaches policies, and a saved state."""

import json
from dataclasses import replace

import pytest

from pollux.controller import Controller, JobReported, JobSpec, JobSubmitted, spec_from
from pollux.controller.codec.events import decode, decode_value, encode, encode_value
from pollux.core import Cluster, InvalidInput, Placement
from pollux.wire.job import JobRequest
from pollux.wire.jobfile import job_to_mapping, parse_job

SPEC = JobSpec("a", group="search", deadline=500.0)


def submitted(at: float = 100.0) -> Controller:
    controller = Controller(Cluster.uniform(1, 4))
    controller.apply(JobSubmitted(at, SPEC))
    return controller


def test_group_and_deadline_are_in_the_snapshot():
    (view,) = submitted().snapshot(100.0).jobs
    assert (view.group, view.deadline) == ("search", 500.0)


def test_a_past_deadline_is_refused():
    with pytest.raises(InvalidInput, match="should have ended 20 s ago, by its deadline; give a later one"):
        submitted(at=520.0)


def test_what_a_job_reports_is_in_the_snapshot_and_survives_a_save():
    controller = submitted()
    for number in range(40):
        progress = 10.0 * number
        controller.apply(JobReported(200.0 + number, "a", progress=progress, loss=1.0 / (number + 1), utilization=0.5))
    controller.apply(JobReported(300.0, "a", loss=9.0, memory_bytes=2e9))
    restored = Controller.restored(json.loads(json.dumps(controller.state())))
    for known in (controller, restored):
        (view,) = known.snapshot(300.0).jobs
        assert len(view.loss_history) == 32
        # The newest loss at one point of progress counts.
        assert view.loss_history[-2:] == ((380.0, 1.0 / 39.0), (390.0, 9.0))
        assert (view.utilization, view.memory_bytes) == (0.5, 2e9)


@pytest.mark.parametrize("wrong", [{"loss": float("nan")}, {"utilization": -0.1}, {"memory_bytes": float("inf")}])
def test_impossible_numbers_are_refused(wrong):
    with pytest.raises(InvalidInput, match="job 'a' reports"):
        submitted().apply(JobReported(200.0, "a", **wrong))


def test_a_shared_placement_is_written_and_read():
    for shared in (False, True):
        placement = Placement((("n0", 2),), shared)
        assert decode_value(Placement, encode_value(placement)) == placement
    event = JobSubmitted(1.0, SPEC)
    assert decode(encode(event)) == event


def test_a_job_file_says_both():
    request = parse_job({"run": "true", "workdir": "/", "group": "search", "deadline": "2030-01-31T18:00:00+01:00"})
    assert (request.group, request.deadline) == ("search", 1896109200.0)
    assert parse_job(job_to_mapping(request)) == request
    spec = spec_from(request, "a")
    assert (spec.group, spec.deadline) == ("search", 1896109200.0)
    assert spec_from(replace(request, deadline=None), "a").deadline is None
    assert JobRequest("a", ("true",)).deadline is None


@pytest.mark.parametrize("wrong", ["tomorrow", "2030-01-31T18:00:00", True, -1, 1e12, [1]])
def test_a_deadline_is_a_moment(wrong):
    with pytest.raises(InvalidInput, match=r"deadline is .*: give a date and time with its zone"):
        parse_job({"run": "true", "workdir": "/", "deadline": wrong})
