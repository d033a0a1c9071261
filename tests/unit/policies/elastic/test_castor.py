"""castor: ranks, doubts, floors and what it says of them."""

from dataclasses import replace

import numpy as np
import pytest

from pollux.controller import ResizeJob, StartJob
from pollux.controller.explanations.explain import explain
from pollux.core import Allocation, Cluster, InvalidInput, JobLimits, JobView, Placement, Prior, Snapshot
from pollux.goodput import BatchLimits, CorrectedThroughput
from pollux.policies import create
from pollux.policies.search.accounts import Account, Accounts, believed
from pollux.policies.search.ranks import RankedWork, RankRule
from pollux.policies.search.solution import Solution, SolverRules
from pollux.policies.search.turns import Turns, turn_weights
from pollux.sim.simulation.simulation import SimulationSettings, simulate
from pollux.sim.workloads.workload import Workload, WorkloadJob
from pollux.testing import FakeApplication, goodput_model


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


def test_what_measurements_correct_counts_unless_switched_off():
    plain = goodput_model()
    slow = replace(plain, throughput=CorrectedThroughput(plain.throughput, ((1, 4, 0.9),)))
    views = [JobView("a", 0.0, goodput=model, largest_gpus=4, remaining=1e6) for model in (plain, slow)]
    for view, switch, expected in (
        (views[0], True, 1.0),
        (views[1], True, np.exp(-0.9)),
        (views[1], False, 1.0),
    ):
        objective = RankedWork(snapshot(view, nodes=1), RankRule(corrected=switch))
        found = objective.fair_goodputs[0] / plain.goodput(1, 4)
        assert found == pytest.approx(expected)


def test_who_keeps_crashing_gets_its_minimum_unless_switched_off():
    crashing = replace(job("a", 1e6), crashes=2)
    assert create("castor").allocate(snapshot(crashing)).allocation["a"].num_gpus == 1
    assert create("castor", crash_cap=False).allocate(snapshot(crashing)).allocation["a"].num_gpus == 8


def test_nobody_grows_into_idle_gpus_when_that_is_switched_off():
    held = {"a": Placement((("node-0", 2),))}
    world = snapshot(job("a", 1e7), nodes=1, running=held)
    for fills in (True, False):
        rules = SolverRules(fill_idle=fills)
        solution = Solution(world, RankedWork(world, RankRule()), rules)
        solution.board.put(0, ((0, 2),))
        solution._use_idle()
        assert solution.board.shares[0] == (((0, 4),) if fills else ((0, 2),))


def test_a_first_job_of_an_unknown_kind_is_measured_at_several_sizes_in_its_first_minute():
    """On an empty cluster nothing idles for want of a model."""
    large = FakeApplication("large", BatchLimits(256, 65536, 8, 512), progress=(1e5,), sync_seconds=0.01)
    workload = Workload("one", (WorkloadJob("large-0", 0.0, "large", 1, 256),))
    settings = SimulationSettings(16, 4, trigger="events", resize_seconds=3.0)
    reported: dict[int, float] = {}

    def listen(event, commands):
        for command in commands:
            if isinstance(command, StartJob | ResizeJob):
                reported[command.placement.num_gpus] = event.at

    simulate(workload, create("castor"), {"large": large}, settings, record=listen)
    assert list(reported) == [4, 16, 64]
    assert reported[64] < 60.0


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
    had = dict.fromkeys(("j0", "j1", "j2"), 0.0)
    memory: object = None
    running: Allocation = {}
    held: set[str] = set()
    for step in range(60):
        jobs = tuple(replace(job(name, None), attained_gpu_seconds=seconds) for name, seconds in had.items())
        world = Snapshot(step, 10.0 * step, Cluster.uniform(1, 2), jobs, running, memory=memory)
        decision = policy.allocate(world)
        running, memory = decision.allocation, decision.memory
        for name, placement in running.items():
            had[name] += 10.0 * placement.num_gpus
        if step >= 30:
            held |= set(running)
    assert held == {"j0", "j1", "j2"}
    assert max(had.values()) < 1.5 * min(had.values())


def test_turns_weigh_nothing_while_there_is_room():
    assert turn_weights(snapshot(job("a", 1.0), job("b", 1.0)), Turns()) is None


def test_a_job_that_may_have_one_gpu_is_not_kept_out_by_what_it_costs_others_to_move():
    """On a cluster that few share, one GPU is all that it can use, not a small part of its fair share."""
    long = [replace(job(f"long-{i}", 1e7), resize_cost_seconds=30.0) for i in range(2)]
    small = JobView("small", 100.0, JobLimits(max_gpus=1), resize_cost_seconds=30.0)
    running = {f"long-{i}": Placement(((f"node-{2 * i}", 4), (f"node-{2 * i + 1}", 4))) for i in range(2)}
    decision = create("castor").allocate(snapshot(*long, small, nodes=4, running=running))
    assert decision.allocation["small"].num_gpus == 1


