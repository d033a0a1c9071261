"""Makes the spec of a job from a user's request."""

from __future__ import annotations

from pollux.controller.messages.events import JobSpec
from pollux.core import JobLimits
from pollux.wire.job import PRIORITY_WEIGHTS, JobRequest

__all__ = ["limits_from", "spec_from"]


def limits_from(request: JobRequest) -> JobLimits:
    """The limits of a request.

    A rigid job is pinned to its first placement, unless its user allows preemption and asks for a fixed number of GPUs:
    then it comes back with the same number, possibly on other nodes.
    """
    returns_alike = request.is_preemptible and request.min_gpus == request.max_gpus
    return JobLimits(
        min_gpus=request.min_gpus,
        max_gpus=request.max_gpus,
        gpu_types=request.resources.gpu_types,
        mixed_types=request.resources.mixed_types,
        cpus_per_gpu=request.resources.cpus,
        memory_bytes_per_gpu=request.resources.memory_bytes,
        preemptible=request.is_preemptible,
        pinned=request.is_rigid and not returns_alike,
    )


def spec_from(
    request: JobRequest, job_id: str, resize_cost_seconds: float = 30.0, cluster_gpus: int | None = None
) -> JobSpec:
    """The spec of a request. Rigid policies give the job its maximum, or `cluster_gpus` if that is less.

    `resize_cost_seconds` is the expected cost of a resize until the job has reported one.
    """
    most = request.max_gpus if cluster_gpus is None else min(request.max_gpus, cluster_gpus)
    return JobSpec(
        job_id,
        limits_from(request),
        requested_gpus=max(most, request.min_gpus),
        weight=PRIORITY_WEIGHTS[request.priority],
        queue=request.queue,
        resize_cost_seconds=resize_cost_seconds,
        retries=request.retries,
        after=request.after,
        time_limit_seconds=request.time_limit_seconds,
        request=request,
        kind=request.kind,
        group=request.group,
        deadline=request.deadline,
    )
