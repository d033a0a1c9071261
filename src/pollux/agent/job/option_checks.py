"""Checks the options of `pollux.init`: the kind of each, and model, optimiser, schedule and batches.

All checks raise one clear error before anything is changed.
"""

from __future__ import annotations

import inspect
import math
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from pollux.agent.adaptation import lr_rules
from pollux.agent.adaptation.adaptation import BatchRange
from pollux.agent.adaptation.progress import SCHEDULE_UNITS
from pollux.agent.checkpoint.training_state import Stateful, require_stateful
from pollux.core.errors import InvalidInput, UnknownName

__all__ = [
    "batch_range",
    "check_dataset_size",
    "check_kinds",
    "check_model",
    "check_replicas",
    "check_schedule",
    "check_wrapper_options",
    "to_be_saved",
]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_signals(value: Any) -> bool:
    never = (signal.SIGKILL, signal.SIGSTOP)
    return isinstance(value, tuple | list | set | frozenset) and all(
        _is_whole(number) and number in signal.valid_signals() and number not in never for number in value
    )


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


_Check: TypeAlias = tuple[Callable[[Any], bool], str]
_COUNT: _Check = (lambda value: _is_whole(value) and value > 0, "give a whole number above 0")
_AMOUNT: _Check = (lambda value: _is_number(value) and value > 0, "give a number above 0")
_FLAG: _Check = (lambda value: isinstance(value, bool), "give True or False")
_PATH: _Check = (lambda value: isinstance(value, str | os.PathLike) and str(value) != "", "give the path of a folder")
_FUNCTION: _Check = (callable, "give a function")
_RULES = f"one of {', '.join(lr_rules.names())}, or a function f(scale, gain, group_index) that returns a factor"
_COUNTS = ("batch_size", "max_batch_size", "max_local_batch", "num_shards", "epoch_size", "keep_checkpoints")
_FLAGS = ("shuffle", "pin_memory", "drop_last", "move_batches", "sync_batchnorm", "measure_noise")
# The check of each option. Model, optimizer, dataset, device and lr_scheduler have checks of their own.
_KINDS: dict[str, _Check] = {
    **dict.fromkeys(_COUNTS, _COUNT),
    **dict.fromkeys(_FLAGS, _FLAG),
    **dict.fromkeys(("clip_norm", "checkpoint_every", "timeout"), _AMOUNT),
    **dict.fromkeys(("checkpoint_dir", "output_dir", "tensorboard_dir"), _PATH),
    **dict.fromkeys(("before_step", "collate_fn"), _FUNCTION),
    "accumulation": (lambda value: _is_whole(value) and value >= 0, "give the number of extra micro-steps, 0 or more"),
    "num_workers": (lambda value: _is_whole(value) and value >= 0, "give a whole number, 0 or more"),
    "seed": (_is_whole, "give a whole number"),
    "warmup_epochs": (lambda value: _is_number(value) and value >= 0, "give a number of epochs, 0 or more"),
    "lr_rule": (lambda value: isinstance(value, str) or callable(value), f"give {_RULES}"),
    "schedule_every": (lambda value: isinstance(value, str), f"give one of {', '.join(SCHEDULE_UNITS)}"),
    "scaler": (lambda value: isinstance(value, torch.amp.GradScaler), "give a torch.amp.GradScaler"),
    "sampler": (lambda value: isinstance(value, Iterable), "give an iterable of indices, such as a torch Sampler"),
    "state": (_is_named, "give a mapping of names (str) to objects with state_dict and load_state_dict"),
    "stop_signals": (_are_signals, "give a tuple of signals that a process can catch, such as (signal.SIGTERM,)"),
    "ddp_options": (_is_named, "give a mapping of options of DistributedDataParallel to their values"),
    "name": (lambda value: isinstance(value, str), "give a text"),
}


def check_kinds(given: Mapping[str, Any], defaults: Mapping[str, inspect.Parameter]) -> None:
    """Refuse options of a wrong kind; None is allowed where it is the default.

    `given` has `init`'s arguments by name, `defaults` its parameters.
    """
    for name, (fits, remedy) in _KINDS.items():
        value = given[name]
        if not fits(value) and not (value is None and defaults[name].default is None):
            raise InvalidInput(f"{name} is {value!r}: {remedy}")


