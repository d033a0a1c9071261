"""`pollux.init`: what it refuses, with which error, and that nothing is left behind when it does."""

import dataclasses
import signal
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import pollux
from pollux.agent import start
from pollux.agent.checkpoint import Checkpointer
from pollux.agent.manifest import MANIFEST_NAME, encode, read_manifest
from pollux.core.errors import CheckpointMismatch, InvalidInput, MisusedJob, PolluxError, UnknownName


@pytest.fixture(autouse=True)
def no_job_stays():
    yield
    job = start._active() if start._active is not None else None
    if job is not None:
        job.close()


def parts(seed: int = 0, size: int = 20, width: int = 4) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))
    data = TensorDataset(torch.randn(size, 3), torch.randint(0, 2, (size,)))
    return model, torch.optim.Adam(model.parameters()), data


def train(job, epochs: int = 1) -> None:
    for _ in job.epochs(epochs):
        for x, y in job.batches():
            job.backward(F.cross_entropy(job.model(x), y))


def refusal(kind: type[PolluxError], **options) -> str:
    """The message of the error that `init` raises; afterwards another `init` must work and signals be as before."""
    model, optimizer, data = parts()
    given = {"model": model, "optimizer": optimizer, "dataset": data, "batch_size": 5, **options}
    weights = [parameter.clone() for parameter in model.parameters()]
    handler, threads = signal.getsignal(signal.SIGTERM), threading.active_count()
    with pytest.raises(kind) as caught:
        pollux.init(**given)
    assert type(caught.value) is kind
    assert all(map(torch.equal, weights, model.parameters()))
    assert signal.getsignal(signal.SIGTERM) == handler
    assert threading.active_count() == threads
    with pollux.init(*parts(), 5) as job:
        assert job.step == 0
    return str(caught.value)


