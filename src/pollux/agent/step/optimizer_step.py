"""One optimiser step: forward and backward of its micro-batches, the average, noise, clipping, the optimiser."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pollux.agent.adaptation.lr_rules import scaled_rates
from pollux.agent.data.step_shape import MicroBatch
from pollux.agent.distributed.process_group import ReplicaGroup, WrappedModel
from pollux.agent.distributed.sync_batchnorm import has_batchnorm, set_counted
from pollux.agent.step.gradient_norms import GradientNormMeter
from pollux.agent.step.loss_sum import LossSum
from pollux.agent.step.loss_weighting import LossWeighting, check_weighting
from pollux.agent.step.model_handle import stable_handle
from pollux.agent.step.oom import OomTrial, free_memory, is_out_of_memory, predicted_local_batch
from pollux.agent.step.step_clock import StepClock
from pollux.core.errors import InvalidInput, MisusedJob, NonFiniteValue

__all__ = ["StepOptions", "StepRunner"]


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What a step does beside the optimiser: gradient scaling, clipping, a function of the user's; wrapper options."""

    scaler: torch.amp.GradScaler | None = None
    clip_norm: float | None = None
    before_step: Callable[[], None] | None = None
    wrapper_options: Mapping[str, object] | None = None


class StepRunner:
    """Runs the micro-batches of steps; `model` is the model to call now, `given` the one that the script gets.

    Without a GPU losses and gradients are checked at once. On a GPU that would wait for the device, so losses are
    summed there and read in rounds: a sum with a value that is not finite is not finite.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        replicas: ReplicaGroup,
        averager: LossWeighting,
        meter: GradientNormMeter | None,
        options: StepOptions,
    ) -> None:
        self.inner = model
        self.optimizer = optimizer
        self.parameters: Sequence[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
        self._all_parameters = list(model.parameters())
        self._layout = self._layout_now()
        self.is_sharded = _is_sharded(model)
        self.clock = StepClock(replicas.device, self.parameters, hooks=replicas.num_replicas > 1)
        self.meter = meter
        self.counts_batchnorm = False
        # Whether values that are not finite are allowed: after a change of batch the guard rail undoes them.
        self.tolerates = False
        self._has_batchnorm = has_batchnorm(model)
        self._has_sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
        self._static_graph = bool((options.wrapper_options or {}).get("static_graph"))
        self._num_finished = 0
        self._replicas = replicas
        self._averager = averager
        # A disabled scaler does nothing, so losses must be checked as without one.
        disabled = options.scaler is not None and not options.scaler.is_enabled()
        self._options = replace(options, scaler=None) if disabled else options
        self._micro: MicroBatch | None = None
        self._ran_backward = True
        self._trial: OomTrial | None = None
        self._on_gpu = replicas.device.type == "cuda"
        self._losses = LossSum(replicas.device)
        self._weighted: Tensor | None = None
        self._whole_factor = 1.0
        self.model = self._wrap()
        self._alone: nn.Module | None = None

    def _wrap(self) -> nn.Module:
        if self.is_sharded:
            return self.inner
        return self._replicas.wrap(self.inner, self._options.wrapper_options)

    @property
    def given(self) -> nn.Module:
        """The model for the user's loop, which may keep it: when replicas change, its calls go to `model`."""
        if self.is_sharded or not self._replicas.can_change or isinstance(self.model, WrappedModel):
            return self.model
        if self._alone is None:
            self._alone = stable_handle(self.inner, lambda: self.model)
        return self._alone

    @property
    def is_waiting(self) -> bool:
        """Whether the script has a batch whose loss it has not passed to `backward`."""
        return self._micro is not None and not self._ran_backward

    @property
    def has_scaler(self) -> bool:
        """Whether a GradScaler skips steps whose gradients are not finite."""
        return self._options.scaler is not None

    @property
    def _checks_values(self) -> bool:
        """Whether losses and gradients that are not finite are refused at once."""
        return not (self._on_gpu or self.has_scaler or self.tolerates)

    @property
    def can_try(self) -> bool:
        """Whether a step can do without the wrapper's averaging; not where layers exchange values between replicas."""
        if self._replicas.num_replicas == 1:
            return True
        return not (self.is_sharded or self._static_graph or self.counts_batchnorm or self._has_sparse)

    def begin_micro_batch(self, micro: MicroBatch, trial_from: int | None) -> None:
        """Start a micro-batch; `trial_from` is the local batch that is known to fit, where this one is a trial."""
        if not self._ran_backward:
            raise MisusedJob(
                "the batch before this one was never passed to job.backward(loss): call it for every batch"
            )
        if micro.index == 0:
            self._follow_layout(micro.step)
        self._micro = micro
        self._ran_backward = False
        trying = trial_from is not None and self.can_try
        if micro.index == 0 and trying and trial_from is not None:
            self._trial = OomTrial(self.inner, trial_from)
            self._trial.start()
        # A static graph must see a synchronised backward pass first; averaging an average again changes nothing.
        learning = self._static_graph and self._num_finished == 0
        self._set_synchronised((micro.is_last or learning) and self._trial is None)
        if self._has_batchnorm:
            set_counted(self.inner, micro.samples > 0)
        self.clock.begin_micro()

    def _layout_now(self) -> tuple[list[int], list[bool]]:
        """The sizes of the parameter groups, and which parameters of the model are trained."""
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        return sizes, [each.requires_grad for each in self._all_parameters]

    def _follow_layout(self, step: int) -> None:
        """Between steps: take over what the script froze, unfroze or added, on all replicas alike."""
        layout = self._layout_now()
        if layout == self._layout:
            return
        self._all_parameters = list(self.inner.parameters())
        layout, before = self._layout_now(), self._layout
        members = {id(each) for each in self._all_parameters}
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if not members.issuperset(map(id, parameters)):
            raise InvalidInput(
                f"at step {step} the optimizer has parameters that are not in the model and would be neither averaged "
                "nor saved: make what holds them a submodule of the model before pollux.init"
            )
        if layout[0] != before[0] and self.meter is not None:
            raise InvalidInput(
                f"at step {step} the optimizer's parameter groups have {layout[0]} parameters, not {before[0]}: where "
                "noise is measured, give it all groups before pollux.init, frozen (requires_grad=False) at first"
            )
        self._replicas.require_alike("which parameters are trained", repr(layout), f"layout/{step}")
        self._layout, self.parameters = layout, parameters
        self.clock.follow(parameters)
        if not self.is_sharded:
            self.rebuild()

    def _set_synchronised(self, synchronised: bool) -> None:
        if isinstance(self.model, WrappedModel):
            self.model.require_backward_grad_sync = synchronised
            self.model.ran = False
        elif self.is_sharded:
            self.model.set_requires_gradient_sync(synchronised)  # type: ignore[operator]

    def backward(self, loss: Tensor, reduction: str, weight: float | Tensor | None) -> MicroBatch:
        """Run the backward pass of the present micro-batch, weighted by its share in the average."""
        micro = self._require_micro()
        check_weighting(reduction, weight)
        # The loss of a failed trial has no graph, and nothing is learned from it.
        failed = self._trial is not None and self._trial.failed
        _check_loss(loss, needs_gradient=not failed)
        self._ran_backward = True
        if not failed:
            self._require_forward()
            self._note(loss, micro, reduction, weight)
            if weight is not None and self._is_nothing(weight):
                loss = self._nothing(loss)
        scaled = self._averager.scale(loss, micro, reduction, weight)
        if self._options.scaler is not None:
            scaled = self._options.scaler.scale(scaled)
        if not failed:
            self._run_backward(scaled, micro, weight)
        if self._has_batchnorm and micro.samples == 0:
            set_counted(self.inner, True)
        self.clock.end_micro()
        return micro

    def _is_nothing(self, weight: float | Tensor) -> bool:
        """Whether a part has weight 0; false on a GPU, which would wait, and where graphs need their own loss."""
        unusual = self.is_sharded or self._static_graph or getattr(self.model, "find_unused_parameters", False)
        return not unusual and not (isinstance(weight, Tensor) and weight.is_cuda) and float(weight) == 0.0

    def _nothing(self, loss: Tensor) -> Tensor:
        """A zero that depends on all parameters, in place of a mean over nothing, whose gradient is not finite."""
        zeros = [p.reshape(-1)[:1].sum() * 0.0 for p in self.inner.parameters() if p.requires_grad]
        return torch.stack([zero.to(loss.dtype) for zero in zeros]).sum().reshape(loss.shape)

    def _require_micro(self) -> MicroBatch:
        if self._micro is None or self._ran_backward:
            raise MisusedJob("job.backward(loss) was called twice for one batch, or outside of job.batches()")
        return self._micro

    def _require_forward(self) -> None:
        if isinstance(self.model, WrappedModel) and not self.model.ran:
            raise MisusedJob("the loss was not computed by job.model: call job.model(x) instead of model(x)")

    def _run_backward(self, scaled: Tensor, micro: MicroBatch, weight: float | Tensor | None) -> None:
        meter = self.meter if micro.measured else None
        if meter is not None:
            factors = self._averager.noise_factors(micro, weight)
            self._whole_factor = factors.whole
            meter.start_measuring(factors.part)
        try:
            scaled.backward()
        except Exception as error:
            if self._trial is None or not is_out_of_memory(error):
                raise
            failed = True
        else:
            failed = False
        self.clock.mark_computed()
        if meter is not None:
            meter.stop_measuring()
        if failed and self._trial is not None:
            # Outside of the handler, whose traceback holds the activations.
            self._trial.fail()

    def _note(self, loss: Tensor, micro: MicroBatch, reduction: str, weight: float | Tensor | None) -> None:
        """Add this part's share of the step's mean loss to the sum."""
        if micro.samples == 0 or (weight is not None and not self._on_gpu and float(weight) == 0.0):
            return
        value = loss.detach()
        if weight is not None:
            self._note_weighted(value, weight)
        if self._checks_values:
            _require_finite_loss(float(value), micro.step)
        if weight is None:
            share = micro.samples / micro.total if reduction == "mean" else 1.0 / micro.total
            self._losses.add(value, share)

    def _note_weighted(self, value: Tensor, weight: float | Tensor) -> None:
        """Sum weight·loss; the sum of the weights is known only at the end of the step."""
        if self._on_gpu and isinstance(weight, Tensor):
            value = torch.where(weight.detach() > 0, value, torch.zeros_like(value))
        part = value.reshape(()).to(torch.float64) * weight
        self._weighted = part if self._weighted is None else self._weighted + part

    def finish(self, lr_factors: Sequence[float]) -> bool:
        """After the last micro-batch: average, measure, clip, step; false where some replica ran out of memory."""
        micro = self._micro
        assert micro is not None
        trial, self._trial = self._trial, None
        if trial is not None:
            trial.stop()
            if self._anywhere(trial.failed):
                self.abandon()
                return False
            self._replicas.average_gradients([each for each in self._all_parameters if each.requires_grad])
        weights = self._averager.finish(self.parameters)
        if weights is not None and self._weighted is not None:
            self._losses.add(self._weighted / weights)
        self._weighted = None
        if self.meter is not None and micro.measured:
            self._measure(self.meter, micro, weights)
        self._step(lr_factors, micro)
        self._num_finished += 1
        self._losses.count_step()
        return True

    def _anywhere(self, failed: bool) -> bool:
        return bool(self._replicas.gather([float(failed)]).any())

    def _measure(self, meter: GradientNormMeter, micro: MicroBatch, weights: Tensor | None) -> None:
        scale = None
        if self._options.scaler is not None:
            scale = self._options.scaler.scale(torch.ones((), device=self._replicas.device))
        factor = 1.0 if weights is None else 1.0 / weights
        meter.close_row(None, micro.total, self._whole_factor, loss_scale=scale, parts_factor=factor)

    def _step(self, lr_factors: Sequence[float], micro: MicroBatch) -> None:
        scaler, optimizer = self._options.scaler, self.optimizer
        self._change_gradients()
        if self._checks_values and not self.is_sharded:
            self._require_finite(micro)
        if self._replicas.is_broken:
            raise dist.DistError("other replicas are lost, and the gradients of this step with them")
        with scaled_rates(optimizer.param_groups, lr_factors):
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _change_gradients(self) -> None:
        """Clip the averaged gradients, and call the user's function on them."""
        options = self._options
        if options.scaler is not None and (options.clip_norm is not None or options.before_step is not None):
            options.scaler.unscale_(self.optimizer)
        if options.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, options.clip_norm)
        if options.before_step is not None:
            options.before_step()

    def _require_finite(self, micro: MicroBatch) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None and not p.grad.is_sparse]
        if gradients and not math.isfinite(float(torch.stack(torch._foreach_norm(gradients)).sum())):
            raise NonFiniteValue(
                f"a gradient is not finite at step {micro.step}, though the loss is: clip gradients (clip_norm=), "
                "lower the learning rate, or divide by mask.sum().clamp(min=1) where a part may hold no token; "
                "neither model nor checkpoint was changed by it"
            )

    def abandon(self) -> None:
        """Drop the step under way with its gradients, losses and measurements."""
        if self._trial is not None:
            self._trial.stop()
            self._trial = None
        self._averager.abandon()
        self.clock.cancel_step()
        if self.meter is not None:
            self.meter.drop_row()
        self.optimizer.zero_grad(set_to_none=True)
        self._losses.forget()
        self._weighted = None
        self._ran_backward = True
        self._micro = None
        free_memory()

    def rebuild(self) -> None:
        """Wrap the model again after the old wrapper was interrupted."""
        self._num_finished = 0
        before, self.model = self.model, self._wrap()
        if isinstance(before, WrappedModel):
            # A function, since there may be more wrappers later, and a script may keep this one.
            before.forward_to(lambda: self.model)

    def disconnect(self) -> None:
        """Forget a pending collective and its step."""
        self._averager.forget()

    def regroup(self) -> None:
        """Forget losses, times and measurements of the old replicas, and wrap the model for the new ones."""
        alone = self._replicas.num_replicas == 1
        self.clock.regroup(hooks=not alone)
        if self.meter is not None:
            self.meter.regroup(set_aside=alone)
        self._averager.forget()
        self._losses.forget()
        self._weighted = None
        self.tolerates = False
        # A state that came with the new replicas may have other parameters frozen.
        self._all_parameters = list(self.inner.parameters())
        self._layout = self._layout_now()
        self.rebuild()

    def losses(self) -> tuple[float, int]:
        """The sum over steps of this replica's share of the mean loss, and the steps, since the last call.

        Its sum over replicas, divided by the steps, is the mean loss. On a GPU it is one call late.
        """
        return self._losses.read()

    def predicted_local_batch(self, local_batch: int) -> int | None:
        """The largest local batch that the device's memory should hold; None: not known."""
        return predicted_local_batch(self._replicas.device, local_batch)


def _check_loss(loss: Any, needs_gradient: bool) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise InvalidInput(f"loss is {shape}: give a tensor with one value, the mean (or sum) over this batch")
    if needs_gradient and not loss.requires_grad:
        raise InvalidInput("the loss has no gradient: compute it from job.model(x), outside of torch.no_grad()")


def _require_finite_loss(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise NonFiniteValue(
            f"the loss is {loss} at step {step}: lower the learning rate, clip gradients (clip_norm=), or check the "
            "data; the last checkpoint is untouched"
        )


def _is_sharded(model: nn.Module) -> bool:
    """Whether the model's parameters are split over replicas by `fully_shard`."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())
