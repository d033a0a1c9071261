"""Snapshots that every policy must handle, by name.

Jobs have everything that a policy may need (`goodput`, `oracle`, `remaining`), unless a case leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pollux.core import Cluster, JobView, Node, Queue, Snapshot
from pollux.testing.builders import FakeOracle, SaturatingGoodput, cluster, goodput_model, job, snapshot

__all__ = ["CASES", "known_job"]

CASES: dict[str, Callable[[], Snapshot]] = {}
"""Name to a function that builds the snapshot."""


def _case(build: Callable[[], Snapshot]) -> Callable[[], Snapshot]:
    CASES[build.__name__.strip("_").replace("_", "-")] = build
    return build


def known_job(job_id: str, submitted_at: float = 0.0, **fields: Any) -> JobView:
    """A job that has run, with all its fields known."""
    fields = {
        "goodput": goodput_model(),
        "oracle": FakeOracle(),
        "remaining": 1e6,
        "largest_gpus": 4,
        "attained_gpu_seconds": 100.0,
        **fields,
    }
    return job(job_id, submitted_at, **fields)


def _jobs(count: int, **fields: Any) -> list[JobView]:
    return [known_job(f"j{index}", 10.0 * index, **fields) for index in range(count)]


@_case
def _no_nodes() -> Snapshot:
    return snapshot(Cluster.of(()), _jobs(2))


@_case
def _no_jobs() -> Snapshot:
    return snapshot(cluster(4, 4))


@_case
def _nothing() -> Snapshot:
    return snapshot(Cluster.of(()))


@_case
def _nodes_without_gpus() -> Snapshot:
    return snapshot(cluster(0, 4, 0), _jobs(3))


@_case
def _one_waits() -> Snapshot:
    return snapshot(cluster(4, 4), _jobs(1))


@_case
def _one_runs() -> Snapshot:
    return snapshot(cluster(4, 4), _jobs(1), {"j0": "n0:2"})


@_case
def _just_submitted() -> Snapshot:
    fields = {"goodput": None, "largest_gpus": 0, "attained_gpu_seconds": 0.0, "remaining": None}
    return snapshot(cluster(4, 4), [known_job(f"j{i}", 600.0, **fields) for i in range(3)], now=600.0)


@_case
def _never_measured_among_known() -> Snapshot:
    jobs = [*_jobs(3), known_job("new", 590.0, goodput=None, remaining=None, largest_gpus=1)]
    return snapshot(cluster(4, 4), jobs, {"j0": "n0:4", "new": "n1:1"})


@_case
def _nothing_known() -> Snapshot:
    return snapshot(cluster(4, 4), [job(f"j{i}", requested_gpus=1 + i) for i in range(4)], {"j1": "n0:2"})


@_case
def _far_more_jobs_than_gpus() -> Snapshot:
    running = {f"j{index}": f"n{index // 4}:1" for index in range(8)}
    return snapshot(cluster(4, 4), _jobs(20, requested_gpus=1), running)


@_case
def _large_requests() -> Snapshot:
    jobs = [known_job(f"j{i}", float(i), requested_gpus=1 + 3 * i, max_gpus=8) for i in range(4)]
    return snapshot(cluster(4, 4), jobs, {"j0": "n1:1"})


@_case
def _too_large() -> Snapshot:
    jobs = [known_job("large", min_gpus=16, requested_gpus=16), *_jobs(3)]
    return snapshot(cluster(4, 4), jobs, {"j0": "n0:2", "j1": "n1:2"})


@_case
def _unknown_gpu_type() -> Snapshot:
    jobs = [known_job("picky", gpu_types=("h100",), requested_gpus=8), *_jobs(3, requested_gpus=2)]
    return snapshot(cluster(4, 4, gpu_type="a100"), jobs, {"j0": "n0:2", "j1": "n0:2"})


@_case
def _pinned() -> Snapshot:
    jobs = [known_job("pinned", 500.0, pinned=True, requested_gpus=3), *_jobs(6, requested_gpus=4)]
    return snapshot(cluster(4, 4), jobs, {"pinned": "n0:2 n1:1", "j0": "n0:2"})


@_case
def _pinned_waits() -> Snapshot:
    jobs = [known_job("pinned", 500.0, pinned=True, requested_gpus=2), *_jobs(2, requested_gpus=2)]
    return snapshot(cluster(4, 4), jobs, {"j0": "n0:2"})


@_case
def _not_preemptible() -> Snapshot:
    jobs = [known_job("steady", 500.0, preemptible=False, requested_gpus=4, attained_gpu_seconds=1e6)]
    return snapshot(cluster(4, 4), [*jobs, *_jobs(8, requested_gpus=2)], {"steady": "n0:4", "j0": "n1:2"})


@_case
def _all_not_preemptible() -> Snapshot:
    jobs = _jobs(6, preemptible=False, requested_gpus=2)
    return snapshot(cluster(4, 4), jobs, {"j0": "n0:2", "j1": "n1:1 n0:1", "j2": "n1:2"})


@_case
def _two_gpu_types() -> Snapshot:
    nodes = Cluster.of([Node("a0", 4, "a100"), Node("t0", 4, "t4"), Node("t1", 4, "t4"), Node("v0", 1, "v100")])
    model = SaturatingGoodput(knee=8.0, speed={"a100": 3.0})
    jobs = [
        known_job("any", requested_gpus=6, goodput=model),
        known_job("a", 1.0, gpu_types=("a100",), requested_gpus=2, goodput=model),
        known_job("t", 2.0, gpu_types=("t4",), requested_gpus=6, goodput=model),
        known_job("either", 3.0, gpu_types=("t4", "v100"), requested_gpus=2, goodput=model),
        known_job("both", 4.0, mixed_types=True, requested_gpus=3, goodput=model),
    ]
    return snapshot(nodes, jobs, {"t": "t0:2", "any": "a0:2"})


@_case
def _few_cpus() -> Snapshot:
    nodes = Cluster.of([Node("n0", 4, num_cpus=10), Node("n1", 4, num_cpus=4), Node("n2", 4, num_cpus=0)])
    return snapshot(nodes, _jobs(5, cpus_per_gpu=3, requested_gpus=2), {"j0": "n0:2"})


@_case
def _little_memory() -> Snapshot:
    nodes = Cluster.of([Node("n0", 4, memory_bytes=100e9), Node("n1", 4, memory_bytes=1e9)])
    return snapshot(nodes, _jobs(5, memory_bytes_per_gpu=30.1e9), {"j4": "n0:1"})


@_case
def _closed_node() -> Snapshot:
    nodes = Cluster.of([Node("n0", 4, schedulable=False), Node("n1", 4)])
    running = {"j0": "n0:2", "j1": "n0:1 n1:1", "j2": "n1:1"}
    return snapshot(nodes, _jobs(5, requested_gpus=2), running)


@_case
def _all_nodes_closed() -> Snapshot:
    return snapshot(cluster(4, 4, schedulable=False), _jobs(3), {"j1": "n1:2"})


@_case
def _quotas() -> Snapshot:
    jobs = [known_job(f"{name}{i}", float(i), queue=name, requested_gpus=2) for name in "ab" for i in range(3)]
    queues = [Queue("a", gpu_quota=3), Queue("b", weight=2.0), Queue("c", gpu_quota=0)]
    jobs.append(known_job("c0", 9.0, queue="c"))
    return snapshot(cluster(4, 4), jobs, {"a0": "n0:2", "b0": "n1:2"}, queues=queues)


@_case
def _quota_lowered() -> Snapshot:
    jobs = _jobs(4, queue="q", requested_gpus=2)
    running = {"j0": "n0:2", "j1": "n0:2", "j2": "n1:2"}
    return snapshot(cluster(4, 4), jobs, running, queues=[Queue("q", gpu_quota=3)])


@_case
def _quota_below_immovable() -> Snapshot:
    jobs = [
        known_job("pinned", pinned=True, queue="q"),
        known_job("steady", 1.0, preemptible=False, queue="q"),
        *_jobs(3, queue="q"),
        known_job("other", 2.0),
    ]
    running = {"pinned": "n0:2", "steady": "n0:2", "j0": "n1:2"}
    return snapshot(cluster(4, 4), jobs, running, queues=[Queue("q", gpu_quota=1)])


@_case
def _shrunk_node() -> Snapshot:
    return snapshot(cluster(2, 4), _jobs(4, requested_gpus=2), {"j0": "n0:2", "j1": "n0:2", "j2": "n1:2 n0:1"})


@_case
def _shrunk_under_immovable() -> Snapshot:
    jobs = [
        known_job("pinned", pinned=True),
        known_job("steady", 1.0, preemptible=False, min_gpus=2),
        *_jobs(3),
    ]
    running = {"pinned": "n0:2", "steady": "n0:2 n1:1", "j0": "n0:2", "j1": "n1:2"}
    return snapshot(cluster(1, 4), jobs, running)


@_case
def _node_without_gpus_left() -> Snapshot:
    return snapshot(cluster(0, 2), _jobs(2, preemptible=False, min_gpus=2), {"j0": "n0:4", "j1": "n1:2"})


def _changed_limits(**fields: Any) -> Snapshot:
    jobs = [
        known_job("higher", min_gpus=3, requested_gpus=3, **fields),
        known_job("lower", 1.0, max_gpus=2, requested_gpus=2, **fields),
        known_job("nearer", 2.0, max_nodes=1, requested_gpus=2, **fields),
        known_job("other", 3.0, gpu_types=("t4",), requested_gpus=1, **fields),
    ]
    nodes = Cluster.of([Node("n0", 4, "a100"), Node("n1", 4, "a100"), Node("n2", 4, "a100"), Node("n3", 4, "t4")])
    running = {"higher": "n0:2", "lower": "n1:3", "nearer": "n0:1 n1:1", "other": "n2:1"}
    return snapshot(nodes, jobs, running)


@_case
def _limits_changed() -> Snapshot:
    return _changed_limits()


@_case
def _limits_changed_not_preemptible() -> Snapshot:
    return _changed_limits(preemptible=False)


@_case
def _limits_changed_pinned() -> Snapshot:
    return _changed_limits(pinned=True)


@_case
def _impossible_limits_not_preemptible() -> Snapshot:
    changed = known_job("higher", preemptible=False, min_gpus=8, requested_gpus=8)
    return snapshot(cluster(4), [changed, *_jobs(2)], {"higher": "n0:2", "j0": "n0:1"})


@_case
def _shared_networks() -> Snapshot:
    running = {"j0": "n0:1 n1:1", "j1": "n1:1 n2:1", "j2": "n0:1 n2:2"}
    return snapshot(cluster(4, 4, 4), _jobs(5, requested_gpus=2), running)


@_case
def _isolated_networks() -> Snapshot:
    return replace(_shared_networks(), cluster=cluster(4, 4, 4, isolated_network=True))


@_case
def _uneven_nodes() -> Snapshot:
    return snapshot(cluster(1, 8, 3, 2), _jobs(6, requested_gpus=3), {"j5": "n1:5 n3:1"})


@_case
def _weights() -> Snapshot:
    jobs = [known_job(f"j{i}", float(i), weight=10.0**i, queue="q") for i in range(4)]
    return snapshot(cluster(4, 4), jobs, queues=[Queue("q", weight=0.01)])


@_case
def _restarted_often() -> Snapshot:
    return snapshot(cluster(4, 4), _jobs(3, num_restarts=1000), {"j0": "n0:1", "j1": "n0:1"})


@_case
def _poor_models() -> Snapshot:
    jobs = [
        known_job("flat", goodput=SaturatingGoodput(knee=1.0)),
        known_job("useless", 1.0, goodput=SaturatingGoodput(rate=0.0), oracle=FakeOracle(steps=0.0)),
        known_job("tiny", 2.0, goodput=SaturatingGoodput(rate=1e-12, across_nodes=0.0)),
        known_job("huge", 3.0, goodput=SaturatingGoodput(rate=1e12)),
    ]
    return snapshot(cluster(4, 4), jobs, {"useless": "n0:4"})
