"""`pollux.init`: checks what the user passed, puts a job together and resumes it where it was left."""

from __future__ import annotations

import atexit
import hashlib
import inspect
import json
import logging
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from pollux.agent.adaptation import lr_rules
from pollux.agent.adaptation.adaptation import Adaptation, BatchRange
from pollux.agent.adaptation.lr_rules import OwnRule
from pollux.agent.adaptation.progress import Schedule, TrainingProgress
from pollux.agent.checkpoint.checkpointer import Checkpointer
from pollux.agent.checkpoint.lease import Holder
from pollux.agent.checkpoint.training_state import Stateful, TrainingState
from pollux.agent.data.loader import Loader, LoaderOptions
from pollux.agent.data.torch_reader import options_of, torch_loader
from pollux.agent.distributed.device import choose_device, gpu_type
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.agent.distributed.sync_batchnorm import has_batchnorm, synchronise_batchnorm
from pollux.agent.elastic.member import ElasticMember
from pollux.agent.elastic.membership import STORE_SECONDS, Membership, connect
from pollux.agent.elastic.step_requests import StepRequests
from pollux.agent.environment import Environment, read_environment
from pollux.agent.job.job import Job
from pollux.agent.job.status import Parts
from pollux.agent.options import (
    batch_range,
    check_kinds,
    check_model,
    check_schedule,
    check_sizes,
    check_wrapper_options,
    to_be_saved,
)
from pollux.agent.reporting.receipt import Receipt
from pollux.agent.reporting.reporter import ReportBuilder
from pollux.agent.reporting.tensorboard import Scalars
from pollux.agent.step.gradient_norms import GradientNormMeter
from pollux.agent.step.loss_weighting import LossWeighting
from pollux.agent.step.optimizer_step import StepOptions, StepRunner
from pollux.core.errors import InvalidInput, MisusedJob
from pollux.wire.objects import ObjectStore
from pollux.wire.stores import PACKAGES, is_address

__all__ = ["init"]

