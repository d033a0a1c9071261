"""Progress, epochs and the schedule that follows them."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pollux.agent.adaptation.progress import Schedule, TrainingProgress
from pollux.core.errors import MisusedJob


class Scheduler:
    def __init__(self):
        self.steps = 0

    def step(self) -> None:
        self.steps += 1


def test_at_efficiency_1_progress_is_samples():
    progress = TrainingProgress(10)
    for _ in range(3):
        progress.add(4, 1.0)
    assert (progress.steps, progress.samples, progress.progress) == (3, 12, 12.0)
    assert progress.epoch_reached
    assert progress.epochs == 1.2


def test_a_larger_batch_counts_by_its_efficiency():
    progress = TrainingProgress(10)
    progress.add(8, 0.5)
    assert (progress.samples, progress.progress, progress.epochs) == (8, 4.0, 0.4)
    assert not progress.epoch_reached


def test_what_was_done_beyond_an_epochs_end_counts_for_the_next():
    progress = TrainingProgress(10)
    progress.add(12, 1.0)
    progress.close_epoch()
    assert (progress.epoch, progress.epoch_began, progress.in_epoch) == (1, 10.0, 2.0)


def test_what_was_left_out_of_an_epoch_does_not_come_later():
    progress = TrainingProgress(10)
    progress.add(6, 1.0)
    progress.close_epoch()
    assert (progress.epoch, progress.in_epoch, progress.epochs) == (1, 0.0, 1.0)


def test_without_a_size_no_epoch_is_ever_reached():
    progress = TrainingProgress(None)
    progress.add(1000, 1.0)
    assert not progress.epoch_reached
    assert progress.epochs == 0.0
    progress.close_epoch()
    assert progress.epoch == 1


def test_rounding_does_not_cost_a_step():
    progress = TrainingProgress(3)
    for _ in range(3):
        progress.add(1, 0.1 + 0.9 - 1e-16)
    assert progress.epoch_reached


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0.05, 1.0)), min_size=1, max_size=60), st.integers(5, 100))
def test_epochs_never_fall_and_the_state_goes_on(steps, size):
    progress = TrainingProgress(size)
    seen = [0.0]
    for samples, efficiency in steps:
        progress.add(samples, efficiency)
        while progress.epoch_reached:
            progress.close_epoch()
        seen.append(progress.epochs)
        fresh = TrainingProgress(size)
        fresh.load_state_dict(progress.state_dict())
        assert fresh.state_dict() == progress.state_dict()
    assert seen == sorted(seen)
    assert progress.epochs == pytest.approx(progress.progress / size)


def test_in_exact_mode_the_schedule_takes_one_step_for_each_of_the_optimisers():
    scheduler, progress = Scheduler(), TrainingProgress(10)
    schedule = Schedule(scheduler, "step", 4, exact=True)
    for samples in (4, 4, 2, 4):
        progress.add(samples, 1.0)
        schedule.after_step(progress)
    assert scheduler.steps == schedule.taken == 4


@pytest.mark.parametrize("efficiency", [1.0, 0.5, 0.3])
def test_in_adaptive_mode_an_epoch_is_as_many_schedule_steps_as_at_the_initial_batch(efficiency):
    """10 samples in batches of 4 are 3 steps, however large the batches are that do them."""
    scheduler, progress = Scheduler(), TrainingProgress(10)
    schedule = Schedule(scheduler, "step", 4, exact=False)
    while progress.epoch < 4:
        progress.add(8, efficiency)
        schedule.after_step(progress)
        while progress.epoch_reached:
            progress.close_epoch()
    assert scheduler.steps == int(progress.epochs * 3 + 1e-9)


def test_a_stream_without_a_size_counts_steps_of_the_initial_batch():
    scheduler, progress = Scheduler(), TrainingProgress(None)
    schedule = Schedule(scheduler, "step", 4, exact=False)
    progress.add(10, 1.0)
    schedule.after_step(progress)
    assert scheduler.steps == 2


def test_by_epoch_the_schedule_waits_for_the_epochs_end():
    scheduler, progress = Scheduler(), TrainingProgress(10)
    schedule = Schedule(scheduler, "epoch", 4, exact=True)
    progress.add(10, 1.0)
    schedule.after_step(progress)
    assert scheduler.steps == 0
    schedule.after_epoch()
    assert scheduler.steps == schedule.taken == 1


def test_by_step_the_end_of_an_epoch_adds_nothing():
    scheduler = Scheduler()
    Schedule(scheduler, "step", 4, exact=True).after_epoch()
    assert scheduler.steps == 0


def test_a_scheduler_that_the_script_steps_too_is_refused():
    parameter = torch.nn.Parameter(torch.zeros(1))
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([parameter], 1.0), 1)
    schedule, progress = Schedule(scheduler, "step", 4, exact=True), TrainingProgress(10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no optimiser steps here
        schedule.after_step(progress)
        schedule.after_step(progress)
        scheduler.step()
    with pytest.raises(MisusedJob, match=r"is at 3, not at 2: .* take scheduler.step\(\) out"):
        schedule.after_step(progress)
    schedule.taken = 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule.after_step(progress)
    assert schedule.taken == 4
