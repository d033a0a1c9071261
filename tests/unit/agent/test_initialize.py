"""`pollux.init`: what it refuses, with which error, and that nothing is left behind when it does."""

import dataclasses
import inspect
import signal
import subprocess
import sys
import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import pollux
from pollux.agent import pass_order
from pollux.agent.checkpoint.checkpointer import Checkpointer
from pollux.agent.checkpoint.manifest import MANIFEST_NAME, encode, read_manifest
from pollux.agent.data.loader import LoaderOptions
from pollux.agent.data.torch_reader import torch_loader
from pollux.agent.job.option_checks import check_model
from pollux.core.errors import CheckpointMismatch, InvalidInput, MisusedJob, PolluxError, UnknownName
from pollux.testing.waiting import PATIENCE_SECONDS


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


class Steps:
    def step(self):
        pass


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
        ({"lr_rule": 7}, ["lr_rule is 7", "adascale"]),
        ({"warmup_epochs": -1.0}, ["warmup_epochs is -1.0"]),
        ({"warmup_epochs": "1"}, ["warmup_epochs is '1'", "number of epochs"]),
        ({"warmup_epochs": None}, ["warmup_epochs is None"]),
        ({"schedule_every": 5}, ["schedule_every is 5", "step"]),
        ({"scaler": 5}, ["scaler is 5", "GradScaler"]),
        ({"before_step": 5}, ["before_step is 5", "function"]),
        ({"collate_fn": 5}, ["collate_fn is 5", "function"]),
        ({"sampler": 5}, ["sampler is 5", "indices"]),
        ({"seed": "a"}, ["seed is 'a'", "whole number"]),
        ({"seed": 1.5}, ["seed is 1.5", "whole number"]),
        ({"shuffle": "no"}, ["shuffle is 'no'", "True or False"]),
        ({"pin_memory": 1}, ["pin_memory is 1", "True or False"]),
        ({"drop_last": "yes"}, ["drop_last is 'yes'", "True or False"]),
        ({"move_batches": None}, ["move_batches is None", "True or False"]),
        ({"sync_batchnorm": 0}, ["sync_batchnorm is 0", "True or False"]),
        ({"measure_noise": "often"}, ["measure_noise is 'often'", "True or False"]),
        ({"num_workers": "2"}, ["num_workers is '2'", "whole number"]),
        ({"num_workers": 1.5}, ["num_workers is 1.5", "whole number"]),
        ({"num_shards": "2"}, ["num_shards is '2'", "whole number"]),
        ({"keep_checkpoints": "2"}, ["keep_checkpoints is '2'"]),
        ({"state": [1]}, ["state is [1]", "mapping of names"]),
        ({"state": {1: Counter()}}, ["state is {1: ", "mapping of names"]),
        ({"checkpoint_dir": 5}, ["checkpoint_dir is 5", "path of a folder"]),
        ({"checkpoint_dir": ""}, ["checkpoint_dir is ''", "path of a folder"]),
        ({"checkpoint_dir": "a\0b"}, ["checkpoint_dir is 'a\0b'", "null"]),
        ({"output_dir": 5}, ["output_dir is 5", "path of a folder"]),
        ({"tensorboard_dir": 5}, ["tensorboard_dir is 5", "path of a folder"]),
        ({"stop_signals": "TERM"}, ["stop_signals is 'TERM'", "signal.SIGTERM"]),
        ({"stop_signals": 15}, ["stop_signals is 15", "tuple"]),
        ({"stop_signals": (9,)}, ["stop_signals is (9,)", "can catch"]),
        ({"stop_signals": (15, 999)}, ["stop_signals is (15, 999)", "can catch"]),
        ({"ddp_options": 5}, ["ddp_options is 5", "DistributedDataParallel"]),
        ({"ddp_options": {1: 2}}, ["ddp_options is {1: 2}", "DistributedDataParallel"]),
        ({"name": 5}, ["name is 5", "text"]),
        ({"device": []}, ["device is '[]'"]),
        ({"device": "meta"}, ["device is 'meta'", "no values"]),
        ({"lr_scheduler": Steps()}, ["lr_scheduler is a Steps", "state_dict() and load_state_dict()"]),
        ({"lr_scheduler": torch.optim.lr_scheduler.StepLR}, ["lr_scheduler", "not one of its kind"]),
        ({"lr_scheduler": object()}, ["lr_scheduler is a object", "step()"]),
        ({"num_workers": -1}, ["num_workers is -1"]),
        ({"device": "cuda"}, ["device is 'cuda'", "no GPU"]),
        ({"device": "toaster"}, ["device is 'toaster'"]),
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
    assert "did you mean 'static_graph'?" in refusal(UnknownName, ddp_options={"static_graf": True})
    assert "unknown option of DistributedDataParallel" in refusal(UnknownName, ddp_options={"module": None})


