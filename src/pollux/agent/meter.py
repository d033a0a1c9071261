"""Squared gradient lengths of single micro-steps and of the whole step, taken by hooks that come and go.

Everything stays on the device until `drain`; what the numbers mean is in `noise`. Sharded (FSDP2) parameters are
not for this meter: their hooks see pieces.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from pollux.core.errors import MisusedJob

__all__ = ["WARM_STEPS", "GradientMeter", "Rows"]

WARM_STEPS = 20

_CHUNK_BYTES = 32 * 2**20
_LARGE_BYTES = 4 * 2**20
_CHUNK_TENSORS = 64
_CPU_BLOCK = 2**14
_TINY = 1e-20  # under a moment of zero where ε is zero too, so that the masked quotient is not NaN

_State: TypeAlias = dict[str, Any]
_Tensors: TypeAlias = list[Tensor]

# The first key that a parameter's state has names the kind; `max_exp_avg_sq` and `acc_delta` come beside others.
_KINDS = (
    ("max_exp_avg_sq", "amsgrad"),
    ("exp_avg_sq", "adam"),
    ("exp_inf", "adamax"),
    ("acc_delta", "adadelta"),
    ("square_avg", "rmsprop"),
    ("sum", "adagrad"),
)
_MOMENT = {kind: "square_avg" if kind == "adadelta" else key for key, kind in _KINDS}


class Rows(NamedTuple):
    """Measured steps on the host: float64 rows by parameter group, int64 parts and samples of each step.

    `parts` is this replica's own share of L and must be summed over replicas; `whole` is T, equal on all of them.
    """

    parts: Tensor
    whole: Tensor
    counts: Tensor
    totals: Tensor


class GradientMeter:
    """Measures steps without changing them and without waiting for the device.

    For a measured step: `begin(weight)` before each micro-step, `end()` after its backward, and after the last one
    `finish(...)`, before clipping and `optimizer.step()`. The hooks on parameters exist between `begin` and `end`
    only. `drain()`, which does wait, gives the rows since the last time.

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

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device | str, capacity: int = 256) -> None:
        self.device = torch.device(device)
        self._optimizer = optimizer
        self._preconditioner = _Preconditioner(optimizer)
        self._capacity = capacity
        self._handles: list[RemovableHandle] = []
        self._weight = 0.0
        self._fired: set[int] = set()
        self._is_spoiled = False
        self._parts = _Sums(self._preconditioner)
        self._host_rows: list[tuple[int, int]] = []
        self._num_rows = 0
        self._last_event: torch.cuda.Event | None = None
        self._last_clock: float | None = None
        self._allocate()

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
        """Whether hooks are in place now."""
        return bool(self._handles)

    @property
    def last_gradient_at(self) -> float | torch.cuda.Event | None:
        """When the last gradient of the last measured micro-step was there; None before the first.

        Seconds of `time.perf_counter`, or with a GPU an event with timing, for `elapsed_time` once it has happened;
        the next measured micro-step records the same event again.
        """
        return self._last_event if self.device.type == "cuda" else self._last_clock

    def begin(self, weight: float) -> None:
        """Set hooks for one micro-step; `weight` turns |P⁻¹g'|² of the gradient g' they see into its share of L.

        The gradient is that of the loss as scaled for this micro-step: if g' = g·bᵢ·K/B, the weight is B/(bᵢ·K²),
        and 0 for an empty part.
        """
        if self._handles:
            raise MisusedJob("a measured micro-step began before the one before it ended: call end() or abandon()")
        if len(self._optimizer.param_groups) != self._num_groups:
            self._allocate()
        self._weight = weight
        self._fired.clear()
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
        if self.device.type != "cuda":
            self._last_clock = time.perf_counter()
        elif gradient.is_cuda:
            if self._last_event is None:
                self._last_event = torch.cuda.Event(enable_timing=True)
            self._last_event.record(torch.cuda.current_stream(gradient.device))

    def end(self) -> None:
        """Remove the hooks and take the lengths that still wait, before anything writes to the gradients again."""
        self._remove_hooks()
        self._parts.flush(self._weight)

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def abandon(self) -> None:
        """Forget the step that is being measured, hooks included; for a step that failed or is not to count."""
        self._remove_hooks()
        self._parts = _Sums(self._preconditioner)
        self._is_spoiled = False

    def finish(
        self,
        count: int,
        total: int,
        whole_factor: float = 1.0,
        loss_scale: Tensor | None = None,
        parts_factor: float | Tensor = 1.0,
    ) -> None:
        """Close the row of a step of `count` non-empty parts and `total` samples, over all replicas.

        T is whole_factor·|P⁻¹ .grad|², as the gradients lie there after reduction. Under a GradScaler, `loss_scale`
        is the tensor by which losses were scaled (`scaler.scale(torch.ones((), device=...))`). Beyond the capacity
        the oldest row is overwritten. A row that cannot be right is closed with NaN, so that replicas stay in step.
        """
        if self._handles:
            raise MisusedJob("a measured step was finished while its micro-step had not ended: call end() first")
        whole = _Sums(self._preconditioner)
        for index, parameter in _parameters(self._optimizer):
            if parameter.grad is not None and parameter.requires_grad:
                whole.add(index, parameter, parameter.grad.detach(), whole_factor)
        whole.flush(whole_factor)
        row = self._ring[self._num_rows % self._capacity].zero_()
        self._parts.write(row[0])
        whole.write(row[1])
        if self._is_spoiled:
            row[0].fill_(torch.nan)
        if loss_scale is not None:
            row.div_(loss_scale.detach().to(self.device, row.dtype, non_blocking=True).square())
        self._host_rows.append((count, total))
        del self._host_rows[: -self._capacity]
        self._num_rows += 1
        self.abandon()

    def drain(self) -> Rows:
        """Fetch and forget the rows so far, oldest first; this waits for the device."""
        kept = len(self._host_rows)
        order = [row % self._capacity for row in range(self._num_rows - kept, self._num_rows)]
        rows = self._ring.cpu().to(torch.float64)[order]
        columns = torch.tensor(self._host_rows, dtype=torch.int64).reshape(kept, 2)
        self._host_rows.clear()
        self._num_rows = 0
        self._preconditioner.refresh()
        return Rows(rows[:, 0].clone(), rows[:, 1].clone(), columns[:, 0].clone(), columns[:, 1].clone())

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

    def __init__(self, preconditioner: _Preconditioner) -> None:
        self._preconditioner = preconditioner
        self._waiting: defaultdict[tuple[int, torch.device], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self._bytes: defaultdict[tuple[int, torch.device], int] = defaultdict(int)
        self._sums: dict[tuple[int, torch.device], Tensor] = {}

    def add(self, index: int, parameter: Tensor, gradient: Tensor, weight: float) -> None:
        key = (index, gradient.device)
        size = gradient.numel() * gradient.element_size() if not gradient.is_sparse else 0
        self._waiting[key].append((parameter, gradient))
        self._bytes[key] += size
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


def _lengths(tensors: _Tensors) -> _Tensors:
    """Lengths in float32 at the least, of tensors of one dtype.

    On a processor a long sum in float32 drifts (8e-5 over four million elements), so it is taken in blocks.
    """
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    if tensors[0].device.type == "cpu" and wide == torch.float32:
        tensors = [block for tensor in tensors for block in tensor.flatten().split(_CPU_BLOCK)]
    return list(torch._foreach_norm(tensors, 2, dtype=wide))


class _Preconditioner:
    """P of one optimiser, read from its state; the table is in `GradientMeter`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._steps_read = 0
        self._steps_counted = 0
        self._without_zeros: dict[int, weakref.ref[Tensor]] = {}
        # Where the optimiser's own count lies on the device, only a count of ours can be asked without waiting.
        self._handle = optimizer.register_step_post_hook(self._count)
        self.refresh()

    def _count(self, *_: object) -> None:
        self._steps_counted += 1

    def close(self) -> None:
        self._handle.remove()

    def refresh(self) -> None:
        """Look at the optimiser's count of steps, and which moments have no zeros left; may wait for the device."""
        step = self._first_state().get("step")
        if step is not None:
            self._steps_read, self._steps_counted = int(step), 0
        checked: dict[int, Tensor] = {}
        for _, parameter in _parameters(self._optimizer):
            state = self._optimizer.state.get(parameter) or {}
            moment = state.get(_MOMENT.get(_kind(state), ""))
            if moment is not None and not self._has_no_zeros(parameter, moment):
                checked[id(parameter)] = moment
        flags = [(moment == 0).any() for moment in checked.values()]
        # All are asked for before the first is read, so that the device is waited for once.
        for (key, moment), has_zeros in zip(checked.items(), flags, strict=True):
            if not has_zeros:
                self._without_zeros[key] = weakref.ref(moment)

    def _has_no_zeros(self, parameter: Tensor, moment: Tensor) -> bool:
        known = self._without_zeros.get(id(parameter))
        return known is not None and known() is moment

    def _first_state(self) -> _State:
        for _, parameter in _parameters(self._optimizer):
            state: _State | None = self._optimizer.state.get(parameter)
            if state:
                return state
        return {}

    @property
    def kind(self) -> str:
        state = self._first_state()
        if not state:
            return "cold" if "eps" in self._optimizer.defaults else "plain"
        return _kind(state)

    @property
    def is_warm(self) -> bool:
        kind = self.kind
        if kind in ("plain", "cold"):
            return kind == "plain"
        return self._step(self._first_state()) >= WARM_STEPS

    def _step(self, state: _State) -> int:
        """How often a parameter was stepped; by our own count where the optimiser's is on the device or missing.

        A step that a scaler skipped on the device is then counted until the next `refresh`. It changes the bias
        correction of all parameters by one factor, which the noise scale does not feel.
        """
        step = state.get("step")
        if step is None or (isinstance(step, Tensor) and step.device.type != "cpu"):
            return self._steps_read + self._steps_counted
        return int(step)

    def apply(self, index: int, waiting: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[_Tensors, float]]:
        """P⁻¹g/factor and the factor, in lists of one dtype and bounded size; the gradients stay as they are."""
        group = self._optimizer.param_groups[index]
        alike: defaultdict[tuple[str, torch.dtype, int, bool], list[_Tensors]] = defaultdict(list)
        for parameter, gradient in waiting:
            state: _State = self._optimizer.state.get(parameter) or {}
            kind = _kind(state)
            tensors = [gradient] if kind == "plain" else [gradient, *_moments(kind, state, group)]
            may_have_zeros = kind != "plain" and not self._has_no_zeros(parameter, tensors[1])
            tensors = _dense(tensors)
            if tensors[0].numel():
                alike[kind, tensors[0].dtype, self._step(state), may_have_zeros].append(tensors)
        for (kind, _, step, may_have_zeros), entries in alike.items():
            if kind == "plain":
                yield [gradient for (gradient,) in entries], 1.0
                continue
            for piece in _pieces(entries):
                yield _divided(kind, piece, step, may_have_zeros, group)


def _kind(state: _State) -> str:
    return next((kind for key, kind in _KINDS if isinstance(state.get(key), Tensor)), "plain")


def _moments(kind: str, state: _State, group: dict[str, Any]) -> _Tensors:
    """What P is made of, the second moment first."""
    beside = {"adadelta": "acc_delta", "rmsprop": "grad_avg" if group.get("centered") else ""}.get(kind)
    return [state[_MOMENT[kind]], *([state[beside]] if beside else [])]


def _dense(tensors: _Tensors) -> _Tensors:
    """A gradient's values as real numbers, with what goes with them of the moments."""
    gradient, *moments = tensors
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        where = tuple(gradient.indices().unbind())
        tensors = [gradient.values(), *(moment[where] for moment in moments)]
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]


