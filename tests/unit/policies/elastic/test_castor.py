"""castor: ranks, doubts, floors and what it says of them."""

import pytest

from pollux.controller.explanations.explain import explain
from pollux.core import Allocation, Cluster, InvalidInput, JobView, Placement, Prior, Snapshot
from pollux.policies import create
from pollux.policies.search.accounts import Account, believed
from pollux.policies.search.ranks import RankedWork, RankRule
from pollux.policies.search.turns import Turns, turn_weights


class Curve:
    def goodput(self, num_nodes: int, num_gpus: int, gpu_type: str = "") -> float:
        return 100.0 * float(num_gpus**0.8)


def job(name: str, remaining: float | None, **more) -> JobView:
    return JobView(name, 0.0, remaining=remaining, goodput=Curve(), largest_gpus=4, resize_cost_seconds=3.0, **more)


def snapshot(*jobs: JobView, nodes: int = 2, now: float = 100.0, **more) -> Snapshot:
    return Snapshot(1, now, Cluster.uniform(nodes, 4), jobs, **more)


def test_the_shorter_job_gets_more():
    decision = create("castor").allocate(snapshot(job("long", 1e7), job("short", 1e5)))
    assert decision.allocation["short"].num_gpus == 8
    assert decision.reasons["long"].numbers["rank"] == 2.0


def test_without_ranks_equal_curves_share_alike():
    decision = create("castor", rank=False).allocate(snapshot(job("long", 1e7), job("short", 1e5)))
    assert decision.allocation["short"].num_gpus == decision.allocation["long"].num_gpus


def test_costs_by_rank_are_those_of_the_law():
    objective = RankedWork(snapshot(job("a", 3e5), job("b", 2e5), job("c", 1e5)), RankRule(curve=0.5))
    objective.prepare(objective.speedups([1], [1])[:, 0] * 0.0)
    expected = [((i**2 - (i - 1) ** 2) / 9) ** 0.5 for i in (1, 2, 3)]
    assert objective.rank_costs.tolist() == pytest.approx(expected)


def test_an_honest_word_is_taken_and_a_constant_one_is_not():
    assert believed(Account(promised=1000.0, worked=400.0), 600.0) == (600.0, False)
    left, stands_still = believed(Account(promised=10.0, worked=400.0), 10.0)
    assert stands_still
    assert left > 10.0


def test_who_is_wrong_by_a_factor_is_corrected():
    left, stands_still = believed(Account(promised=1000.0, worked=1800.0), 100.0)
    assert left == pytest.approx(200.0, rel=0.05)
    assert not stands_still


def test_a_job_of_a_known_kind_starts_on_many_gpus():
    known = Prior(Curve(), largest_gpus=8, num_observations=5, learned_at=0.0, total=1e6)
    fresh = JobView("fresh", 0.0, resize_cost_seconds=3.0)
    unknown = create("castor").allocate(snapshot(fresh, nodes=4)).allocation["fresh"].num_gpus
    kind = JobView("fresh", 0.0, resize_cost_seconds=3.0, kind="kind", prior=known)
    assert unknown == 4
    assert create("castor").allocate(snapshot(kind, nodes=4)).allocation["fresh"].num_gpus > 4


def test_the_loser_is_told_who_goes_first():
    jobs = (job("long", 1e7), job("short", 1e5))
    running = {"long": Placement((("node-0", 4), ("node-1", 4)))}
    decision = create("castor").allocate(snapshot(*jobs, running=running))
    text, _ = explain(decision.reasons["long"], "long")
    assert "short goes first" in text
    assert "left against" in text


@pytest.mark.parametrize("options", [{"power": 0.0}, {"curve": 1.0}, {"growth": 0}, {"fairness_bound": 0.5}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(InvalidInput):
        create("castor", **options)


def test_more_jobs_than_gpus_take_turns():
    policy = create("pollux")
    jobs = tuple(job(f"j{i}", None) for i in range(3))
    at = 0.0
    memory: object = None
    running: Allocation = {}
    held: set[str] = set()
    for step in range(40):
        decision = policy.allocate(Snapshot(step, at, Cluster.uniform(1, 2), jobs, running, memory=memory))
        at, running, memory = at + 10.0, decision.allocation, decision.memory
        if step >= 20:
            held |= set(running)
    assert held == {"j0", "j1", "j2"}


def test_turns_weigh_nothing_while_there_is_room():
    assert turn_weights(snapshot(job("a", 1.0), job("b", 1.0)), Turns()) is None