@pytest.mark.parametrize("option", list(inspect.signature(pollux.init).parameters))
def test_what_is_of_no_use_to_anyone_is_refused_by_the_name_of_its_option(option):
    """A new option must be checked too, or this fails."""
    assert option in refusal(InvalidInput, **{option: object()})


def test_numbers_of_epochs_paths_and_signals_may_come_in_several_kinds(tmp_path):
    options: dict[str, Any] = {"warmup_epochs": 1, "lr_rule": "legw", "output_dir": str(tmp_path), "seed": -3}
    options["stop_signals"] = [signal.SIGUSR1]
    with pollux.init(*parts(), 5, ddp_options={}, state={}, **options) as job:
        train(job)
    assert (tmp_path / "receipt.json").exists()


def test_a_model_that_is_wrapped_already_is_refused():
    model, optimizer, _ = parts()
    message = refusal(InvalidInput, model=nn.DataParallel(model), optimizer=optimizer)
    assert "wrapped in DataParallel" in message


def test_an_optimizer_that_needs_a_closure_is_refused():
    model, _, _ = parts()
    message = refusal(InvalidInput, model=model, optimizer=torch.optim.LBFGS(model.parameters()))
    assert "optimizer is a LBFGS" in message
    assert "closure" in message


def test_an_optimizer_whose_step_a_scheduler_has_wrapped_is_taken():
    model, optimizer, data = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    pollux.init(model, optimizer, data, 5, lr_scheduler=scheduler).close()


def test_parameters_outside_of_the_model_are_refused():
    """They would be neither averaged nor saved."""
    model, _, _ = parts()
    loss = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], 0.1)
    message = refusal(InvalidInput, model=model, optimizer=optimizer)
    assert "2 of the optimizer's 6 parameters are not in the model" in message
    assert "submodule" in message
    data = parts()[2]
    pollux.init(nn.ModuleDict({"model": model, "loss": loss}), optimizer, data, 5).close()


def test_parameters_of_the_model_may_be_left_to_themselves():
    model, _, data = parts()
    pollux.init(model, torch.optim.SGD(model[0].parameters(), 0.1), data, 5).close()


def as_sharded(module: nn.Module) -> None:
    """Give a module the class that `fully_shard` gives it, without the process group that it wants."""
    module.__class__ = type(f"FSDP{type(module).__name__}", (FSDPModule, type(module)), {})


def test_a_model_of_which_only_parts_are_sharded_is_refused():
    model, optimizer, _ = parts()
    as_sharded(model[0])
    message = refusal(InvalidInput, model=model, optimizer=optimizer)
    assert "the Sequential around them is not" in message
    assert "fully_shard(model)" in message
    as_sharded(model)
    check_model(model, optimizer)


def test_names_that_are_taken_are_refused_in_state():
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert "state has a 'scaler'" in refusal(InvalidInput, scaler=scaler, state={"scaler": Counter()})
    pollux.init(*parts(), 5, state={"scaler": Counter()}).close()