_log = logging.getLogger("pollux")
_DEFAULT_CHECKPOINT_EVERY = 600.0
_active: weakref.ref[Job] | None = None
_ORDER = "the order that the sampler gives"
_REMEDIES = {
    _ORDER: "a sampler must give the whole pass on every replica, in the same order; Pollux shares the samples out"
}


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
    `DataLoader`, whose settings are then taken over. What each option does:

    - *Batch.* `batch_size` samples per optimiser step over all replicas (M0). `max_batch_size`: leave it out for exact
      mode, where the batch stays M0; otherwise it may grow up to this ceiling. `max_local_batch`: the most that one
      replica takes at once; more is accumulated. `accumulation`: extra micro-steps to use at the least.
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

    Raises `InvalidInput` and its kin before anything is changed; `CheckpointMismatch` where the folder holds another
    job's checkpoints; `MisusedJob` where a job is active in this process already.
    """
    check_kinds(locals(), inspect.signature(init).parameters)
    _require_inactive()
    environment = read_environment()
    batch_size, max_batch_size, max_local_batch = environment.batches(batch_size, max_batch_size, max_local_batch)
    dataset, loading, batch_size = _data_options(
        dataset,
        batch_size,
        shuffle=shuffle,
        seed=seed,
        sampler=sampler,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=pin_memory,
        drop_last=drop_last,
        num_shards=num_shards,
    )
    check_model(model, optimizer)
    check_wrapper_options(ddp_options or {})
    allowed = batch_range(batch_size, max_batch_size, max_local_batch, accumulation)
    rule = lr_rules.create(lr_rule if lr_rule is not None else lr_rules.default_rule(optimizer), warmup=warmup_epochs)
    check_schedule(lr_scheduler, schedule_every)
    stateful = to_be_saved(state or {}, lr_scheduler=lr_scheduler, scaler=scaler)

    where = choose_device(device, environment)
    loader = torch_loader(dataset, loading, 0, 1)
    allowed = _within_a_pass(allowed, loader)
    check_sizes(loader, batch_size, allowed.maximum, environment)
    _move(model, optimizer, where)
    replicas, live = _replicas(environment, where, timeout)
    try:
        job = _assemble(
            model,
            optimizer,
            loader,
            allowed,
            replicas,
            live,
            environment,
            step_options=StepOptions(scaler, clip_norm, before_step, ddp_options),
            rule=rule,
            schedule=lr_scheduler,
            schedule_every=schedule_every,
            epoch_size=epoch_size,
            stateful=stateful,
            seed=loading.seed,
            warmup=warmup_epochs,
            sync_batchnorm=sync_batchnorm,
            measure_noise=measure_noise if measure_noise is not None else not allowed.is_exact,
            checkpoints=_location(environment.checkpoint_dir if checkpoint_dir is None else checkpoint_dir),
            checkpoint_every=checkpoint_every or environment.checkpoint_every or _DEFAULT_CHECKPOINT_EVERY,
            keep=keep_checkpoints or environment.keep_checkpoints or 2,
            output_dir=Path(output_dir) if output_dir is not None else environment.output_dir,
            tensorboard_dir=tensorboard_dir,
            signals=tuple(stop_signals),
            move_batches=move_batches,
            name=name or environment.job or _script_name(),
        )
    except BaseException:
        replicas.close()
        raise
    _activate(job)
    return job


def _assemble(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Loader,
    allowed: BatchRange,
    replicas: ReplicaGroup,
    live: ElasticMember | None,
    environment: Environment,
    *,
    step_options: StepOptions,
    rule: lr_rules.Rule,
    schedule: Any,
    schedule_every: str,
    epoch_size: int | None,
    stateful: Mapping[str, Stateful],
    seed: int,
    warmup: float,
    sync_batchnorm: bool,
    measure_noise: bool,
    checkpoints: Path | ObjectStore | None,
    checkpoint_every: float,
    keep: int,
    output_dir: Path | None,
    tensorboard_dir: str | Path | None,
    signals: tuple[int, ...],
    move_batches: bool,
    name: str,
) -> Job:
    loader.resize(replicas.replica, replicas.num_replicas)
    _agree(
        replicas,
        live,
        {
            "batch_size": allowed.initial,
            "max_batch_size": allowed.maximum,
            "max_local_batch": allowed.local_max,
            "accumulation": allowed.accumulation,
            **_data_facts(loader),
            "epoch_size": epoch_size,
            "lr_rule": rule.name,
            "warmup_epochs": float(warmup),
            "lr_scheduler": type(schedule).__name__,
            "schedule_every": schedule_every,
            "measure_noise": measure_noise,
            "sync_batchnorm": sync_batchnorm,
            "state": sorted(stateful),
            "whether there is a checkpoint_dir": checkpoints is not None,
            **_model_facts(model, optimizer, step_options),
        },
    )
    _make_folders(replicas, checkpoints, output_dir)
    synchronised = replicas.num_replicas > 1 and sync_batchnorm and has_batchnorm(model)
    if synchronised:
        synchronise_batchnorm(model, torch.distributed.group.WORLD)
    training = TrainingState(model, optimizer, stateful, replicas, seed)
    averager = LossWeighting(replicas, allowed.initial, adaptive=not allowed.is_exact)
    engine = StepRunner(model, optimizer, replicas, averager, None, step_options)
    _require_exact_when_sharded(engine, allowed)
    if live is not None and engine.is_sharded:
        live.refusal = "the model is sharded by fully_shard, and such shards cannot be split anew in living processes"
    if measure_noise and not engine.is_sharded:
        engine.meter = GradientNormMeter(optimizer, replicas.device, set_aside=replicas.num_replicas == 1)
    engine.counts_batchnorm = synchronised
    checkpointer = None
    if checkpoints is not None:
        checkpointer = Checkpointer(
            checkpoints,
            keep=keep,
            replica=replicas.replica,
            num_replicas=replicas.num_replicas,
            group=replicas.another_control() if engine.is_sharded else replicas.control,
            sharded=engine.is_sharded,
            opens=live is None or not live.joins,
            holder=_holder(environment),
        )
    size = epoch_size or _whole_batches(loader, allowed.initial)
    freeze = float(size) if size else 100.0 * allowed.initial
    adaptation = Adaptation(
        allowed, rule, engine, replicas, replicas.one_name(gpu_type(replicas.device)), freeze, measure_noise
    )
    receipt = Receipt(
        name,
        mode="exact" if allowed.is_exact else "adaptive",
        initial_batch=allowed.initial,
        max_batch=allowed.maximum,
        rule=rule.name,
        dataset_size=loader.size,
    )
    job = Job(
        Parts(
            replicas=replicas,
            engine=engine,
            loader=loader,
            adaptation=adaptation,
            progress=TrainingProgress(size),
            state=training,
            receipt=receipt,
            watch=StepRequests(replicas, checkpoint_every if checkpointer is not None else None, signals, mover=live),
            schedule=None
            if schedule is None
            else Schedule(schedule, schedule_every, allowed.initial, exact=allowed.is_exact),
            checkpointer=checkpointer,
            output_dir=output_dir,
            move_batches=move_batches,
            teller=ReportBuilder.of(environment, gpu_type(replicas.device)),
            live=live,
            environment=environment,
            sync_batchnorm=sync_batchnorm,
            on_close=_deactivate,
        )
    )
    try:
        _begin(job, checkpointer, training, replicas, tensorboard_dir)
    except BaseException:
        # Signals, threads and the lock on the folder must not outlive a job that never was.
        job.close()
        raise
    return job


def _begin(
    job: Job,
    checkpointer: Checkpointer | None,
    training: TrainingState,
    replicas: ReplicaGroup,
    tensorboard_dir: str | Path | None,
) -> None:
    """Resume from the newest checkpoint or from other replicas' memory, or start from the beginning."""
    live = job.attend()
    if checkpointer is not None:
        checkpointer.check_objects(training.user_objects())
    joins = live is not None and live.joins
    saved = checkpointer.latest() if checkpointer is not None and not joins else None
    if live is not None and joins:
        live.join(job)
    elif saved is not None:
        job.resume(saved)
    else:
        if replicas.replica > 0:
            # Replica 0 keeps the user's own random state, as plain PyTorch would.
            training.seed_rng(0)
        text = f"{replicas.num_replicas} replicas on {replicas.num_nodes} nodes"
        job.receipt.event("started", 0, 0.0, text)
    if checkpointer is not None and not joins:
        job.heed_deaths()
    if tensorboard_dir is not None:
        job.attach_scalars(
            Scalars(
                tensorboard_dir,
                replica=replicas.replica,
                resumed_samples=job.samples if saved is not None or joins else None,
            )
        )
    job.note_batchnorm(accumulates=job.accumulation > 0)


