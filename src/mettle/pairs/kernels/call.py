# pyright: reportMissingImports=false
"""The fused engine: one autograd function from raw embeddings to one value per anchor and their mean."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.kernels.config import Choice
from mettle.pairs.kernels.function import Plan
from mettle.pairs.kernels.launch import flat
from mettle.pairs.kernels.spec import Form, precision


@dataclass(frozen=True)
class Result:
    """One value per anchor, where it is defined, and the mean over those."""

    values: Tensor
    defined: Tensor
    mean: Tensor


def fused(
    form: Form,
    z: Tensor,
    labels: Tensor,
    ref: tuple[Tensor, Tensor] | None = None,
    biased: tuple[Tensor, Tensor] | None = None,
    mode: str | None = None,
    cut: Choice | None = None,
) -> Result:
    """Evaluate a form on raw embeddings, against themselves or against ``ref``.

    ``mode`` overrides the precision of the products, ``cut`` the sizes of tiles.
    """
    others = (labels, *(ref or ()), *(biased or ()))
    if any(x.device != z.device for x in others):
        raise InputError(
            f"embeddings are on {z.device}, others on {', '.join({str(x.device) for x in others})}: use one"
        )
    biased = biased if form.second else None
    mode = mode or (precision(form, z.dtype) if z.is_cuda else "exact")
    plan = Plan(form, flat(labels), None if ref is None else flat(ref[1]), biased, mode, cut)
    with torch.cuda.device_of(z):
        values, mean, defined = _Fused.apply(plan, z, None if ref is None else ref[0])  # type: ignore[misc]
    return Result(values, defined, mean)


class _Fused(torch.autograd.Function):
    """Values and mean as functions of the embeddings; scores are computed again on the way back."""

    @staticmethod
    def forward(ctx, plan: Plan, z: Tensor, ref: Tensor | None):  # type: ignore[override]
        values, mean, defined = plan.forward(z.detach(), None if ref is None else ref.detach())
        ctx.plan = plan
        ctx.like = z.new_empty(0), None if ref is None else ref.new_empty(0)
        ctx.mark_non_differentiable(defined)
        ctx.set_materialize_grads(False)
        return values, mean, defined

    @staticmethod
    def backward(ctx, g_values: Tensor | None, g_mean: Tensor | None, _):  # type: ignore[override]
        if torch.is_grad_enabled():
            raise InputError("the fused engine has first derivatives only: do not pass create_graph=True")
        z, ref = ctx.like
        needs = ctx.needs_input_grad
        return None, *ctx.plan.backward(g_values, g_mean, z, ref, needs[1], needs[2])


__all__ = ["Result", "fused"]