def _pieces(entries: list[_Tensors]) -> Iterator[list[_Tensors]]:
    """Lists of bounded size; a single large tensor comes in slices, so that what is computed from it stays small."""
    piece: list[_Tensors] = []
    elements = 0
    for tensors in entries:
        size = tensors[0].numel()
        if size * 4 > _CHUNK_BYTES:
            for parts in zip(*(tensor.reshape(-1).split(_CHUNK_BYTES // 4) for tensor in tensors), strict=True):
                yield [list(parts)]
            continue
        if piece and (elements + size) * 4 > _CHUNK_BYTES:
            yield piece
            piece, elements = [], 0
        piece.append(tensors)
        elements += size
    if piece:
        yield piece


def _divided(
    kind: str, entries: list[_Tensors], step: int, may_have_zeros: bool, group: dict[str, Any]
) -> tuple[_Tensors, float]:
    columns = [[_wide(tensor) for tensor in column] for column in zip(*entries, strict=True)]
    gradients, moments = columns[0], columns[1]
    below, factor = _denominators(kind, columns[1:], step, group)
    quotients = list(torch._foreach_div(gradients, below))
    if may_have_zeros:
        torch._foreach_mul_(quotients, torch._foreach_sign(moments))
    return quotients, factor


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _denominators(kind: str, moments: list[_Tensors], step: int, group: dict[str, Any]) -> tuple[_Tensors, float]:
    """P·factor and the factor, which is one number for all tensors and so costs no pass of its own."""
    if kind == "adamax":
        return moments[0], 1.0
    eps, factor = max(float(group["eps"]), _TINY), 1.0
    if kind == "adadelta":
        below = torch._foreach_add(moments[0], eps)
        torch._foreach_div_(below, torch._foreach_add(moments[1], eps))
        torch._foreach_sqrt_(below)
        return list(below), factor
    if kind in ("adam", "amsgrad"):
        # √(v/c) + ε = (√v + ε√c)/√c
        factor = (1.0 - float(group["betas"][1]) ** max(step, 1)) ** 0.5
    if len(moments) > 1:
        centred = torch._foreach_addcmul(moments[0], moments[1], moments[1], -1.0)
        torch._foreach_clamp_min_(centred, 0.0)
        moments = [list(centred)]
    below = torch._foreach_sqrt(moments[0])
    torch._foreach_add_(below, eps * factor)
    return list(below), factor
