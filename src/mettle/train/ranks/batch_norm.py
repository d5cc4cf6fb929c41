"""Batch norm by the mean and variance of the batch of all ranks.

Networks stay as they are: inside `SynchronizedBatchNorm` every call of `torch.nn.functional.batch_norm` in training
mode, whichever layer makes it, takes its statistics over ranks. On a GPU that is the function of `nn.SyncBatchNorm`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional
from torch.nn.modules._functions import SyncBatchNorm
from torch.overrides import TorchFunctionMode

from mettle.errors import InputError


class SynchronizedBatchNorm(TorchFunctionMode):
    """Inside, batch norms in training mode normalize by the rows of all ranks; all of them make the same calls."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Batch norm over ranks in place of that of one process; everything else as it is."""
        found = synchronized_batch_norm if func is functional.batch_norm else func
        return found(*args, **(kwargs or {}))


def synchronized_batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.batch_norm`, in training mode by the rows of all ranks."""
    if not training:
        return functional.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    if x.is_cuda:
        ones = torch.ones(x.shape[1], dtype=torch.float32, device=x.device) if weight is None else weight
        zeros = torch.zeros_like(ones) if bias is None else bias
        group, size = dist.group.WORLD, dist.get_world_size()
        return SyncBatchNorm.apply(x, ones, zeros, running_mean, running_var, eps, momentum, group, size)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    found: Any = _BatchNormFunction.apply(wide, weight, bias, running_mean, running_var, momentum, eps)
    return found.to(x.dtype)


class _BatchNormFunction(torch.autograd.Function):
    """On CPUs: the kernels of torch, with statistics and their gradients summed over ranks.

    With x̂ = (x - μ) / σ over the N values of a channel on all ranks, ∂L/∂x = γ/σ (g - Σg/N - x̂ Σ(g x̂)/N).
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight, bias, running_mean, running_var, momentum: float, eps: float):  # type: ignore[override]
        variance, mean = torch.var_mean(x, [0, *range(2, x.ndim)], unbiased=False)
        own = torch.cat([mean, variance, x.new_tensor([x.numel() // x.shape[1]])])
        table = own.new_zeros(dist.get_world_size(), len(own))
        table[dist.get_rank()] = own
        dist.all_reduce(table)
        means, variances, counts = table.split([x.shape[1], x.shape[1], 1], 1)
        total = float(counts.sum())
        if total <= 1:
            raise InputError(
                "batch norm needs more than one value of each channel in the batch of all ranks: raise its size"
            )
        share = counts / total
        mean = (share * means).sum(0)
        variance = (share * (variances + (means - mean).square())).sum(0)
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((variance * (total / (total - 1))).to(running_var.dtype), momentum)
        ctx.save_for_backward(x, weight, mean, (variance + eps).rsqrt())
        ctx.total, ctx.eps, ctx.has_bias = total, eps, bias is not None
        # The kernel of evaluation: by a mean and a variance that are given.
        return functional.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx, g: Tensor):  # type: ignore[override]
        x, weight, mean, inverse = ctx.saved_tensors
        sums = torch.ops.aten.native_batch_norm_backward(
            g, x, weight, None, None, mean, inverse, True, ctx.eps, [False, True, True]
        )
        with_x, plain = sums[1], sums[2]  # Σ g x̂ and Σ g of this rank
        over_ranks = torch.cat([with_x, plain])
        dist.all_reduce(over_ranks)
        all_with_x, all_plain = (over_ranks / ctx.total).split(len(mean))
        factor = inverse if weight is None else inverse * weight
        slope = -factor * inverse * all_with_x
        shape = [1, -1, *[1] * (x.ndim - 2)]
        found = g * factor.view(shape)
        found.addcmul_(x, slope.view(shape)).sub_((factor * all_plain + slope * mean).view(shape))
        own = (None if weight is None else with_x, plain if ctx.has_bias else None)
        return found, *own, None, None, None, None
