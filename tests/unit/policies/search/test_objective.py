"""The objective against numbers worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from pollux.core import InvalidInput, Queue
from pollux.policies.search.objective import Objective
from pollux.testing import SaturatingGoodput, cluster, goodput_model, job, snapshot


def test_speedup_is_relative_to_the_fair_share_on_one_node():
    jobs = [job("a", goodput=SaturatingGoodput(rate=10.0, across_nodes=0.5)), job("b", goodput=SaturatingGoodput())]
    objective = Objective(snapshot(cluster(4, 4, 4, 4), jobs), jobs)
    assert objective.fair_gpus == 8
    # 8 GPUs are modelled on one node although no node has so many: the slowdown across nodes is not in the base.
    assert objective.speedups([1, 2, 1], [8, 8, 4])[0] == pytest.approx([1.0, 0.5, 0.5])


def test_a_job_never_measured_is_taken_to_be_linear():
    jobs = [job("a"), job("b")]
    objective = Objective(snapshot(cluster(4, 4), jobs), jobs)
    assert objective.speedups([1, 1], [1, 4])[0] == pytest.approx([0.25, 1.0])


def test_a_fair_share_beyond_the_batch_limits_is_the_most_that_is_possible():
    model = goodput_model()
    jobs = [job("a", goodput=model)]
    many = [64] * 64
    objective = Objective(snapshot(cluster(*many), jobs), jobs)
    assert objective.fair_gpus > model.max_gpus
    assert objective.speedups([1], [model.max_gpus])[0, 0] == pytest.approx(1.0, rel=0.01)


def test_restart_factor():
    jobs = [
        replace(job("old"), submitted_at=0.0, num_restarts=2),
        replace(job("worn"), submitted_at=0.0, num_restarts=50),
        replace(job("new"), submitted_at=970.0),
        replace(job("cheap"), submitted_at=0.0, num_restarts=2, resize_cost_seconds=1.0),
    ]
    held = replace(snapshot(cluster(4, 4), jobs, {"old": "n0:1", "worn": "n0:1", "cheap": "n0:1"}), now=1000.0)
    factors = Objective(held, jobs).restart_factors
    assert factors == pytest.approx([(1000 - 60) / 1030, 0.0, 30 / 60, (1000 - 2) / 1001])
    floored = Objective(held, jobs, start_floor=0.7).restart_factors
    assert floored == pytest.approx([factors[0], 0.0, 0.7, factors[3]])


def test_utility_scales_by_nodes_per_gpu_and_never_reaches_zero():
    jobs = [job("a")]
    objective = Objective(snapshot(cluster(4, 4), jobs), jobs)
    assert objective.utilities(np.array([0.0, 1.0]), 0.5) == pytest.approx([0.001, 0.5 * 2 / 8 + 0.001])


@pytest.mark.parametrize("power", [-10.0, -1.0, -0.5, 0.5, 1.0])
def test_fitness_is_the_power_mean(power):
    jobs = [job("a"), job("b")]
    objective = Objective(snapshot(cluster(4), jobs), jobs, power)
    expected = ((0.2**power + 0.6**power) / 2) ** (1 / power)
    assert objective.fitness(np.array([0.2, 0.6])) == pytest.approx(expected)


def test_power_zero_is_the_geometric_mean():
    jobs = [job("a"), job("b")]
    objective = Objective(snapshot(cluster(4), jobs), jobs, 0.0)
    assert objective.fitness(np.array([0.2, 0.8])) == pytest.approx(0.4)


def test_weights_of_jobs_and_queues_multiply():
    jobs = [job("a", weight=2.0, queue="q"), job("b")]
    view = replace(snapshot(cluster(4), jobs), queues={"q": Queue("q", weight=3.0)})
    objective = Objective(view, jobs)
    assert objective.weights == pytest.approx([6.0, 1.0])
    assert objective.fitness(np.array([0.2, 0.6])) == pytest.approx(7 / (6 / 0.2 + 1 / 0.6))


def test_a_power_that_is_no_number_is_refused():
    with pytest.raises(InvalidInput, match="fairness is nan"):
        Objective(snapshot(cluster(4), []), [], math.nan)
