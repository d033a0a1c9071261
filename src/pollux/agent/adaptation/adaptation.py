"""Chooses the batch of the steps to come in rounds, the same on every replica.

`batch_tuner` says which batch is better, `lr_rules` what a larger one does to the learning rate.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pollux.agent.adaptation.background_fit import BackgroundFit
from pollux.agent.adaptation.batch_tuner import BatchChange, fitting_choice, is_clear, next_batch
from pollux.agent.adaptation.loss_guard import LossGuard, Spike
from pollux.agent.adaptation.lr_rules import Rule
from pollux.agent.adaptation.measurements import ReplicaExchange, StepSource, StepTime
from pollux.agent.adaptation.memory_limits import MemoryLimits
from pollux.agent.adaptation.noise_scale import MIN_MEASURED, NoiseEstimate, NoiseTracker
from pollux.agent.adaptation.round_exchange import RoundNumbers, SummedNoise, exchange
from pollux.agent.adaptation.round_pace import RoundPace
from pollux.agent.adaptation.second_moments import SecondMoments
from pollux.agent.adaptation.step_profile import Profile
from pollux.agent.adaptation.step_recorder import StepRecorder
from pollux.agent.data.step_shape import MicroBatch, StepShape
from pollux.goodput import BatchChoice, BatchLimits, Efficiency, GoodputModel, PublishedThroughput, corrected

__all__ = ["Adaptation", "BatchRange", "RoundReport"]

_Item = TypeVar("_Item")
_TIMED_EVERY = 32
_TIMED_EVERY_ALONE = 4
_LEAST_ROUNDS = 6
_RATE = 0.5  # assumed ratio of the learning rate to the best one, for steps that are too short


@dataclass(frozen=True, slots=True)
class BatchRange:
    """The user's limits: M0, largest total batch (None: M0), largest local batch, least accumulation."""

    initial: int
    maximum: int | None = None
    local_max: int | None = None
    accumulation: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether the batch must stay M0."""
        return self.maximum is None


@dataclass(frozen=True, slots=True)
class RoundReport:
    """The results of a round: mean loss (None: no step), throughput in samples per second, spike (None: no spike)."""

    loss: float | None
    throughput: float | None
    spike: Spike | None = None


class Adaptation:
    """The present batch, and all that the choice of the next one depends on.

    In exact mode it only times steps. Replicas exchange their numbers in each round and decide from the same table, so
    that all of them choose the same batch.
    """

    def __init__(
        self,
        allowed: BatchRange,
        rule: Rule,
        engine: StepSource,
        replicas: ReplicaExchange,
        gpu_type: str,
        freeze_progress: float,
        measure_noise: bool,
    ) -> None:
        self.allowed = allowed
        self.rule = rule
        self.memory = MemoryLimits(gpu_type)
        self.profile = Profile()
        self.guard = LossGuard(freeze_progress)
        self.fit = BackgroundFit()
        self.measures_noise = measure_noise and engine.meter is not None
        self.tracker = NoiseTracker(allowed.initial, max(len(engine.optimizer.param_groups), 1))
        self.believed: NoiseEstimate | None = None
        self.total = allowed.initial
        self.model: PublishedThroughput | None = None
        self._gpu_type = gpu_type
        self._engine = engine
        self._replicas = replicas
        self._kind = ""
        self.pace = RoundPace(not allowed.is_exact)
        self._samples = 0
        self._cap: int | None = None
        self._recorder = StepRecorder(self.profile, replicas, gpu_type)
        self._moments: SecondMoments | None = None
        self._is_cold = True
        self._find_moments()
        self.choice = self.fitted()

    @property
    def adapts(self) -> bool:
        """Whether the batch may change."""
        return not self.allowed.is_exact

    @property
    def local_max(self) -> int | None:
        """The largest local batch allowed: by the user, and by what ran out of memory."""
        limits = [limit for limit in (self.allowed.local_max, self.memory.largest) if limit is not None]
        return min(limits, default=None)

    @property
    def goodput_model(self) -> GoodputModel | None:
        """Fitted throughput and efficiency, to predict for other numbers of GPUs; None before the first fit."""
        if self.model is None:
            return None
        allowed = self.allowed
        efficiency = self.believed.efficiency if self.believed is not None else Efficiency(allowed.initial, 1.0, 1.0)
        most = allowed.maximum or allowed.initial
        return GoodputModel(self.model, efficiency, BatchLimits(allowed.initial, most, 1, self.local_max or most))

    @property
    def reported_model(self) -> GoodputModel | None:
        """The same, corrected by the fit's residuals on this replica's measurements; for reports, not for decisions."""
        model = self.goodput_model
        if model is None or self.model is None:
            return None
        return replace(model, throughput=corrected(self.model, self.profile.observations(self._gpu_type)))

    def fitted(self) -> BatchChoice:
        """The present total batch, split for the present replicas."""
        return fitting_choice(self.total, self._replicas.num_replicas, self.local_max, self.allowed.accumulation)

    def shape(self, step: int) -> StepShape:
        """The shape of step number `step`; called when its data is issued, in the same order on all replicas."""
        repeats = self.choice.accumulation + 1
        measured = self._is_measured(step)
        if measured and self._replicas.num_replicas * repeats == 1:
            # One gradient shows no noise; two halves of the batch give an unbiased estimate.
            repeats = 2
        return StepShape(self.total, repeats, measured)

    def _is_measured(self, step: int) -> bool:
        meter = self._engine.meter
        if not self.measures_noise or meter is None or self.total < 2 or not meter.is_warm:
            return False
        return self.pace.is_measured(step)

    def times_compute(self, step: int, measured: bool) -> bool:
        """Whether to time the computation of this step separately."""
        return measured or step % (_TIMED_EVERY if self._replicas.num_replicas > 1 else _TIMED_EVERY_ALONE) == 0

    def estimate(self) -> NoiseEstimate:
        """The present estimate of the gradient noise."""
        return self.tracker.estimate()

    def efficiency(self, total: int) -> float:
        """Progress per sample of steps of that size, once second moments have adapted to it; for the tuner.

        It is 1 up to the initial batch, and before anything is known. A step at S·M0 is worth the gain of Eq. (G9) if
        the learning rate lets it move that far; under a rule that scales less, it is worth only the distance that it
        moves. The gradients of larger batches have less noise, so second moments shrink, and with them Adam's
        denominators.
        """
        believed = self._believed_at(total)
        return 1.0 if believed is None else self._aim(total, believed) * self.allowed.initial / total

    def counted_efficiency(self, total: int) -> float:
        """Progress per sample of a step of that size with the present second moments; progress counts this.

        After the batch grew this is below `efficiency` for a while: steps are too short until second moments have
        adapted. On a parabola, at c times the best learning rate, a step of x times the right length is worth
        x·(2 − c·x)/(2 − c) of a right one. We assume c = 1/2, the mean of a schedule that falls to zero.
        """
        believed, efficiency = self._believed_at(total), self.efficiency(total)
        if believed is None or self._moments is None:
            return efficiency
        reach = self._reach(total / self.allowed.initial, believed, self._moments.ratios)
        part = min(reach / self._aim(total, believed), 1.0)
        return efficiency * part * (2.0 - _RATE * part) / (2.0 - _RATE)

    def _believed_at(self, total: int) -> NoiseEstimate | None:
        """The noise by which a step of that size is discounted; None where it counts in full."""
        return self.believed if self.adapts and total > self.allowed.initial else None

    def _aim(self, total: int, believed: NoiseEstimate) -> float:
        """How many steps at M0 a step of that size is worth, once second moments have followed."""
        scale = total / self.allowed.initial
        gain = float(believed.efficiency.gain(scale))
        ratios = () if self._moments is None else self._moments.final_ratios(gain)
        return min(gain, self._reach(scale, believed, ratios))

    def _reach(self, scale: float, believed: NoiseEstimate, ratios: Sequence[float]) -> float:
        """How far a step moves along the gradient, in steps at M0: by group the learning rate over the denominator."""
        factors = self.rule.factors(scale, believed, math.inf)
        weights = [max(sqr, 0.0) for sqr in believed.group_sqr]
        if len(weights) != len(factors) or not sum(weights) > 0.0:
            weights = [1.0] * len(factors)
        if len(ratios) != len(factors):
            ratios = (1.0,) * len(factors)
        moves = [factor / math.sqrt(ratio) for factor, ratio in zip(factors, ratios, strict=True)]
        return sum(weight * move for weight, move in zip(weights, moves, strict=True)) / sum(weights)

    def _find_moments(self) -> None:
        """Find out whether the optimiser has second moments; called after each step until that is known."""
        meter = self._engine.meter
        kind = meter.kind if meter is not None and self.adapts else "plain"
        if kind != "cold":
            self._is_cold = False
            self._moments = SecondMoments.of(self._engine.optimizer, kind)

    def _restore_moments(self, state: dict[str, Any]) -> None:
        self._moments = SecondMoments.restored(state.get("moments")) if self.adapts else None
        self._is_cold = self._moments is None

    def factors(self, total: int, epochs: float) -> tuple[float, ...]:
        """Learning-rate factors by parameter group for a step of `total` samples."""
        groups = len(self._engine.optimizer.param_groups)
        if not self.adapts or total <= self.allowed.initial:
            return (1.0,) * groups
        return self.rule.factors(total / self.allowed.initial, self.believed or self.estimate(), epochs)

    def trial_from(self, local_batch: int) -> int | None:
        """The largest local batch that ran, if this one is larger (a trial); else None."""
        return max(self.memory.largest_run, 1) if local_batch > self.memory.largest_run else None

    def timed_next(self, source: Iterator[_Item]) -> _Item | None:
        """The next item of a source of data, None at its end; the clock counts the wait for it."""
        began = time.perf_counter()
        item = next(source, None)
        self._engine.clock.add_data_wait(time.perf_counter() - began)
        return item

    def begin_step(self, micro: MicroBatch, epochs: float) -> tuple[float, ...]:
        """Start a step with its first micro-batch; returns the factors of its learning rates."""
        self._engine.clock.begin_step(self.times_compute(micro.step, micro.measured))
        return self.factors(micro.total, epochs)

    def end_step(self, micro: MicroBatch) -> float:
        """End a step whose last micro-batch was `micro`; returns the progress per sample that it counts."""
        self._engine.clock.end_step(micro.repeats, micro.largest_local_batch, micro.measured)
        return self.count_step(micro.largest_local_batch, micro.total)

    def count_step(self, local_batch: int, total: int) -> float:
        """Count a step that is done; returns the progress per sample that it counts."""
        self.memory.note_run(local_batch)
        self._samples += total
        if not self.adapts:
            return 1.0
        if self._is_cold:
            # Second moments that are found after a step contain that step already.
            self._find_moments()
            return self.counted_efficiency(total)
        if self._moments is None:
            return self.efficiency(total)
        believed, scale = self._believed_at(total), total / self.allowed.initial
        self._moments.add_step(1.0 if believed is None else float(believed.efficiency.gain(scale)))
        counted = self.counted_efficiency(total)
        self._moments.credit(counted * max(scale, 1.0))
        return counted

    def shrink_batch(self, local_batch: int) -> int:
        """Go back to a local batch that fits, after this one ran out of memory on some replica; returns it."""
        fitting = self.memory.note_out_of_memory(local_batch)
        if self.adapts and self.total > self.allowed.initial and fitting * self.choice.num_gpus >= self.allowed.initial:
            self.total = max(self.allowed.initial, fitting * (self.choice.accumulation + 1) * self.choice.num_gpus)
        self.choice = fitting_choice(self.total, self._replicas.num_replicas, fitting, self.allowed.accumulation)
        return self.choice.local_batch

    def limit_local_batch(self, largest: int) -> bool:
        """Limit the local batch, with accumulation where needed; returns whether the limit is new."""
        is_new = self.memory.set_limit(largest)
        if self.choice.local_batch > largest:
            self.choice = self.fitted()
        return is_new

    def change_batch(self, change: BatchChange) -> None:
        """Change to another batch."""
        self.choice = change.choice
        self.total = change.choice.total
        self.pace.rounds_since_change = 0
        self.guard.changed()

    def go_back(self, total: int, step: int, state: dict[str, Any] | None = None) -> None:
        """Return to an earlier batch and step after a spike; `state` is the saved state if the weights return too."""
        if state is not None:
            self.tracker.load_state_dict(state["tracker"])
            self._restore_moments(state)
        self.pace.schedule_round(step)
        self.total = total
        self.choice = self.fitted()
        self.pace.rounds_since_change = 0

    def is_round(self, step: int) -> bool:
        """Whether a round is due after this step; the same on every replica."""
        return self.pace.is_round(step)

    def round(self, step: int) -> RoundReport:
        """Exchange measurements and fit the throughput model; a collective."""
        times = self._engine.clock.drain()
        self._recorder.record(times, self._engine.clock.includes_data_wait)
        self.fit.request(self.profile.observations(self._gpu_type))
        mine = self._own_numbers(times)
        table = exchange(mine, self._replicas)
        if table.noise is not None:
            self._add_noise(table.noise)
        self.model = table.model or self.model
        self._cap = table.memory_holds
        is_known = self.adapts and is_clear(self.estimate())
        self.pace.set_measuring(table.step_seconds, table.measuring_cost, self.tracker.num_measured, is_known)
        self.pace.end_round(step, table.step_seconds)
        samples, self._samples = self._samples, 0
        spent = sum(each.step_seconds for each in times)
        throughput = samples / spent if spent > 0.0 and len(times) >= mine.num_losses else None
        return RoundReport(table.mean_loss, throughput, self._judge(table.mean_loss, samples))

    def _own_numbers(self, times: Sequence[StepTime]) -> RoundNumbers:
        """This replica's measurements of the steps of a round."""
        losses, count = self._engine.losses()
        plain = [each.step_seconds for each in times if not each.measured]
        measured = [each.step_seconds for each in times if each.measured]
        seconds = statistics.median(plain) if plain else math.nan
        return RoundNumbers(
            loss_sum=losses,
            num_losses=count,
            step_seconds=seconds,
            measuring_cost=statistics.median(measured) / seconds - 1.0 if plain and measured else math.nan,
            memory_holds=self._engine.predicted_local_batch(self.choice.local_batch),
            model=self.fit.parameters,
            noise=self._engine.meter.collect() if self.measures_noise and self._engine.meter is not None else None,
        )

    def _judge(self, loss: float | None, samples: int) -> Spike | None:
        if loss is None or not self.adapts:
            return None
        self.guard.record(loss, samples)
        return self.guard.verdict()

    def _add_noise(self, rows: SummedNoise) -> None:
        meter = self._engine.meter
        assert meter is not None
        if meter.num_groups != self.tracker.num_groups:
            self.tracker.restart("the optimiser's parameter groups changed", meter.num_groups)
        elif self._kind not in ("", meter.kind):
            self.tracker.restart(f"the preconditioner changed from {self._kind} to {meter.kind}")
        self._kind = meter.kind
        if self._moments is not None:
            self._moments.match_groups(self._engine.optimizer)
        if len(rows.counts) and rows.parts.shape[1] == self.tracker.num_groups:
            self.tracker.add(rows.parts, rows.whole, rows.counts, rows.totals)
        self._update_believed(self.estimate())

    def _update_believed(self, estimate: NoiseEstimate) -> None:
        if estimate.is_known:
            self.believed = estimate
        elif (
            self.believed is not None
            and estimate.num_measured >= MIN_MEASURED
            and estimate.low > self.believed.noise_scale
        ):
            # The interval excludes noise below `low`; a smaller estimate would count too little progress.
            self.believed = replace(estimate, noise_scale=estimate.low)

    def next_change(self, progress: float) -> BatchChange | None:
        """The batch to change to now; None to stay, as while adaptation is frozen or a change is recent."""
        if not self.adapts or self.model is None or self.allowed.maximum is None:
            return None
        if self.guard.is_frozen(progress) or self.guard.is_watching or self.pace.rounds_since_change < _LEAST_ROUNDS:
            return None
        caps = [cap for cap in (self.local_max, self._cap, self.memory.largest_run * 2) if cap]
        limits = BatchLimits(self.allowed.initial, self.allowed.maximum, 1, max(min(caps), 1))
        return next_batch(
            self.choice,
            self.estimate(),
            self.model,
            limits,
            self._replicas.num_nodes,
            self.efficiency,
            self.allowed.accumulation,
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "total": self.total,
            "accumulation": self.choice.accumulation,
            "num_replicas": self._replicas.num_replicas,
            "believed": None if self.believed is None else self.believed.state_dict(),
            "kind": self._kind,
            "every": self.pace.measures_every,
            "tracker": self.tracker.state_dict(),
            "moments": None if self._moments is None else self._moments.state_dict(),
            "profile": self.profile.state_dict(),
            "memory": self.memory.state_dict(),
            "guard": self.guard.state_dict(),
            "fit": self.fit.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Restore a state, maybe on other replicas: the total batch stays, its split may change."""
        self.tracker.load_state_dict(state["tracker"])
        if self.tracker.num_groups != len(self._engine.optimizer.param_groups):
            self.tracker.restart("parameter groups", len(self._engine.optimizer.param_groups))
        self._kind = str(state["kind"])
        self.pace.measures_every = int(state["every"])
        self._restore_moments(state)
        self.believed = NoiseEstimate.restored(state["believed"])
        self.profile.load_state_dict(state["profile"])
        self.memory.load_state_dict(state["memory"])
        self.guard.load_state_dict(state["guard"])
        self.fit.load_state_dict(state["fit"])
        self.model = self.fit.parameters
        if self.adapts and self.allowed.maximum is not None:
            self.total = min(max(int(state["total"]), self.allowed.initial), self.allowed.maximum)
        self.choice = self.fitted()
        if self.adapts and state["num_replicas"] == self._replicas.num_replicas:
            least = max(int(state["accumulation"]), self.allowed.accumulation)
            self.choice = fitting_choice(self.total, self._replicas.num_replicas, self.local_max, least)
        # The state to roll back to was in the memory of the old process.
        self.guard.accept_change()
        self.pace.schedule_round(step)

    def regrouped(self, state: dict[str, Any], step: int) -> None:
        """Restore a state after the replicas changed; all restore the same state, so they decide alike."""
        self.pace.start_again()
        self._samples = 0
        self._cap = None
        self._recorder.forget_rests()
        self.load_state_dict(state, step)
        parameters = state["fit"]["parameters"]
        self.model = None if parameters is None else PublishedThroughput(*parameters)

    def close(self) -> None:
        """End the fitting thread."""
        self.fit.close()
