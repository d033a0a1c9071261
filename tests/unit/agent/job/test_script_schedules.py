import logging

import pytest
import torch
from torch.optim import lr_scheduler

from pollux.agent.adaptation.progress import TrainingProgress
from pollux.agent.distributed.environment import Environment
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.agent.job.script_schedules import ScriptSchedules, script_schedules

BATCH, SIZE = 10, 100


@pytest.fixture
def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)


def follow(optimizer, exact, handed_over=None, saved=()):
    """The script's schedulers as a job has them; the progress that it makes; whether a step is under way."""
    schedules, unsaved = script_schedules(optimizer, handed_over, saved)
    progress, mid_step = TrainingProgress(SIZE), [False]
    paced = ScriptSchedules(schedules, progress, BATCH, exact, ReplicaGroup(Environment(), torch.device("cpu")))
    paced.attach(lambda: mid_step[0])
    return paced, unsaved, progress, mid_step


def train(optimizer, scheduler, paced, progress, batch, efficiency=1.0, every=1):
    """An epoch of steps with so many samples, after each of which, or every so many, the script steps its scheduler."""
    paced.in_batches = True
    number = 0
    while not progress.epoch_reached:
        progress.add(batch, efficiency)
        number += 1
        optimizer.step()
        if number % every == 0:
            scheduler.step()
    paced.in_batches = False
    progress.close_epoch()


@pytest.mark.parametrize(
    ("batch", "efficiency", "every", "calls"),
    [(10, 1.0, 1, 10), (20, 1.0, 1, 10), (50, 0.5, 1, 10), (25, 1.0, 2, 5), (100, 1.0, 1, 10), (30, 0.9, 1, 10)],
)
def test_a_larger_batch_advances_it_by_the_progress(optimizer, batch, efficiency, every, calls):
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    paced, _, progress, _ = follow(optimizer, exact=False)
    for epoch in range(1, 4):
        train(optimizer, scheduler, paced, progress, batch, efficiency, every)
        assert scheduler.last_epoch == pytest.approx(calls * epoch, abs=1)


@pytest.mark.parametrize("exact", [True, False])
def test_an_epochs_call_is_one_call_and_one_inside_a_step_none(optimizer, exact):
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    paced, _, progress, mid_step = follow(optimizer, exact)
    optimizer.step()
    scheduler.step()
    assert scheduler.last_epoch == 1
    paced.in_batches, mid_step[0] = True, True
    scheduler.step()
    assert scheduler.last_epoch == 1
    mid_step[0] = False
    progress.add(BATCH, 1.0)
    scheduler.step()
    assert scheduler.last_epoch == 2


def test_a_metric_is_read_and_a_named_epoch_passes(optimizer):
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    follow(optimizer, exact=True)
    for metric in (1.0, torch.tensor(2.0)):
        plateau.step(metric)
    plateau.step(metrics=3.0)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_state_goes_along_and_the_scheduler_is_given_back(optimizer):
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    kind = type(scheduler)
    paced, unsaved, _, _ = follow(optimizer, exact=True)
    assert isinstance(scheduler, kind)
    assert type(scheduler).__name__ == "StepLR"
    optimizer.step()
    scheduler.step()
    (kept,) = unsaved.values()
    state = kept.state_dict()
    scheduler.step()
    kept.load_state_dict(state)
    assert scheduler.last_epoch == 1
    paced.close()
    assert type(scheduler) is kind


def test_only_those_that_the_script_steps_itself_are_followed(optimizer):
    mine = lr_scheduler.StepLR(optimizer, 1)
    others = lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0), 1)
    parts = [lr_scheduler.StepLR(optimizer, 1), lr_scheduler.ConstantLR(optimizer)]
    sequence = lr_scheduler.SequentialLR(optimizer, parts, [3])
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    schedules, unsaved = script_schedules(optimizer, mine, [plateau])
    assert {id(each.scheduler) for each in schedules} == {id(sequence), id(plateau)}
    assert [each.scheduler for each in unsaved.values()] == [sequence]
    del others


def test_one_whose_state_cannot_be_saved_is_told(optimizer, caplog):
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    scheduler.hook = lambda: None
    with caplog.at_level(logging.WARNING, "pollux"):
        schedules, unsaved = script_schedules(optimizer, None, ())
    assert len(schedules) == 1
    assert unsaved == {}
    assert "cannot be saved" in caplog.text
