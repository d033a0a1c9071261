"""BatchNorm with the statistics of all replicas' samples of a micro-step.

PyTorch's own synchronised layer runs on GPUs only and has no filler samples; this one runs on any device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["has_batchnorm", "set_counted", "synchronise_batchnorm"]


def _layers(model: nn.Module) -> Iterator[_BatchNorm]:
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            yield module


def has_batchnorm(model: nn.Module) -> bool:
    """Whether some layer normalises over the batch in training, so that a split batch differs from a whole one."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def synchronise_batchnorm(model: nn.Module, group: dist.ProcessGroup | None) -> int:
    """Let every BatchNorm layer normalise over all replicas of `group`; returns the number of layers.

    The layers stay the same objects with the same parameters, buffers and state-dict names: only their class changes to
    a subclass, and back with `group` None.
    """
    count = 0
    for layer in _layers(model):
        original: type[_BatchNorm] = getattr(type(layer), "original_class", type(layer))
        if group is None:
            layer.__class__ = original
            for name in ("pollux_group", "pollux_counted"):
                vars(layer).pop(name, None)
        else:
            layer.__class__ = _synchronised_class(original)
            vars(layer)["pollux_group"] = group
            vars(layer)["pollux_counted"] = True
        count += 1
    return count


def set_counted(model: nn.Module, counted: bool) -> None:
    """Set whether this replica's samples count in the statistics; those of a filler must not.

    Layers that are not synchronised then use their running averages.
    """
    for layer in _layers(model):
        entries = vars(layer)
        if "pollux_counted" in entries:
            entries["pollux_counted"] = counted
        elif counted and entries.pop("pollux_trained", False):
            layer.training = True
        elif not counted and layer.training:
            layer.training, entries["pollux_trained"] = False, True


_classes: dict[type[_BatchNorm], type[_BatchNorm]] = {}


def _synchronised_class(original: type[_BatchNorm]) -> type[_BatchNorm]:
    if original not in _classes:
        _classes[original] = type(
            f"Synchronised{original.__name__}",
            (original,),
            {"forward": _forward, "original_class": original, "__deepcopy__": _deepcopy},
        )
    return _classes[original]


def _deepcopy(self: _BatchNorm, memo: dict[int, Any]) -> _BatchNorm:
    """Copy as a plain layer, since a process group cannot be copied; for example for an average of weights."""
    import copy

    original: type[_BatchNorm] = type(self).original_class  # type: ignore[attr-defined]
    result = original.__new__(original)
    memo[id(self)] = result
    kept = {name: value for name, value in vars(self).items() if not name.startswith("pollux_")}
    vars(result).update(copy.deepcopy(kept, memo))
    return result


def _forward(self: _BatchNorm, input: Tensor) -> Tensor:
    uses_batch = self.training or (self.running_mean is None and self.running_var is None)
    if not uses_batch or not torch.is_grad_enabled():
        # Outside of training not all replicas need run this forward pass, so none may wait here.
        return type(self).original_class.forward(self, input)  # type: ignore[attr-defined, no-any-return]
    self._check_input_dim(input)
    counted: bool = vars(self)["pollux_counted"]
    mean, variance, count = _statistics(input, counted, vars(self)["pollux_group"])
    if self.training and self.track_running_stats:
        _track(self, mean, variance, count)
    entries = vars(self)
    output: Tensor = _Normalise.apply(input, self.weight, self.bias, mean, variance, count, self.eps, entries, counted)
    return output


def _statistics(input: Tensor, counted: bool, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and number of values per channel over all replicas, by Chan's rule for merging parts."""
    wide = input.detach()
    if wide.dtype in (torch.float16, torch.bfloat16):
        wide = wide.float()
    dims = [dim for dim in range(input.dim()) if dim != 1]
    values = input.numel() // input.shape[1] if counted else 0
    if values:
        variance, mean = torch.var_mean(wide, dims, correction=0)
    else:
        mean = torch.zeros(input.shape[1], dtype=wide.dtype, device=wide.device)
        variance = torch.zeros_like(mean)
    size = mean.new_full((1,), float(values))
    mine = torch.cat([mean, variance, size])
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    table = torch.stack(parts)
    channels = mean.shape[0]
    sizes = table[:, -1:]
    # The last micro-steps of an accumulated step may have fillers only: then divide by one.
    count = sizes.sum()
    divisor = count.clamp(min=1.0)
    means, variances = table[:, :channels], table[:, channels : 2 * channels]
    mean = (means * sizes).sum(0) / divisor
    variance = ((variances + (means - mean) ** 2) * sizes).sum(0) / divisor
    # Without samples the variance is set to one, which keeps a filler's activations in range.
    return mean, torch.where(count > 0, variance, torch.ones_like(variance)), count


def _track(layer: _BatchNorm, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    if layer.running_mean is None or layer.running_var is None:
        return
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_((count > 0).to(layer.num_batches_tracked.dtype))
    if layer.momentum is None:
        assert layer.num_batches_tracked is not None
        factor = 1.0 / layer.num_batches_tracked.clamp(min=1).to(layer.running_mean.dtype)
    else:
        factor = torch.full_like(count, layer.momentum)
    factor = factor * (count > 0)
    unbiased = variance * (count / (count - 1.0).clamp(min=1.0))
    layer.running_mean.add_((mean.to(layer.running_mean.dtype) - layer.running_mean) * factor)
    layer.running_var.add_((unbiased.to(layer.running_var.dtype) - layer.running_var) * factor)


class _Normalise(torch.autograd.Function):
    """y = (x − mean)/sqrt(variance + eps)·weight + bias, with a gradient through the statistics of all replicas."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        eps: float,
        entries: dict[str, Any],
        counted: bool,
    ) -> Tensor:
        shape = [1, -1, *([1] * (input.dim() - 2))]
        inverse = torch.rsqrt(variance + eps)
        normal = (input.to(mean.dtype) - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normal, inverse, weight, count)
        # Not the group itself: a script may keep a loss, which must not keep the group alive.
        ctx.entries, ctx.shape, ctx.counted = entries, shape, counted
        output = normal
        if weight is not None:
            output = output * weight.view(shape)
        if bias is not None:
            output = output + bias.view(shape)
        return output.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        normal, inverse, weight, count = ctx.saved_tensors
        shape = ctx.shape
        grad = outputs[0].to(normal.dtype)
        dims = [dim for dim in range(normal.dim()) if dim != 1]
        grad_bias = grad.sum(dims)
        grad_weight = (grad * normal).sum(dims)
        sums = torch.cat([grad_bias, grad_weight])
        dist.all_reduce(sums, group=ctx.entries["pollux_group"])
        channels = grad_bias.shape[0]
        scale = inverse if weight is None else inverse * weight
        divisor = count.clamp(min=1.0)
        mean_grad = (sums[:channels] / divisor).view(shape)
        mean_product = (sums[channels:] / divisor).view(shape)
        if ctx.counted:
            grad = grad - mean_grad - normal * mean_product
        grad_input = grad * scale.view(shape)
        own_weight = None if weight is None else grad_weight.to(weight.dtype)
        own_bias = None if weight is None else grad_bias.to(weight.dtype)
        return grad_input.to(outputs[0].dtype), own_weight, own_bias, None, None, None, None, None, None
