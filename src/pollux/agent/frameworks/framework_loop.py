"""The agent's parts for a training loop that a framework owns: data, weights, gradient noise, batch, learning rates.

The framework calls model, backward and optimiser, and keeps the checkpoints. Its own names are in `lightning` and
`huggingface`.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pollux.agent.adaptation import lr_rules
from pollux.agent.adaptation.adaptation import Adaptation
from pollux.agent.adaptation.batch_tuner import BatchChange
from pollux.agent.adaptation.noise_scale import NoiseEstimate, NoiseTracker
from pollux.agent.adaptation.progress import TrainingProgress
from pollux.agent.data.loader import Loader, LoaderOptions
from pollux.agent.data.step_shape import MicroBatch
from pollux.agent.data.torch_reader import torch_loader
from pollux.agent.distributed.device import gpu_type
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.agent.elastic.member import refuse_all
from pollux.agent.elastic.membership import STORE_SECONDS, Membership, connect
from pollux.agent.environment import Environment
from pollux.agent.frameworks.framework_status import HostedReports, HostedStatus
from pollux.agent.frameworks.framework_steps import FrameworkOptions, FrameworkSteps
from pollux.agent.job.job import JobStopped
from pollux.agent.step.loss_weighting import LossWeighting
from pollux.core.errors import CheckpointMismatch, InvalidInput, MisusedJob

__all__ = ["FrameworkTraining"]

_log = logging.getLogger("pollux")
_VERSION = 1


@dataclass(slots=True)
class _Attached:
    steps: FrameworkSteps
    replicas: ReplicaGroup
    averager: LossWeighting
    adaptation: Adaptation
    reports: HostedReports


class FrameworkTraining:
    """One job inside a framework's loop; the same on all replicas.

    In this order: `attach` once the optimiser exists; `epoch()` yields batches; for each batch `begin` before its
    forward pass, `begin_backward` and `end_backward` around its backward pass; after the last one of a step
    `before_step`, the optimiser, `after_step`. The framework may ask for batches ahead of running them.
    """

    def __init__(self, dataset: Any, options: FrameworkOptions, loading: LoaderOptions) -> None:
        self.options = options
        self.loader = torch_loader(dataset, loading, 0, 1)
        self.progress = TrainingProgress(self._epoch_size())
        self.schedule_taken = 0
        self.micro: MicroBatch | None = None
        self.epochs_wanted: float | None = None
        """How many epochs the framework is to train, for reports; None: not known. Set before `attach`."""
        self._finished = False
        self._loading = loading
        self._attached: _Attached | None = None
        self._pending: dict[str, Any] | None = None
        self._issued: deque[MicroBatch] = deque()
        self._unfinished: deque[tuple[Loader, int]] = deque()
        self._mid_step = False
        self._epoch_ended = False
        self._before_change: int | None = None
        self._refuses = False
        size = self.loader.size
        if size is not None and size < options.batch_size:
            raise InvalidInput(
                f"the dataset has {size} samples, fewer than batch_size {options.batch_size}: use a smaller batch"
            )

    def _epoch_size(self) -> int | None:
        size = self.loader.size
        if self.options.epoch_size is not None or size is None or not self._drops_last:
            return self.options.epoch_size or size
        return size // self.options.batch_size * self.options.batch_size

    @property
    def _drops_last(self) -> bool:
        return self.loader.options.drop_last

    def attach(self, optimizer: torch.optim.Optimizer, environment: Environment, device: torch.device) -> None:
        """Join the framework's replicas and optimiser; its process group must be there. A collective."""
        self.detach()
        options, allowed = self.options, self.options.allowed
        most = options.max_batch_size or options.batch_size
        if most < environment.num_replicas:
            raise InvalidInput(
                f"the batch is {most} at most, below the {environment.num_replicas} replicas: use fewer replicas or a "
                "larger batch"
            )
        rule = lr_rules.create(options.lr_rule or lr_rules.default_rule(optimizer), warmup=options.warmup_epochs)
        measures = options.measure_noise if options.measure_noise is not None else not allowed.is_exact
        replicas = ReplicaGroup(environment, device)
        if environment.store and replicas.is_first and not self._refuses:
            self._refuses = True
            store = connect(environment.store, STORE_SECONDS)
            membership = Membership(store, environment.generation, environment.replica)
            refuse_all(membership, "a framework owns the loop and its process group: this job moves by a restart")
        replicas.check_same("batch_size", options.batch_size)
        replicas.check_same("the size of the dataset", self.loader.size or -1)
        steps = FrameworkSteps(optimizer, device, measures)
        freeze = float(self.progress.epoch_size or 100 * options.batch_size)
        adaptation = Adaptation(allowed, rule, steps, replicas, replicas.one_name(gpu_type(device)), freeze, measures)
        averager = LossWeighting(replicas, options.batch_size, adaptive=not allowed.is_exact)
        status = HostedStatus(adaptation, self.progress, replicas.num_replicas)
        reports = HostedReports(environment, status, gpu_type(device), self.epochs_wanted)
        self._finished = False
        self._attached = _Attached(steps, replicas, averager, adaptation, reports)
        self.loader.resize(replicas.replica, replicas.num_replicas)
        if self._pending is not None:
            adaptation.load_state_dict(self._pending, self.progress.steps)
            self._pending = None

    def detach(self) -> None:
        """Leave optimiser and replicas as they were; the place in the data is kept."""
        attached, self._attached = self._attached, None
        if attached is not None:
            self._pending = attached.adaptation.state_dict()
            attached.reports.close(self._finished)
            attached.steps.close()
            attached.adaptation.close()
            attached.replicas.close()
        self._forget_issued()

    def _parts(self) -> _Attached:
        if self._attached is None:
            raise MisusedJob(
                "batches were asked for before the training began: pass the callback to the Trainer that is given the "
                "loader"
            )
        return self._attached

    # What it is now

    @property
    def is_attached(self) -> bool:
        """Whether a training is under way."""
        return self._attached is not None

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
        """What each parameter group's learning rate is multiplied by for the present batch."""
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
        return self.progress.epoch + self._is_over()

    @property
    def last_issued(self) -> MicroBatch:
        """The part that the batch yielded last has in its step."""
        if not self._issued:
            raise MisusedJob("no batch was taken from Pollux's loader")
        return self._issued[-1]

    # Data

    def epoch(self) -> Iterator[Any]:
        """This replica's batches of the epoch that is under way or comes next; forgets what was asked for before.

        In exact mode an epoch is a pass. Otherwise it is as much progress as a pass at the initial batch, counting
        what is issued and not yet used, and may go over the end of a pass.
        """
        adaptation = self._parts().adaptation
        self._forget_issued()
        if self._is_over():
            self._close_epoch()
            if not self._by_progress:
                self.loader.skip_pass()
        if self.loader.pass_done:
            self.loader.next_pass()
        step, current = self.progress.steps, self.loader
        while True:
            began_at, first_step = current.cursor, step
            run = current.micro_batches(adaptation.shape, step)
            while not self._enough_issued():
                item = self._timed_next(run)
                if item is None:
                    break
                micro, batch = item
                step = micro.step + micro.is_last
                self._issue(micro, current)
                yield batch
            nothing = step == first_step
            if self._enough_issued() or not (self._by_progress or nothing):
                break
            if began_at == 0 and nothing:
                raise InvalidInput("a whole pass has no full batch: leave drop_last out, or use a smaller batch")
            if nothing and not self._by_progress:
                # A stream that turns out to have ended just where it was left.
                self._close_epoch()
            current = self._following(current)
        self._epoch_ended = True

    def _issue(self, micro: MicroBatch, loader: Loader) -> None:
        self._issued.append(micro)
        self._mid_step = not micro.is_last
        if micro.is_last:
            self._unfinished.append((loader, micro.total))

    @property
    def _by_progress(self) -> bool:
        return self.adapts and self.progress.epoch_size is not None

    def _enough_issued(self) -> bool:
        if self._mid_step or not self._by_progress or self.progress.epoch_size is None:
            return False
        efficiency = self._parts().adaptation.counted
        ahead = sum(total * efficiency(total) for _, total in self._unfinished)
        return self.progress.in_epoch + ahead >= self.progress.epoch_size * (1.0 - 1e-9)

    def _is_over(self) -> bool:
        """Whether the epoch under way has had all its steps."""
        if self._epoch_ended or self._by_progress:
            return self._epoch_ended or self.progress.epoch_reached
        size = self.loader.size
        # What is left below a whole batch will be dropped, though the loader was not asked for it yet.
        dropped = self._drops_last and size is not None and size - self.loader.cursor < self.options.batch_size
        return self.loader.pass_done or dropped

    def _timed_next(self, run: Iterator[tuple[MicroBatch, Any]]) -> tuple[MicroBatch, Any] | None:
        clock = self._parts().steps.clock
        began = time.perf_counter()
        item = next(run, None)
        clock.waited(time.perf_counter() - began)
        return item

    def _following(self, current: Loader) -> Loader:
        """The data of the pass after this one, whose last steps may still be under way."""
        if not self._unfinished:
            current.skip_pass()
            return current
        loader = torch_loader(current.dataset, self._loading, current.replica, current.num_replicas)
        loader.load_state_dict({**loader.state_dict(), "pass": current.pass_index + 1, "order": None})
        return loader

    def _forget_issued(self) -> None:
        self._issued.clear()
        self._unfinished.clear()
        self._mid_step = False
        self.micro = None
        self.loader.rewind()

    def _close_epoch(self) -> None:
        if self.progress.epoch_size is None:
            self.progress.epoch_size = self.loader.cursor
        self.progress.close_epoch()
        self._epoch_ended = False

    # Steps

    def begin(self) -> MicroBatch:
        """The oldest batch that was issued is about to be run."""
        if not self._issued:
            raise MisusedJob("a batch came that is not from Pollux's loader: give the Trainer that loader alone")
        attached = self._parts()
        self.micro = micro = self._issued.popleft()
        adaptation, clock = attached.adaptation, attached.steps.clock
        if micro.index == 0:
            clock.begin(adaptation.is_told_apart(micro.step, micro.measured))
            attached.steps.factors = adaptation.factors(micro.total, self.progress.epochs)
        clock.begin_micro()
        return micro

    def weight(self, like: Tensor, weight: float | Tensor | None = None) -> Tensor:
        """The factor of this batch's mean loss, so that the mean over replicas is that of the whole step.

        `weight` is the number of tokens, or of whatever else the loss is the mean of; None: of samples.
        """
        one = torch.ones((), dtype=like.dtype, device=like.device)
        return self._parts().averager.scale(one, self._current(), "mean", weight)

    def note_loss(self, loss: Tensor) -> None:
        """Count this batch's mean loss."""
        micro = self._current()
        if micro.samples:
            self.note_share(loss.detach() * (micro.samples / micro.total))

    def note_share(self, share: Tensor) -> None:
        """Count what this batch adds to the mean loss of its step."""
        self._parts().steps.losses_seen.add(share)

    def begin_backward(self, weight: float | Tensor | None = None, part: float | None = None) -> None:
        """Set hooks where this step is measured; `part`: see `GradientNormMeter.begin`, None for that of `weight`."""
        attached, micro = self._parts(), self._current()
        if attached.steps.meter is not None and micro.measured:
            if part is None:
                part = attached.averager.noise_factors(micro, weight).part
            attached.steps.meter.begin(part)

    def end_backward(self) -> None:
        """The backward pass is over."""
        steps = self._parts().steps
        if steps.meter is not None and steps.meter.is_measuring:
            steps.meter.end()
        steps.clock.end_micro()

    def before_step(self, loss_scale: Tensor | None = None, *, unscaled: bool = False) -> None:
        """Gradients are averaged over replicas, and not clipped yet; `unscaled`: freed of the loss scale already."""
        attached, micro = self._parts(), self._current()
        weights = attached.averager.finish(attached.steps.parameters)
        meter = attached.steps.meter
        if meter is None or not micro.measured:
            return
        parts: float | Tensor = 1.0 if weights is None else 1.0 / weights
        if unscaled and loss_scale is not None:
            parts, loss_scale = parts / loss_scale.double().square(), None
        meter.finish(None, micro.total, loss_scale=loss_scale, parts_factor=parts)

    def after_step(self) -> None:
        """The optimiser has stepped: the samples count, and the batch may change for steps not issued yet."""
        attached, micro = self._parts(), self._current()
        self.micro = None
        adaptation = attached.adaptation
        local = -(-micro.total // (attached.replicas.num_replicas * micro.repeats))
        attached.steps.clock.end(micro.repeats, local, micro.measured)
        attached.steps.losses_seen.count_step()
        self.progress.add(micro.total, adaptation.stepped(local, micro.total))
        self._commit()
        attached.reports.stepped()
        if adaptation.is_round(self.progress.steps):
            self._round(adaptation, attached.reports)

    def _commit(self) -> None:
        loader, _ = self._unfinished.popleft()
        if loader is not self.loader:
            self.loader.close()
            self.loader = loader
        loader.commit()

    def refresh(self) -> None:
        """The optimiser's state was restored after `attach`."""
        meter = self._parts().steps.meter
        if meter is not None:
            meter.refresh()

    def pause(self) -> None:
        """Something else comes in between, a validation for instance: the step under way is not timed."""
        if self._attached is not None:
            self._attached.steps.clock.cancel()

    def _current(self) -> MicroBatch:
        if self.micro is None:
            raise MisusedJob("a backward pass or an optimiser step came without a batch of Pollux's loader before it")
        return self.micro

    def _round(self, adaptation: Adaptation, reports: HostedReports) -> None:
        report = adaptation.round(self.progress.steps)
        reports.round(report)
        if report.spike is not None and self._before_change is not None:
            bad = adaptation.total
            adaptation.go_back(self._before_change, self.progress.steps)
            adaptation.guard.freeze(self.progress.progress)
            self._before_change = None
            _log.warning("%s: back to batch %d from %d; the weights stay", report.spike, adaptation.total, bad)
            return
        change = adaptation.next_change(self.progress.progress)
        if change is not None:
            self._change(adaptation, change)

    def _change(self, adaptation: Adaptation, change: BatchChange) -> None:
        self._before_change = adaptation.total
        adaptation.take(change)
        _log.info("batch %d to %d: %s", self._before_change, adaptation.total, change.reason)

    def schedule_due(self) -> int:
        """How often a schedule that advances with every step should have advanced by now, if it follows progress."""
        progress, initial = self.progress, self.options.batch_size
        if not progress.epoch_size:
            return math.floor(progress.progress / initial + 1e-9)
        return math.floor(progress.epochs * math.ceil(progress.epoch_size / initial) + 1e-9)

    def steps_per_epoch(self) -> int | None:
        """Optimiser steps of an epoch at the initial batch, at any number of replicas; None: not known."""
        size = self.progress.epoch_size
        return None if size is None else -(-size // self.options.batch_size)

    # Stopping

    def listen(self) -> None:
        """From here on SIGTERM, to any replica, is a request to save and stop after a step that all agree on."""
        attached = self._parts()
        attached.reports.listen(attached.replicas)

    def wants_stop(self) -> bool:
        """Whether the framework is to save now and call `stop`; asked after each step, on all replicas alike."""
        return self._parts().reports.wants_stop()

    def stop(self) -> None:
        """The state is saved here: wait until it is on all replicas, then end this process with exit code 143."""
        attached = self._parts()
        attached.replicas.gather([1.0])
        _log.info("stopped after step %d, as asked", self.progress.steps)
        attached.reports.close(final=False)
        raise JobStopped

    def finish(self) -> None:
        """The training has come to its end, and the job is done; a collective."""
        self._finished = True
        self.merge_ledger()

    # State

    def merge_ledger(self) -> None:
        """Bring together which samples were used; a collective, and without effect where no training is under way."""
        if self._attached is not None:
            ledger = self.loader.ledger
            mine = torch.tensor(ledger.local_part(), dtype=torch.int64)
            count, digest = self._attached.replicas.add_up(mine).tolist()
            ledger.absorb(count, digest)

    def state_dict(self) -> dict[str, Any]:
        """Where the training stands, as plain values and at most one tensor; a collective with several replicas."""
        self.merge_ledger()
        if self._attached is not None:
            self._attached.reports.saved()
        return {
            "version": _VERSION,
            "batch_size": self.options.batch_size,
            "data": self.loader.state_dict(),
            "progress": self.progress.state_dict(),
            "schedule": self.schedule_taken,
            "ended": self._is_over() and not self._unfinished,
            "adaptation": self._pending if self._attached is None else self._attached.adaptation.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from an earlier run, at any number of replicas."""
        if state.get("version") != _VERSION:
            raise CheckpointMismatch(
                f"the state of Pollux has version {state.get('version')}, known is {_VERSION}: resume with the release "
                "that wrote it"
            )
        if state["batch_size"] != self.options.batch_size:
            raise CheckpointMismatch(
                f"the checkpoint was written with batch_size {state['batch_size']}, this run has "
                f"{self.options.batch_size}: the batch over all replicas must stay"
            )
        self._forget_issued()
        self.loader.load_state_dict(state["data"])
        self.progress.load_state_dict(state["progress"])
        self.schedule_taken = int(state["schedule"])
        self._epoch_ended = bool(state["ended"])
        if self._attached is None:
            self._pending = state["adaptation"]
        elif state["adaptation"] is not None:
            self._attached.adaptation.load_state_dict(state["adaptation"], self.progress.steps)
