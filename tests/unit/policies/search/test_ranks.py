"""castor's objective: ties, accounts that outlive a gap, models and shares that are worth nothing."""

import math
from dataclasses import replace

import numpy as np
import pytest

from pollux.core import Cluster, JobView, Node, Prior
from pollux.goodput import BatchLimits
from pollux.policies import create
from pollux.policies.search.accounts import Account, Accounts, believed
from pollux.policies.search.objective import Objective
from pollux.policies.search.ranks import RankedWork, RankRule
from pollux.testing import SaturatingGoodput, cluster, goodput_model, job, snapshot

LINEAR = SaturatingGoodput()


def ready(view, rule=None):
    """The objective once ranks are known, all jobs working at half their speed-up of one GPU."""
    objective = RankedWork(view, rule or RankRule())
    objective.prepare(np.zeros(len(view.jobs)))
    return objective


def test_of_equal_jobs_the_earlier_goes_first():
    known = [job(f"j{i}", goodput=LINEAR, remaining=1e5) for i in range(3)]
    for jobs in (known, [job(f"j{i}") for i in range(3)]):
        objective = ready(snapshot(cluster(4), jobs))
        assert [objective.numbers(j)["rank"] for j in range(3)] == [1.0, 2.0, 3.0]
        assert objective.rank_costs[0] > objective.rank_costs[1] > objective.rank_costs[2]
    one_gpu = snapshot(cluster(1), [replace(each, submitted_at=100.0 * i) for i, each in enumerate(known)])
    assert set(create("castor").allocate(one_gpu).allocation) == {"j0"}


@pytest.mark.parametrize("rise", [1.0, 1.02, 1.1])
def test_a_word_that_rises_as_the_job_works_is_doubted(rise):
    account, word = Account(), 100.0
    for _ in range(30):
        account = account.after(10.0, 100.0, 1.0, job("a", goodput=LINEAR, remaining=word))
        word *= rise
    left, stands_still = believed(account, word / rise)
    assert stands_still
    assert left > 10.0 * word / rise


def test_accounts_outlive_decisions_in_which_the_job_is_not_seen():
    kept = {"a": Account(received=50.0, promised=1e4, worked=5e3), "b": Account(received=7.0)}
    before = Accounts(500.0, kept)
    policy = create("castor")
    both = [job("a", goodput=LINEAR, remaining=5e3), job("b", goodput=LINEAR)]
    for gone in (snapshot(Cluster(()), both), snapshot(cluster(4), []), snapshot(cluster(4), both[:1])):
        memory = policy.allocate(replace(gone, memory=before)).memory
        assert isinstance(memory, Accounts)
        assert {name: account.received for name, account in memory.by_job.items()} == {"a": 50.0, "b": 7.0}
        again = policy.allocate(replace(snapshot(cluster(4), both), memory=memory)).memory
        assert isinstance(again, Accounts)
        assert again.by_job["b"].received == 7.0


def test_accounts_of_jobs_that_do_not_come_back_are_forgotten_in_time():
    accounts = Accounts(0.0)
    for i in range(3000):
        accounts = accounts.kept(float(i), {f"j{i}": Account(float(i))})
    assert len(accounts.by_job) <= 1001
    assert "j2999" in accounts.by_job


def kind(**limits):
    model = goodput_model()
    return Prior(replace(model, limits=replace(model.limits, **limits)), 4, 5, 0.0, 1e6)


