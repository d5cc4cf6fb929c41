"""Large batches under ``torch.compile``: one operator that the compiler does not look into.

A small batch is traced as it is and fused by the compiler. A batch that eager mode would evaluate in tiles or in Triton
kernels would be traced as one matrix; here it is an operator instead, ``mettle::pair_loss_mean``, which runs the engine
of eager mode. It returns the mean and the gradient of the mean with respect to the embeddings, so the backward pass is
one multiplication and nothing is computed twice. The Triton kernels are called one after another; for the other engines
autograd runs inside the operator. Eager mode does not go through here.
"""

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mettle.pairs.dispatch import DENSE_UP_TO, pair_loss
from mettle.pairs.kernels import fused_mean_and_gradient
from mettle.pairs.loss_reduction import LossReduction

_losses: WeakValueDictionary[int, Any] = WeakValueDictionary()
_handles = count()


def register_loss(loss: Any) -> int:
    """A number by which the operator finds a loss, for as long as the loss exists."""
    handle = next(_handles)
    _losses[handle] = loss
    return handle


def is_opaque(z: Tensor) -> bool:
    """Whether a batch is too large to be traced as one matrix by ``torch.compile``."""
    return torch.compiler.is_compiling() and len(z) * len(z) > DENSE_UP_TO


def compiled_mean(handle: int, z: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of a batch inside a compiled function, as one operator."""
    return torch.ops.mettle.pair_loss_mean(z, labels, handle, torch.is_grad_enabled() and z.requires_grad)[0]


@torch.library.custom_op("mettle::pair_loss_mean", mutates_args=())
def pair_loss_mean(z: Tensor, labels: Tensor, handle: int, with_gradient: bool) -> tuple[Tensor, Tensor]:
    """What the loss makes of its anchors, their mean or another number, and, if wanted, its gradient by ``z``."""
    loss = _losses[handle]
    difficulty, zero_if_empty = getattr(loss, "difficulty", None), getattr(loss, "empty", "error") == "zero"
    reduction: LossReduction = getattr(loss, "reduction", "mean")
    fused = z.is_cuda and reduction == "mean"
    found = fused_mean_and_gradient(loss, difficulty, z, labels, with_gradient) if fused else None
    if found is not None:
        mean, gradient, defined = found
        if zero_if_empty:
            mean = torch.where(defined.any(), mean, 0)
            gradient = gradient if gradient is None else torch.where(defined.any(), gradient, 0)
        return mean, mean.new_empty(0) if gradient is None else gradient
    with _autograd_inside(), torch.set_grad_enabled(with_gradient):
        leaf = z.detach().requires_grad_(with_gradient)
        output = pair_loss(loss, leaf, labels, difficulty=difficulty)
        mean = output.reduce(reduction, zero_if_empty=zero_if_empty)
        gradient = torch.autograd.grad(mean, leaf)[0] if with_gradient else mean.new_empty(0)
    return mean.detach().clone(), gradient.detach().clone().to(mean.dtype)


@pair_loss_mean.register_fake
def _(z: Tensor, labels: Tensor, handle: int, with_gradient: bool) -> tuple[Tensor, Tensor]:
    dtype = torch.float32 if z.dtype in (torch.float16, torch.bfloat16) else z.dtype
    return z.new_empty((), dtype=dtype), z.new_empty(z.shape if with_gradient else 0, dtype=dtype)


def _save_gradient(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.dtype = inputs[0].dtype


def _scale_gradient(ctx: Any, g_mean: Tensor, g_gradient: Tensor | None) -> tuple[Tensor, None, None, None]:
    (gradient,) = ctx.saved_tensors
    return (g_mean * gradient).to(ctx.dtype), None, None, None


pair_loss_mean.register_autograd(_scale_gradient, setup_context=_save_gradient)


def _autograd_inside() -> Any:
    """Autograd as usual: an operator runs below it, where nothing would be recorded."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradCPU", "AutogradCUDA", "AutogradOther", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)