def _replicas(
    environment: Environment, device: torch.device, timeout: float | None
) -> tuple[ReplicaGroup, ElasticMember | None]:
    """This process's replicas, and its way to others where somebody supervises them. A joiner begins alone."""
    if not environment.store:
        return ReplicaGroup(environment, device, timeout), None
    own_group = torch.distributed.is_initialized()
    store = connect(environment.store, timeout or environment.timeout or STORE_SECONDS)
    membership = Membership(store, environment.generation, environment.replica)
    place = replace(environment, replica=0, num_replicas=1, num_nodes=1) if environment.joins else environment
    replicas = ReplicaGroup(place, device, timeout, membership.group_store(environment.generation))
    live = ElasticMember(membership, replicas, environment.joins)
    if own_group:
        live.refusal = "the script made the process group itself"
    return replicas, live


def _script_name() -> str:
    """The name of the script that was started; "job" where there is none, as in a notebook."""
    script = Path(sys.argv[0]) if sys.argv else Path()
    return script.stem if script.suffix == ".py" else "job"


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
    _active = None


def _data_options(dataset: Any, batch_size: int | None, **given: Any) -> tuple[Any, LoaderOptions, int]:
    """The dataset, how to read it, and the batch size; what was passed wins over what a DataLoader says."""
    options = LoaderOptions(shuffle=not _is_iterable(dataset))
    if isinstance(dataset, DataLoader):
        options = options_of(dataset)
        batch_size = batch_size if batch_size is not None else dataset.batch_size
        dataset = dataset.dataset
    if batch_size is None:
        raise InvalidInput("batch_size is missing: give the number of samples of one optimiser step, over all replicas")
    return dataset, replace(options, **{key: value for key, value in given.items() if value is not None}), batch_size


def _is_iterable(dataset: Any) -> bool:
    return isinstance(dataset, torch.utils.data.IterableDataset)


def _within_a_pass(allowed: BatchRange, loader: Loader) -> BatchRange:
    """Under `drop_last` a batch above the dataset would drop every pass whole, so that nothing ever happened."""
    size, maximum = loader.size, allowed.maximum
    if maximum is None or size is None or size >= maximum or not loader.options.drop_last:
        return allowed
    _log.warning("max_batch_size is %d, but with drop_last a batch has at most the dataset's %d samples", maximum, size)
    return replace(allowed, maximum=max(size, allowed.initial))


def _data_facts(loader: Loader) -> dict[str, object]:
    """What replicas must agree on to take the same steps: with workers, shapes are asked for ahead."""
    options, names = loader.options, ("seed", "shuffle", "drop_last", "num_workers", "prefetch_factor", "num_shards")
    return {
        "the kind of dataset": type(loader.dataset).__name__,
        "the kind of sampler": type(options.sampler).__name__,
        _ORDER: loader.order_hash(),
        "the size of the dataset": loader.size,
        **{name: getattr(options, name) for name in names},
    }