@pytest.mark.parametrize(
    ("limits", "gpus", "used"),
    [
        ({}, {}, True),
        ({"maximum": 128, "local_min": 64}, {"min_gpus": 4}, False),  # two GPUs fill the largest batch of the other job
        ({"maximum": 128, "local_min": 64}, {"min_gpus": 2}, True),
        ({"local_min": 1, "local_max": 8, "accumulation": False}, {"max_gpus": 4}, False),  # 128 samples need 16 GPUs
        ({"local_min": 1, "local_max": 8, "accumulation": False}, {"max_gpus": 16}, True),
    ],
)
def test_a_prior_that_leaves_a_job_nowhere_to_run_is_ignored(limits, gpus, used):
    fresh = job("a", prior=kind(**limits), **gpus)
    view = snapshot(cluster(*[4] * 8), [fresh, job("long", goodput=LINEAR, remaining=1e9, largest_gpus=64)])
    objective = RankedWork(view, RankRule())
    assert (objective.jobs[0].goodput is not None) is used
    if used:
        return
    held = {"long": " ".join(f"n{i}:4" for i in range(8))}
    decision = create("castor").allocate(replace(view, running=snapshot(running=held).running, now=1.0))
    assert "a" in decision.allocation


@pytest.mark.parametrize("policy", ["castor", "pollux"])
def test_at_a_fair_share_of_one_gpu_a_job_that_needs_more_is_still_worth_something(policy):
    limits = BatchLimits(128, 4096, 32, 32, accumulation=False)
    wide = replace(goodput_model(), limits=limits)
    assert [wide.goodput(1, k) > 0.0 for k in (1, 2, 3, 4)] == [False, False, False, True]
    for model, fewest in ((wide, 4), (SaturatingFrom(3), 3)):
        jobs = [
            job("wide", goodput=model, largest_gpus=8, weight=16.0),
            *(job(f"j{i}", goodput=LINEAR) for i in range(15)),
        ]
        view = snapshot(cluster(4, 4, 4, 4), jobs)
        objective = RankedWork(view, RankRule()) if policy == "castor" else Objective(view, jobs)
        assert objective.fair_gpus == 1
        assert objective.speedups([1, 1], [fewest - 1, fewest])[0] == pytest.approx([0.0, 1.0])
        assert model.goodput(1, create(policy).allocate(view).allocation["wide"].num_gpus) > 0.0


class SaturatingFrom:
    """Linear from so many GPUs on, nothing below."""

    def __init__(self, fewest: int) -> None:
        self.fewest = fewest

    def goodput(self, num_nodes: int, num_gpus: int, gpu_type: str = "") -> float:
        return 10.0 * num_gpus if num_gpus >= self.fewest else 0.0


def test_closed_nodes_count_for_the_fair_share_by_what_is_held_there():
    nodes = Cluster((Node("n0", 4), Node("n1", 4, schedulable=False), Node("n2", 4, schedulable=False)))
    jobs = [job("a", goodput=LINEAR), job("b", goodput=LINEAR)]
    for running, open_gpus in (({}, 4), ({"a": "n1:2"}, 6), ({"a": "n0:4", "b": "n1:4"}, 8)):
        view = snapshot(nodes, jobs, running)
        for objective in (RankedWork(view, RankRule()), Objective(view, jobs)):
            assert objective.fair_gpus == open_gpus // 2
        assert ready(view).num_gpus == open_gpus


class Odd:
    """A model that gives no number on some GPUs."""

    def __init__(self, value: float) -> None:
        self.value = value

    def goodput(self, num_nodes: int, num_gpus: int, gpu_type: str = "") -> float:
        return 100.0 * num_gpus if num_gpus in (1, 4) else self.value


@pytest.mark.parametrize("policy", ["castor", "pollux"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_goodput_that_is_no_number_counts_as_none(policy, value):
    jobs = [JobView("odd", 0.0, goodput=Odd(value), largest_gpus=8, remaining=1e6), job("b", goodput=LINEAR)]
    view = snapshot(cluster(4, 4), jobs)
    for objective in (RankedWork(view, RankRule()), Objective(view, jobs)):
        assert objective.speedups([1, 1], [1, 2])[0].tolist() == [0.25, 0.0]
    allocation = create(policy).allocate(view).allocation
    assert allocation["odd"].num_gpus in (1, 4)
    assert allocation["b"].num_gpus > 0
