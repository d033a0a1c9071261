"""The scale P of each coordinate in an optimiser's step, from the optimiser's state before the step."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["WARM_STEPS", "Preconditioner", "grouped_parameters"]

WARM_STEPS = 20

_PIECE_BYTES = 128 * 2**20
_TINY = 1e-20  # in place of ε where ε is zero, so that the masked quotient of a zero moment is not NaN

_State: TypeAlias = dict[str, Any]
_Tensors: TypeAlias = list[Tensor]

# The first of these keys in a parameter's state gives the kind; `max_exp_avg_sq` and `acc_delta` come with others.
_KINDS = (
    ("max_exp_avg_sq", "amsgrad"),
    ("exp_avg_sq", "adam"),
    ("exp_inf", "adamax"),
    ("acc_delta", "adadelta"),
    ("square_avg", "rmsprop"),
    ("sum", "adagrad"),
)
_MOMENT = {kind: "square_avg" if kind == "adadelta" else key for key, kind in _KINDS}


class Preconditioner:
    """P of one optimiser, read from its state; the table is in `gradient_norms.GradientNormMeter`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._steps_read = 0
        self._steps_counted = 0
        self._without_zeros: dict[int, weakref.ref[Tensor]] = {}
        # The optimiser's own count may lie on the device; ours can be read without waiting.
        self._handle = optimizer.register_step_post_hook(self._count)
        self.refresh()

    def _count(self, *_: object) -> None:
        self._steps_counted += 1

    def close(self) -> None:
        """Stop counting the optimiser's steps."""
        self._handle.remove()

    def refresh(self) -> None:
        """Read the optimiser's count of steps, and which moments have no zeros left; may wait for the device."""
        step = self._first_state().get("step")
        if step is not None:
            self._steps_read, self._steps_counted = int(step), 0
        checked: dict[int, Tensor] = {}
        for _, parameter in grouped_parameters(self._optimizer):
            state = self._optimizer.state.get(parameter) or {}
            moment = state.get(_MOMENT.get(_kind(state), ""))
            if moment is not None and not self._has_no_zeros(parameter, moment):
                checked[id(parameter)] = moment
        flags = [(moment == 0).any() for moment in checked.values()]
        # All flags are computed before the first is read, so that there is one wait for the device.
        for (key, moment), has_zeros in zip(checked.items(), flags, strict=True):
            if not has_zeros:
                self._without_zeros[key] = weakref.ref(moment)

    def _has_no_zeros(self, parameter: Tensor, moment: Tensor) -> bool:
        known = self._without_zeros.get(id(parameter))
        return known is not None and known() is moment

    def _first_state(self) -> _State:
        for _, parameter in grouped_parameters(self._optimizer):
            state: _State | None = self._optimizer.state.get(parameter)
            if state:
                return state
        return {}

    @property
    def kind(self) -> str:
        """The kind of P; "cold" before the first step of an optimiser whose kind has state."""
        state = self._first_state()
        if not state:
            return "cold" if "eps" in self._optimizer.defaults else "plain"
        return _kind(state)

    @property
    def is_warm(self) -> bool:
        """Whether the second moments have seen `WARM_STEPS` steps."""
        kind = self.kind
        if kind in ("plain", "cold"):
            return kind == "plain"
        return self._step(self._first_state()) >= WARM_STEPS

    def _step(self, state: _State) -> int:
        """The steps of a parameter so far; our own count where the optimiser's lies on the device or is missing.

        Until the next `refresh` our count includes steps that a scaler skipped on the device. That changes the bias
        correction of all parameters by one factor, which the noise scale does not depend on.
        """
        step = state.get("step")
        if step is None or (isinstance(step, Tensor) and step.device.type != "cpu"):
            return self._steps_read + self._steps_counted
        return int(step)

    def apply(self, index: int, waiting: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[_Tensors, float]]:
        """P⁻¹g/factor and the factor, in lists of one dtype and bounded size; does not change the gradients."""
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
    """The parts of P, the second moment first."""
    beside = {"adadelta": "acc_delta", "rmsprop": "grad_avg" if group.get("centered") else ""}.get(kind)
    return [state[_MOMENT[kind]], *([state[beside]] if beside else [])]


def _dense(tensors: _Tensors) -> _Tensors:
    """A gradient's values as real numbers, with the moments at the same places."""
    gradient, *moments = tensors
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        where = tuple(gradient.indices().unbind())
        tensors = [gradient.values(), *(moment[where] for moment in moments)]
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]


def _pieces(entries: list[_Tensors]) -> Iterator[list[_Tensors]]:
    """Lists of bounded size; a large tensor comes in slices, so that temporary results stay small."""
    piece: list[_Tensors] = []
    elements = 0
    for tensors in entries:
        size = tensors[0].numel()
        if size * 4 > _PIECE_BYTES:
            for parts in zip(*(tensor.reshape(-1).split(_PIECE_BYTES // 4) for tensor in tensors), strict=True):
                yield [list(parts)]
            continue
        if piece and (elements + size) * 4 > _PIECE_BYTES:
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
    """P·factor and the factor, one number for all tensors, which saves a pass over them."""
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


def grouped_parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, Tensor]]:
    """All parameters of an optimiser, each with the number of its group."""
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            yield index, parameter
