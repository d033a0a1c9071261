"""The edges of the loop: left early, failed saves, schedules that end, signals after the end, memory given back."""

import gc
import json
import signal
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import pollux
from pollux.agent.adaptation.batch_tuner import BatchChange
from pollux.agent.adaptation.progress import Schedule, TrainingProgress
from pollux.agent.elastic.heartbeat import HeartbeatSource
from pollux.agent.elastic.stray_collective import StrayCollectiveCheck
from pollux.core.errors import NonFiniteValue, PolluxError
from pollux.goodput import BatchChoice


def parts(size: int = 64, norm: bool = False) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), *([nn.BatchNorm1d(4)] if norm else []), nn.Tanh(), nn.Linear(4, 2)]
    model = nn.Sequential(*layers)
    data = TensorDataset(torch.randn(size, 3), torch.randint(0, 2, (size,)))
    return model, torch.optim.SGD(model.parameters(), 0.1), data


def train(job, epochs: int = 1) -> None:
    for _ in job.epochs(epochs):
        for x, y in job.batches():
            job.backward(F.cross_entropy(job.model(x), y))


@pytest.mark.parametrize("ceiling", [None, 32])
def test_an_epoch_may_be_left_before_the_loss_of_a_batch(ceiling):
    with pollux.init(*parts(), 8, max_batch_size=ceiling) as job:
        for _ in job.epochs(3):
            for number, (x, y) in enumerate(job.batches()):
                if number == 2:
                    break
                job.backward(F.cross_entropy(job.model(x), y))
        assert job.epoch == 3
        assert job.step >= 3


def test_what_was_done_before_the_loop_was_left_is_saved(tmp_path):
    options = {"checkpoint_dir": tmp_path / "saved", "output_dir": tmp_path / "out"}
    with pollux.init(*parts(), 8, **options) as job:
        for epoch in job.epochs(5):
            for x, y in job.batches():
                job.backward(F.cross_entropy(job.model(x), y))
            if epoch == 1:
                break
    assert json.loads((tmp_path / "out" / "receipt.json").read_text())["totals"]["steps"] == 16
    with pollux.init(*parts(), 8, **options) as again:
        assert again.step == 16


def test_an_error_in_the_loop_saves_nothing(tmp_path):
    def broken() -> None:
        with pollux.init(*parts(), 8, checkpoint_dir=tmp_path) as job:
            for _ in job.epochs(2):
                for x, y in job.batches():
                    job.backward(F.cross_entropy(job.model(x), y))
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize("enabled", [False, True])
def test_a_scaler_does_not_train_on_nan_to_the_end(enabled):
    def diverged() -> None:
        with pollux.init(*parts(640), 8, scaler=torch.amp.GradScaler("cpu", enabled=enabled)) as job:
            for _ in job.epochs(50):
                for x, y in job.batches():
                    job.backward(F.cross_entropy(job.model(x), y) * float("nan"))

    with pytest.raises(NonFiniteValue, match="the loss became nan" if enabled else "the loss is nan at step 0"):
        diverged()


def test_a_schedule_of_so_many_steps_ends_with_them():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=13)
    schedule = Schedule(scheduler, "step", 8, exact=False)
    progress = TrainingProgress(96)
    for samples in (40, 40, 40):
        optimizer.step()
        progress.add(samples, 1.0)
        schedule.after_step(progress)
    assert progress.epoch_reached
    assert schedule.taken == 12


def test_signals_after_the_last_epoch_are_the_users_again():
    before = signal.getsignal(signal.SIGTERM)
    with pollux.init(*parts(), 8) as job:
        assert signal.getsignal(signal.SIGTERM) is not before
        train(job)
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_closed_job_gives_its_model_back():
    model, optimizer, data = parts()
    job = pollux.init(model, optimizer, data, 8)
    train(job)
    job.close()
    gone = weakref.ref(job)
    del job, model, optimizer
    gc.collect()
    assert gone() is None


def test_halving_a_batch_for_its_noise_is_not_exact_under_batchnorm():
    with pollux.init(*parts(norm=True), 8, measure_noise=True) as job:
        assert not job.is_exact
    with pollux.init(*parts(), 8, measure_noise=True) as job:
        assert job.is_exact


def test_a_save_that_failed_is_not_one(tmp_path, monkeypatch):
    with pollux.init(*parts(), 8, checkpoint_dir=tmp_path) as job:
        for _ in job.epochs(1):
            for x, y in job.batches():
                job.backward(F.cross_entropy(job.model(x), y))
            assert job._parts.checkpointer is not None
            disk = job._parts.checkpointer._hold.folder
            with monkeypatch.context() as patch:
                patch.setattr(disk, "publish", lambda *_: (_ for _ in ()).throw(OSError("no space left on device")))
                with pytest.raises(PolluxError, match="no space left"):
                    job.checkpoint()
            assert "checkpointed" not in [event.kind for event in job.receipt.events]
        assert [event.kind for event in job.receipt.events].count("checkpointed") == 1


