"""The knapsack: exact where it is small, near it where it is large, and never over a limit."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.policies.search import knapsack
from pollux.policies.search.knapsack import Options, choose


def random_options(seed: int, jobs: int, width: int, pools: int = 1, queues: int = 0, share: float = 0.4) -> Options:
    rng = np.random.default_rng(seed)
    gpus = np.sort(rng.integers(1, 9, (jobs, width)), axis=1)
    gpus[:, 0] = 0
    cost = np.sort(rng.uniform(0.0, 10.0, (jobs, width)), axis=1)[:, ::-1].copy()
    cost[:, 0] = 1000.0
    pool = rng.integers(0, pools, (jobs, width))
    queue = rng.integers(-1, queues, jobs) if queues else np.full(jobs, -1)
    capacity = np.full(pools, max(int(share * gpus.max(axis=1).sum() / pools), 1))
    quota = np.full(queues, max(int(share * capacity.sum() / max(queues, 1)), 1))
    return Options(cost, gpus, pool, queue, capacity, quota[:queues])


def total(options: Options, chosen) -> float:
    return float(options.cost[np.arange(len(chosen)), chosen].sum())


def legal(options: Options, chosen) -> bool:
    rows = np.arange(len(chosen))
    gpus = options.gpus[rows, chosen]
    pools = np.bincount(options.pool[rows, chosen], gpus, len(options.capacity))
    queues = [gpus[options.queue == q].sum() for q in range(len(options.quota))]
    return bool((pools <= options.capacity).all() and (np.array(queues) <= options.quota).all())


def brute_force(options: Options) -> float:
    jobs, width = options.cost.shape
    choices = (np.array(c) for c in itertools.product(range(width), repeat=jobs))
    return min(total(options, chosen) for chosen in choices if legal(options, chosen))


@pytest.mark.parametrize("seed", range(12))
def test_small_problems_are_solved_exactly(seed):
    options = random_options(seed, jobs=5, width=4)
    chosen = choose(options)
    assert legal(options, chosen)
    assert total(options, chosen) == pytest.approx(brute_force(options))


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(0, 3), st.floats(0.1, 1.2))
def test_prices_never_exceed_a_limit(seed, pools, queues, share):
    options = random_options(seed, jobs=12, width=5, pools=pools, queues=queues, share=share)
    assert legal(options, knapsack._by_prices(options))


@pytest.mark.parametrize("seed", range(8))
def test_prices_come_near_the_exact_answer(seed):
    options = random_options(seed, jobs=120, width=6, share=0.6)
    exact, priced = knapsack._exact(options), knapsack._by_prices(options)
    assert legal(options, priced)
    assert total(options, priced) <= 1.01 * total(options, exact)


def test_several_pools_come_near_brute_force():
    for seed in range(6):
        options = random_options(seed, jobs=5, width=4, pools=2, queues=1, share=0.8)
        assert total(options, choose(options)) <= 1.002 * brute_force(options)


def test_equal_jobs_share_what_a_single_price_cannot_divide():
    """At the price where one would step up all would, so that what is left has to be handed out one by one."""
    jobs = 1000
    options = Options(
        cost=np.tile([1000.0, 10.0, 6.0], (jobs, 1)), gpus=np.tile([0, 1, 2], (jobs, 1)),
        pool=np.zeros((jobs, 3), dtype=np.int64), queue=np.full(jobs, -1),
        capacity=np.array([1500]), quota=np.array([], dtype=np.int64),
    )  # fmt: skip
    chosen = knapsack._by_prices(options)
    assert options.gpus[np.arange(jobs), chosen].sum() == 1500
    assert (chosen > 0).all()


def test_a_job_that_cannot_be_refused_takes_all_and_the_rest_nothing():
    options = Options(
        cost=np.array([[np.inf, 5.0], [1000.0, 1.0]]), gpus=np.array([[0, 9], [0, 1]]),
        pool=np.zeros((2, 2), dtype=np.int64), queue=np.full(2, -1),
        capacity=np.array([8]), quota=np.array([], dtype=np.int64),
    )  # fmt: skip
    assert choose(options)[0] == 1


def test_no_jobs_no_choice():
    empty = np.zeros((0, 3))
    ints = empty.astype(np.int64)
    options = Options(empty, ints, ints, np.zeros(0, dtype=np.int64), np.array([4]), np.array([], dtype=np.int64))
    assert len(choose(options)) == 0
