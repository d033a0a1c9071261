"""The options of `pollux.init`, checked and completed from the launcher's variables, as one frozen value."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from pollux.agent.adaptation import lr_rules
from pollux.agent.adaptation.adaptation import BatchRange
from pollux.agent.checkpoint.training_state import Stateful
from pollux.agent.data.loader import LoaderOptions
from pollux.agent.data.torch_reader import options_of
from pollux.agent.distributed.environment import Environment
from pollux.agent.job.option_checks import batch_range, check_model, check_schedule, check_wrapper_options, to_be_saved
from pollux.agent.job.script_schedules import ScriptSchedule, script_schedules
from pollux.agent.step.optimizer_step import StepOptions
from pollux.core.errors import InvalidInput
from pollux.storage.address import PACKAGES, is_address
from pollux.storage.object_store import ObjectStore

__all__ = ["JobOptions"]

_DEFAULT_CHECKPOINT_EVERY = 600.0
_DEFAULT_KEEP_CHECKPOINTS = 2
_LOADING = ("shuffle", "seed", "sampler", "collate_fn", "num_workers", "pin_memory", "drop_last", "num_shards")


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The options of a job. Most have the names of `pollux.init`; the others are:

    `batches` are the batches that are allowed, `loading` says how data is read, `step` what a step does beside the
    optimiser; `rule` is the learning-rate rule, `script_schedules` are the schedulers that the script steps itself,
    `stateful` has the objects to save beside model and optimiser, `checkpoints` is the place of checkpoints, None for
    none.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    dataset: Any
    loading: LoaderOptions
    batches: BatchRange
    step: StepOptions
    rule: lr_rules.Rule
    warmup_epochs: float
    lr_scheduler: Any
    schedule_every: str
    script_schedules: tuple[ScriptSchedule, ...]
    stateful: Mapping[str, Stateful]
    epoch_size: int | None
    move_batches: bool
    sync_batchnorm: bool
    measure_noise: bool
    checkpoints: Path | ObjectStore | None
    checkpoint_every: float
    keep_checkpoints: int
    output_dir: Path | None
    tensorboard_dir: str | os.PathLike[str] | None
    stop_signals: tuple[int, ...]
    timeout: float | None
    name: str

    @classmethod
    def of(cls, given: Mapping[str, Any], environment: Environment) -> JobOptions:
        """The options of a call of `pollux.init`; `given` has its arguments by name, their kinds checked."""
        batch_size, ceiling, local_ceiling = environment.batches(
            given["batch_size"], given["max_batch_size"], given["max_local_batch"]
        )
        dataset, loading, batch_size = _data(given["dataset"], batch_size, {name: given[name] for name in _LOADING})
        model, optimizer, schedule = given["model"], given["optimizer"], given["lr_scheduler"]
        check_model(model, optimizer)
        check_wrapper_options(given["ddp_options"] or {})
        batches = batch_range(batch_size, ceiling, local_ceiling, given["accumulation"])
        rule = given["lr_rule"] if given["lr_rule"] is not None else lr_rules.default_rule(optimizer)
        rule = lr_rules.create(rule, warmup=given["warmup_epochs"])
        check_schedule(schedule, given["schedule_every"])
        stateful = to_be_saved(given["state"] or {}, lr_scheduler=schedule, scaler=given["scaler"])
        own_schedules, unsaved = script_schedules(optimizer, schedule, stateful.values())
        measures = given["measure_noise"]
        same = ("epoch_size", "schedule_every", "move_batches", "sync_batchnorm", "tensorboard_dir", "timeout")
        return cls(
            model=model,
            optimizer=optimizer,
            dataset=dataset,
            loading=loading,
            batches=batches,
            step=StepOptions(given["scaler"], given["clip_norm"], given["before_step"], given["ddp_options"]),
            rule=rule,
            warmup_epochs=float(given["warmup_epochs"]),
            lr_scheduler=schedule,
            script_schedules=own_schedules,
            stateful={**stateful, **unsaved},
            measure_noise=measures if measures is not None else not batches.is_exact,
            stop_signals=tuple(given["stop_signals"]),
            name=given["name"] or environment.job or _script_name(),
            **_saving(given, environment),
            **{name: given[name] for name in same},
        )


def _data(dataset: Any, batch_size: int | None, given: Mapping[str, Any]) -> tuple[Any, LoaderOptions, int]:
    """The dataset, how to read it, and the batch size; arguments override the settings of a DataLoader."""
    options = LoaderOptions(shuffle=not isinstance(dataset, IterableDataset))
    if isinstance(dataset, DataLoader):
        options = options_of(dataset)
        batch_size = batch_size if batch_size is not None else dataset.batch_size
        dataset = dataset.dataset
    if batch_size is None:
        raise InvalidInput("batch_size is missing: give the number of samples of one optimiser step, over all replicas")
    return dataset, replace(options, **{key: value for key, value in given.items() if value is not None}), batch_size


def _saving(given: Mapping[str, Any], environment: Environment) -> dict[str, Any]:
    """The places of checkpoints and the receipt, how often to save, and how many checkpoints to keep."""
    checkpoint_dir, output_dir = given["checkpoint_dir"], given["output_dir"]
    return {
        "checkpoints": _location(environment.checkpoint_dir if checkpoint_dir is None else checkpoint_dir),
        "checkpoint_every": given["checkpoint_every"] or environment.checkpoint_every or _DEFAULT_CHECKPOINT_EVERY,
        "keep_checkpoints": given["keep_checkpoints"] or environment.keep_checkpoints or _DEFAULT_KEEP_CHECKPOINTS,
        "output_dir": Path(output_dir) if output_dir is not None else environment.output_dir,
    }


def _location(checkpoint_dir: str | os.PathLike[str] | None) -> Path | ObjectStore | None:
    """The place of checkpoints: a folder, or the store behind an address."""
    if checkpoint_dir is None:
        return None
    text = os.fspath(checkpoint_dir)
    if is_address(text):
        return ObjectStore(text)
    scheme, colon, _ = text.partition(":/")
    if colon and scheme in PACKAGES:
        raise InvalidInput(f"checkpoint_dir is '{text}', a path made of an address: give it as text, '{scheme}://...'")
    return Path(text)


def _script_name() -> str:
    """The name of the script that was started; "job" where there is none, as in a notebook."""
    script = Path(sys.argv[0]) if sys.argv else Path()
    return script.stem if script.suffix == ".py" else "job"
