"""A training in the loop of a PyTorch framework: data, weights, gradient noise, batch, learning rates.

The framework calls model, backward and optimiser, and writes checkpoints. `lightning` and `huggingface` adapt this to
their frameworks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pollux.agent.adaptation import lr_rules
from pollux.agent.adaptation.adaptation import Adaptation
from pollux.agent.adaptation.noise_scale import NoiseEstimate, NoiseTracker
from pollux.agent.adaptation.progress import TrainingProgress
from pollux.agent.adaptation.state_version import require_version
from pollux.agent.data.loader import Loader, LoaderOptions
from pollux.agent.data.step_shape import MicroBatch
from pollux.agent.data.torch_reader import torch_loader
from pollux.agent.distributed.device import gpu_type
from pollux.agent.distributed.environment import Environment
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.agent.elastic.member import refuse_all
from pollux.agent.elastic.membership import STORE_SECONDS, Membership, connect
from pollux.agent.frameworks.framework_reports import FrameworkReports
from pollux.agent.frameworks.framework_steps import FrameworkSteps
from pollux.agent.frameworks.options import FrameworkOptions
from pollux.agent.job.job import JobStopped
from pollux.agent.job.option_checks import check_dataset_size, check_replicas
from pollux.agent.reporting.status import TrainingStatus, merge_ledger
from pollux.agent.step.loss_weighting import LossWeighting
from pollux.agent.training.epoch_batches import EpochBatches
from pollux.agent.training.rounds import AdaptationRounds
from pollux.core.errors import CheckpointMismatch, MisusedJob

__all__ = ["FrameworkTraining"]

_log = logging.getLogger("pollux")
_VERSION = 1


@dataclass(slots=True)
class _Attached:
    steps: FrameworkSteps
    replicas: ReplicaGroup
    adaptation: Adaptation
    reports: FrameworkReports
    rounds: AdaptationRounds


class FrameworkTraining:
    """One job inside a framework's loop; the same on all replicas.

    The order of calls: `attach` once the optimiser exists; `epoch()` yields batches; for each batch `begin_micro_batch`
    before its forward pass, `steps.begin_backward` and `steps.end_backward` around its backward pass; after the last
    one of a step `steps.before_step`, the optimiser, `after_step`. The framework may draw batches before it runs them.
    """

    def __init__(self, dataset: Any, options: FrameworkOptions, loading: LoaderOptions) -> None:
        loader = torch_loader(dataset, loading, 0, 1)
        size = loader.size
        check_dataset_size(size, options.batch_size)
        if options.epoch_size is None and size is not None and loading.drop_last:
            size = size // options.batch_size * options.batch_size
        self.options = options
        self.progress = TrainingProgress(options.epoch_size or size)
        self.batches = EpochBatches(loader, self.progress, options.batch_size, self.adapts)
        self.schedule_taken = 0
        self.epochs_wanted: float | None = None
        """How many epochs the framework trains, for reports; None: not known. Set before `attach`."""
        self._finished = False
        self._attached: _Attached | None = None
        self._pending: dict[str, Any] | None = None
        self._refuses = False

    def attach(self, optimizer: torch.optim.Optimizer, environment: Environment, device: torch.device) -> None:
        """Attach to the framework's replicas and optimiser, once its process group exists; a collective."""
        self.detach()
        options, allowed = self.options, self.options.allowed
        check_replicas(environment.num_replicas, options.batch_size, options.max_batch_size)
        rule = lr_rules.create(options.lr_rule or lr_rules.default_rule(optimizer), warmup=options.warmup_epochs)
        measures = options.measure_noise if options.measure_noise is not None else not allowed.is_exact
        replicas = ReplicaGroup(environment, device)
        self._refuse_live_resize(environment, replicas)
        replicas.require_same("batch_size", options.batch_size)
        replicas.require_same("the size of the dataset", self.loader.size or -1)
        weighting = LossWeighting(replicas, options.batch_size, adaptive=not allowed.is_exact)
        steps = FrameworkSteps(optimizer, device, weighting, measures)
        freeze = float(self.progress.epoch_size or 100 * options.batch_size)
        adaptation = Adaptation(allowed, rule, steps, replicas, replicas.joint_name(gpu_type(device)), freeze, measures)
        status = TrainingStatus(adaptation, self.progress, replicas)
        reports = FrameworkReports(environment, status, gpu_type(device), self.epochs_wanted)
        rounds = AdaptationRounds(adaptation, self.progress, reports)
        self._finished = False
        self._attached = _Attached(steps, replicas, adaptation, reports, rounds)
        self.loader.resize(replicas.replica, replicas.num_replicas)
        if self._pending is not None:
            adaptation.load_state_dict(self._pending, self.progress.steps)
            self._pending = None

    def _refuse_live_resize(self, environment: Environment, replicas: ReplicaGroup) -> None:
        if environment.store and replicas.is_first and not self._refuses:
            self._refuses = True
            store = connect(environment.store, STORE_SECONDS)
            membership = Membership(store, environment.generation, environment.replica)
            refuse_all(membership, "a framework owns the loop and its process group: this job moves by a restart")

    def detach(self) -> None:
        """Detach from optimiser and replicas; keep the place in the data."""
        attached, self._attached = self._attached, None
        if attached is not None:
            self._pending = attached.adaptation.state_dict()
            attached.reports.close(self._finished)
            attached.steps.close()
            attached.adaptation.close()
            attached.replicas.close()
        self.batches.forget_issued()

    def _parts(self) -> _Attached:
        if self._attached is None:
            raise MisusedJob(
                "batches were asked for before the training began: pass the callback to the Trainer that is given the "
                "loader"
            )
        return self._attached

    # Where it stands

    @property
    def is_attached(self) -> bool:
        """Whether a training is under way."""
        return self._attached is not None

    @property
    def loader(self) -> Loader:
        """Where the training is in its data."""
        return self.batches.loader

    @property
    def steps(self) -> FrameworkSteps:
        """The calls around backward passes and the optimiser; `MisusedJob` before `attach`."""
        return self._parts().steps

    @property
    def micro(self) -> MicroBatch | None:
        """The present micro-batch; None for none."""
        return None if self._attached is None else self._attached.steps.micro

    @property
    def adapts(self) -> bool:
        """Whether the batch may change."""
        return not self.options.allowed.is_exact

    @property
    def batch_size(self) -> int:
        """Samples of one optimiser step over all replicas, at present."""
        return self.options.batch_size if self._attached is None else self._attached.adaptation.total

    @property
    def accumulation(self) -> int:
        """Extra micro-steps of one optimiser step, at present."""
        return self.options.accumulation if self._attached is None else self._attached.adaptation.choice.accumulation

    @property
    def lr_factors(self) -> tuple[float, ...]:
        """The factor of each parameter group's learning rate for the present batch."""
        if self._attached is None:
            return ()
        return self._attached.adaptation.factors(self.batch_size, self.progress.epochs)

    @property
    def noise(self) -> NoiseEstimate:
        """The gradient noise scale with its interval; it may say "unknown, at least x"."""
        if self._attached is None:
            return NoiseTracker(self.options.batch_size, 1).estimate()
        return self._attached.adaptation.estimate()

    @property
    def epochs_done(self) -> int:
        """Epochs that are over."""
        return self.progress.epoch + self.batches.epoch_is_over

    # Batches and steps

    def epoch(self) -> Iterator[Any]:
        """This replica's batches of the present or the next epoch; drops batches that were issued before."""
        attached = self._parts()
        attached.steps.micro = None
        yield from self.batches.epoch(attached.adaptation)

    def begin_micro_batch(self) -> MicroBatch:
        """Start the oldest micro-batch that was issued."""
        micro = self.batches.begin_oldest()
        attached = self._parts()
        first = micro.index == 0
        attached.steps.begin_micro_batch(
            micro, attached.adaptation.begin_step(micro, self.progress.epochs) if first else None
        )
        return micro

    def after_step(self) -> None:
        """Count the step after the optimiser; the batch may change for steps that are not issued yet."""
        attached = self._parts()
        micro = attached.steps.end_step()
        self.progress.add(micro.total, attached.adaptation.end_step(micro))
        self.batches.commit()
        attached.reports.step_done()
        attached.rounds.run_due()

    def pause(self) -> None:
        """Do not time the present step, since something else, such as a validation, comes in between."""
        if self._attached is not None:
            self._attached.steps.clock.cancel_step()

    def schedule_due(self) -> int:
        """How often a schedule by step should have advanced by now, if it follows progress."""
        return self.progress.scheduled_steps(self.options.batch_size)

    def steps_per_epoch(self) -> int | None:
        """Optimiser steps of an epoch at the initial batch, at any number of replicas; None: not known."""
        size = self.progress.epoch_size
        return None if size is None else -(-size // self.options.batch_size)

    # The end

    def listen(self) -> None:
        """Let SIGTERM to any replica request a save and a stop, after a step that all replicas agree on."""
        attached = self._parts()
        attached.reports.listen(attached.replicas)

    def wants_stop(self) -> bool:
        """Whether the framework is to save now and call `stop`; asked after each step, on all replicas alike."""
        return self._parts().reports.wants_stop()

    def stop(self) -> None:
        """After a save: wait until all replicas have saved, then end this process with exit code 143."""
        attached = self._parts()
        attached.replicas.gather([1.0])
        _log.info("stopped after step %d, as asked", self.progress.steps)
        attached.reports.close(final=False)
        raise JobStopped

    def finish(self) -> None:
        """Note that the job is done; a collective."""
        self._finished = True
        self._merge_ledger()

    # State

    def _merge_ledger(self) -> None:
        if self._attached is not None:
            merge_ledger(self.loader, self._attached.replicas)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values and at most one tensor; a collective with several replicas."""
        self._merge_ledger()
        if self._attached is not None:
            self._attached.reports.saved()
        return {
            "version": _VERSION,
            "batch_size": self.options.batch_size,
            **self.batches.state_dict(),
            "progress": self.progress.state_dict(),
            "schedule": self.schedule_taken,
            "adaptation": self._pending if self._attached is None else self._attached.adaptation.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, at any number of replicas."""
        require_version("the state of Pollux", state, _VERSION)
        if state["batch_size"] != self.options.batch_size:
            raise CheckpointMismatch(
                f"the checkpoint was written with batch_size {state['batch_size']}, this run has "
                f"{self.options.batch_size}: the batch over all replicas must stay"
            )
        if self._attached is not None:
            self._attached.steps.micro = None
        self.batches.load_state_dict(state["data"], bool(state["ended"]))
        self.progress.load_state_dict(state["progress"])
        self.schedule_taken = int(state["schedule"])
        if self._attached is None:
            self._pending = state["adaptation"]
        elif state["adaptation"] is not None:
            self._attached.adaptation.load_state_dict(state["adaptation"], self.progress.steps)
