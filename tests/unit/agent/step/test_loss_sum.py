"""Sums of losses: shares of a step's parts, steps counted, values that are not finite."""

import math

import pytest
import torch

from pollux.agent.step.loss_sum import LossSum


@pytest.fixture
def losses():
    return LossSum(torch.device("cpu"))


def test_the_parts_of_a_step_count_by_their_shares(losses):
    losses.add(torch.tensor(4.0), 0.25)
    losses.add(torch.tensor([8.0]), 0.75)
    losses.count_step()
    assert losses.read() == (7.0, 1)


def test_reading_begins_a_new_sum(losses):
    losses.add(torch.tensor(1.0))
    losses.count_step()
    losses.read()
    assert losses.read() == (0.0, 0)


def test_a_value_that_is_not_finite_stays_in_the_sum(losses):
    losses.add(torch.tensor(float("nan")))
    losses.add(torch.tensor(1.0))
    assert math.isnan(losses.read()[0])


def test_the_sum_is_kept_in_double_precision(losses):
    for _ in range(10):
        losses.add(torch.tensor(0.1, dtype=torch.float16), 0.1)
    assert losses.read()[0] == pytest.approx(float(torch.tensor(0.1, dtype=torch.float16)), rel=1e-15)


def test_what_is_forgotten_is_not_read(losses):
    losses.add(torch.tensor(1.0, requires_grad=True))
    losses.count_step()
    losses.forget()
    assert losses.read() == (0.0, 0)
