"""A job's whole model: throughput, efficiency and limits together; what policies and agents ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pollux.core import is_gpu_type
from pollux.core.errors import InvalidInput
from pollux.goodput.batch import BatchChoice, BatchLimits, best_batch
from pollux.goodput.corrected import CorrectedThroughput
from pollux.goodput.efficiency import Efficiency
from pollux.goodput.throughput import ThroughputModel

__all__ = ["GoodputModel"]


@dataclass(frozen=True, slots=True)
class GoodputModel:
    """GOODPUT(N, K, m, s) = THROUGHPUT · EFFICIENCY, Eq. (G11) (§3), in useful samples per second.

    `by_type` holds throughput models of GPU types that were measured apart; other types use `throughput`.
    """

    throughput: ThroughputModel
    efficiency: Efficiency
    limits: BatchLimits
    by_type: Mapping[str, ThroughputModel] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.efficiency.initial_batch != self.limits.initial:
            raise InvalidInput(
                f"the efficiency is relative to a batch of {self.efficiency.initial_batch}, the limits start "
                f"at {self.limits.initial}: give both the same initial batch"
            )

    @property
    def max_gpus(self) -> int:
        """The most GPUs that can each have the smallest local batch; see Eq. (G12)."""
        return self.limits.maximum // self.limits.local_min

    @property
    def min_gpus(self) -> int:
        """The fewest GPUs that hold the initial batch; one, if a GPU may take several local batches; see Eq. (G12)."""
        return 1 if self.limits.accumulation else -(-self.limits.initial // self.limits.local_max)

    def throughput_on(self, gpu_type: str = "") -> ThroughputModel:
        """The throughput model for a GPU type; a node's name for it may be shorter than the measured one."""
        if not self.by_type or gpu_type in self.by_type:
            return self.by_type.get(gpu_type, self.throughput)
        named = (measured for name, measured in self.by_type.items() if is_gpu_type(gpu_type, name))
        return next(named, self.throughput)

    def best_batch(self, num_nodes: int, num_gpus: int, gpu_type: str = "") -> tuple[BatchChoice, float]:
        """The batch with the highest goodput on a placement, and that goodput; see `best_batch`."""
        throughput = self.throughput_on(gpu_type)
        choice, goodput = best_batch(throughput, self.efficiency, self.limits, num_nodes, num_gpus)
        if goodput > 0.0 and isinstance(throughput, CorrectedThroughput):
            goodput /= throughput.factor(num_nodes, num_gpus)
        return choice, goodput

    def goodput(self, num_nodes: int, num_gpus: int, gpu_type: str = "") -> float:
        """Useful samples per second at the best batch; 0 where the job cannot run."""
        return self.best_batch(num_nodes, num_gpus, gpu_type)[1]

    @property
    def as_fitted(self) -> GoodputModel:
        """The same model without corrections by measurements."""
        models = (self.throughput, *self.by_type.values())
        if not any(isinstance(model, CorrectedThroughput) for model in models):
            return self
        by_type = {name: _fitted(model) for name, model in self.by_type.items()}
        return replace(self, throughput=_fitted(self.throughput), by_type=by_type)

    def goodput_at(self, choice: BatchChoice, num_nodes: int, gpu_type: str = "") -> float:
        """Useful samples per second at a given batch: M/T_iter, Eq. (G7), times the efficiency, Eq. (G10)."""
        seconds = self.throughput_on(gpu_type).step_seconds(
            float(num_nodes), float(choice.num_gpus), float(choice.local_batch), float(choice.accumulation)
        )
        return choice.total / seconds * self.efficiency_at(choice.total)

    def efficiency_at(self, total_batch: float) -> float:
        """Progress per sample at a total batch, relative to the initial batch; Eq. (G10)."""
        return self.efficiency.efficiency(float(total_batch))


def _fitted(model: ThroughputModel) -> ThroughputModel:
    return model.base if isinstance(model, CorrectedThroughput) else model
