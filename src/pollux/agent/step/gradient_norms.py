"""Squared gradient lengths of single micro-steps and of the whole step, taken on measured steps only.

Everything stays on the device until `drain`; what the numbers mean is in `noise_scale`. Sharded (FSDP2) parameters are
not for this meter: their hooks see pieces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from pollux.agent.step.deferred_copy import DeferredCopy
from pollux.agent.step.preconditioner import WARM_STEPS, Preconditioner
from pollux.core.errors import MisusedJob

__all__ = ["WARM_STEPS", "GradientNormMeter", "Rows"]

_CHUNK_BYTES = 32 * 2**20
_LARGE_BYTES = 4 * 2**20
_CHUNK_TENSORS = 64
_CPU_BLOCK = 2**14


class Rows(NamedTuple):
    """Measured steps on the host: float64 rows by parameter group, int64 parts and samples of each step.

    `parts` is this replica's own share of L and `counts` its own number of parts that had any weight: both must be
    summed over replicas. `whole` is T and `totals` the step's samples, equal on all of them.
    """

    parts: Tensor
    whole: Tensor
    counts: Tensor
    totals: Tensor


class GradientNormMeter:
    """Measures steps without changing them and without waiting for the device.

    For a measured step: `begin(weight)` before each micro-step, `end()` after its backward, and after the last one
    `finish(...)`, before clipping and `optimizer.step()`. Temporary hooks on the parameters, between `begin` and
    `end` only, see each micro-step's gradient before it is added up or reduced. With `set_aside` (one replica, and
    memory for a second set of gradients) there are no hooks: what was added up so far is laid aside during the
    backward pass and added again after it, bit for bit the same sum, in a few kernels instead of some for each
    parameter. `drain()`, which does wait, gives the rows since the last time; `collect()` does not wait.

    Lengths are those of P⁻¹g, the direction that the optimiser steps along, with P from its state as it is:

    | kind | state | P |
    |---|---|---|
    | adam (AdamW, NAdam, RAdam), amsgrad | `exp_avg_sq`, `max_exp_avg_sq` | √(v/(1 − β₂^step)) + ε |
    | adagrad, rmsprop | `sum`, `square_avg` | √v + ε (less the squared mean where centred) |
    | adadelta | `square_avg`, `acc_delta` | √(v + ε)/√(d + ε) |
    | adamax | `exp_inf` | u |
    | plain | anything else | 1 |

    Coordinates whose second moment is still zero have P⁻¹ = 0: no gradient was ever seen there, and dividing the
    first one by ε alone would drown all others. Parameters that are frozen, or not in the optimiser, do not count.
    `device` holds the rows; parameters may lie on others. Sparse gradients wait for the device.
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
        """Read the optimiser's state again, after it was restored; this waits for the device."""
        self._preconditioner.refresh()

    def _allocate(self) -> None:
        self._num_groups = len(self._optimizer.param_groups)
        self._ring = torch.zeros((self._capacity, 2, self._num_groups), dtype=_exact(self.device), device=self.device)
        self._host_rows.clear()
        self._num_rows = 0

    @property
    def num_groups(self) -> int:
        """Parameter groups of the rows; follows `add_param_group` at the next `begin`, which drops older rows."""
        return self._num_groups

    @property
    def kind(self) -> str:
        """Which preconditioner is in use: statistics do not survive a change of it.

        "plain", "adam", "amsgrad", "adagrad", ...; "cold" before the first step of an optimiser that has one.
        """
        return self._preconditioner.kind

    @property
    def is_warm(self) -> bool:
        """Whether the second moments have seen `WARM_STEPS` steps, so that measuring under them makes sense.

        A restored optimiser brings its count along; where it lies on the device, it is read at the next `drain`.
        """
        return self._preconditioner.is_warm

    @property
    def is_measuring(self) -> bool:
        """Whether a measured micro-step is under way."""
        return bool(self._handles) or self._aside is not None

    def begin(self, weight: float) -> None:
        """One micro-step begins; `weight` turns |P⁻¹g'|² of the gradient g' they see into its share of L.

        The gradient is that of the loss as scaled for this micro-step: if g' = g·bᵢ·K/B, the weight is B/(bᵢ·K²),
        and 0 for an empty part.
        """
        if self.is_measuring:
            raise MisusedJob("a measured micro-step began before the one before it ended: call end() or abandon()")
        if len(self._optimizer.param_groups) != self._num_groups:
            self._allocate()
        self._weight = weight
        self._num_parts += weight > 0.0
        self._fired.clear()
        if self._set_aside and self._has_room():
            self._aside = {}
            for _, parameter in _parameters(self._optimizer):
                if parameter.grad is not None:
                    self._aside[id(parameter)] = parameter.grad
                    parameter.grad = None
            return
        for index, parameter in _parameters(self._optimizer):
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(partial(self._take, index, parameter)))

    def _take(self, index: int, parameter: Tensor, gradient: Tensor) -> None:
        if id(parameter) in self._fired:
            # Nested backward passes (re-entrant checkpointing) bring one parameter's gradient in pieces, and
            # the length of a sum is not the sum of lengths.
            self._is_spoiled = True
        self._fired.add(id(parameter))
        self._parts.add(index, parameter, gradient.detach(), self._weight)

    def _has_room(self) -> bool:
        """Whether memory holds a second set of gradients with some to spare; where it once did not, hooks serve."""
        if self.device.type == "cuda":
            size = sum(p.numel() * p.element_size() for _, p in _parameters(self._optimizer) if p.requires_grad)
            most = torch.cuda.get_device_properties(self.device).total_memory
            self._set_aside = most - torch.cuda.max_memory_allocated(self.device) > 2 * size
        return self._set_aside

    def end(self) -> None:
        """Measure the gradients that still wait, before anything writes to them again, and remove the hooks."""
        self._remove_hooks()
        if self._aside is not None:
            self._add_back(self._aside)
            self._aside = None
        self._parts.flush(self._weight)

    def _add_back(self, aside: dict[int, Tensor]) -> None:
        sums: list[Tensor] = []
        added: list[Tensor] = []
        for index, parameter in _parameters(self._optimizer):
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

    def abandon(self) -> None:
        """Forget the step that is being measured, hooks included; for a step that failed or is not to count."""
        self._remove_hooks()
        self._aside = None
        self._parts = _Sums(self._preconditioner)
        self._num_parts = 0
        self._is_spoiled = False

    def finish(
        self,
        count: int | None,
        total: int,
        whole_factor: float = 1.0,
        loss_scale: Tensor | None = None,
        parts_factor: float | Tensor = 1.0,
    ) -> None:
        """Close the row of a step of `total` samples over all replicas and `count` parts here.

        `count` None: as many as began with a weight; a part without one says nothing, and must not count as one.
        T is whole_factor·|P⁻¹ .grad|², as the gradients lie there after reduction. Under a GradScaler, `loss_scale`
        is the tensor by which losses were scaled (`scaler.scale(torch.ones((), device=...))`). Beyond the capacity
        the oldest row is overwritten. `parts_factor` is what the shares of L lack still. A row that cannot be right is
        closed with NaN, so that replicas stay in step.
        """
        if self.is_measuring:
            raise MisusedJob("a measured step was finished while its micro-step had not ended: call end() first")
        whole = _Sums(self._preconditioner)
        for index, parameter in _parameters(self._optimizer):
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
        self.abandon()

    def drain(self) -> Rows:
        """Fetch and forget the rows so far, oldest first; this waits for the device."""
        self._late.forget()
        rows = self._rows(self._ring.cpu(), self._num_rows, self._host_rows)
        self._start_over()
        self._preconditioner.refresh()
        return rows

    def collect(self) -> Rows:
        """Return the rows that the call before this one sent to the host, and send those since; never waits long.

        Without a GPU it returns the rows so far. Now and then, ever less often, it reads the optimiser's
        state, which does wait.
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
        """Forget all rows and start as a new meter, which reads the optimiser's state. `set_aside` as above."""
        self.abandon()
        self.drain()
        self._set_aside = set_aside
        self._num_drains = 0

    def close(self) -> None:
        """Remove every hook, the one that counts the optimiser's steps too; the meter is done."""
        self.abandon()
        self._preconditioner.close()


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, Tensor]]:
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            yield index, parameter


def _exact(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


class _Sums:
    """Σ weight·|P⁻¹g|² by parameter group and device, with few kernels for many tensors and bounded memory."""

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
        # A large gradient is dealt with while its hook still runs: one that is held when autograd wants to keep it
        # as `.grad` would be copied instead.
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
    """Lengths in float32 or better, of tensors of one dtype.

    On a processor a long sum in float32 drifts (8e-5 over four million elements), so it is taken in blocks.
    """
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    if tensors[0].device.type == "cpu" and wide == torch.float32:
        tensors = [block for tensor in tensors for block in tensor.flatten().split(_CPU_BLOCK)]
    return list(torch._foreach_norm(tensors, 2, dtype=wide))
