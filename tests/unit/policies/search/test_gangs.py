"""A job that needs many GPUs at once, among short ones that keep coming: castor and pollux do not starve it."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from pollux.core import JobLimits
from pollux.goodput import BatchLimits
from pollux.policies import create
from pollux.policies.search.accounts import Account, Accounts
from pollux.policies.search.ranks import RankedWork, RankRule
from pollux.policies.search.turns import Turns, turn_weights
from pollux.sim.applications.modelled import Terms
from pollux.sim.simulation.simulation import SimulationSettings, simulate
from pollux.sim.workloads.workload import Workload, WorkloadJob
from pollux.testing import FakeApplication, SaturatingGoodput, cluster, job, snapshot

LINEAR = SaturatingGoodput()
BATCHES = BatchLimits(64, 64, 1, 64)


@dataclass(frozen=True)
class Termed(FakeApplication):
    """A fake application with the limits that its user gave it."""

    terms: Terms | None = None


def stream(gang_gpus: int, shorts: int) -> tuple[Workload, dict[str, Termed]]:
    """A job of five minutes on that many GPUs, among jobs of a minute on one GPU that ask for a little more than 8."""
    wide = Terms(JobLimits(gang_gpus, gang_gpus))
    applications = {
        "gang": Termed("gang", BATCHES, (300.0,), terms=wide),
        "short": Termed("short", BATCHES, (60.0,), terms=Terms(JobLimits(1, 1))),
    }
    jobs = [WorkloadJob(f"short-{i}", 60.0 * i / 8.4, "short", 1, 64) for i in range(shorts)]
    jobs.insert(5, WorkloadJob("gang-0", jobs[5].time, "gang", gang_gpus, 64))
    return Workload("stream", tuple(jobs)), applications


@pytest.mark.parametrize("policy", ["castor", "pollux"])
def test_a_job_that_needs_many_gpus_is_not_starved_by_a_stream_of_short_ones(policy):
    workload, applications = stream(8, 200)
    settings = SimulationSettings(2, 4, trigger="events", resize_seconds=1.0)
    outcome = simulate(workload, create(policy), applications, settings)
    ended = {found.name: found.finished for found in outcome.jobs}
    last = max(found.submitted for found in outcome.jobs)
    # It needs five minutes of the whole cluster; the stream, a little more than all of it for twenty minutes and more.
    assert ended["gang-0"] < 0.8 * last
    assert last > 1400.0


@pytest.mark.parametrize("resized", [3.0, 30.0])
def test_one_late_job_on_all_gpus_outweighs_as_many_short_ones(resized):
    """Whatever ranks say: a hundred jobs, 32 GPUs, and a late one that needs all of them."""
    now = 1e5
    gang = job("gang", min_gpus=32, max_gpus=32, goodput=LINEAR, remaining=1e7, resize_cost_seconds=resized)
    shorts = [
        job(f"s{i}", now - 60.0, max_gpus=1, goodput=LINEAR, remaining=3e3, resize_cost_seconds=resized, largest_gpus=1)
        for i in range(99)
    ]
    running = {f"s{i}": f"n{i // 4}:1" for i in range(32)}
    accounts = {"gang": Account(), **{f"s{i}": Account(received=60.0) for i in range(99)}}
    view = snapshot(cluster(*[4] * 8), [gang, *shorts], running, now=now, memory=Accounts(now, accounts))
    assert create("castor").allocate(view).allocation["gang"].num_gpus == 32
    assert "gang" not in create("castor", fairness_bound=None).allocate(view).allocation


def test_what_a_job_that_needs_many_gpus_is_owed_is_its_minimum():
    """On its minimum all the time it is never late, and alone it has nobody to wait for."""
    gang = job("gang", 0.0, min_gpus=16, max_gpus=16, goodput=SaturatingGoodput(knee=8.0), remaining=1e6)
    view = snapshot(
        cluster(*[4] * 4), [gang, *(job(f"s{i}", 600.0) for i in range(15))], {"gang": "n0:4 n1:4 n2:4 n3:4"}
    )
    received = replace(view, memory=Accounts(0.0, {"gang": Account()}))
    objective = RankedWork(received, RankRule())
    objective.prepare(np.array([float(objective.speedups([1], [16])[0, 0])] + [0.0] * 15))
    assert objective.lateness[0] == pytest.approx(1.0, abs=0.01)
    assert objective.gangs.tolist() == [16.0] + [1.0] * 15


def test_in_turns_a_job_that_needs_many_gpus_counts_for_many_and_waits_ever_less_patiently():
    jobs = [job("gang", min_gpus=8, max_gpus=8), *(job(f"s{i}", attained_gpu_seconds=500.0) for i in range(8))]
    view = snapshot(cluster(4, 4), jobs, {f"s{i}": f"n{i // 4}:1" for i in range(8)}, now=1000.0)
    found = []
    for since in (1000.0, 900.0, 0.0):
        weights = turn_weights(view, Turns({"gang": (False, since)}))
        assert weights is not None
        found.append(float(weights[0]))
    assert 8.0 == found[0] < found[1] < found[2]
    assert found[2] > 8 * 5.0
