"""Step times by the host's clock."""

import pytest
import torch
from torch import nn

from pollux.agent.step import step_clock
from pollux.agent.step.step_clock import StepClock


class Time:
    now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def time(monkeypatch):
    made = Time()
    monkeypatch.setattr(step_clock, "time", made)
    return made


def clock(model=None):
    return StepClock(torch.device("cpu"), list(model.parameters()) if model else [])


def test_a_steps_time_and_its_wait_for_data(time):
    made = clock()
    made.begin_step(told_apart=False)
    time.now += 0.25
    made.add_data_wait(0.25)
    made.begin_micro()
    time.now += 1.0
    made.end_micro()
    made.end_step(repeats=2, local_batch=8, measured=True)
    (step,) = made.drain()
    assert (step.step_seconds, step.data_seconds, step.compute_seconds) == (1.25, 0.25, None)
    assert (step.repeats, step.local_batch, step.measured) == (2, 8, True)
    assert made.drain() == []


def test_computing_ends_with_the_last_gradient(time):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    made = clock(model)
    made.begin_step(told_apart=True)
    for _ in range(2):
        made.begin_micro()
        time.now += 0.5
        model(torch.ones(1, 2)).sum().backward()
        # What follows the last gradient is not computing.
        time.now += 2.0
        made.end_micro()
    made.end_step(2, 1, False)
    (step,) = made.drain()
    assert step.compute_seconds == 0.5
    assert step.step_seconds == 5.0
    assert all(not parameter._backward_hooks for parameter in model.parameters())


def test_a_step_that_was_cancelled_is_not_there(time):
    model = nn.Linear(2, 1)
    made = clock(model)
    made.begin_step(told_apart=True)
    made.begin_micro()
    made.cancel_step()
    made.end_step(1, 1, False)
    assert made.drain() == []
    assert not model.weight._backward_hooks


def test_what_nobody_reads_does_not_pile_up(time):
    made = clock()
    for _ in range(step_clock._MAX_PENDING + 10):
        made.begin_step(False)
        time.now += 1.0
        made.end_step(1, 1, False)
    assert len(made.drain()) == step_clock._MAX_PENDING


def test_parameters_without_gradients_are_not_hooked(time):
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    made = clock(model)
    made.begin_step(True)
    made.begin_micro()
    assert model.weight._backward_hooks
    assert not model.bias._backward_hooks
    made.end_micro()
