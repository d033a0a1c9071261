"""Squared gradient lengths of single micro-steps and of the whole step, on measured steps only.

The numbers stay on the device until they are collected; `noise_scale` uses them. Parameters sharded by FSDP2 cannot be
measured: hooks see only pieces of their gradients.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from pollux.agent.step.deferred_copy import DeferredCopy
from pollux.agent.step.preconditioner import WARM_STEPS, Preconditioner, grouped_parameters
from pollux.core.errors import MisusedJob

__all__ = ["WARM_STEPS", "GradientNormMeter", "Rows"]

_CHUNK_BYTES = 32 * 2**20
_LARGE_BYTES = 4 * 2**20
_CHUNK_TENSORS = 64
_CPU_BLOCK = 2**14


class Rows(NamedTuple):
    """Measured steps on the host: float64 rows by parameter group, int64 counts and samples of each step.

    `parts` is this replica's share of L and `counts` its number of parts with a weight: both are to be summed over
    replicas. `whole` is T and `totals` the step's samples, equal on all replicas.
    """

    parts: Tensor
    whole: Tensor
    counts: Tensor
    totals: Tensor


class GradientNormMeter:
    """Measures steps without changing them and without waiting for the device.

    In a measured step call `start_measuring(weight)` before each micro-step, `stop_measuring()` after its backward
    pass, and `close_row(...)` after the last one, before clipping and `optimizer.step()`. Between start and stop,
    temporary hooks on the parameters see the gradient of the micro-step before it is summed or reduced. With
    `set_aside` (one replica, and memory for a second set of gradients) there are no hooks: the gradients so far are set
    aside during the backward pass and added again after it. The sum is the same bit for bit, with few kernels instead
    of some for each parameter. `drain()` waits for the device and returns the rows so far; `collect()` does not wait.

    Lengths are those of P⁻¹g, the direction that the optimiser steps along, with P from its state as it is:

    | kind | state | P |
    |---|---|---|
    | adam (AdamW, NAdam, RAdam), amsgrad | `exp_avg_sq`, `max_exp_avg_sq` | √(v/(1 − β₂^step)) + ε |
    | adagrad, rmsprop | `sum`, `square_avg` | √v + ε (less the squared mean where centred) |
    | adadelta | `square_avg`, `acc_delta` | √(v + ε)/√(d + ε) |
    | adamax | `exp_inf` | u |
    | plain | anything else | 1 |

    Coordinates whose second moment is still zero have P⁻¹ = 0: they have seen no gradient, and the first one divided
    by ε would dominate all others. Frozen parameters, and those not in the optimiser, do not count. `device` holds the
    rows; parameters may lie on others. Measuring sparse gradients waits for the device.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        capacity: int = 256,
        *,
        set_aside: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self._set_aside = set_aside
        self._aside: dict[int, Tensor] | None = None
        self._late: DeferredCopy[tuple[int, list[tuple[int, int]]]] = DeferredCopy()
        self._num_drains = 0
        self._optimizer = optimizer
        self._preconditioner = Preconditioner(optimizer)
        self._capacity = capacity
        self._handles: list[RemovableHandle] = []
        self._weight = 0.0
        self._fired: set[int] = set()
        self._is_spoiled = False
        self._num_parts = 0
        self._parts = _Sums(self._preconditioner)
        self._host_rows: list[tuple[int, int]] = []
        self._num_rows = 0
        self._allocate()

    def refresh(self) -> None:
        """Read the optimiser's state again, after it was restored; waits for the device."""
        self._preconditioner.refresh()

    def _allocate(self) -> None:
        self._num_groups = len(self._optimizer.param_groups)
        self._ring = torch.zeros((self._capacity, 2, self._num_groups), dtype=_exact(self.device), device=self.device)
        self._host_rows.clear()
        self._num_rows = 0

    @property
    def num_groups(self) -> int:
        """Parameter groups of the rows. A group that is added counts from the next start, which drops older rows."""
        return self._num_groups

    @property
    def kind(self) -> str:
        """The kind of preconditioner; lengths under different kinds cannot be compared.

        "plain", "adam", "amsgrad", "adagrad", ...; "cold" before the first step of an optimiser whose kind has state.
        """
        return self._preconditioner.kind

    @property
    def is_warm(self) -> bool:
        """Whether the second moments have seen `WARM_STEPS` steps, enough to measure by them.

        A restored optimiser has its own count; where that lies on the device, the next `drain` reads it.
        """
        return self._preconditioner.is_warm

    @property
    def is_measuring(self) -> bool:
        """Whether a micro-step is being measured."""
        return bool(self._handles) or self._aside is not None

    def start_measuring(self, weight: float) -> None:
        """Start to measure a micro-step; `weight` turns |P⁻¹g'|² of its gradient g' into its share of L.

        g' is the gradient of the loss as scaled for this micro-step: for g' = g·bᵢ·K/B the weight is B/(bᵢ·K²); it is
        0 for an empty part.
        """
        if self.is_measuring:
            raise MisusedJob(
                "a measured micro-step began before the one before it ended: call stop_measuring() or drop_row()"
            )
        if len(self._optimizer.param_groups) != self._num_groups:
            self._allocate()
        self._weight = weight
        self._num_parts += weight > 0.0
        self._fired.clear()
        if self._set_aside and self._has_room():
            self._aside = {}
            for _, parameter in grouped_parameters(self._optimizer):
                if parameter.grad is not None:
                    self._aside[id(parameter)] = parameter.grad
                    parameter.grad = None
            return
        for index, parameter in grouped_parameters(self._optimizer):
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(partial(self._add_gradient, index, parameter)))

    def _add_gradient(self, index: int, parameter: Tensor, gradient: Tensor) -> None:
        if id(parameter) in self._fired:
            # Nested backward passes (re-entrant checkpointing) give a parameter's gradient in pieces, and the length
            # of a sum is not the sum of lengths.
            self._is_spoiled = True
        self._fired.add(id(parameter))
        self._parts.add(index, parameter, gradient.detach(), self._weight)

    def _has_room(self) -> bool:
        """Whether memory holds a second set of gradients and some more; once it does not, hooks are used."""
        if self.device.type == "cuda":
            size = sum(p.numel() * p.element_size() for _, p in grouped_parameters(self._optimizer) if p.requires_grad)
            most = torch.cuda.get_device_properties(self.device).total_memory
            self._set_aside = most - torch.cuda.max_memory_allocated(self.device) > 2 * size
        return self._set_aside

    def stop_measuring(self) -> None:
        """Measure the gradients that wait, before anything writes to them again, and remove the hooks."""
        self._remove_hooks()
        if self._aside is not None:
            self._add_back(self._aside)
            self._aside = None
        self._parts.flush(self._weight)

    def _add_back(self, aside: dict[int, Tensor]) -> None:
        sums: list[Tensor] = []
        added: list[Tensor] = []
        for index, parameter in grouped_parameters(self._optimizer):
            before, now = aside.get(id(parameter)), parameter.grad
            if now is not None and parameter.requires_grad:
                self._parts.add(index, parameter, now.detach(), self._weight, held=True)
            if before is None:
                continue
            if now is None:
                parameter.grad = before
            elif before.is_sparse or now.is_sparse:
                parameter.grad = before + now
            else:
                parameter.grad = before
                sums.append(before)
                added.append(now)
        self._parts.flush(self._weight)
        if sums:
            torch._foreach_add_(sums, added)

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def drop_row(self) -> None:
        """Forget the row that is being measured, and remove the hooks; for a step that failed or does not count."""
        self._remove_hooks()
        self._aside = None
        self._parts = _Sums(self._preconditioner)
        self._num_parts = 0
        self._is_spoiled = False

    def close_row(
        self,
        count: int | None,
        total: int,
        whole_factor: float = 1.0,
        loss_scale: Tensor | None = None,
        parts_factor: float | Tensor = 1.0,
    ) -> None:
        """Close the row of a step of `total` samples over all replicas and `count` parts here.

        `count` None: the parts that had a weight; a part without one must not count. T is whole_factor·|P⁻¹ .grad|² of
        the reduced gradients; the shares of L are multiplied by `parts_factor`. Under a GradScaler, `loss_scale` is the
        tensor by which losses were scaled (`scaler.scale(torch.ones((), device=...))`). Beyond the capacity the oldest
        row is overwritten. A row that cannot be right becomes NaN, so that all replicas have the same number of rows.
        """
        if self.is_measuring:
            raise MisusedJob(
                "a measured step was finished while its micro-step had not ended: call stop_measuring() first"
            )
        whole = _Sums(self._preconditioner)
        for index, parameter in grouped_parameters(self._optimizer):
            if parameter.grad is not None and parameter.requires_grad:
                whole.add(index, parameter, parameter.grad.detach(), whole_factor, held=True)
        whole.flush(whole_factor)
        row = self._ring[self._num_rows % self._capacity].zero_()
        self._parts.write(row[0])
        whole.write(row[1])
        if isinstance(parts_factor, Tensor):
            parts_factor = parts_factor.detach().to(self.device, row.dtype, non_blocking=True)
        row[0].mul_(parts_factor)
        if self._is_spoiled:
            row[0].fill_(torch.nan)
        if loss_scale is not None:
            row.div_(loss_scale.detach().to(self.device, row.dtype, non_blocking=True).square())
        self._host_rows.append((self._num_parts if count is None else count, total))
        del self._host_rows[: -self._capacity]
        self._num_rows += 1
        self.drop_row()

    def drain(self) -> Rows:
        """Return and forget the rows so far, oldest first; waits for the device."""
        self._late.forget()
        rows = self._rows(self._ring.cpu(), self._num_rows, self._host_rows)
        self._start_over()
        self._preconditioner.refresh()
        return rows

    def collect(self) -> Rows:
        """Send the rows so far to the host, and return those that the call before sent.

        Without a GPU it returns the rows so far. At calls 1, 2, 4, 8, ... it reads the optimiser's state, which waits
        for the device.
        """
        arrived = self._late.exchange(self._ring, (self._num_rows, list(self._host_rows)))
        self._start_over()
        self._num_drains += 1
        if self._num_drains & (self._num_drains - 1) == 0:
            self._preconditioner.refresh()
        if arrived is None:
            return self._rows(torch.zeros_like(self._ring, device="cpu"), 0, [])
        return self._rows(arrived[0], *arrived[1])

    def _rows(self, ring: Tensor, num_rows: int, host_rows: list[tuple[int, int]]) -> Rows:
        kept = len(host_rows)
        order = [row % self._capacity for row in range(num_rows - kept, num_rows)]
        rows = ring.to(torch.float64)[order]
        columns = torch.tensor(host_rows, dtype=torch.int64).reshape(kept, 2)
        return Rows(rows[:, 0].clone(), rows[:, 1].clone(), columns[:, 0].clone(), columns[:, 1].clone())

    def _start_over(self) -> None:
        self._host_rows.clear()
        self._num_rows = 0

    def regroup(self, set_aside: bool) -> None:
        """Forget all rows and read the optimiser's state again, since the replicas changed; `set_aside` as above."""
        self.drop_row()
        self.drain()
        self._set_aside = set_aside
        self._num_drains = 0

    def close(self) -> None:
        """Remove all hooks, also the one that counts the optimiser's steps."""
        self.drop_row()
        self._preconditioner.close()


