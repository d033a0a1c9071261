"""`pollux.init`: checks the user's options, assembles a job, and starts or resumes it."""

from __future__ import annotations

import atexit
import inspect
import logging
import signal
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pollux.agent.adaptation.adaptation import BatchRange
from pollux.agent.adaptation.lr_rules import OwnRule
from pollux.agent.checkpoint.training_state import Stateful
from pollux.agent.data.loader import Loader
from pollux.agent.data.torch_reader import torch_loader
from pollux.agent.distributed.device import choose_device
from pollux.agent.distributed.environment import Environment, read_environment
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.agent.elastic.member import ElasticMember
from pollux.agent.elastic.membership import STORE_SECONDS, Membership, connect
from pollux.agent.job.assembly import assemble
from pollux.agent.job.job import Job
from pollux.agent.job.job_options import JobOptions
from pollux.agent.job.option_checks import check_dataset_size, check_kinds, check_replicas
from pollux.core.errors import InvalidInput, MisusedJob

__all__ = ["init"]

_log = logging.getLogger("pollux")
_active: weakref.ref[Job] | None = None


def init(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    batch_size: int | None = None,
    *,
    max_batch_size: int | None = None,
    max_local_batch: int | None = None,
    accumulation: int = 0,
    lr_rule: str | OwnRule | None = None,
    lr_scheduler: Any = None,
    schedule_every: str = "step",
    warmup_epochs: float = 0.0,
    scaler: torch.amp.GradScaler | None = None,
    clip_norm: float | None = None,
    before_step: Callable[[], None] | None = None,
    device: torch.device | str | None = None,
    seed: int | None = None,
    shuffle: bool | None = None,
    sampler: Iterable[int] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int | None = None,
    pin_memory: bool | None = None,
    drop_last: bool | None = None,
    num_shards: int | None = None,
    epoch_size: int | None = None,
    move_batches: bool = True,
    sync_batchnorm: bool = True,
    measure_noise: bool | None = None,
    state: Mapping[str, Stateful] | None = None,
    checkpoint_dir: str | Path | None = None,
    checkpoint_every: float | None = None,
    keep_checkpoints: int | None = None,
    output_dir: str | Path | None = None,
    tensorboard_dir: str | Path | None = None,
    stop_signals: tuple[int, ...] = (signal.SIGTERM,),
    ddp_options: Mapping[str, object] | None = None,
    timeout: float | None = None,
    name: str | None = None,
) -> Job:
    """Start or resume a training job in this process, as one of the replicas that torchrun or a scheduler started.

    `model` and `optimizer` are used as they are and moved to the device; `dataset` is map-style, iterable, or a whole
    `DataLoader`, whose settings then hold. What each option does:

    - *Batch.* `batch_size` samples per optimiser step over all replicas (M0). `max_batch_size`: leave it out for exact
      mode, where the batch stays M0; otherwise the batch may grow up to this ceiling. `max_local_batch`: the most that
      one replica takes at once; more is accumulated. `accumulation`: the least number of extra micro-steps.
    - *Learning rate.* `lr_rule`: "adascale", "sqrt", "linear", "legw", "none", or `f(scale, gain, group_index) ->
      factor`; by default "sqrt" for Adam-like optimisers, else "adascale". `lr_scheduler`: stepped for you, every
      "step" or "epoch" of progress (`schedule_every`). `warmup_epochs`: length of the schedule's linear warm-up, for
      "legw".
    - *Step.* `scaler`: a GradScaler. `clip_norm`: clip the gradient's norm. `before_step`: called with averaged,
      unscaled gradients just before the optimiser, for clipping of another kind.
    - *Data.* `seed` of order and augmentation; by default that of a DataLoader's generator, else 0. `shuffle`,
      `sampler`, `collate_fn`, `num_workers`, `pin_memory`, `drop_last` as in a DataLoader. `num_shards`: virtual shards
      of an iterable dataset. `epoch_size`: samples of an epoch where the dataset has no length. `move_batches`: move
      tensors to the device.
    - *Exactness.* `sync_batchnorm`: BatchNorm over all replicas' samples. `measure_noise`: gradient noise in exact
      mode too (with one replica this splits measured batches in two).
    - *Safety.* `state`: more objects with `state_dict` and `load_state_dict`, by name. `checkpoint_dir`,
      `checkpoint_every` (seconds, 600 by default), `keep_checkpoints`. `stop_signals`: save and exit on these.
    - *Output.* `output_dir`: folder for the receipt. `tensorboard_dir`: folder for scalars. `name` of the job; by
      default the script's.
    - *Replicas.* `device`: this replica's GPU where there is one, else the CPU. `ddp_options`: for
      DistributedDataParallel. `timeout`: seconds after which a collective fails.

    Raises `InvalidInput` and related errors before anything is changed; `CheckpointMismatch` where the folder holds
    another job's checkpoints; `MisusedJob` where a job is active in this process already.
    """
    given = dict(locals())
    check_kinds(given, inspect.signature(init).parameters)
    _require_inactive()
    environment = read_environment()
    options = JobOptions.of(given, environment)
    where = choose_device(device, environment)
    loader = torch_loader(options.dataset, options.loading, 0, 1)
    options = replace(options, batches=_within_a_pass(options.batches, loader))
    check_replicas(environment.num_replicas, options.batches.initial, options.batches.maximum)
    check_dataset_size(loader.size, options.batches.initial)
    _move(model, optimizer, where)
    replicas, member = _join_replicas(environment, where, timeout)
    try:
        job = Job(assemble(options, environment, loader, replicas, member, on_close=_deactivate))
        try:
            job._start(options.tensorboard_dir)
        except BaseException:
            # A job that did not start must leave no signal handlers, threads or lock on its folder.
            job.close()
            raise
    except BaseException:
        replicas.close()
        raise
    _activate(job)
    return job


