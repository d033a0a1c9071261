"""The weight of each part in the average, for every kind of loss."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pollux.agent.data.step_shape import MicroBatch, share
from pollux.agent.distributed.environment import Environment
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.agent.step.loss_weighting import LossWeighting, check_weighting
from pollux.core.errors import InvalidInput, MisusedJob, UnknownName


def averager(initial: int = 4, adaptive: bool = False, num_replicas: int = 1) -> LossWeighting:
    replicas = ReplicaGroup(Environment(), torch.device("cpu"))
    # Only the number counts here; no collective runs but for weights.
    replicas.num_replicas = num_replicas
    return LossWeighting(replicas, initial, adaptive)


def micro(samples: int, total: int, index: int = 0, repeats: int = 1) -> MicroBatch:
    return MicroBatch(0, index, repeats, samples, total, False, (samples,))


def scaled(made: LossWeighting, part: MicroBatch, reduction: str = "mean", weight=None) -> float:
    return float(made.scale(torch.tensor(1.0, dtype=torch.float64), part, reduction, weight))


@given(st.integers(1, 200), st.integers(1, 6), st.integers(1, 4))
def test_factors_of_means_add_up_to_the_number_of_replicas(total, num_replicas, repeats):
    """The wrapper divides by K, so that the weights of all parts sum to 1."""
    made = averager(num_replicas=num_replicas)
    factors = [
        scaled(made, micro(end - first, total, index, repeats))
        for index, row in enumerate(share(total, num_replicas, repeats))
        for first, end in row
    ]
    assert sum(factors) == pytest.approx(num_replicas, rel=1e-12)


def test_a_whole_batch_is_left_alone():
    made = averager()
    loss = torch.tensor(3.0)
    assert made.scale(loss, micro(4, 4), "mean", None) is loss


def test_sums_are_not_divided_by_replicas():
    assert scaled(averager(num_replicas=3), micro(2, 7), "sum") == 3.0


def test_sums_keep_the_size_they_have_at_the_initial_batch():
    assert scaled(averager(4, adaptive=True), micro(8, 8), "sum") == 0.5
    assert scaled(averager(4, adaptive=True), micro(3, 3), "sum") == 1.0
    assert scaled(averager(4, adaptive=False), micro(8, 8), "sum") == 1.0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_filler_counts_nothing(reduction):
    assert scaled(averager(num_replicas=2), micro(0, 3), reduction) == 0.0


def parameter(value: float) -> Any:
    made = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    made.grad = torch.tensor([value], dtype=torch.float64)
    return made


@pytest.mark.parametrize("as_tensor", [False, True])
def test_by_weight_the_gradient_is_the_weighted_mean(as_tensor):
    made = averager()
    for weights in ([3.0, 5.0], [100.0, 1.0], [2.0, 0.0], [7.0, 7.0]):
        gradient = 0.0
        for index, weight in enumerate(weights):
            given_weight = torch.tensor(weight) if as_tensor else weight
            loss = torch.tensor(float(index + 1), dtype=torch.float64)
            gradient += float(made.scale(loss, micro(2, 4, index, 2), "mean", given_weight))
        held = parameter(gradient)
        total: Any = made.finish([held])
        assert float(total) == sum(weights)
        expected = (weights[0] + 2.0 * weights[1]) / sum(weights)
        assert float(held.grad) == pytest.approx(expected, rel=1e-14)


def test_a_mean_over_nothing_is_not_a_number_and_counts_nothing():
    made = averager()
    loss: Any = torch.tensor(float("nan"), requires_grad=True)
    out = made.scale(loss, micro(2, 4), "mean", 0.0)
    out.backward()
    assert float(out.detach()) == 0.0
    assert float(loss.grad) == 0.0


def test_a_step_whose_weights_are_all_0_leaves_gradients_of_0():
    made = averager()
    made.scale(torch.tensor(1.0), micro(4, 4), "mean", 0.0)
    held = parameter(0.0)
    made.finish([held])
    assert float(held.grad) == 0.0


def test_one_step_one_kind():
    made = averager()
    scaled(made, micro(2, 4, 0, 2))
    with pytest.raises(MisusedJob, match="'mean' and goes on by 'weight'"):
        scaled(made, micro(2, 4, 1, 2), weight=3.0)
    made.abandon()
    scaled(made, micro(2, 4, 0, 2), weight=3.0)


def test_wrong_words_and_weights():
    with pytest.raises(UnknownName, match="unknown reduction 'none'"):
        scaled(averager(), micro(1, 1), "none")
    with pytest.raises(UnknownName, match="unknown reduction '5'"):
        scaled(averager(), micro(1, 1), 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weight", "seen"),
    [
        (-1.0, "weight is -1.0"),
        (math.nan, "weight is nan"),
        (math.inf, "weight is inf"),
        ("5", "weight is '5'"),
        (True, "weight is True"),
        ([3], r"weight is \[3\]"),
        (torch.tensor(-2.0), r"weight is tensor\(-2\.\)"),
        (torch.tensor(math.nan), r"weight is tensor\(nan\)"),
        (torch.tensor([1.0, 2.0]), r"weight is a tensor of shape \[2\]"),
        (torch.tensor([]), r"weight is a tensor of shape \[0\]"),
        (torch.tensor(1j), r"type torch.complex64"),
    ],
    ids=str,
)
def test_a_weight_is_one_number_of_0_or_more(weight, seen):
    made = averager()
    with pytest.raises(InvalidInput, match=f"{seen}.*how many tokens"):
        scaled(made, micro(1, 1), weight=weight)
    assert scaled(made, micro(1, 1)) == 1.0, "what was refused is no beginning of a step"


@pytest.mark.parametrize(
    "weight", [3, 3.0, np.int64(3), np.float32(3.0), torch.tensor([[3]]), torch.tensor(3.0)], ids=repr
)
def test_a_weight_may_be_a_number_of_any_kind(weight):
    assert scaled(averager(), micro(1, 1), weight=weight) == 1.0


def test_the_value_of_a_weight_that_is_not_on_the_host_is_not_looked_at():
    check_weighting("mean", torch.ones((), device="meta"))
    with pytest.raises(InvalidInput, match=r"shape \[2\]"):
        check_weighting("mean", torch.ones(2, device="meta"))


@pytest.mark.parametrize("weight", [5.0, torch.tensor(5.0)])
def test_a_sum_has_no_weight(weight):
    with pytest.raises(InvalidInput, match=r"reduction is 'sum' and weight is .*5.*: use one"):
        scaled(averager(), micro(1, 1), "sum", weight)


@pytest.mark.parametrize(("reduction", "weighted"), [("mean", False), ("sum", False), ("mean", True)])
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_noise_factors_bring_squared_norms_back_to_those_of_the_average(reduction, weighted, num_replicas):
    """L = Σ (n/N)·|g|² over parts, and T = |mean gradient|², from what hooks and gradients show."""
    made = averager(12, num_replicas=num_replicas)
    made._reference = 5.0
    total = 12
    norms = [float(number + 1) for number in range(num_replicas * 2)]
    seen, whole, weights = 0.0, 0.0, 0.0
    rows = share(total, num_replicas, 2)
    parts = [(index, first, end) for index, row in enumerate(rows) for first, end in row]
    for norm, (index, first, end) in zip(norms, parts, strict=True):
        # Not the last one: no collective is wanted here.
        part = MicroBatch(0, index, 3, end - first, total, True, ())
        weight = float(end - first) if weighted else None
        mean_gradient = norm * (part.samples if reduction == "sum" else 1.0)
        gradient = mean_gradient * scaled(made, part, reduction, weight)
        factors = made.noise_factors(part, weight)
        seen += gradient**2 * factors.part
        whole += gradient / num_replicas
        weights += weight or 0.0
    expected = sum(norm**2 * (end - first) / total for norm, (_, first, end) in zip(norms, parts, strict=True))
    average = sum(norm * (end - first) / total for norm, (_, first, end) in zip(norms, parts, strict=True))
    if weighted:
        seen, whole = seen / weights, whole * 5.0 / weights
    assert seen == pytest.approx(expected)
    assert whole**2 * factors.whole == pytest.approx(average**2)


def test_a_filler_has_no_part_in_the_noise():
    made = averager()
    scaled(made, micro(0, 3))
    assert made.noise_factors(micro(0, 3), None).part == 0.0
