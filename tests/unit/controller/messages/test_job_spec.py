"""From a submitted request to what is scheduled."""

from typing import Any

import pytest

from pollux.controller import spec_from
from pollux.core import JobLimits
from pollux.wire.job import JobRequest, Resources


def request(**fields: Any) -> JobRequest:
    return JobRequest("train", ("python", "train.py"), **{"min_gpus": 1, "max_gpus": 8, **fields})


def test_everything_that_matters_is_taken_over():
    asked = request(
        min_gpus=2, resources=Resources(4.0, 1e9, ("h100",)), priority="high", queue="vision", after=("other",),
        time_limit_seconds=60.0, retries=5,
    )  # fmt: skip
    spec = spec_from(asked, "train-2", 7.5)
    assert spec.limits == JobLimits(2, 8, gpu_types=("h100",), cpus_per_gpu=4.0, memory_bytes_per_gpu=1e9)
    assert (spec.id, spec.weight, spec.queue, spec.after, spec.resize_cost_seconds) == (
        "train-2",
        4.0,
        "vision",
        ("other",),
        7.5,
    )
    assert (spec.time_limit_seconds, spec.retries, spec.request) == (60.0, 5, asked)


@pytest.mark.parametrize(("priority", "weight"), [("low", 0.25), ("normal", 1.0), ("high", 4.0)])
def test_priorities_are_weights(priority, weight):
    assert spec_from(request(priority=priority), "a").weight == weight


@pytest.mark.parametrize(
    ("fields", "pinned", "preemptible"),
    [
        ({}, False, True),
        ({"preemptible": False}, False, False),
        ({"min_gpus": 8}, True, False),
        ({"on_resize": "never"}, True, False),
        ({"min_gpus": 8, "preemptible": True}, False, True),
        ({"on_resize": "never", "preemptible": True}, True, True),
        ({"min_gpus": 8, "on_resize": "live"}, False, True),
    ],
)
def test_rigid_jobs_keep_what_they_have(fields, pinned, preemptible):
    limits = spec_from(request(**fields), "a").limits
    assert (limits.pinned, limits.preemptible) == (pinned, preemptible)


@pytest.mark.parametrize(("cluster_gpus", "asked"), [(None, 8), (16, 8), (4, 4), (1, 2)])
def test_fixed_sizes_are_the_most_that_is_asked_for_and_there(cluster_gpus, asked):
    assert spec_from(request(min_gpus=2), "a", cluster_gpus=cluster_gpus).requested_gpus == asked
