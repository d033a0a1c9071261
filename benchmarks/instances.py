"""Synthetic scheduling problems: clusters full of jobs with random models, in four situations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pollux.core import Cluster, Decision, JobLimits, JobView, Placement, Policy, Snapshot
from pollux.goodput import BatchLimits, Efficiency, GoodputModel, PublishedThroughput
from pollux.sim.simulation.simulation import simulate
from pollux.sim.workloads.builtin import builtin_applications, builtin_workload

CASES = ("cold", "steady", "burst", "contention", "given")
SEARCH_ROUNDS = 3


def random_job(rng: np.random.Generator, name: str, now: float, max_gpus: int = 64) -> JobView:
    """One job with a model drawn from wide ranges: fast and slow steps, good and bad networks, quiet and noisy."""
    initial = int(2 ** rng.integers(3, 10))
    local_max = int(initial * 2 ** rng.integers(0, 3))
    local_min = max(int(local_max // 2 ** rng.integers(2, 6)), 1)
    maximum = max(int(initial * 2 ** rng.integers(4, 8)), local_min * max_gpus)
    alpha_c = 10 ** rng.uniform(-2.0, -0.7)
    beta_c = alpha_c * rng.uniform(0.5, 4.0) / local_max
    alpha_r = alpha_c * 10 ** rng.uniform(-1.5, 0.3)
    alpha_n = alpha_r * 10 ** rng.uniform(0.1, 0.9)
    model = GoodputModel(
        PublishedThroughput(
            alpha_c, beta_c, alpha_n, alpha_n * 10 ** rng.uniform(-3.0, -1.0),
            alpha_r, alpha_r * 10 ** rng.uniform(-3.0, -1.0), rng.uniform(1.0, 4.0),
        ),
        Efficiency(initial, 1.0, 10 ** rng.uniform(-0.5, 2.0)),
        BatchLimits(initial, maximum, local_min, local_max),
    )  # fmt: skip
    age = float(10 ** rng.uniform(1.8, 4.8))
    restarts = int(rng.integers(0, 6)) if age > 600 else 0
    return JobView(
        name, now - age, JobLimits(1, min(max_gpus, model.max_gpus)), goodput=model, num_restarts=restarts,
        largest_gpus=max_gpus, attained_gpu_seconds=age,
    )  # fmt: skip


def make(policy: Policy, case: str, num_nodes: int, gpus_per_node: int, num_jobs: int, seed: int) -> Snapshot:
    """A snapshot of that situation; `policy` brings the cluster into it.

    cold: nobody holds anything. steady: all but a few jobs hold what the policy gave them a while ago, and their
    noise has moved since. burst: 30 % of the jobs have just arrived. contention: the jobs need half as many GPUs
    again as there are, just to run at their minimum. given: two thirds hold placements that no policy would make, any
    number of GPUs on one or two nodes.
    """
    rng = np.random.default_rng([seed, num_nodes, num_jobs, CASES.index(case)])
    now = 100_000.0
    cluster = Cluster.uniform(num_nodes, gpus_per_node)
    jobs = [random_job(rng, f"job-{i}", now) for i in range(num_jobs)]
    if case == "contention":
        jobs = [_needy(rng, job, 1.5 * cluster.num_gpus / num_jobs) for job in jobs]
    cold = Snapshot(1, now, cluster, tuple(jobs))
    if case == "cold":
        return cold
    if case == "given":
        return replace(cold, running=_scattered(rng, cluster, jobs))
    arriving = {"steady": 0.05, "burst": 0.3, "contention": 0.2}[case]
    present = jobs[: max(int(num_jobs * (1 - arriving)), 1)]
    running: dict[str, object] = {}
    for step in range(3):
        present = [_drift(rng, job) for job in present]
        decision = policy.allocate(Snapshot(step, now, cluster, tuple(present), running))  # type: ignore[arg-type]
        running = dict(decision.allocation)
    new = [replace(job, submitted_at=now - float(rng.uniform(0, 90)), num_restarts=0) for job in jobs[len(present) :]]
    present = [_drift(rng, job) for job in present]
    return Snapshot(9, now, cluster, tuple(present + new), running)  # type: ignore[arg-type]


class _Recorder:
    """A policy that remembers what it was asked."""

    def __init__(self, policy: Policy) -> None:
        self.name, self.needs, self.batch, self._policy = policy.name, policy.needs, policy.batch, policy
        self.snapshots: list[Snapshot] = []

    def allocate(self, snapshot: Snapshot) -> Decision:
        self.snapshots.append(snapshot)
        return self._policy.allocate(snapshot)


def history(policy: Policy, count: int) -> list[Snapshot]:
    """Snapshots of a simulated day: the built-in workload on 16 nodes x 4 GPUs, evenly spaced while it is busy."""
    recorder = _Recorder(policy)
    simulate(builtin_workload(), recorder, builtin_applications())
    busy = [snapshot for snapshot in recorder.snapshots if len(snapshot.jobs) >= 4]
    return [busy[i * len(busy) // count] for i in range(count)]


def _scattered(rng: np.random.Generator, cluster: Cluster, jobs: list[JobView]) -> dict[str, Placement]:
    """Random placements of two thirds of the jobs: any count on one node, or a part on each of two."""
    free = {node.id: node.num_gpus for node in cluster.nodes}
    running: dict[str, Placement] = {}
    for job in jobs[: len(jobs) * 2 // 3]:
        names = rng.permutation([node for node, count in free.items() if count])[: int(rng.integers(1, 3))]
        shares = {str(node): int(rng.integers(1, free[str(node)] + 1)) for node in names}
        if shares and sum(shares.values()) <= job.limits.max_gpus:
            for node, count in shares.items():
                free[node] -= count
            running[job.id] = Placement.of(shares)
    return running


def _needy(rng: np.random.Generator, job: JobView, mean_gpus: float) -> JobView:
    """The job with a minimum, a power of two whose mean over jobs is about `mean_gpus`."""
    exponent = np.log2(max(mean_gpus / 1.25, 1.0)) + rng.uniform(-1.0, 1.0)
    least = min(2 ** max(round(float(exponent)), 0), job.limits.max_gpus)
    return replace(job, limits=replace(job.limits, min_gpus=least))


def _drift(rng: np.random.Generator, job: JobView) -> JobView:
    model = job.goodput
    assert isinstance(model, GoodputModel)
    noise = model.efficiency
    moved = Efficiency(noise.initial_batch, noise.grad_sqr, noise.grad_var * float(np.exp(rng.normal(0.05, 0.2))))
    return replace(job, goodput=replace(model, efficiency=moved))
