"""One optimiser step: its micro-batches, its average, its learning rate, and what is left when it is abandoned."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pollux.agent.data.step_shape import MicroBatch, share
from pollux.agent.distributed.environment import Environment
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.agent.step.gradient_norms import GradientNormMeter
from pollux.agent.step.loss_weighting import LossWeighting
from pollux.agent.step.optimizer_step import StepOptions, StepRunner
from pollux.core.errors import MisusedJob, NonFiniteValue


class Model(nn.Module):
    def __init__(self, limit=10**9):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
        self.limit = limit

    def forward(self, x):
        if len(x) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return (x * self.weight).sum(1)


X = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0], [1.0, 3.0], [0.5, 0.5]], dtype=torch.float64)


def engine(model=None, **options) -> Any:
    model = model or Model()
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "lr": 0.1}])
    replicas = ReplicaGroup(Environment(), torch.device("cpu"))
    return StepRunner(
        model, optimizer, replicas, LossWeighting(replicas, len(X), adaptive=False), None, StepOptions(**options)
    )


def run(made: Any, repeats: int = 1, trial_from: int | None = None, factors=(1.0,), times: float = 1.0) -> Any:
    for index, ((first, end),) in enumerate(share(len(X), 1, repeats)):
        made.begin_micro_batch(MicroBatch(0, index, repeats, end - first, len(X), False, (end - first,)), trial_from)
        made.backward(made.model(X[first:end]).mean() * times, "mean", None)
    return made.finish(factors)


@pytest.mark.parametrize("repeats", [1, 2, 3, 5])
def test_the_gradient_is_that_of_the_whole_batch(repeats):
    made = engine()
    assert run(made, repeats)
    expected = torch.tensor([1.0, 2.0], dtype=torch.float64) - 0.1 * X.mean(0)
    torch.testing.assert_close(made.inner.weight.detach(), expected, rtol=1e-14, atol=0)
    assert made.inner.weight.grad is None


def test_a_learning_rate_factor_holds_for_one_step():
    made = engine()
    run(made, factors=(3.0,))
    expected = torch.tensor([1.0, 2.0], dtype=torch.float64) - 0.3 * X.mean(0)
    torch.testing.assert_close(made.inner.weight.detach(), expected, rtol=1e-14, atol=0)
    assert made.optimizer.param_groups[0]["lr"] == 0.1


def test_losses_are_the_mean_over_steps():
    made = engine()
    first = float((X * made.inner.weight).sum(1).mean().detach())
    run(made, 2)
    second = float((X * made.inner.weight).sum(1).mean().detach())
    run(made, 3)
    total, count = made.losses()
    assert count == 2
    assert total == pytest.approx(first + second)
    assert made.losses() == (0.0, 0)


def test_clipping_and_the_users_last_word_come_before_the_optimiser():
    seen = []
    model: Any = Model()
    made = engine(model, clip_norm=0.01, before_step=lambda: seen.append(model.weight.grad.norm().item()))
    run(made, times=100.0)
    assert seen == [pytest.approx(0.01, rel=1e-3)]


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_trial_that_runs_out_of_memory_leaves_nothing(repeats):
    made = engine(Model(limit=2))
    before = made.inner.weight.detach().clone()
    assert run(made, repeats, trial_from=1) is False
    assert torch.equal(made.inner.weight, before)
    assert made.inner.weight.grad is None
    assert made.losses() == (0.0, 0)
    assert "forward" not in vars(made.inner)
    assert run(made, 3)


def test_without_a_trial_the_error_is_the_users():
    made = engine(Model(limit=2))
    with pytest.raises(torch.OutOfMemoryError):
        run(made)


def test_abandoning_forgets_the_half_step():
    made = engine()
    made.begin_micro_batch(MicroBatch(0, 0, 2, 3, 5, False, (3,)), 1)
    made.backward(made.model(X[:3]).mean(), "mean", None)
    made.abandon()
    assert made.inner.weight.grad is None
    assert made.losses() == (0.0, 0)
    assert "forward" not in vars(made.inner)
    assert run(made)
    expected = torch.tensor([1.0, 2.0], dtype=torch.float64) - 0.1 * X.mean(0)
    torch.testing.assert_close(made.inner.weight.detach(), expected, rtol=1e-14, atol=0)


def test_values_that_are_not_finite():
    made = engine()
    with pytest.raises(NonFiniteValue, match="the loss is nan at step 0"):
        run(made, times=math.nan)
    made.abandon()
    made.tolerates = True
    assert run(made, times=math.nan)
    total, count = made.losses()
    assert (math.isnan(total), count) == (True, 1)


def test_the_order_of_calls():
    made = engine()
    micro = MicroBatch(0, 0, 1, 5, 5, False, (5,))
    with pytest.raises(MisusedJob, match="outside of"):
        made.backward(made.model(X).mean(), "mean", None)
    made.begin_micro_batch(micro, None)
    with pytest.raises(MisusedJob, match="never passed"):
        made.begin_micro_batch(micro, None)
    made.backward(made.model(X).mean(), "mean", None)
    with pytest.raises(MisusedJob, match="twice"):
        made.backward(made.model(X).mean(), "mean", None)


def test_alone_any_step_may_be_tried_and_the_model_is_not_wrapped():
    made = engine()
    assert made.can_try
    assert made.model is made.inner
    assert not made.is_sharded


@pytest.mark.parametrize(("weights", "count"), [((2.0, 1.0, 2.0), 3), ((2.0, 0.0, 3.0), 2)])
def test_parts_of_no_weight_do_not_count_in_a_measured_step(weights, count):
    made = engine()
    made.meter = GradientNormMeter(made.optimizer, "cpu")
    for index, (((first, end),), weight) in enumerate(zip(share(len(X), 1, 3), weights, strict=True)):
        made.begin_micro_batch(MicroBatch(0, index, 3, end - first, len(X), True, (end - first,)), None)
        made.backward(made.model(X[first:end]).mean(), "mean", weight)
    made.finish((1.0,))
    rows = made.meter.drain()
    assert rows.counts.tolist() == [count]
    assert rows.totals.tolist() == [len(X)]


def test_a_step_whose_gradients_were_broken_off_is_not_taken():
    made = engine()
    before = made.inner.weight.detach().clone()
    made._replicas.is_broken = True
    with pytest.raises(dist.DistError, match="other replicas are lost"):
        run(made, factors=(3.0,))
    assert torch.equal(made.inner.weight, before)
    assert made.optimizer.param_groups[0]["lr"] == 0.1