def _model_facts(model: nn.Module, optimizer: torch.optim.Optimizer, options: StepOptions) -> dict[str, object]:
    """What replicas must agree on for the average of their gradients to mean anything."""
    parameters = list(model.parameters())
    layout = repr([(tuple(each.shape), str(each.dtype), each.requires_grad) for each in parameters])
    digest = hashlib.blake2b(layout.encode(), digest_size=4).hexdigest()
    groups = optimizer.param_groups
    return {
        "the model": f"{len(parameters)} parameters, {sum(each.numel() for each in parameters)} values, {digest}",
        "the optimizer": f"{type(optimizer).__name__} of {[len(group['params']) for group in groups]} parameters",
        "the learning rates": [float(group.get("lr", 0.0)) for group in groups],
        "scaler": type(options.scaler).__name__,
        "clip_norm": options.clip_norm,
        "ddp_options": sorted(options.wrapper_options or ()),
    }


def _agree(replicas: ReplicaGroup, live: ElasticMember | None, mine: Mapping[str, object]) -> None:
    """Refuse to go on where replicas were started with different options, naming the first that differs."""
    everyones = [json.loads(text) for text in replicas.gather_bytes(json.dumps(mine).encode())]
    if live is not None and live.joins:
        # Of the learning rates only those at the start can be compared, and they are.
        everyones.append(live.membership.facts() or everyones[0])
    elif live is not None and replicas.is_first:
        live.membership.share_facts(mine)
    for name in mine:
        seen = list(dict.fromkeys(repr(options.get(name)) for options in everyones))
        if len(seen) > 1:
            remedy = _REMEDIES.get(name, "start all of them with the same script and arguments")
            raise InvalidInput(f"replicas disagree on {name} ({', '.join(seen)}): {remedy}")


def _location(checkpoint_dir: str | os.PathLike[str] | None) -> Path | ObjectStore | None:
    """Where checkpoints are: a folder, or the store behind an address."""
    if checkpoint_dir is None:
        return None
    text = os.fspath(checkpoint_dir)
    if is_address(text):
        return ObjectStore(text)
    scheme, colon, _ = text.partition(":/")
    if colon and scheme in PACKAGES:
        raise InvalidInput(f"checkpoint_dir is '{text}', a path made of an address: give it as text, '{scheme}://...'")
    return Path(text)


def _holder(environment: Environment) -> Holder:
    launch = environment.store or str(environment.generation)
    return Holder(environment.run_id, launch, environment.generation)


def _make_folders(replicas: ReplicaGroup, checkpoints: Path | ObjectStore | None, output_dir: Path | None) -> None:
    """Make the folders with their parents, so that what cannot be written is known now and on all replicas."""
    folder = checkpoints if isinstance(checkpoints, Path) else None
    wanted = {"checkpoint_dir": folder, "output_dir": output_dir} if replicas.is_first else {}
    problem = ""
    if isinstance(checkpoints, ObjectStore):
        try:
            checkpoints.make_cache()
        except InvalidInput as error:
            problem = str(error)
    for name, folder in wanted.items():
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                if not os.access(folder, os.W_OK | os.X_OK):
                    raise PermissionError("no permission to write there")
        except (OSError, ValueError) as error:
            problem = problem or f"{name} is '{folder}', which cannot be a folder to write to ({error}): give another"
    problems = [found.decode() for found in replicas.gather_bytes(problem.encode()) if found]
    if problems:
        raise InvalidInput(problems[0])


def _whole_batches(loader: Loader, initial: int) -> int | None:
    """Samples of an epoch at the initial batch: without those that `drop_last` leaves out."""
    if loader.size is None or not loader.options.drop_last:
        return loader.size
    return loader.size // initial * initial


def _move(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    if any(parameter.device != device for parameter in model.parameters()):
        if any(optimizer.state.values()):
            raise InvalidInput(
                f"the optimizer has state already and the model is not on {device}: move the model there first, then "
                "build the optimizer"
            )
        model.to(device)


def _require_exact_when_sharded(engine: StepRunner, allowed: BatchRange) -> None:
    if engine.is_sharded and not allowed.is_exact:
        raise InvalidInput(
            "the model is sharded by fully_shard, which runs in exact mode only: leave max_batch_size out"
        )
