# pyright: reportGeneralTypeIssues=false
"""From cosines to own classes and log-sum-exps over the others to the loss of each sample: one launch.

In plain torch a margin is some thirty launches a step, which keep the host longer than the GPU.
"""

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from mettle.pairs.kernel_spec import MarginSpec
from mettle.pairs.kernels.config import cdiv
from mettle.pairs.kernels.launch import Launch, find_launch_cache, flatten_tensor
from mettle.pairs.kernels.pair_terms import sigmoid, softplus
from mettle.pairs.similarity import differentiable_gradients

LEAST_SINE_SQUARED = tl.constexpr(1e-7)  # as `losses.arcface.sine_of` in float32
BLOCK = 256

Reference = Callable[[Tensor, Tensor], Tensor]


def margin_loss(target: Tensor, others: Tensor, spec: MarginSpec, reference: Reference) -> Tensor:
    """(B,) log(1 + e^{others − scale · margin(target)}), as the spec says.

    ``reference`` computes the same in plain torch, for second derivatives.
    """
    return MarginLossFunction.apply(target, others, spec, reference)  # type: ignore[return-value]


class MarginLossFunction(torch.autograd.Function):
    """Values as functions of both; their derivatives are computed with them."""

    @staticmethod
    def forward(ctx, target: Tensor, others: Tensor, spec: MarginSpec, reference: Reference):  # type: ignore[override]
        """(B,) values."""
        ctx.save_for_backward(target, others)
        target, others = flatten_tensor(target.detach()), flatten_tensor(others.detach())
        n = len(target)
        values, grads = torch.empty_like(target), target.new_empty(2, n)
        cache = find_launch_cache(("margin", spec.mode), (target,))
        angle = spec.angle
        cache.launch(
            "margin",
            margin_loss_kernel,
            (target, others, values, grads),
            lambda: Launch((cdiv(n, BLOCK),), (n,), {"MODE": spec.mode, "SIZE": BLOCK}),
            (spec.scale, math.cos(angle), math.sin(angle), -math.cos(angle), angle * math.sin(angle), spec.subtract),
        )
        ctx.grads, ctx.reference = grads, reference
        return values

    @staticmethod
    def backward(ctx, g: Tensor):  # type: ignore[override]
        """Gradients of both."""
        if torch.is_grad_enabled():  # create_graph=True: the kernel has no graph
            target, others = ctx.saved_tensors
            found = differentiable_gradients((ctx.reference(target, others),), (g,), (target, others))
            return *found, None, None
        g_target, g_others = (ctx.grads * g).unbind()
        return g_target, g_others, None, None


@triton.jit
def margin_loss_kernel(
    TARGET, OTHERS, VALUES, GRADS, n, scale, cos_m, sin_m, limit, drop, subtract,
    MODE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Values, and their derivatives for the cosine and for the log-sum-exp. The margins are `losses.arcface.ArcFace`'s.

    Grid: (n / SIZE,). A program owns SIZE samples of VALUES (n,) and GRADS (2, n), float32.
    """
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    there = at < n
    c = tl.load(TARGET + at, mask=there, other=0.0)
    others = tl.load(OTHERS + at, mask=there, other=0.0)
    squared = 1.0 - c * c
    sine = tl.sqrt(tl.maximum(squared, LEAST_SINE_SQUARED))
    moved = c * cos_m - sine * sin_m
    slope = cos_m + tl.where(squared >= LEAST_SINE_SQUARED, c / sine * sin_m, 0.0)
    if MODE == "keep":
        slope = tl.where(c > limit, slope, 1.0)
        moved = tl.where(c > limit, moved, c - drop)
    elif MODE == "easy":
        slope = tl.where(c > 0, slope, 1.0)
        moved = tl.where(c > 0, moved, c)
    elif MODE == "smooth":
        slope = tl.where(c > limit, slope, -slope)
        moved = tl.where(c > limit, moved, -2.0 - moved)
    elif MODE == "detach":
        slope = 1.0 + 0.0 * c
    y = others - scale * (moved - subtract)
    p = sigmoid(y)
    tl.store(VALUES + at, softplus(y), mask=there)
    tl.store(GRADS + at, -scale * slope * p, mask=there)
    tl.store(GRADS + n + at, p, mask=there)
