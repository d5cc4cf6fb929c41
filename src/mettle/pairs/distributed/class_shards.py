"""What ranks that hold different classes tell each other: one exchange of two numbers per sample.

Rank r has classes C_r and finds, for every sample i of all ranks,

    target_ir = similarity to the class of the label where that is in C_r, else 0
    others_ir = log Σ over wrong classes j in C_r of e^{x_ij}

    target_i = Σ_r target_ir        others_i = log Σ_r e^{others_ir}

Both go through one all-gather, and every rank adds them up in the order of ranks: all hold the same bits. Backwards
nothing is sent here: every rank computes the same loss of the same numbers, so it knows the gradient of both, and its
own part of it is that of its own classes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


@dataclass(frozen=True)
class ClassRange:
    """The classes of one rank: as many as of any other, or one more."""

    rank: int
    ranks: int
    classes: int  # of all ranks

    @property
    def start(self) -> int:
        """The first of them."""
        return self.rank * self.classes // self.ranks

    @property
    def stop(self) -> int:
        """One behind the last."""
        return (self.rank + 1) * self.classes // self.ranks

    def __len__(self) -> int:
        return self.stop - self.start

    def positions(self, labels: Tensor) -> Tensor:
        """Labels as places among these classes; ``len(self)`` for a class of another rank."""
        inside = (labels >= self.start) & (labels < self.stop)
        return torch.where(inside, labels - self.start, len(self))


def combine_classes(target: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Both over the classes of all ranks, with gradient; the same on every rank."""
    found: Any = _CombineFunction.apply(target, others)
    return found


def combine_targets(target: Tensor) -> Tensor:
    """The similarity to the own class alone, where wrong classes are measured by it."""
    return combine_classes(target, torch.full_like(target, -torch.inf).detach())[0]


def sum_gradient_over_ranks(x: Tensor) -> Tensor:
    """The same numbers, of which every rank makes another part of the loss: their gradient is summed over ranks."""
    found: Any = _SumGradientFunction.apply(x)
    return found


class _SumGradientFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor):  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g: Tensor):  # type: ignore[override]
        g = g.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(g)
        return g


class _CombineFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, target: Tensor, others: Tensor):  # type: ignore[override]
        packed = torch.stack([target, others])
        parts = [torch.empty_like(packed) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, packed)
        targets, logs = torch.stack(parts).unbind(1)
        whole = logs.logsumexp(0)
        ctx.save_for_backward(torch.where(whole == -torch.inf, 0, (others - whole).exp()))
        return targets.sum(0), whole

    @staticmethod
    def backward(ctx, g_target: Tensor, g_others: Tensor):  # type: ignore[override]
        (share,) = ctx.saved_tensors
        return g_target, g_others * share