def _check_sharding(model: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule

    # A compiled model has the model inside.
    root = getattr(model, "_orig_mod", model)
    if not isinstance(root, FSDPModule) and any(isinstance(module, FSDPModule) for module in model.modules()):
        raise InvalidInput(
            f"parts of the model are sharded by fully_shard, but the {type(root).__name__} around them is not: call "
            "fully_shard(model) last, after its parts"
        )


def check_wrapper_options(options: Mapping[str, object]) -> None:
    """Refuse options that DistributedDataParallel does not have."""
    known = set(inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters) - {"self", "module"}
    for name in options:
        if name not in known:
            raise UnknownName("option of DistributedDataParallel in ddp_options", name, known)


def to_be_saved(state: Mapping[str, Stateful], **ours: Any) -> dict[str, Stateful]:
    """The objects to save by name: the user's, and those of ours that are not None."""
    there = {name: item for name, item in ours.items() if item is not None}
    for name in state:
        if name in there:
            raise InvalidInput(f"state has a '{name}', the name that {name}= is saved under: choose another name")
    return {**require_stateful(state), **there}


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse objects that are no model or optimiser, and an optimiser of another model's parameters."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model is a {type(model).__name__}: give a torch.nn.Module")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise InvalidInput(f"model is wrapped in {type(model).__name__} already: pass the model itself")
    _check_sharding(model)
    _check_optimizer(optimizer)
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    strangers = trained - {id(parameter) for parameter in model.parameters()}
    if trained == strangers:
        raise InvalidInput("the optimizer has none of the model's parameters: build it from model.parameters()")
    if strangers:
        raise InvalidInput(
            f"{len(strangers)} of the optimizer's {len(trained)} parameters are not in the model and would be neither "
            "averaged nor saved: make what holds them, such as a loss with weights, a submodule of the model"
        )


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidInput(f"optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InvalidInput(
            f"optimizer is a {type(optimizer).__name__}, whose step() computes the loss again by a closure: use one "
            "that steps from the gradients that are there, such as SGD or AdamW"
        )


def batch_range(initial: int, maximum: int | None, local_max: int | None, accumulation: int) -> BatchRange:
    """The batches that the user allows, in samples; `InvalidInput` where they contradict each other."""
    if maximum is not None and maximum < initial:
        raise InvalidInput(
            f"batch_size is {initial}, above max_batch_size {maximum}: raise the ceiling or lower the initial batch"
        )
    if accumulation >= initial:
        raise InvalidInput(f"accumulation is {accumulation} with a batch of {initial}: each micro-step needs a sample")
    return BatchRange(initial, maximum, local_max, accumulation)


def check_schedule(scheduler: Any, unit: str) -> None:
    """Refuse an object that is no learning-rate scheduler, and one that needs a metric; None: no scheduler."""
    if unit not in SCHEDULE_UNITS:
        raise UnknownName("schedule_every", unit, SCHEDULE_UNITS)
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise InvalidInput(
            "lr_scheduler is a ReduceLROnPlateau, which needs a metric: leave it out here, call its step(metric) after "
            "your evaluation, and pass it in state= to have it saved"
        )
    needed = ("step", "state_dict", "load_state_dict")
    missing = [name for name in needed if not callable(getattr(scheduler, name, None))]
    if scheduler is not None and (missing or isinstance(scheduler, type)):
        lacks = f"without {' and '.join(f'{name}()' for name in missing)}" if missing else "itself, not one of its kind"
        raise InvalidInput(f"lr_scheduler is a {type(scheduler).__name__} {lacks}: give a PyTorch scheduler")


def check_replicas(num_replicas: int, batch_size: int, maximum: int | None) -> None:
    """Refuse batches with fewer samples than there are replicas."""
    ceiling = maximum if maximum is not None else batch_size
    if ceiling < num_replicas:
        name = "max_batch_size" if maximum is not None else "batch_size"
        raise InvalidInput(
            f"{name} is {ceiling}, below the {num_replicas} replicas: each needs a sample; use fewer replicas or a "
            "larger batch"
        )


def check_dataset_size(size: int | None, batch_size: int) -> None:
    """Refuse a dataset that has not a sample for each place of a batch; None: its size is not known."""
    if size is not None and size < batch_size:
        raise InvalidInput(f"the dataset has {size} samples, fewer than batch_size {batch_size}: use a smaller batch")