@pytest.mark.parametrize("option", ["checkpoint_dir", "output_dir"])
def test_a_folder_that_cannot_be_is_refused(option, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        assert f"{option} is '{folder}'" in refusal(InvalidInput, **{option: folder})
    assert (tmp_path / "file").read_text() == "not a folder"


@pytest.mark.parametrize("option", ["checkpoint_dir", "output_dir"])
def test_a_folder_that_cannot_be_written_to_now_is_told_and_training_goes_on(option, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pollux.init(*parts(), 5, **{option: tmp_path}) as job:
        train(job)
    assert f"{option} is '{tmp_path}'" in caplog.text
    assert "no permission to write there" in caplog.text


@pytest.mark.parametrize("option", ["checkpoint_dir", "output_dir"])
def test_folders_are_made_with_their_parents(option, tmp_path):
    folder = tmp_path / "no" / "such" / "folder"
    with pollux.init(*parts(), 5, **{option: folder}) as job:
        assert folder.is_dir()
        train(job)
    assert list(folder.iterdir())


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


@pytest.mark.parametrize(("given", "expected"), [(None, 1234), (7, 7), (0, 0)])
def test_the_seed_is_that_of_a_dataloader_unless_one_is_given(given, expected):
    model, optimizer, data = parts()
    loader = DataLoader(data, batch_size=20, shuffle=True, generator=torch.Generator().manual_seed(1234))
    with pollux.init(model, optimizer, loader, seed=given) as job:
        for _ in job.epochs(1):
            for x, y in job.batches():
                assert torch.equal(x, data.tensors[0][pass_order(20, expected, 0)])
                job.backward(F.cross_entropy(job.model(x), y))
        assert job._parts.state._seed == expected


def test_the_seed_is_0_where_nothing_says_another():
    with pollux.init(*parts(), 5) as job:
        assert job._parts.loader.options.seed == job._parts.state._seed == 0


@pytest.mark.parametrize(
    ("options", "ceiling"),
    [({"drop_last": True}, 20), ({}, 4096), ({"drop_last": True, "batch_size": 20}, 20)],
    ids=str,
)
def test_dropping_the_last_batch_keeps_the_ceiling_within_a_pass(options, ceiling, caplog):
    """A batch above the dataset would be dropped in every pass, and training never end."""
    model, optimizer, data = parts()
    with pollux.init(**{"batch_size": 5, "max_batch_size": 4096, **options}, **bound(model, optimizer, data)) as job:
        assert job._parts.adaptation.allowed.maximum == ceiling
    said = [record.getMessage() for record in caplog.records]
    assert said == (
        ["max_batch_size is 4096, but with drop_last a batch has at most the dataset's 20 samples"]
        if ceiling < 4096
        else []
    )


def bound(model, optimizer, data) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer, "dataset": data}


def test_a_samplers_order_has_a_number_that_replicas_can_compare():
    data = parts()[2]

    def number(order, **options) -> int:
        return torch_loader(data, LoaderOptions(sampler=order, **options), 0, 1).order_hash()

    assert number([3, 1, 2]) == number((3, 1, 2)) != number([1, 3, 2])
    assert float(number([3, 1, 2])) == number([3, 1, 2]) < 2**52
    assert number(None) == number(None, shuffle=False) == 0
    assert torch_loader(Endless(), LoaderOptions(shuffle=False), 0, 1).order_hash() == 0
    shuffled = torch_loader(data, LoaderOptions(sampler=torch.utils.data.RandomSampler(data)), 0, 1)
    first = shuffled.order_hash()
    shuffled.skip_pass()
    assert shuffled.order_hash() != first


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


def scheduled(kind, **options) -> tuple[tuple[Any, Any, Any], Any]:
    model, optimizer, data = parts()
    return (model, optimizer, data), kind(optimizer, **options)


def in_turn(optimizer, second) -> Any:
    first = lr_scheduler.LinearLR(optimizer, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [first, second(optimizer)], milestones=[2])


def saved_with(folder, kind, **options) -> Any:
    given, schedule = scheduled(kind, **options)
    with pollux.init(*given, 5, checkpoint_dir=folder, lr_scheduler=schedule) as job:
        train(job)
    return schedule


def test_a_checkpoint_with_another_kind_of_schedule_is_refused(tmp_path):
    saved_with(tmp_path, lr_scheduler.StepLR, step_size=3)
    given, schedule = scheduled(lr_scheduler.CosineAnnealingLR, T_max=9)
    text = mismatch(tmp_path, *given, lr_scheduler=schedule)
    assert "the checkpoint's lr_scheduler is a StepLR, this one is a CosineAnnealingLR" in text
    assert saved_with(tmp_path, lr_scheduler.StepLR, step_size=3).last_epoch == 4


def test_schedules_in_turn_are_of_a_kind_by_their_parts(tmp_path):
    saved_with(tmp_path, in_turn, second=partial(lr_scheduler.ExponentialLR, gamma=0.9))
    given, schedule = scheduled(in_turn, second=lr_scheduler.ConstantLR)
    text = mismatch(tmp_path, *given, lr_scheduler=schedule)
    assert "SequentialLR(LinearLR, ExponentialLR), this one is a SequentialLR(LinearLR, ConstantLR)" in text


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


def test_what_scripts_need_is_at_the_top():
    from pollux.agent.job.job import JobStopped

    assert pollux.PolluxError is PolluxError
    assert pollux.JobStopped is JobStopped
    assert {"Job", "JobStopped", "PolluxError", "init"} <= set(dir(pollux))


def test_the_root_of_errors_needs_no_pytorch():
    code = "import sys; sys.modules['torch'] = None; import pollux; print(pollux.PolluxError.__name__)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert (result.stdout.strip(), result.stderr) == ("PolluxError", "")
