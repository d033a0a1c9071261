"""Weighs the parts of a step, so that the gradient is Σ n·g / Σ n for any split of the batch."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pollux.agent.data.step_shape import MicroBatch
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.core.errors import InvalidInput, MisusedJob, UnknownName

__all__ = ["REDUCTIONS", "LossWeighting", "NoiseFactors", "check_weighting"]

REDUCTIONS = ("mean", "sum")
_WEIGHT = "how many tokens (or other units) the loss is the mean of"


def check_weighting(reduction: str, weight: float | Tensor | None) -> None:
    """Refuse an unknown `reduction`, and a `weight` that is not a finite number of 0 or more.

    The value of a tensor on a GPU is not checked, since reading it would wait for the device.
    """
    if reduction not in REDUCTIONS:
        raise UnknownName("reduction", str(reduction), REDUCTIONS)
    if weight is None:
        return
    if reduction == "sum":
        raise InvalidInput(
            f"reduction is 'sum' and weight is {weight}: use one of them; weight is for a loss that is a mean"
        )
    if isinstance(weight, Tensor) and (weight.numel() != 1 or weight.is_complex()):
        raise InvalidInput(
            f"weight is a tensor of shape {list(weight.shape)} and type {weight.dtype}: give one number, {_WEIGHT}"
        )
    if not _can_weigh(weight):
        raise InvalidInput(f"weight is {weight!r}: give {_WEIGHT}")


def _can_weigh(weight: float | Tensor) -> bool:
    if isinstance(weight, Tensor):
        return weight.device.type != "cpu" or 0.0 <= float(weight.detach()) < math.inf
    return isinstance(weight, numbers.Real) and not isinstance(weight, bool) and 0.0 <= weight < math.inf


@dataclass(frozen=True, slots=True)
class NoiseFactors:
    """Factors that turn squared norms of scaled gradients into those of the average: for a part, and the whole."""

    part: float
    whole: float


class LossWeighting:
    """Scales losses before their backward pass; the wrapper then takes the mean over K replicas.

    - mean over the samples: factor n·K/N, known in advance, exact;
    - sum over the samples: factor K, times M0/N where the batch may grow, so that the gradient keeps its size at the
      initial batch M0;
    - mean over something else, such as tokens, with its `weight`: factor w·K/reference; once the sum W of all weights
      is known, the gradients are multiplied by reference/W. The reference is the mean weight of the step before, equal
      on all replicas; it only keeps numbers in range.
    """

    def __init__(self, replicas: ReplicaGroup, initial_batch: int, adaptive: bool) -> None:
        self._replicas = replicas
        self._initial = initial_batch
        self._adaptive = adaptive
        self._kind: str | None = None
        self._reference = 0.0
        self._sum: Tensor | None = None
        self._work: dist.Work | None = None
        self._parts = 0

    def scale(self, loss: Tensor, micro: MicroBatch, reduction: str, weight: float | Tensor | None) -> Tensor:
        """The scaled loss, for the backward pass."""
        check_weighting(reduction, weight)
        kind = "weight" if weight is not None else reduction
        if self._kind not in (None, kind):
            raise MisusedJob(f"this step began with a loss by '{self._kind}' and goes on by '{kind}': use one in all")
        self._kind = kind
        if weight is not None:
            return self._weighted(loss, micro, weight)
        factor = self._factor(micro)
        return loss if factor == 1.0 else loss * factor

    def _factor(self, micro: MicroBatch) -> float:
        if micro.samples == 0:
            return 0.0
        if self._kind == "sum":
            return self._replicas.num_replicas * self._sum_scale(micro)
        return micro.samples * self._replicas.num_replicas / micro.total

    def _sum_scale(self, micro: MicroBatch) -> float:
        return self._initial / micro.total if self._adaptive and micro.total > self._initial else 1.0

    def _weighted(self, loss: Tensor, micro: MicroBatch, weight: float | Tensor) -> Tensor:
        device = loss.device
        if not isinstance(weight, Tensor):
            weight = torch.tensor(float(weight), dtype=torch.float64)
        weight = weight.detach().to(device=device, dtype=torch.float64).reshape(())
        if micro.samples == 0:
            weight = torch.zeros_like(weight)
        if self._reference == 0.0:
            total = float(self._replicas.add_up(weight.cpu().clone()))
            self._reference = max(total / self._replicas.num_replicas, 1.0)
        self._sum = weight.clone() if self._sum is None else self._sum + weight
        self._parts += 1
        if micro.is_last and self._replicas.num_replicas > 1:
            self._work = dist.all_reduce(self._sum, async_op=True)
        # A mean over no token is NaN, and so is 0 times NaN.
        counted = torch.where(weight > 0.0, loss, torch.zeros_like(loss))
        return counted * (weight / self._reference * self._replicas.num_replicas).to(loss.dtype)

    def noise_factors(self, micro: MicroBatch, weight: float | Tensor | None) -> NoiseFactors:
        """The factors for a measured step; that of the whole is for gradients after `finish`.

        A part's share in L is (n/N)·|g|². The hook sees g' = f·g with the factor f of `scale`, so the share is
        |g'|²·(n/N)/f². With weights W is not known yet: `finish` returns it.
        """
        if micro.samples == 0:
            return NoiseFactors(0.0, 1.0)
        replicas = self._replicas.num_replicas
        share = micro.samples / micro.total
        if self._kind == "sum":
            scale = self._sum_scale(micro)
            return NoiseFactors(share / (replicas * micro.samples * scale) ** 2, 1.0 / (micro.total * scale) ** 2)
        if self._kind == "weight":
            value = float(weight) if weight is not None else 0.0
            if value <= 0.0:
                return NoiseFactors(0.0, 1.0)
            return NoiseFactors((self._reference / replicas) ** 2 / value, 1.0)
        return NoiseFactors(share / (share * replicas) ** 2, 1.0)

    def finish(self, parameters: Iterable[nn.Parameter]) -> Tensor | None:
        """After the last backward pass: with weights, scale the gradients to the average and return W; else None."""
        weights, parts = self._sum, self._parts
        self._kind, self._sum, self._parts = None, None, 0
        if self._work is not None:
            self._work.wait()
            self._work = None
        if weights is None:
            return None
        factor = torch.where(weights > 0.0, self._reference / weights, torch.zeros_like(weights))
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                parameter.grad.mul_(factor.to(parameter.grad.dtype))
            else:
                by_type.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for dtype, gradients in by_type.items():
            torch._foreach_mul_(gradients, factor.to(dtype))
        if not weights.is_cuda:
            # The next step's reference. On a GPU reading it would wait for the device, so the first one stays.
            self._reference = max(float(weights) / (parts * self._replicas.num_replicas), 1.0)
        return weights

    def forget(self) -> None:
        """Forget the step under way and the reference: the replicas have changed."""
        self._work = None
        self.abandon()
        self._reference = 0.0

    def abandon(self) -> None:
        """Drop the step under way."""
        if self._work is not None:
            self._work.wait()
        self._kind, self._sum, self._work, self._parts = None, None, None, 0
