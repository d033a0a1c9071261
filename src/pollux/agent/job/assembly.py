"""Assembles the parts of a job from its options, once the replicas agree about them."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from pollux.agent.adaptation.adaptation import Adaptation
from pollux.agent.adaptation.progress import Schedule, TrainingProgress
from pollux.agent.checkpoint.checkpointer import Checkpointer
from pollux.agent.checkpoint.folder import is_misuse
from pollux.agent.checkpoint.lease import Holder
from pollux.agent.checkpoint.training_state import TrainingState
from pollux.agent.data.loader import Loader
from pollux.agent.distributed.device import gpu_type
from pollux.agent.distributed.environment import Environment
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.agent.distributed.sync_batchnorm import has_batchnorm, synchronise_batchnorm
from pollux.agent.elastic.member import ElasticMember
from pollux.agent.elastic.step_requests import StepRequests
from pollux.agent.job.job_options import JobOptions
from pollux.agent.job.parts import JobParts
from pollux.agent.job.rate_agreement import RateAgreement
from pollux.agent.job.script_schedules import ScriptSchedules
from pollux.agent.reporting.receipt import Receipt
from pollux.agent.step.gradient_norms import GradientNormMeter
from pollux.agent.step.loss_weighting import LossWeighting
from pollux.agent.step.optimizer_step import StepRunner
from pollux.core.errors import InvalidInput
from pollux.storage.object_store import ObjectStore

__all__ = ["assemble"]

_log = logging.getLogger("pollux")
_ORDER = "the order that the sampler gives"
_REMEDIES = {
    _ORDER: "a sampler must give the whole pass on every replica, in the same order; Pollux shares the samples out"
}


def assemble(
    options: JobOptions,
    environment: Environment,
    loader: Loader,
    replicas: ReplicaGroup,
    member: ElasticMember | None,
    on_close: Callable[[], None],
) -> JobParts:
    """The parts of a job; a collective, which fails on all replicas where they were started differently."""
    loader.resize(replicas.replica, replicas.num_replicas)
    _require_agreement(_facts(options, loader), replicas, member)
    _make_folders(options, replicas)
    allowed = options.batches
    synchronised = replicas.num_replicas > 1 and options.sync_batchnorm and has_batchnorm(options.model)
    if synchronised:
        synchronise_batchnorm(options.model, torch.distributed.group.WORLD)
    state = TrainingState(options.model, options.optimizer, options.stateful, replicas, options.loading.seed)
    engine = _step_runner(options, replicas)
    engine.counts_batchnorm = synchronised
    if member is not None and engine.is_sharded:
        member.refusal = "the model is sharded by fully_shard, and its shards cannot be split again while the job runs"
    checkpointer = _checkpointer(options, environment, replicas, member, engine.is_sharded)
    size = options.epoch_size or _whole_batches(loader, allowed.initial)
    freeze = float(size) if size else 100.0 * allowed.initial
    kind = replicas.joint_name(gpu_type(replicas.device))
    adaptation = Adaptation(allowed, options.rule, engine, replicas, kind, freeze, options.measure_noise)
    receipt = Receipt(
        options.name,
        mode="exact" if allowed.is_exact else "adaptive",
        initial_batch=allowed.initial,
        max_batch=allowed.maximum,
        rule=options.rule.name,
        dataset_size=loader.size,
    )
    progress = TrainingProgress(size)
    own = ScriptSchedules(options.script_schedules, progress, allowed.initial, allowed.is_exact, replicas)
    checkpoint_every = options.checkpoint_every if checkpointer is not None else None
    return JobParts(
        replicas=replicas,
        engine=engine,
        loader=loader,
        adaptation=adaptation,
        progress=progress,
        state=state,
        receipt=receipt,
        requests=StepRequests(replicas, checkpoint_every, options.stop_signals, mover=member),
        script_schedules=own,
        rates=RateAgreement(replicas, options.optimizer, own.names),
        schedule=_schedule(options),
        checkpointer=checkpointer,
        member=member,
        environment=environment,
        output_dir=options.output_dir,
        move_batches=options.move_batches,
        sync_batchnorm=options.sync_batchnorm,
        on_close=on_close,
    )


def _schedule(options: JobOptions) -> Schedule | None:
    scheduler, allowed = options.lr_scheduler, options.batches
    if scheduler is None:
        return None
    return Schedule(scheduler, options.schedule_every, allowed.initial, exact=allowed.is_exact)


def _step_runner(options: JobOptions, replicas: ReplicaGroup) -> StepRunner:
    allowed, optimizer = options.batches, options.optimizer
    weighting = LossWeighting(replicas, allowed.initial, adaptive=not allowed.is_exact)
    engine = StepRunner(options.model, optimizer, replicas, weighting, None, options.step)
    if engine.is_sharded and not allowed.is_exact:
        raise InvalidInput(
            "the model is sharded by fully_shard, which runs in exact mode only: leave max_batch_size out"
        )
    if options.measure_noise and not engine.is_sharded:
        engine.meter = GradientNormMeter(optimizer, replicas.device, set_aside=replicas.num_replicas == 1)
    return engine


def _checkpointer(
    options: JobOptions,
    environment: Environment,
    replicas: ReplicaGroup,
    member: ElasticMember | None,
    is_sharded: bool,
) -> Checkpointer | None:
    if options.checkpoints is None:
        return None
    launch = environment.store or str(environment.generation)
    return Checkpointer(
        options.checkpoints,
        keep=options.keep_checkpoints,
        replica=replicas.replica,
        num_replicas=replicas.num_replicas,
        group=replicas.another_control() if is_sharded else replicas.control,
        sharded=is_sharded,
        opens=member is None or not member.joins,
        holder=Holder(environment.run_id, launch, environment.generation),
    )


def _whole_batches(loader: Loader, initial: int) -> int | None:
    """Samples of an epoch at the initial batch: without those that `drop_last` leaves out."""
    if loader.size is None or not loader.options.drop_last:
        return loader.size
    return loader.size // initial * initial


def _facts(options: JobOptions, loader: Loader) -> dict[str, object]:
    """The values that replicas must agree on, by the name that an error uses."""
    allowed, step, loading = options.batches, options.step, loader.options
    parameters, groups = list(options.model.parameters()), options.optimizer.param_groups
    num_by_group = [len(group["params"]) for group in groups]
    layout = repr([(tuple(each.shape), str(each.dtype), each.requires_grad) for each in parameters])
    digest = hashlib.blake2b(layout.encode(), digest_size=4).hexdigest()
    read_alike = ("seed", "shuffle", "drop_last", "num_workers", "prefetch_factor", "num_shards")
    return {
        "batch_size": allowed.initial,
        "max_batch_size": allowed.maximum,
        "max_local_batch": allowed.local_max,
        "accumulation": allowed.accumulation,
        "the kind of dataset": type(loader.dataset).__name__,
        "the kind of sampler": type(loading.sampler).__name__,
        _ORDER: loader.order_hash(),
        "the size of the dataset": loader.size,
        **{name: getattr(loading, name) for name in read_alike},
        "epoch_size": options.epoch_size,
        "lr_rule": options.rule.name,
        "warmup_epochs": options.warmup_epochs,
        "lr_scheduler": type(options.lr_scheduler).__name__,
        "schedule_every": options.schedule_every,
        "measure_noise": options.measure_noise,
        "sync_batchnorm": options.sync_batchnorm,
        "state": sorted(options.stateful),
        "whether there is a checkpoint_dir": options.checkpoints is not None,
        "the model": f"{len(parameters)} parameters, {sum(each.numel() for each in parameters)} values, {digest}",
        "the optimizer": f"{type(options.optimizer).__name__} of {num_by_group} parameters",
        "the learning rates": [float(group.get("lr", 0.0)) for group in groups],
        "scaler": type(step.scaler).__name__,
        "clip_norm": step.clip_norm,
        "ddp_options": sorted(step.wrapper_options or ()),
    }


def _require_agreement(mine: dict[str, object], replicas: ReplicaGroup, member: ElasticMember | None) -> None:
    """Raise `InvalidInput` where replicas have different options, naming the first that differs."""
    everyones = [json.loads(text) for text in replicas.gather_bytes(json.dumps(mine).encode())]
    if member is not None and member.joins:
        # The learning rates may have changed since, so those at the start are compared.
        everyones.append(member.membership.facts() or everyones[0])
    elif member is not None and replicas.is_first:
        member.membership.share_facts(mine)
    for name in mine:
        seen = list(dict.fromkeys(repr(options.get(name)) for options in everyones))
        if len(seen) > 1:
            remedy = _REMEDIES.get(name, "start all of them with the same script and arguments")
            raise InvalidInput(f"replicas disagree on {name} ({', '.join(seen)}): {remedy}")


def _make_folders(options: JobOptions, replicas: ReplicaGroup) -> None:
    """Make the folders with their parents, so that all replicas fail now if a folder cannot be written to."""
    checkpoints, problem = options.checkpoints, ""
    wanted: dict[str, Path | None] = {}
    if isinstance(checkpoints, ObjectStore):
        try:
            checkpoints.make_cache()
        except InvalidInput as error:
            problem = str(error)
        checkpoints = None
    if replicas.is_first:
        wanted = {"checkpoint_dir": checkpoints, "output_dir": options.output_dir}
    for name, folder in wanted.items():
        if folder is not None:
            problem = problem or _folder_problem(name, folder)
    problems = [found.decode() for found in replicas.gather_bytes(problem.encode()) if found]
    if problems:
        raise InvalidInput(problems[0])


def _folder_problem(name: str, folder: Path) -> str:
    """Make a folder; returns why it can never be written to, else an empty text.

    A problem of the disk, which is full or broken now, is only logged: training goes on.
    """
    existed = folder.is_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no permission to write there")
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) or (is_misuse(folder, error) and not existed):
            return f"{name} is '{folder}', which cannot be a folder to write to ({error}): give another"
        _log.error("%s is '%s', where nothing can be written now (%s): training goes on", name, folder, error)
    return ""