def _join_replicas(
    environment: Environment, device: torch.device, timeout: float | None
) -> tuple[ReplicaGroup, ElasticMember | None]:
    """The replicas of this process, and its elastic member under a shim; a joining replica starts alone."""
    if not environment.store:
        return ReplicaGroup(environment, device, timeout), None
    own_group = torch.distributed.is_initialized()
    store = connect(environment.store, timeout or environment.timeout or STORE_SECONDS)
    membership = Membership(store, environment.generation, environment.replica)
    place = replace(environment, replica=0, num_replicas=1, num_nodes=1) if environment.joins else environment
    replicas = ReplicaGroup(place, device, timeout, membership.group_store(environment.generation))
    member = ElasticMember(membership, replicas, environment.joins)
    if own_group:
        member.refusal = "the script made the process group itself"
    return replicas, member


def _require_inactive() -> None:
    job = _active() if _active is not None else None
    if job is not None:
        raise MisusedJob("pollux.init was called a second time: one process trains one job; call job.close() first")


def _activate(job: Job) -> None:
    global _active
    _active = weakref.ref(job)
    atexit.register(job.close)


def _deactivate() -> None:
    global _active
    job, _active = _active() if _active is not None else None, None
    if job is not None:
        atexit.unregister(job.close)


def _within_a_pass(allowed: BatchRange, loader: Loader) -> BatchRange:
    """Under `drop_last`, limit the batch to the dataset's size: a larger batch would drop every pass."""
    size, maximum = loader.size, allowed.maximum
    if maximum is None or size is None or size >= maximum or not loader.options.drop_last:
        return allowed
    _log.warning("max_batch_size is %d, but with drop_last a batch has at most the dataset's %d samples", maximum, size)
    return replace(allowed, maximum=max(size, allowed.initial))


def _move(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    if any(parameter.device != device for parameter in model.parameters()):
        if any(optimizer.state.values()):
            raise InvalidInput(
                f"the optimizer has state already and the model is not on {device}: move the model there first, then "
                "build the optimizer"
            )
        model.to(device)
