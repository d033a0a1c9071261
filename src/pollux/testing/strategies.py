"""Hypothesis strategies: clusters, jobs and snapshots of every kind, small enough to read when one fails."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import strategies as st

from pollux.core import Cluster, Decision, JobLimits, JobView, Node, Placement, Queue, Snapshot, check
from pollux.testing.builders import FakeOracle, SaturatingGoodput, goodput_model

__all__ = ["NOW", "clusters", "job_limits", "jobs", "nodes", "plain_snapshots", "queues", "snapshots"]

NOW = 10_000.0
"""When all snapshots are taken, in seconds."""

_GPU_TYPES = ("a100", "t4")
_GIB = 2**30

# Lists of traits instead of a draw for each field: a tenth of the draws, and failures are easy to read.
_NODE_TRAITS: tuple[dict[str, Any], ...] = (
    {},
    {"num_gpus": 0},
    {"num_gpus": 1},
    {"num_gpus": 3},
    {"num_gpus": 8},
    {"num_cpus": 16.0},
    {"num_cpus": 5.0},
    {"memory_bytes": 100.0 * _GIB},
    {"isolated_network": True},
)
_LIMIT_TRAITS: tuple[dict[str, Any], ...] = (
    {"min_gpus": 2},
    {"min_gpus": 3},
    {"min_gpus": 8},
    {"max_gpus": 1},
    {"max_gpus": 3},
    {"max_nodes": 1},
    {"max_nodes": 2},
    {"gpu_types": ("t4",)},
    {"gpu_types": ("a100", "t4")},
    {"mixed_types": True},
    {"cpus_per_gpu": 3.0},
    {"cpus_per_gpu": 0.1},
    {"memory_bytes_per_gpu": 33.4 * _GIB},
    {"pinned": True},
    {"preemptible": False},
)
_JOB_TRAITS: tuple[dict[str, Any], ...] = (
    {"queue": "batch"},
    {"queue": "research"},
    {"weight": 0.5},
    {"weight": 10.0},
    {"attained_gpu_seconds": 57_600.0},
    {"attained_gpu_seconds": 1e6, "num_restarts": 3, "largest_gpus": 8},
    {"num_restarts": 100, "largest_gpus": 2},
    {"resize_cost_seconds": 0.0},
    {"resize_cost_seconds": 300.0, "largest_gpus": 1},
    {"oracle": FakeOracle(parallel_seconds=5.0, steps=1.0)},
    {"oracle": FakeOracle(serial_seconds=0.0, steps=1e5)},
    {"goodput": goodput_model(), "remaining": 1e7},
    {"goodput": goodput_model(sync_seconds=0.5, noise_scale=100.0), "largest_gpus": 4},
    {"goodput": goodput_model(noise_scale=1e5, initial=32), "largest_gpus": 8},
    {"goodput": SaturatingGoodput(), "remaining": 1e3},
    {"goodput": SaturatingGoodput(rate=3.0, knee=4.0, across_nodes=0.6, speed={"a100": 3.0})},
)


def _some(traits: tuple[dict[str, Any], ...], most: int) -> st.SearchStrategy[dict[str, Any]]:
    """Up to `most` of the traits together; a later one overrides an earlier one."""
    return st.lists(st.sampled_from(traits), max_size=most).map(
        lambda chosen: {name: value for trait in chosen for name, value in trait.items()}
    )


@cache
def nodes(gpu_types: tuple[str, ...] = _GPU_TYPES) -> st.SearchStrategy[Node]:
    """A node `n` of up to eight GPUs, sometimes with countable CPUs or memory."""

    def build(trait: dict[str, Any], gpu_type: str) -> Node:
        return Node(**{"id": "n", "num_gpus": 4, "gpu_type": gpu_type, **trait})

    return st.builds(build, st.sampled_from(_NODE_TRAITS), st.sampled_from(gpu_types))


@st.composite
def clusters(draw: st.DrawFn, max_nodes: int = 5) -> Cluster:
    """One or two GPU types on up to `max_nodes` nodes."""
    gpu_types = draw(st.sampled_from([("",), _GPU_TYPES]))
    count = draw(st.integers(1, max_nodes))
    return Cluster.of(replace(draw(nodes(gpu_types)), id=f"n{index}") for index in range(count))


@cache
def job_limits() -> st.SearchStrategy[JobLimits]:
    """Limits of every kind."""

    def build(traits: dict[str, Any]) -> JobLimits:
        low = traits.get("min_gpus", 1)
        return JobLimits(**{**traits, "max_gpus": max(low, traits.get("max_gpus", 8))})

    return _some(_LIMIT_TRAITS, 3).map(build)


@cache
def queues() -> st.SearchStrategy[dict[str, Queue]]:
    """The queues that jobs name, some of them with quotas."""
    several = [
        Queue("batch", 2.0, 5),
        Queue("batch", gpu_quota=2),
        Queue("research", gpu_quota=0),
        Queue("", 0.1),
    ]
    return st.lists(st.sampled_from(several), max_size=2).map(lambda chosen: {queue.name: queue for queue in chosen})


@cache
def jobs() -> st.SearchStrategy[JobView]:
    """A job `j` with any history by `NOW`; without a model unless a trait gives it one."""

    def build(limits: JobLimits, age: float, requested: int, traits: dict[str, Any]) -> JobView:
        fields: dict[str, Any] = {"oracle": FakeOracle(), "limits": limits, "requested_gpus": requested}
        return JobView("j", NOW - age, **{**fields, **traits})

    ages = st.sampled_from([60.0, 0.0, 5.0, 3600.0])
    sizes = st.sampled_from([1, 2, 3, 4, 9])
    return st.builds(build, job_limits(), ages, sizes, _some(_JOB_TRAITS, 3))


@st.composite
def snapshots(draw: st.DrawFn, max_jobs: int = 7, disturbed: bool = True) -> Snapshot:
    """Any snapshot that a controller may give to a policy.

    All running jobs were placed legally. When `disturbed`, nodes were closed or lost GPUs since then, or limits and
    quotas changed, so that placements may no longer be legal.
    """
    nodes_now = draw(clusters())
    count = draw(st.integers(0, max_jobs))
    views = tuple(replace(draw(jobs()), id=f"j{index}") for index in range(count))
    found = Snapshot(1, NOW, nodes_now, views, queues=draw(queues()), seed=draw(st.integers(0, 3)))
    running = _draw_running(draw, found)
    views = tuple(
        replace(view, largest_gpus=max(view.largest_gpus, running[view.id].num_gpus)) if view.id in running else view
        for view in views
    )
    found = replace(found, jobs=views, running=running)
    return _disturb(draw, found) if disturbed else found


@st.composite
def plain_snapshots(draw: st.DrawFn, max_jobs: int = 10, size: int = 1) -> Snapshot:
    """Equal nodes without limits but GPUs, and jobs that all ask for `size` of them, some of which run."""
    num_nodes = draw(st.integers(1, 4))
    nodes_now = Cluster.uniform(num_nodes, 4)
    limits = JobLimits(min_gpus=size, max_gpus=4 * num_nodes)
    count = draw(st.integers(1, max_jobs))
    views = tuple(replace(draw(jobs()), id=f"j{index}", limits=limits, requested_gpus=size) for index in range(count))
    slots = [node.id for node in nodes_now.nodes for _ in range(4 // size)]
    homes = draw(st.permutations(slots))[: draw(st.integers(0, min(count, len(slots))))]
    running = {view.id: Placement(((home, size),)) for view, home in zip(views, homes, strict=False)}
    return Snapshot(1, NOW, nodes_now, views, running)


def _draw_running(draw: st.DrawFn, bare: Snapshot) -> dict[str, Placement]:
    """Placements of some of the jobs, legal all together."""
    running: dict[str, Placement] = {}
    for job in bare.jobs:
        most = draw(st.sampled_from([0, 1, 2, 4, 8]))
        left = min(max(most, job.limits.min_gpus), job.limits.max_gpus) if most else 0
        first = draw(st.integers(0, len(bare.cluster.nodes) - 1))
        around = bare.cluster.nodes[first:] + bare.cluster.nodes[:first]
        shares: dict[str, int] = {}
        for node in around:
            free = node.num_gpus - sum(placement.on(node.id) for placement in running.values())
            if node.gpu_type == around[0].gpu_type or job.limits.mixed_types:
                shares[node.id] = min(left, max(free, 0))
                left -= shares[node.id]
        tried = {**running, job.id: Placement.of(shares)}
        if tried[job.id] and not check(bare, Decision(tried)):
            running = tried
    return running


def _disturb(draw: st.DrawFn, found: Snapshot) -> Snapshot:
    changes: dict[str, Any] = {}
    nodes_now = list(found.cluster.nodes)
    for index, change in draw(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=3)):
        node = nodes_now[index % len(nodes_now)]
        closed = replace(node, schedulable=False) if change else replace(node, num_gpus=node.num_gpus // 2)
        nodes_now[index % len(nodes_now)] = closed
    views = list(found.jobs)
    if views:
        for index, limits in draw(st.lists(st.tuples(st.integers(0, 6), job_limits()), max_size=3)):
            views[index % len(views)] = replace(views[index % len(views)], limits=limits)
    if draw(st.booleans()):
        changes["queues"] = draw(queues())
    return replace(found, cluster=Cluster.of(nodes_now), jobs=tuple(views), **changes)