def _exact(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


class _Sums:
    """Sums of weight·|P⁻¹g|² by parameter group and device, with few kernels for many tensors and bounded memory."""

    def __init__(self, preconditioner: Preconditioner) -> None:
        self._preconditioner = preconditioner
        self._waiting: defaultdict[tuple[int, torch.device], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self._bytes: defaultdict[tuple[int, torch.device], int] = defaultdict(int)
        self._sums: dict[tuple[int, torch.device], Tensor] = {}

    def add(self, index: int, parameter: Tensor, gradient: Tensor, weight: float, held: bool = False) -> None:
        key = (index, gradient.device)
        size = gradient.numel() * gradient.element_size() if not gradient.is_sparse else 0
        self._waiting[key].append((parameter, gradient))
        self._bytes[key] += size
        if held:
            return
        # A large gradient is measured while its hook still runs: autograd would copy a gradient with another reference,
        # instead of keeping it as `.grad`.
        if size >= _LARGE_BYTES or self._bytes[key] >= _CHUNK_BYTES or len(self._waiting[key]) >= _CHUNK_TENSORS:
            self._flush(key, weight)

    def flush(self, weight: float) -> None:
        for key in list(self._waiting):
            self._flush(key, weight)

    def _flush(self, key: tuple[int, torch.device], weight: float) -> None:
        waiting = self._waiting.pop(key, [])
        self._bytes.pop(key, None)
        if key not in self._sums:
            self._sums[key] = torch.zeros((), dtype=_exact(key[1]), device=key[1])
        total = self._sums[key]
        for scaled, factor in self._preconditioner.apply(key[0], waiting):
            lengths = torch.stack(_lengths(scaled)).to(total.dtype)
            total.add_(lengths.dot(lengths), alpha=weight * factor * factor)

    def write(self, row: Tensor) -> None:
        for (index, _), value in self._sums.items():
            row[index].add_(value.to(row.device, row.dtype, non_blocking=True))


def _lengths(tensors: list[Tensor]) -> list[Tensor]:
    """Lengths of tensors of one dtype, in float32 or better.

    On a CPU a long sum in float32 drifts (8e-5 over four million elements), so there it is summed in blocks.
    """
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    if tensors[0].device.type == "cpu" and wide == torch.float32:
        tensors = [block for tensor in tensors for block in tensor.flatten().split(_CPU_BLOCK)]
    return list(torch._foreach_norm(tensors, 2, dtype=wide))
