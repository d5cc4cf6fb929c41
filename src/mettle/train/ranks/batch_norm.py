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
    wide = x if x.dtype == torch.float64 else x.float()
    dims = [0, *range(2, x.ndim)]
    own = wide.new_tensor([x.numel() // x.shape[1]])
    parts: Any = _GatherStatistics.apply(torch.cat([wide.mean(dims), wide.var(dims, unbiased=False), own]))
    means, variances, counts = parts.split([x.shape[1], x.shape[1], 1], 1)
    total = float(counts.detach().sum())
    if total <= 1:
        raise InputError(
            "batch norm needs more than one value of each channel in the batch of all ranks: raise its size"
        )
    share = counts / total
    mean = (share * means).sum(0)
    variance = (share * (variances + (means - mean).square())).sum(0)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((variance * (total / (total - 1))).to(running_var.dtype), momentum)
    shape = [1, -1, *[1] * (x.ndim - 2)]
    scale = (variance + eps).rsqrt()
    found = (wide - mean.view(shape)) * (scale if weight is None else scale * weight).view(shape)
    found = found if bias is None else found + bias.view(shape)
    return found.to(x.dtype)


class _GatherStatistics(torch.autograd.Function):
    """(k,) numbers of each rank to (ranks, k); a rank's numbers count in the outputs of all ranks."""

    @staticmethod
    def forward(ctx, own: Tensor):  # type: ignore[override]
        found = own.new_zeros(dist.get_world_size(), len(own))
        found[dist.get_rank()] = own
        dist.all_reduce(found)
        return found

    @staticmethod
    def backward(ctx, g: Tensor):  # type: ignore[override]
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g[dist.get_rank()]