@pytest.mark.parametrize("cost", [0.3, 3.0, 30.0, 300.0])
def test_nobody_waits_for_long_at_any_load_and_resize_cost(cost):
    """A job of unknown size among long ones that hold everything runs within a few resize costs, or a few seconds."""
    jobs = [replace(job(f"long-{i}", 1e8), resize_cost_seconds=cost) for i in range(12)]
    newcomer = JobView("new", 100.0, JobLimits(max_gpus=4), resize_cost_seconds=cost)
    policy, memory = create("castor"), None
    running: Allocation = policy.allocate(snapshot(*jobs)).allocation
    assert sum(place.num_gpus for place in running.values()) == 8
    for waited in (0.0, 1.0, 2.0, 3.0):
        at = snapshot(*jobs, newcomer, now=100.0 + waited * max(cost, 1.0), running=running, memory=memory)
        decision = policy.allocate(at)
        memory, running = decision.memory, decision.allocation
        if "new" in running:
            return
    raise AssertionError(running)


def test_in_turns_who_has_run_for_long_keeps_what_it_has_for_longer_and_waits_for_longer():
    world = contended((9e4, 1e5), (9e4, 2e3), (90.0, 0.0))
    jobs = (*world.jobs, replace(world.jobs[0], id="old"), replace(world.jobs[1], id="young"))
    turns = Turns({"j0": (True, 0.0), "j1": (True, 0.0), "old": (False, 0.0), "young": (False, 0.0)})
    weights = turn_weights(replace(world, jobs=jobs), turns)
    assert weights is not None
    assert weights[0] > 2.0 > 1.0 > weights[1]
    assert weights[3] < weights[4] == 3.0


def late(age: float, received: float, **more) -> float:
    view = JobView("a", 0.0, goodput=None, resize_cost_seconds=10.0, **more)
    world = snapshot(view, job("b", 1e7), now=age, memory=Accounts(age, {"a": Account(received)}))
    objective = RankedWork(world, RankRule())
    objective.prepare(np.zeros(2))
    return float(objective.lateness[0])


def test_who_may_be_short_is_late_long_before_a_job_of_middling_size():
    assert late(10.0, 0.0) == pytest.approx(2.0)
    assert late(40.0, 0.0) == pytest.approx(5.0)
    assert late(400.0, 400.0) == pytest.approx(1.0)
    assert late(1200.0, 400.0) == pytest.approx(2.0)


def wavering(rates: list[float]) -> float:
    account = Account()
    for rate in rates:
        account = account.after(1.0, rate, 1.0, job("a", 1e5))
    return account.waver


def test_a_prediction_that_changes_wavers_and_one_that_stays_does_not():
    assert wavering([100.0] * 20) == 0.0
    up_and_down = wavering([100.0, 110.0] * 20)
    assert 0.8 * np.log(1.1) < up_and_down <= np.log(1.1)
    assert wavering([100.0, 110.0] * 20 + [110.0] * 20) == up_and_down
    assert wavering([100.0 * 1.1**i for i in range(20)]) == pytest.approx(0.0, abs=1e-9)


def test_where_it_runs_elsewhere_another_prediction_is_no_change():
    account = Account().after(1.0, 100.0, 1.0, job("a", 1e5)).moved(5.0)
    assert account.after(1.0, 300.0, 1.0, job("a", 1e5)).waver == 0.0
    assert account.paused_until == 5.0


@pytest.mark.parametrize("steady", [True, False])
def test_a_job_is_moved_only_for_more_than_its_predictions_waver_by(steady):
    one = JobView("a", 0.0, remaining=1e7, goodput=Curve(), largest_gpus=8, resize_cost_seconds=1.0)
    world = snapshot(one, running={"a": Placement((("node-0", 3),))}, nodes=1)
    for waver, moves in ((0.0, True), (0.5, not steady)):
        account = Account(promised=1e7, foreseen=100.0 * 3**0.8, change=waver)
        given = replace(world, memory=Accounts(100.0, {"a": account}))
        decision = create("castor", steady=steady).allocate(given)
        assert (decision.allocation["a"].num_gpus == 4) is moves


def contended(*ages_and_held: tuple[float, float]) -> Snapshot:
    jobs = tuple(
        replace(job(f"j{i}", None), submitted_at=100.0 - age, attained_gpu_seconds=had)
        for i, (age, had) in enumerate(ages_and_held)
    )
    running = {view.id: Placement((("node-0", 1),)) for view in jobs if view.attained_gpu_seconds}
    return Snapshot(1, 100.0, Cluster.uniform(1, len(running)), jobs, running)


def test_in_turns_who_never_ran_goes_first_and_who_had_most_makes_room():
    world = contended((90.0, 4000.0), (80.0, 50.0), (0.0, 0.0))
    turns = Turns({"j0": (True, 0.0), "j1": (True, 20.0)})
    weights = turn_weights(world, turns)
    assert weights is not None
    assert weights[2] == 5.0
    assert weights[0] < 3.0 < weights[1]
    decision = create("pollux").allocate(replace(world, memory=turns))
    assert set(decision.allocation) == {"j1", "j2"}


def test_who_fell_behind_is_owed_its_share_in_a_sentence():
    views = (job("long", 1e7), replace(job("slow", 2e7), submitted_at=-1e6))
    running = {"long": Placement((("node-0", 4), ("node-1", 4)))}
    decision = create("castor").allocate(snapshot(*views, running=running))
    for name, words in (
        ("slow", "it has a right to its fair share: so far it is expected to take"),
        ("long", "slow goes first: it is"),
    ):
        text, _ = explain(decision.reasons[name], name)
        assert words in text
        assert "times as long as on" in text
        assert "lateness" not in text
