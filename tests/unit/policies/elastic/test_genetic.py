"""The published genetic search: its sorting, its operators, its repair, and the decisions it leads to.

What every policy must do is tested by the conformance suite. All budgets here are tiny: it stays quick.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.core import Cluster, Decision, InvalidInput, JobView, Node, Placement, Queue, Snapshot, check
from pollux.policies import create
from pollux.policies.elastic import genetic
from pollux.policies.elastic.genetic import PolluxGenetic
from pollux.policies.search.nsga2 import Found, Space, crowding_distances, non_dominated_ranks, search
from pollux.policies.search.objective import Objective
from pollux.testing.builders import SaturatingGoodput, after, cluster, goodput_model, job, place, snapshot
from pollux.testing.strategies import plain_snapshots, snapshots

RNG = np.random.default_rng


def quick(**options: Any) -> PolluxGenetic:
    return PolluxGenetic(**{"population": 12, "generations": 10, **options})


def known(job_id: str, submitted_at: float = 0.0, **fields: Any) -> JobView:
    fields = {"goodput": goodput_model(), "largest_gpus": 4, "attained_gpu_seconds": 100.0, **fields}
    return job(job_id, submitted_at, **fields)


def space(num_jobs: int = 3, num_nodes: int = 2, gpus: int = 4, **fields: Any) -> Space:
    """Jobs without limits on equal nodes, all of them waiting."""

    def ints(value: Any, *shape: int) -> Any:
        return np.broadcast_to(np.asarray(value, dtype=np.int32), shape).copy()

    given_fields = {
        "current": 0,
        "most": gpus,
        "lost": 0,
        "min_gpus": 1,
        "max_gpus": 64,
        "max_nodes": 16,
        "queue": -1,
        "node_type": 0,
        "one_type": False,
        "shared": True,
        "needs": np.zeros((num_jobs, 0)),
        "stock": np.zeros((num_nodes, 0)),
        "quota": [],
        **fields,
    }
    for name in ("current", "most"):
        given_fields[name] = ints(given_fields[name], num_jobs, num_nodes)
    for name in ("lost", "min_gpus", "max_gpus", "max_nodes", "queue"):
        given_fields[name] = ints(given_fields[name], num_jobs)
    given_fields["gpus"] = ints(gpus, num_nodes)
    given_fields["node_type"] = ints(given_fields["node_type"], num_nodes)
    given_fields["quota"] = np.array(given_fields["quota"], dtype=np.int32)
    given_fields["one_type"] = np.broadcast_to(np.array(given_fields["one_type"]), num_jobs)
    given_fields["shared"] = np.broadcast_to(np.array(given_fields["shared"]), num_nodes)
    return Space(**given_fields)


def states(*matrices: Any) -> Any:
    return np.array(matrices, dtype=np.int32)


def repaired(where: Space, *matrices: Any, seed: int = 0) -> Any:
    return where.repair(states(*matrices), RNG(seed)).tolist()


# Sorting


def ranks_by_definition(values: Any) -> list[int]:
    """Peel off the points that no other one dominates, again and again."""
    ranks, left, front = [-1] * len(values), set(range(len(values))), 0
    while left:
        best = {
            i for i in left if not any((values[k] >= values[i]).all() and (values[k] > values[i]).any() for k in left)
        }
        for i in best:
            ranks[i] = front
        left -= best
        front += 1
    return ranks


points = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=25)


@given(points)
def test_ranks_are_those_of_the_definition(some):
    values = np.array(some, dtype=float)
    assert non_dominated_ranks(values).tolist() == ranks_by_definition(values)


@given(points)
def test_ends_of_every_front_are_least_crowded(some):
    values = np.array(some, dtype=float)
    ranks = non_dominated_ranks(values)
    distances = crowding_distances(values, ranks)
    assert (distances >= 0).all()
    for front in set(ranks.tolist()):
        members = ranks == front
        for objective in (0, 1):
            ends = values[members, objective].min(), values[members, objective].max()
            for end in ends:
                assert np.isinf(distances[members][values[members, objective] == end]).any()


def test_crowding_is_the_gap_between_the_neighbours():
    values = np.array([[0, 10], [1, 6], [4, 5], [10, 0]], dtype=float)
    distances = crowding_distances(values, np.zeros(4, dtype=np.int64))
    assert distances.tolist() == pytest.approx([np.inf, 0.4 + 0.5, 0.9 + 0.6, np.inf])


def test_all_but_one_of_equal_points_are_fully_crowded():
    values = np.array([[0, 4], [1, 3], [1, 3], [1, 3], [4, 0]], dtype=float)
    distances = crowding_distances(values, np.zeros(5, dtype=np.int64))
    assert sorted(distances[1:4].tolist()) == pytest.approx([0.0, 0.0, 2.0])


def test_survivors_are_the_first_fronts_and_the_ends_of_the_cut_one():
    values = np.array([[0, 1], [5, 5], [3, 1], [2, 2], [1, 3], [2.1, 1.9]], dtype=float)
    found = Found.of(np.arange(6, dtype=np.int32).reshape(6, 1, 1), values)
    assert found.best == 1
    assert set(found.survivors(3).states.ravel().tolist()) == {1, 2, 4}
    assert len(found.survivors(100).states) == 6


def test_tournaments_are_won_by_the_better_front_then_the_less_crowded():
    values = np.array([[3, 3], [1, 1], [2, 2]], dtype=float)
    found = Found.of(np.zeros((3, 1, 1), dtype=np.int32), values)
    winners = found.tournament(300, RNG(0)).tolist()
    # Everybody fights equally often and the worst beats nobody but itself.
    assert winners.count(0) > winners.count(2) > winners.count(1)
    crowded = Found(np.zeros((2, 1, 1), np.int32), values[:2], np.zeros(2, np.int64), np.array([0.1, 2.0]))
    assert crowded.tournament(1, RNG(0)).tolist() == [1]


# Operators


def test_children_swap_the_rows_before_one_cut():
    one, other = np.full((6, 2), 1), np.full((6, 2), 2)
    parents = np.array([[one] * 20, [other] * 20], dtype=np.int32)
    children = space(6).crossover(parents, RNG(0))
    assert children.shape == (40, 6, 2)
    first, second = children[:20], children[20:]
    assert (first + second == 3).all(), "what one child has not, the other has"
    assert (np.diff(first[:, :, 0], axis=1) <= 0).all(), "one cut"
    assert len({child.tobytes() for child in first}) > 3, "anywhere"


def test_mutation_stays_between_nothing_and_the_most():
    where = space(5, 3, most=3, current=[[3, 0, 0], [0, 2, 1], [0, 0, 0], [1, 1, 1], [0, 0, 2]])
    mutated = np.tile(where.current, (200, 1, 1))
    where.mutate(mutated, RNG(1))
    assert mutated.min() == 0
    assert mutated.max() == 3
    assert (mutated != where.current).any(axis=(1, 2)).mean() > 0.5


def test_mutation_gives_to_jobs_only_where_gpus_are_free():
    where = space(2, 2, current=[[4, 0], [4, 0]])
    mutated = np.tile(where.current, (300, 1, 1))
    where.mutate(mutated, RNG(2))
    overfull = mutated[:, :, 0]
    assert set(overfull.ravel().tolist()) == {0, 4}, "cleared now and then, never anything else"
    assert 0 < (overfull == 0).mean() < 0.05
    assert set(mutated[:, :, 1].ravel().tolist()) == {0, 1, 2, 3, 4}


def test_mutation_brings_rows_back_to_the_current_allocation():
    where = space(1, 1, most=0, gpus=4, current=[[2]])
    mutated = np.zeros((1000, 1, 1), dtype=np.int32)
    where.mutate(mutated, RNG(3))
    assert 0.07 < (mutated == 2).mean() < 0.13


# Repair


def test_second_distributed_job_loses_the_shared_node():
    matrix = [[1, 1, 0], [0, 1, 1], [0, 1, 0]]
    assert repaired(space(3, 3), matrix) == [[[1, 1, 0], [0, 0, 1], [0, 1, 0]]]
    assert repaired(space(3, 3, shared=False), matrix) == [matrix]
    assert repaired(space(3, 3, shared=[True, False, True]), matrix) == [matrix]


def test_jobs_are_cut_to_their_caps_on_random_nodes():
    where = space(1, 4, max_gpus=5)
    cut = where.repair(np.full((200, 1, 4), 2, dtype=np.int32), RNG(0))
    assert (cut.sum(axis=2) == 5).all()
    assert ((cut == 0).mean(axis=0) > 0.1).all(), "every node is given up at times"
    few = space(1, 4, max_nodes=2).repair(np.full((200, 1, 4), 2, dtype=np.int32), RNG(0))
    assert (np.count_nonzero(few, axis=2) == 2).all()


def test_nodes_serve_jobs_in_order():
    assert repaired(space(3, 1), [[3], [3], [3]]) == [[[3], [1], [0]]]
    assert repaired(space(3, 1, min_gpus=[1, 2, 1]), [[3], [3], [3]]) == [[[3], [0], [0]]]


def test_quotas_serve_jobs_in_order():
    where = space(3, 2, queue=[0, 1, 0], quota=[3, 100])
    assert repaired(where, [[2, 0], [0, 4], [2, 0]]) == [[[2, 0], [0, 4], [1, 0]]]


def test_cpus_serve_jobs_in_order():
    where = space(3, 1, needs=np.array([[2.0], [0.0], [0.5]]), stock=np.array([[5.0]]), gpus=8)
    assert repaired(where, [[3], [2], [3]]) == [[[2], [2], [2]]]


def test_jobs_keep_the_gpu_type_of_which_they_have_most():
    where = space(2, 3, node_type=[0, 1, 1], one_type=[True, False], shared=False)
    assert repaired(where, [[2, 2, 1], [1, 1, 1]]) == [[[0, 2, 1], [1, 1, 1]]]


def test_pinned_rows_come_first_and_never_change():
    where = space(2, 1, current=[[3], [0]], num_pinned=1)
    assert repaired(where, [[0], [4]], [[4], [4]]) == [[[3], [1]], [[3], [1]]]


def test_jobs_that_may_not_be_stopped_go_home_together():
    where = space(3, 1, current=[[2], [2], [0]], num_kept=2)
    assert repaired(where, [[4], [2], [1]]) == [[[2], [2], [0]]], "the second one was left with nothing"
    assert repaired(where, [[3], [2], [1]]) == [[[3], [1], [0]]], "resizing is allowed"


def test_home_is_cut_to_new_limits_where_that_leaves_enough():
    assert space(1, 1, current=[[4]], max_gpus=2, num_kept=1).home.tolist() == [[2]]
    assert space(1, 1, current=[[2]], min_gpus=3, num_kept=1).home.tolist() == [[2]]
    stuck = space(2, 1, gpus=3, current=[[3], [2]], min_gpus=[1, 2], num_kept=2)
    assert stuck.home.tolist() == [[1], [2]], "who cannot shrink goes before who can"


matrices = st.integers(0, 2**32 - 1).map(lambda seed: RNG(seed).integers(0, 6, (4, 5, 4)).astype(np.int32))


@given(matrices, st.integers(0, 2**32 - 1), st.booleans())
def test_repair_leaves_nothing_illegal_and_legal_matrices_alone(some, seed, apart):
    rng = RNG(seed)
    where = space(
        5,
        4,
        most=rng.integers(0, 5, (5, 4)),
        min_gpus=rng.integers(1, 3, 5),
        max_gpus=rng.integers(2, 9, 5),
        max_nodes=rng.integers(1, 4, 5),
        node_type=rng.integers(0, 2, 4),
        one_type=rng.random(5) < 0.5,
        shared=apart,
        needs=rng.choice([0.0, 1.0, 1.5], (5, 1)),
        stock=rng.choice([2.0, 5.0, np.inf], (4, 1)),
        queue=rng.integers(-1, 2, 5),
        quota=rng.integers(0, 9, 2),
    )
    legal = where.repair(some, rng)
    assert (legal >= 0).all()
    assert (legal <= where.most).all()
    assert (legal.sum(axis=1) <= where.gpus).all()
    totals, spans = legal.sum(axis=2), np.count_nonzero(legal, axis=2)
    assert ((totals == 0) | (totals >= where.min_gpus)).all()
    assert (totals <= where.max_gpus).all()
    assert (spans <= where.max_nodes).all()
    assert (np.einsum("pjn,jr->pnr", legal, where.needs) <= where.stock + 1e-6).all()
    for q, quota in enumerate(where.quota):
        assert (totals[:, where.queue == q].sum(axis=1) <= quota).all()
    single = legal[:, where.one_type]
    assert not ((single * where.node_type).any(axis=2) & (single * (1 - where.node_type)).any(axis=2)).any()
    if apart:
        assert (((legal > 0) & (spans > 1)[:, :, None]).sum(axis=1) <= 1).all()
    assert (where.repair(legal.copy(), rng) == legal).all()


# The search


def most_gpus(some: Any) -> Any:
    """Objectives for tests: GPUs in use, and few jobs that use them."""
    return np.column_stack((some.sum(axis=(1, 2)), -np.count_nonzero(some.any(axis=2), axis=1))).astype(float)


def test_search_improves_and_never_loses_the_best():
    where, start = space(6, 4), np.zeros((1, 6, 4), dtype=np.int32)
    best = [
        search(where, most_gpus, start, 10, generations, RNG(0)).values[:, 0].max()
        for generations in (0, 1, 2, 4, 8, 16)
    ]
    assert best[0] == 0
    assert best == sorted(best), "the same random numbers, for longer"
    assert best[-1] == 16, "all GPUs are in use"


def test_populations_hold_no_duplicates_and_no_more_than_asked():
    found = search(space(3, 2), most_gpus, np.zeros((5, 3, 2), dtype=np.int32), 20, 5, RNG(0))
    assert len({state.tobytes() for state in found.states}) == len(found.states) == 20


def test_search_ends_where_there_is_nothing_else():
    found = search(space(1, 1, most=0), most_gpus, np.zeros((1, 1, 1), dtype=np.int32), 10, 3, RNG(0))
    assert found.states.tolist() == [[[0]]]


# Decisions


def fitness(situation: Snapshot, decision: Decision) -> float:
    """The first objective, computed job by job."""
    objective = Objective(situation, situation.jobs)
    speedups, factors = np.zeros(len(situation.jobs)), np.ones(len(situation.jobs))
    for j, view in enumerate(situation.jobs):
        new = decision.allocation.get(view.id, Placement())
        if new:
            speedups[j] = objective.speedups([new.num_nodes], [new.num_gpus])[j, 0]
        if new != situation.placement(view.id):
            factors[j] = objective.restart_factors[j]
    return objective.fitness(objective.utilities(speedups, factors))


def test_it_is_registered_with_the_published_settings():
    policy = create("pollux-genetic")
    assert isinstance(policy, PolluxGenetic)
    assert policy.name == "pollux-genetic"
    assert policy.batch == "adaptive"
    assert policy.needs == {"goodput"}
    assert (policy.fairness, policy.avoid_interference) == (-1.0, True)
    assert (policy.population, policy.generations) == (100, 100)


@pytest.mark.parametrize("options", [{"population": 0}, {"generations": -1}], ids=str)
def test_impossible_budgets_are_refused(options):
    with pytest.raises(InvalidInput, match=next(iter(options))):
        PolluxGenetic(**options)


@settings(max_examples=40)
@given(snapshots(), st.sampled_from([0, 1, 3]), st.sampled_from([-1.0, 0.0, 1.0]))
def test_decisions_are_legal_whatever_happened(situation, generations, fairness):
    policy = PolluxGenetic(fairness=fairness, population=6, generations=generations)
    decision = policy.allocate(situation)
    assert check(situation, decision) == ()
    assert policy.allocate(situation) == decision
    if situation.jobs and situation.cluster.num_gpus:
        assert decision.memory is not None, "the answer of the search itself was legal"


@settings(max_examples=25)
@given(plain_snapshots())
def test_decisions_are_worth_no_less_than_staying(situation):
    staying = Decision(situation.running)
    decision = quick().allocate(situation)
    assert fitness(situation, decision) >= fitness(situation, staying) * (1 - 1e-12)


def test_idle_gpus_are_found_and_the_doubling_rule_holds():
    linear = SaturatingGoodput()
    jobs = [
        known("small", goodput=linear, largest_gpus=1),
        known("large", 1.0, goodput=linear, largest_gpus=4),
        known("new", 2.0, goodput=None, largest_gpus=0),
    ]
    situation = snapshot(cluster(4, 4, 4, 4), jobs, {"small": "n0:1", "large": "n1:4"})
    decision = quick(generations=30).allocate(situation)
    counts = {job_id: placement.num_gpus for job_id, placement in decision.allocation.items()}
    assert counts == {"small": 2, "large": 8, "new": 1}


def test_maximum_bounds_the_doubling_rule_and_minimum_lifts_it():
    jobs = [known("most", largest_gpus=4, max_gpus=3), known("least", 1.0, largest_gpus=0, min_gpus=4)]
    decision = quick(generations=30).allocate(snapshot(cluster(4, 4), jobs))
    assert {key: placement.num_gpus for key, placement in decision.allocation.items()} == {
        "most": 3,
        "least": 4,
    }


def distributed_per_node(decision: Decision) -> int:
    spread = [placement for placement in decision.allocation.values() if placement.is_distributed]
    nodes = [node for placement in spread for node, _ in placement.shares]
    return max((nodes.count(node) for node in nodes), default=0)


@pytest.mark.parametrize(
    ("options", "node", "most"),
    [({}, {}, 1), ({"avoid_interference": False}, {}, 2), ({}, {"isolated_network": True}, 2)],
    ids=["avoided", "allowed", "isolated"],
)
def test_distributed_jobs_share_nodes_only_where_that_is_allowed(options, node, most):
    linear = SaturatingGoodput()
    jobs = [known(f"j{i}", goodput=linear, largest_gpus=2, min_gpus=3, max_gpus=3) for i in range(2)]
    situation = snapshot(cluster(2, 2, 2, **node), jobs)
    decision = quick(generations=30, **options).allocate(situation)
    assert distributed_per_node(decision) == most
    assert len(decision.allocation) == most


def test_unchanged_jobs_keep_the_placement_they_have():
    jobs = [known("spread", max_gpus=4), known("other", 1.0, max_gpus=2)]
    situation = snapshot(cluster(2, 2, 2), jobs, {"spread": "n2:2 n0:2", "other": "n1:2"})
    decision = quick().allocate(situation)
    assert decision.allocation["spread"] is situation.running["spread"]
    assert decision.allocation["other"] is situation.running["other"]


def test_a_job_that_has_restarted_too_often_is_not_moved():
    frozen = known("frozen", 500.0, num_restarts=10, largest_gpus=8)
    situation = snapshot(cluster(4, 4), [frozen], {"frozen": "n0:1"}, now=600.0)
    assert quick(generations=30).allocate(situation).allocation == situation.running
    free = replace(situation, jobs=(replace(frozen, num_restarts=0),))
    assert quick(generations=30).allocate(free).allocation["frozen"].num_gpus > 1


def test_the_faster_gpu_type_is_preferred_and_types_are_not_mixed():
    model = SaturatingGoodput(knee=3.0, across_nodes=0.5, speed={"fast": 4.0})
    nodes = Cluster.of([Node("s", 4, "slow"), Node("f", 4, "fast")])
    decision = quick(generations=30).allocate(snapshot(nodes, [known("j", goodput=model)]))
    assert decision.allocation["j"] == place("f:4")
    mixed = known("j", goodput=SaturatingGoodput(speed={"fast": 1.1}), mixed_types=True)
    assert quick(generations=30).allocate(snapshot(nodes, [mixed])).allocation["j"] == place("s:4 f:4")


def test_seeds_and_revisions_change_the_search_and_nothing_else_does():
    jobs = [known(f"j{i}", float(i)) for i in range(6)]
    situation = snapshot(cluster(4, 4, 4), jobs)
    policy = quick(generations=2)
    first = policy.allocate(situation)
    assert policy.allocate(replace(situation)) == first
    others = [replace(situation, seed=seed) for seed in range(1, 5)]
    others += [replace(situation, revision=revision) for revision in range(2, 6)]
    assert any(policy.allocate(other) != first for other in others)
    policy.allocate(replace(situation, seed=-1))


# Memory


def test_the_next_decision_starts_from_the_last_front():
    jobs = [known(f"j{i}", float(i)) for i in range(6)]
    situation = snapshot(cluster(4, 4, 4), jobs)
    decision = quick().allocate(situation)
    front = decision.memory
    assert isinstance(front, genetic._Front)
    assert front.states.shape[1:] == (6, 3)
    again = replace(situation, memory=front)
    assert fitness(again, PolluxGenetic(generations=0).allocate(again)) >= fitness(situation, decision)


def test_memory_is_adapted_to_the_jobs_and_nodes_that_are_there():
    front = genetic._Front(("a", "b"), ("n0", "n1"), states([[1, 2], [3, 4]], [[5, 6], [7, 8]]))
    adapted = front.adapted(["c", "b"], ["n1", "n2", "n0"])
    assert adapted.tolist() == [[[0, 0, 0], [4, 0, 3]], [[0, 0, 0], [8, 0, 7]]]
    assert front.adapted([], ["n0"]).shape == (2, 0, 1)


def test_jobs_and_nodes_may_come_and_go_between_decisions():
    jobs = [known(f"j{i}", float(i)) for i in range(5)]
    policy = quick()
    situation = snapshot(cluster(4, 4, 4), jobs)
    for change in range(6):
        decision = policy.allocate(situation)
        assert check(situation, decision) == ()
        situation = after(situation, decision, 60.0)
        kept = [view for view in situation.jobs if view.id != f"j{change}"]
        nodes = cluster(*[4, 2, 4, 8][: 2 + change % 3])
        running = {
            view.id: placement
            for view in kept
            if (placement := situation.placement(view.id))
            and all(nodes.by_id.get(node) == situation.cluster.by_id[node] for node, _ in placement.shares)
        }
        views = (*kept, known(f"n{change}", situation.now, largest_gpus=0))
        situation = replace(situation, cluster=nodes, jobs=views, running=running)


@pytest.mark.parametrize(
    "memory",
    [
        "text",
        object(),
        (("j0",), ("n0",), [[1]]),
        genetic._Front(("j0",), ("n0",), states([[1, 2], [3, 4]])),
        genetic._Front(("gone",), ("lost",), states([[7]])),
        genetic._Front(("j0",), ("n0", "n1"), states([[-3, 9]], [[10**6, -(10**9)]])),
        genetic._Front((), (), np.zeros((0, 0, 0), dtype=np.int32)),
    ],
    ids=["text", "object", "tuple", "shape", "strangers", "numbers", "empty"],
)
def test_garbage_in_memory_does_no_harm(memory):
    situation = snapshot(cluster(4, 4), [known("j0"), known("j1", 1.0)], {"j0": "n0:2"}, memory=memory)
    decision = quick().allocate(situation)
    assert check(situation, decision) == ()
    assert fitness(situation, decision) >= fitness(situation, Decision(situation.running))


# Who may not be moved or stopped


def test_pinned_stay_and_steady_jobs_are_resized_at_most():
    jobs = [
        known("pinned", 500.0, pinned=True, attained_gpu_seconds=1e6),
        known("steady", 500.0, preemptible=False, attained_gpu_seconds=1e6),
        *(known(f"j{i}", float(i)) for i in range(8)),
    ]
    situation = snapshot(cluster(4, 4), jobs, {"pinned": "n1:1 n0:1", "steady": "n0:3"})
    for seed in range(5):
        decision = quick().allocate(replace(situation, seed=seed))
        assert check(situation, decision) == ()
        assert decision.allocation["pinned"] == place("n1:1 n0:1")
        assert decision.allocation["steady"].num_gpus >= 1


def test_placements_on_nodes_that_are_gone_are_not_kept():
    jobs = [known("j"), known("steady", 1.0, preemptible=False, queue="q"), known("q", 2.0, queue="q")]
    running = {"j": "gone:2 n0:1", "steady": "gone:1 n1:1"}
    situation = snapshot(cluster(4, 4), jobs, running, queues=[Queue("q", gpu_quota=2)])
    decision = quick(generations=20).allocate(situation)
    assert check(situation, decision) == ()
    assert decision.allocation["j"].on("gone") == 0
    assert decision.allocation["steady"] == situation.running["steady"], "it may not be stopped"
    assert "q" not in decision.allocation, "what is held on lost nodes counts for the quota"


def test_an_illegal_answer_of_the_search_becomes_a_legal_decision(monkeypatch):
    def overfull(where, evaluate, start, *rest):
        return Found.of(start + np.int32(3), evaluate(start))

    monkeypatch.setattr(genetic, "search", overfull)
    jobs = [
        known("runs"),
        known("waits", 1.0),
        known("pinned", 2.0, pinned=True),
        known("shrunk", 3.0, max_gpus=1),
    ]
    situation = snapshot(cluster(4, 4), jobs, {"runs": "n0:2", "pinned": "n1:1", "shrunk": "n1:2"})
    decision = quick().allocate(situation)
    assert check(situation, decision) == ()
    assert decision.allocation == {"runs": place("n0:2"), "pinned": place("n1:1")}


def test_clusters_and_requests_may_be_large():
    jobs = [
        known("wide", goodput=SaturatingGoodput(), max_nodes=200, max_gpus=150),
        known("huge", 1.0, min_gpus=10**12, max_gpus=10**12),
    ]
    situation = snapshot(cluster(*[1] * 150), jobs, {"wide": " ".join(f"n{i}:1" for i in range(140))})
    decision = quick(generations=2).allocate(situation)
    assert check(situation, decision) == ()
    assert decision.allocation["wide"].num_gpus >= 140


def test_nothing_to_do_is_no_problem():
    assert quick().allocate(snapshot(cluster(4), [])).allocation == {}
    assert quick().allocate(snapshot(Cluster.of(()), [known("j")])).allocation == {}
    assert quick().allocate(snapshot(cluster(0, 0), [known("j")])).allocation == {}


def test_mating_gives_up_in_small_spaces():
    decision = quick(population=50).allocate(snapshot(cluster(2), [known("j")]))
    assert decision.allocation["j"] == place("n0:2")
