"""The batch of the steps to come: measured, modelled and chosen in rounds, the same on every replica.

What a better batch is, `batch_tuner` says; what a larger one does to the learning rate, `lr_rules`.
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
_RATE = 0.5  # of the best learning rate: how a step that is too short is taken to count


@dataclass(frozen=True, slots=True)
class BatchRange:
    """What the user allows: M0, the ceiling (None: the batch stays M0), the local ceiling and least accumulation."""

    initial: int
    maximum: int | None = None
    local_max: int | None = None
    accumulation: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether the batch must stay what it is."""
        return self.maximum is None


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What a round found: mean loss over its steps (None: no step), throughput in samples per second, a spike."""

    loss: float | None
    throughput: float | None
    spike: Spike | None = None


class Adaptation:
    """Holds the present batch and everything that decides about the next one.

    In exact mode it times steps and nothing more. Decisions use numbers that were exchanged between the
    replicas in the same round, so that all of them come to the same one.
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
        """Throughput and efficiency as known now, for predictions on other numbers of GPUs; None before a first fit."""
        if self.model is None:
            return None
        allowed = self.allowed
        efficiency = self.believed.efficiency if self.believed is not None else Efficiency(allowed.initial, 1.0, 1.0)
        most = allowed.maximum or allowed.initial
        return GoodputModel(self.model, efficiency, BatchLimits(allowed.initial, most, 1, self.local_max or most))

    @property
    def reported_model(self) -> GoodputModel | None:
        """The same, corrected by what the fit leaves of this replica's measurements; for reports, not for decisions."""
        model = self.goodput_model
        if model is None or self.model is None:
            return None
        return replace(model, throughput=corrected(self.model, self.profile.observations(self._gpu_type)))

    def fitted(self) -> BatchChoice:
        """The present total batch as it runs on the present replicas."""
        return fitting_choice(self.total, self._replicas.num_replicas, self.local_max, self.allowed.accumulation)

    def shape(self, step: int) -> StepShape:
        """What step number `step` should be; asked when its data is issued, in the same order on all replicas."""
        repeats = self.choice.accumulation + 1
        measured = self._is_measured(step)
        if measured and self._replicas.num_replicas * repeats == 1:
            # One gradient alone says nothing of its noise; two halves of the batch do, without a bias.
            repeats = 2
        return StepShape(self.total, repeats, measured)

    def _is_measured(self, step: int) -> bool:
        meter = self._engine.meter
        if not self.measures_noise or meter is None or self.total < 2 or not meter.is_warm:
            return False
        return self.pace.is_measured(step)

    def is_told_apart(self, step: int, measured: bool) -> bool:
        """Whether computing is to be timed apart from the rest of this step."""
        return measured or step % (_TIMED_EVERY if self._replicas.num_replicas > 1 else _TIMED_EVERY_ALONE) == 0

    def estimate(self) -> NoiseEstimate:
        """What is known of the gradient noise now."""
        return self.tracker.estimate()

    def efficiency(self, total: int) -> float:
        """Progress per sample of steps of that size once the optimiser has settled on them, as the tuner asks for it.

        1 up to the initial batch, and before anything is known. A step at S·M0 is worth the gain of Eq. (G9) if the
        learning rate lets it move that far; under a rule that scales it less, it is worth only what it moves. Second
        moments shrink with the noise of larger batches, and with them the denominators of Adam and its kin.
        """
        believed = self._believed_at(total)
        return 1.0 if believed is None else self._aim(total, believed) * self.allowed.initial / total

    def counted(self, total: int) -> float:
        """Progress per sample of a step of that size with second moments as they are now, as progress counts it.

        Below `efficiency` for a while after the batch grew: until second moments have followed, steps are too short. On
        a parabola, at c times the best learning rate, a step of x times its due length is worth x·(2 − c·x)/(2 − c) of
        it. The rate is taken to be half the best one, as it is on average in a schedule that falls to zero.
        """
        believed, efficiency = self._believed_at(total), self.efficiency(total)
        if believed is None or self._moments is None:
            return efficiency
        reach = self._reach(total / self.allowed.initial, believed, self._moments.ratios)
        part = min(reach / self._aim(total, believed), 1.0)
        return efficiency * part * (2.0 - _RATE * part) / (2.0 - _RATE)

    def _believed_at(self, total: int) -> NoiseEstimate | None:
        """The noise by which steps of that size count; None where they count in full."""
        return self.believed if self.adapts and total > self.allowed.initial else None

    def _aim(self, total: int, believed: NoiseEstimate) -> float:
        """Steps at M0 that a step of that size is worth once second moments have followed."""
        scale = total / self.allowed.initial
        gain = float(believed.efficiency.gain(scale))
        ratios = () if self._moments is None else self._moments.final_ratios(gain)
        return min(gain, self._reach(scale, believed, ratios))

    def _reach(self, scale: float, believed: NoiseEstimate, ratios: Sequence[float]) -> float:
        """How far one step moves along the gradient, in steps at M0: learning rate over denominator, by group."""
        factors = self.rule.factors(scale, believed, math.inf)
        weights = [max(sqr, 0.0) for sqr in believed.group_sqr]
        if len(weights) != len(factors) or not sum(weights) > 0.0:
            weights = [1.0] * len(factors)
        if len(ratios) != len(factors):
            ratios = (1.0,) * len(factors)
        moves = [factor / math.sqrt(ratio) for factor, ratio in zip(factors, ratios, strict=True)]
        return sum(weight * move for weight, move in zip(weights, moves, strict=True)) / sum(weights)

    def _find_moments(self) -> None:
        """Find out whether the optimiser has second moments; asked after each step until that is known."""
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
        """The local batch that is known to fit, where this one is larger than any that ran; else None."""
        return max(self.memory.largest_run, 1) if local_batch > self.memory.largest_run else None

    def timed_next(self, source: Iterator[_Item]) -> _Item | None:
        """The next item of a source of data, whose wait is timed; None where there is none."""
        began = time.perf_counter()
        item = next(source, None)
        self._engine.clock.waited(time.perf_counter() - began)
        return item

    def begin_step(self, micro: MicroBatch, epochs: float) -> tuple[float, ...]:
        """The first part of a step is about to be run: the factors of its learning rates."""
        self._engine.clock.begin(self.is_told_apart(micro.step, micro.measured))
        return self.factors(micro.total, epochs)

    def end_step(self, micro: MicroBatch) -> float:
        """The optimiser has stepped, and `micro` was the last part: the progress per sample that the step counts."""
        self._engine.clock.end(micro.repeats, micro.largest_local_batch, micro.measured)
        return self.stepped(micro.largest_local_batch, micro.total)

    def stepped(self, local_batch: int, total: int) -> float:
        """A step was done; the progress per sample that it counts."""
        self.memory.ran(local_batch)
        self._samples += total
        if not self.adapts:
            return 1.0
        if self._is_cold:
            # What is found after a step contains it already.
            self._find_moments()
            return self.counted(total)
        if self._moments is None:
            return self.efficiency(total)
        believed, scale = self._believed_at(total), total / self.allowed.initial
        self._moments.step(1.0 if believed is None else float(believed.efficiency.gain(scale)))
        counted = self.counted(total)
        self._moments.credit(counted * max(scale, 1.0))
        return counted

    def ran_out(self, local_batch: int) -> int:
        """Memory did not hold this local batch on some replica: go back to one that fits; returns it."""
        fitting = self.memory.ran_out(local_batch)
        if self.adapts and self.total > self.allowed.initial and fitting * self.choice.num_gpus >= self.allowed.initial:
            self.total = max(self.allowed.initial, fitting * (self.choice.accumulation + 1) * self.choice.num_gpus)
        self.choice = fitting_choice(self.total, self._replicas.num_replicas, fitting, self.allowed.accumulation)
        return self.choice.local_batch

    def limit(self, largest: int) -> bool:
        """Stay at or below this local batch, with accumulation where needed; returns whether that is news."""
        is_new = self.memory.limit(largest)
        if self.choice.local_batch > largest:
            self.choice = self.fitted()
        return is_new

    def change_batch(self, change: BatchChange) -> None:
        """Go over to another batch."""
        self.choice = change.choice
        self.total = change.choice.total
        self.pace.rounds_since_change = 0
        self.guard.changed()

    def go_back(self, total: int, step: int, state: dict[str, Any] | None = None) -> None:
        """Return to an earlier batch and step, after a spike; `state`: what was saved there, if weights return too."""
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
        """Bring measurements together; a collective where noise is measured by several replicas."""
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
        """What this replica measured in the steps of a round."""
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
            self._moments.follow(self._engine.optimizer)
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
            # Unknown, but at least `low`: what was believed below that is refuted, and would count too little progress.
            self.believed = replace(estimate, noise_scale=estimate.low)

    def next_change(self, progress: float) -> BatchChange | None:
        """The batch to go over to now, or None. Not while frozen, watched, or before losses are known well enough."""
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
        """Go on from an earlier run, maybe on other replicas: the total batch stays, its split may not."""
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
        # The state that a roll-back would return to is gone with the process.
        self.guard.accept_change()
        self.pace.schedule_round(step)

    def regrouped(self, state: dict[str, Any], step: int) -> None:
        """Go on among other replicas, each from the same state and alike in all that decides."""
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