def test_a_last_save_that_fails_does_not_keep_the_script_from_its_model(tmp_path, monkeypatch, caplog):
    options = {"checkpoint_dir": tmp_path / "saved", "output_dir": tmp_path / "out"}
    with pollux.init(*parts(), 8, **options) as job:
        assert job._parts.checkpointer is not None
        disk = job._parts.checkpointer._hold.folder
        monkeypatch.setattr(disk, "publish", lambda *_: (_ for _ in ()).throw(OSError("no space left on device")))
        train(job)
    assert "the last checkpoint could not be saved" in caplog.text
    events = json.loads((tmp_path / "out" / "receipt.json").read_text())["events"]
    assert [event["kind"] for event in events][-2:] == ["not-saved", "finished"]


def test_the_loss_on_record_is_the_one_that_is_averaged():
    with pollux.init(*parts(16), 16, accumulation=1) as job:
        weights = iter([3.0, 1.0])
        losses = []
        for _ in job.epochs(1):
            for x, y in job.batches():
                weight = next(weights)
                loss = F.cross_entropy(job.model(x), y)
                losses.append(weight * loss.item())
                job.backward(loss, weight=weight)
        assert job._parts.engine.losses()[0] == pytest.approx(sum(losses) / 4.0)


def test_after_a_roll_back_there_is_a_checkpoint_to_go_on_from(tmp_path):
    done: list[str] = []
    with pollux.init(*parts(), 8, max_batch_size=64, checkpoint_dir=tmp_path, keep_checkpoints=1) as job:
        for _ in job.epochs(2):
            for x, y in job.batches():
                job.backward(F.cross_entropy(job.model(x), y))
                if job.step == 4 and not done:
                    done.append("changed")
                    job._run.rounds._rounds.change_batch(
                        BatchChange(BatchChoice(16, 0, 1), 1.5, 1.0, 0.9, "for the test")
                    )
                if job.step == 7 and len(done) == 1:
                    done.append("rolled back")
                    job.checkpoint()
                    job._run.rounds._rounds.roll_back("for the test")
                    assert job.step == 4
                    assert [path.name[:15] for path in tmp_path.glob("step-*")] == ["step-0000000004"]
        assert len(done) == 2
        assert all(entry["samples"] == 64 for entry in job.receipt.to_json()["ledger"])


class Beating:
    """What of a supervised replica the loop tells of itself."""

    def __init__(self) -> None:
        self.beat: Any = HeartbeatSource()
        self.refusal = ""
        self.stray_check = StrayCollectiveCheck(lambda why: None)

    def start_activity(self, what: str) -> None:
        self.beat.busy = what

    def end_pause(self) -> None:
        pass

    def stepped(self, step: int) -> bool:
        self.beat.step, self.beat.busy = step, ""
        return False

    def finish(self) -> None:
        self.beat.busy = "finished"


def supervised(job: Any) -> Any:
    live = Beating()
    job._parts.member = live
    return live.beat


class Noting(TensorDataset):
    """A dataset that notes what the replica says of itself while it reads."""

    beat: Any = None
    seen: Any = None

    def __getitem__(self, index: Any) -> Any:
        if self.beat is not None:
            self.seen.append(self.beat.busy)
        return super().__getitem__(index)


def test_the_wait_for_data_is_announced_and_the_scripts_own_time_is_not():
    model, optimizer, plain = parts()
    data = Noting(*plain.tensors)
    with pollux.init(model, optimizer, data, 8) as job:
        beat = supervised(job)
        data.beat, data.seen, own = beat, [], []
        for _ in job.epochs(2):
            for x, y in job.batches():
                own.append(beat.busy)
                job.backward(F.cross_entropy(job.model(x), y))
    assert data.seen[0] == own[0] == "first step"
    assert set(data.seen[8:]) == {"data"}
    assert set(own[1:]) == {""}


def test_a_save_that_a_script_asks_for_is_announced(tmp_path, monkeypatch):
    with pollux.init(*parts(), 8, checkpoint_dir=tmp_path) as job:
        beat, seen = supervised(job), []
        save = job._parts.checkpointer.save

        def noted(*arguments: Any, **named: Any) -> None:
            seen.append(beat.busy)
            save(*arguments, **named)

        monkeypatch.setattr(job._parts.checkpointer, "save", noted)
        for before in ("", "pass end", "regroup"):
            beat.busy = before
            job.checkpoint()
            assert beat.busy == before
    assert seen[:3] == ["checkpoint", "checkpoint", "regroup"]


def test_who_leaves_ends_its_event_file():
    closed = []
    with pollux.init(*parts(), 8) as job:
        record: Any = job._run.record
        record.scalars = SimpleNamespace(close=lambda: closed.append("closed"))
        job._loop._elastic.prepare_to_leave()
    assert closed[0] == "closed"