class Counter:
    """A user's object with state."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Halfway:
    def state_dict(self):
        return {}


class Endless(IterableDataset[Any]):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 8, "max_batch_size": 4}, ["batch_size is 8", "max_batch_size 4"]),
        ({"batch_size": 21}, ["20 samples", "batch_size 21"]),
        ({"batch_size": 0}, ["batch_size is 0"]),
        ({"batch_size": -3}, ["batch_size is -3"]),
        ({"batch_size": 2.5}, ["batch_size is 2.5", "whole"]),
        ({"batch_size": 5.0}, ["batch_size is 5.0", "whole"]),
        ({"batch_size": "5"}, ["batch_size is '5'"]),
        ({"batch_size": True}, ["batch_size is True"]),
        ({"batch_size": float("nan")}, ["batch_size is nan"]),
        ({"batch_size": None}, ["batch_size is missing"]),
        ({"max_batch_size": 0}, ["max_batch_size is 0"]),
        ({"max_local_batch": 0}, ["max_local_batch is 0"]),
        ({"accumulation": -1}, ["accumulation is -1"]),
        ({"accumulation": 1.5}, ["accumulation is 1.5"]),
        ({"accumulation": 5}, ["accumulation is 5", "batch of 5"]),
        ({"clip_norm": -1.0}, ["clip_norm is -1.0"]),
        ({"clip_norm": float("inf")}, ["clip_norm is inf"]),
        ({"checkpoint_every": 0.0}, ["checkpoint_every is 0.0"]),
        ({"keep_checkpoints": 0}, ["keep_checkpoints is 0"]),
        ({"timeout": "soon"}, ["timeout is 'soon'"]),
        ({"model": "resnet"}, ["model is a str", "torch.nn.Module"]),
        ({"optimizer": object()}, ["optimizer is a object", "torch.optim.Optimizer"]),
        ({"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)}, ["none of the model's parameters"]),
        ({"dataset": 3}, ["int", "__getitem__"]),
        ({"dataset": TensorDataset(torch.zeros(0, 3), torch.zeros(0))}, ["empty"]),
        ({"state": {"counter": object()}}, ["state['counter']", "state_dict and load_state_dict"]),
        ({"state": {"half": Halfway()}}, ["state['half']", "load_state_dict"]),
        ({"lr_rule": 7}, ["learning-rate rule is 7"]),
        ({"warmup_epochs": -1.0}, ["warmup is -1.0"]),
        ({"lr_scheduler": object()}, ["lr_scheduler is a object", "step()"]),
        ({"num_workers": -1}, ["num_workers is -1"]),
        ({"device": "cuda"}, ["device is 'cuda'", "no GPU"]),
        ({"device": "toaster"}, ["device is 'toaster'"]),
        ({"checkpoint_dir": "no/such/parent/folder"}, ["no/such/parent", "does not exist"]),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, list) else "+".join(value),
)
def test_bad_input_is_refused_before_anything_changes(options, words):
    if "device" in options and torch.cuda.is_available():
        options = {"device": "cuda:99"}
    message = refusal(InvalidInput, **options)
    for word in words:
        assert word in message


def test_unknown_names_come_with_a_suggestion():
    assert "did you mean 'adascale'?" in refusal(UnknownName, lr_rule="adascal")
    assert "did you mean 'step'?" in refusal(UnknownName, schedule_every="steps")


def test_a_model_that_is_wrapped_already_is_refused():
    model, optimizer, _ = parts()
    message = refusal(InvalidInput, model=nn.DataParallel(model), optimizer=optimizer)
    assert "wrapped in DataParallel" in message


def test_a_plateau_scheduler_is_refused_with_the_way_to_use_it():
    model, optimizer, data = parts()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(InvalidInput, match=r"ReduceLROnPlateau.*state="):
        pollux.init(model, optimizer, data, 5, lr_scheduler=scheduler)


def test_rank_and_world_size_must_fit(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InvalidInput, match="WORLD_SIZE is 2 but RANK is not set"):
        pollux.init(*parts(), 5)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(InvalidInput, match="RANK is 2 with WORLD_SIZE 2"):
        pollux.init(*parts(), 5)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InvalidInput, match="max_batch_size is 1, below the 2 replicas"):
        pollux.init(*parts(), 1, max_batch_size=1)
    with pytest.raises(InvalidInput, match="batch_size is 1, below the 2 replicas"):
        pollux.init(*parts(), 1)


def test_a_second_job_is_refused_until_the_first_is_closed():
    with pollux.init(*parts(), 5), pytest.raises(MisusedJob, match=r"second time.*job.close\(\)"):
        pollux.init(*parts(), 5)
    pollux.init(*parts(), 5).close()


def test_a_stream_without_items_is_refused_when_it_is_read():
    model, optimizer, _ = parts()
    with pollux.init(model, optimizer, Endless(), 5) as job, pytest.raises(InvalidInput, match="gave no items"):
        train(job)


def test_a_dataloader_is_taken_over():
    model, optimizer, data = parts()
    seen = []
    loader = DataLoader(data, batch_size=6, shuffle=False, drop_last=True)
    with pollux.init(model, optimizer, loader) as job:
        assert job.batch_size == 6
        for _ in job.epochs(1):
            for x, y in job.batches():
                seen.append(x)
                job.backward(F.cross_entropy(job.model(x), y))
    assert torch.equal(torch.cat(seen), data.tensors[0][:18])


def test_a_dataloader_with_its_own_batches_is_refused():
    model, optimizer, data = parts()
    with pytest.raises(InvalidInput, match="batch_size=None"):
        pollux.init(model, optimizer, DataLoader(data, batch_size=None), 5)


def saved_in(folder, **options) -> None:
    with pollux.init(*parts(), 5, checkpoint_dir=folder, **options) as job:
        train(job)


def listing(folder) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def mismatch(folder, model, optimizer, data, **options) -> str:
    """The refusal of a checkpoint that does not fit; the folder stays as it is and can be used at once."""
    before = listing(folder)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(CheckpointMismatch) as caught:
        pollux.init(model, optimizer, data, 5, checkpoint_dir=folder, **options)
    assert listing(folder) == before
    assert signal.getsignal(signal.SIGTERM) == handler
    with pollux.init(*parts(), 5, checkpoint_dir=folder) as job:
        assert job.step == 4
    return str(caught.value)


def test_a_checkpoint_of_another_job_is_refused(tmp_path):
    saved_in(tmp_path)
    assert "0.weight" in mismatch(tmp_path, *parts(width=5))
    model, _, data = parts()
    assert "SGD" in mismatch(tmp_path, model, torch.optim.SGD(model.parameters(), 0.1), data)
    model, _, data = parts()
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    assert "parameter groups" in mismatch(tmp_path, model, torch.optim.Adam(groups), data)
    assert "size 20" in mismatch(tmp_path, *parts(size=25))
    assert "seed 0" in mismatch(tmp_path, *parts(), seed=1)
    assert "no state for 'counter'" in mismatch(tmp_path, *parts(), state={"counter": Counter()})


def test_a_refused_checkpoint_leaves_the_model_as_it_was(tmp_path):
    saved_in(tmp_path)
    model, optimizer, data = parts(seed=5, size=25)
    before = [parameter.clone() for parameter in model.parameters()]
    mismatch(tmp_path, model, optimizer, data)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_checkpoint_of_another_format_is_refused(tmp_path):
    saved_in(tmp_path)
    folder = next(tmp_path.glob("step-*"))
    other = dataclasses.replace(read_manifest(folder), format=999)
    (folder / MANIFEST_NAME).write_bytes(encode(other))
    changed = listing(tmp_path)
    with pytest.raises(CheckpointMismatch, match="format 999"):
        pollux.init(*parts(), 5, checkpoint_dir=tmp_path)
    assert listing(tmp_path) == changed


def test_a_checkpoint_folder_serves_one_job_at_a_time(tmp_path):
    saved_in(tmp_path)
    first = pollux.init(*parts(), 5, checkpoint_dir=tmp_path)
    try:
        with pytest.raises(MisusedJob, match="in use"):
            Checkpointer(tmp_path)
    finally:
        first.close()


def test_a_users_object_is_saved_and_restored(tmp_path):
    counter = Counter()
    with pollux.init(*parts(), 5, checkpoint_dir=tmp_path, state={"counter": counter}) as job:
        counter.count = 41
        train(job)
    fresh = Counter()
    with pollux.init(*parts(), 5, checkpoint_dir=tmp_path, state={"counter": fresh}) as job:
        assert fresh.count == 41
        assert job.epoch == 1


def test_a_scaler_is_saved_and_restored(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    with pollux.init(*parts(), 5, checkpoint_dir=tmp_path, scaler=scaler) as job:
        train(job)
    assert scaler.get_scale() == 256.0
    fresh = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    with pollux.init(*parts(), 5, checkpoint_dir=tmp_path, scaler=fresh):
        assert fresh.get_scale() == 256.0


def test_without_a_checkpoint_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pollux.init(*parts(), 5) as job:
        train(job)
    assert list(tmp_path.iterdir()) == []


def test_the_environment_may_name_the_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("POLLUX_CHECKPOINT_DIR", str(tmp_path / "saved"))
    monkeypatch.setenv("POLLUX_OUTPUT_DIR", str(tmp_path / "out"))
    with pollux.init(*parts(), 5) as job:
        train(job)
    assert list((tmp_path / "saved").glob("step-*"))
    assert (tmp_path / "out" / "receipt.json").exists()
