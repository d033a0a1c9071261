"""Sizes that ended an earlier start because memory ran out are not tried again, and others are not blamed."""

import json
import logging
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import pollux
from pollux.agent.adaptation.batch_tuner import BatchChange
from pollux.agent.checkpoint.oom_notes import Lesson, TrialNotes
from pollux.goodput import BatchChoice


def notes(folder, gpu_type="H200", counts_deaths=True) -> TrialNotes:
    return TrialNotes(folder, gpu_type, counts_deaths)


def test_nothing_is_known_at_first_nor_after_a_trial_that_held(tmp_path):
    assert notes(tmp_path).learned() is None
    first = notes(tmp_path)
    first.note_trial(32, 16)
    first.clear_trial()
    first.note_out_of_memory()
    assert notes(tmp_path).learned() is None
    assert not list(tmp_path.iterdir())


def test_what_ran_out_of_memory_is_known_at_once_and_stays_known(tmp_path):
    first = notes(tmp_path)
    first.note_trial(32, 16)
    first.note_out_of_memory()
    assert notes(tmp_path).learned() == notes(tmp_path).learned() == Lesson(32, 16)
    assert notes(tmp_path, "A100").learned() is None
    other = notes(tmp_path, "A100")
    other.note_trial(9, 0)
    other.note_out_of_memory()
    assert notes(tmp_path, "A100").learned() == Lesson(9, 4)
    assert notes(tmp_path).learned() == Lesson(32, 16)


def test_a_death_that_says_nothing_counts_when_it_comes_again(tmp_path):
    notes(tmp_path).note_trial(32, 16)
    second = notes(tmp_path)
    assert second.learned() is None
    # A start that dies before the trial says nothing of it.
    assert notes(tmp_path).learned() is None
    second.note_trial(32, 16)
    assert notes(tmp_path).learned() == Lesson(32, 16)


def test_the_batch_that_was_asked_for_is_not_blamed_for_deaths(tmp_path):
    for _ in range(3):
        again = notes(tmp_path)
        assert again.learned() is None
        again.note_trial(32, 0)


def test_deaths_of_different_trials_are_not_added_up(tmp_path):
    notes(tmp_path).note_trial(32, 16)
    second = notes(tmp_path)
    assert second.learned() is None
    second.note_trial(24, 16)
    assert notes(tmp_path).learned() is None


def test_without_counting_only_certain_deaths_are_noted(tmp_path):
    for _ in range(3):
        again = notes(tmp_path, counts_deaths=False)
        assert again.learned() is None
        again.note_trial(32, 16)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "[]", '{"H200": 3}', '{"H200": [0, -1]}', '{"H200": ["a", 1]}', "\x00"])
def test_files_that_make_no_sense_are_left_out(tmp_path, text):
    (tmp_path / ".out-of-memory.json").write_text(text)
    (tmp_path / ".trial.json").write_text('{"open": true, "gpu_type": "H200", "deaths": "many"}')
    assert notes(tmp_path).learned() is None


def test_a_folder_that_cannot_be_written_to_ends_nothing(tmp_path):
    first = notes(tmp_path / "gone")
    first.note_trial(32, 16)
    first.note_out_of_memory()
    assert first.learned() is None


def parts() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    data = TensorDataset(torch.randn(128, 3), torch.randint(0, 2, (128,)))
    return model, torch.optim.SGD(model.parameters(), 0.1), data


def train(job, limit: int, error: BaseException, change_at: int = -1, raise_at: int = -1, epochs: int = 2) -> list[int]:
    """The script's own loss holds `limit` samples at most; returns the local batches that ran."""
    ran = []
    for _ in job.epochs(epochs):
        for x, y in job.batches():
            out = job.model(x)
            if len(x) > limit or job.step == raise_at:
                raise error
            job.backward(F.cross_entropy(out, y))
            ran.append(len(x))
            if job.step == change_at:
                job.checkpoint()
                job._run.rounds._rounds.change_batch(BatchChange(BatchChoice(16, 0, 1), 1.5, 1.0, 0.9, "for the test"))
    return ran


OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")


def test_a_loss_that_runs_out_of_memory_at_a_new_size_does_so_once(tmp_path, caplog):
    options = {"max_batch_size": 64, "checkpoint_dir": tmp_path, "measure_noise": False}
    with pytest.raises(torch.OutOfMemoryError), pollux.init(*parts(), 8, **options) as job:
        train(job, 8, OUT, change_at=4)
    with caplog.at_level(logging.WARNING), pollux.init(*parts(), 8, **options) as job:
        assert job.step == 4
        assert job._parts.adaptation.local_max == 8
        assert "a local batch of 16 ended an earlier start" in caplog.text
        job._run.rounds._rounds.change_batch(BatchChange(job._parts.adaptation.fitted(), 1.5, 1.0, 0.9, "for the test"))
        assert max(train(job, 8, OUT)) == 8
        assert [event["kind"] for event in job.receipt.to_json()["events"]].count("out-of-memory") == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING), pollux.init(*parts(), 8, **options) as job:
        assert job._parts.adaptation.local_max == 8
        assert "ended an earlier start" not in caplog.text


def test_in_exact_mode_the_batch_is_accumulated_at_the_next_start(tmp_path):
    with pytest.raises(torch.OutOfMemoryError), pollux.init(*parts(), 8, checkpoint_dir=tmp_path) as job:
        train(job, 4, OUT)
    with pollux.init(*parts(), 8, checkpoint_dir=tmp_path) as job:
        assert job.batch_size == 8
        assert train(job, 4, OUT, epochs=1) == [4] * 32
        assert job.step == 16


def test_an_error_that_nobody_catches_is_known_when_the_process_ends(tmp_path, monkeypatch):
    job = pollux.init(*parts(), 8, checkpoint_dir=tmp_path)
    with pytest.raises(torch.OutOfMemoryError):
        train(job, 4, OUT)
    # As the interpreter leaves it to what runs at its exit.
    monkeypatch.setattr(sys, "last_value", OUT, raising=False)
    job.close()
    assert json.loads((tmp_path / ".out-of-memory.json").read_text()) == {"cpu": [8, 4]}


@pytest.mark.parametrize("error", [RuntimeError("a slip"), KeyboardInterrupt()])
def test_other_errors_change_nothing(tmp_path, error):
    options = {"max_batch_size": 64, "checkpoint_dir": tmp_path, "measure_noise": False}
    for change_at in (4, 6, 8):
        with pytest.raises(type(error)), pollux.init(*parts(), 8, **options) as job:
            train(job, 8, error, change_at)
    with pollux.init(*parts(), 8, **options) as job:
        assert job._parts.adaptation.local_max is None


def test_memory_that_runs_out_at_a_size_that_ran_before_is_not_the_sizes_fault(tmp_path):
    with pytest.raises(torch.OutOfMemoryError), pollux.init(*parts(), 8, checkpoint_dir=tmp_path) as job:
        train(job, 8, OUT, raise_at=3)
    with pollux.init(*parts(), 8, checkpoint_dir=tmp_path) as job:
        assert job._parts.adaptation.local_max is None
