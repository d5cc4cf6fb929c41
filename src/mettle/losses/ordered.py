"""Triplets by order: an anchor's positives or negatives are sorted once, instead of met one by one.

With p positives and b negatives of a row, all hinges of all triplets take p·b steps; in order they take (p + b) log p:
the triplets of a negative that miss the margin are those of a run of the sorted positives, and their sum is the
difference of two running sums. Those are in float64, where the difference loses nothing.
"""

import torch
from torch import Tensor

from mettle.pairs import Mask

TIED = 4  # negatives of a row at exactly one distance: in float32 two are common, more are copies


def hinges(
    d: Tensor, near: Tensor, weight: Tensor, margin: float, *, within: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Of every negative at distance ``d`` (a, b), over the positives of its anchor, ``near`` and ``weight`` (a, 1, m).

    Returns Σ w·[near − d + margin]₊, the weight of the terms above 0, and the weight of all terms, (a, b) each;
    ``within``: over positives closer than the negative only, by no more than the margin.
    """
    near, order = near.squeeze(1).double().sort(1)
    weight = weight.squeeze(1).double().gather(1, order)
    far = d.double().contiguous()
    kept, least = near.detach(), far.detach() - margin
    first = torch.searchsorted(kept, least)  # a hinge of exactly 0 has the gradient of those above
    above = torch.searchsorted(kept, least, right=True)
    last = torch.searchsorted(kept, far.detach()) if within else torch.full_like(first[:, :1], near.shape[1])
    first, above = torch.minimum(first, last), torch.minimum(above, last)

    def run(x: Tensor, start: Tensor) -> Tensor:
        sums = torch.nn.functional.pad(x, (1, 0)).cumsum(1)
        return sums.gather(1, last) - sums.gather(1, start)

    met = run(weight, first)
    value = run(weight * near, first) + met * (margin - far)
    count = met if within else weight.sum(1, keepdim=True).expand_as(far)
    return value.to(d.dtype), run(weight, above).to(d.dtype), count.to(d.dtype)


def following(d: Tensor, there: Mask, near: Tensor) -> Tensor | None:
    """For every positive in ``near`` (a, 1, m) the closest negative of ``d`` (a, b) beyond it, infinity where none is.

    Returns (a, c, m): the negatives that tie for it stand below each other, because they share its gradient. None where
    more than `TIED` do.
    """
    far = d if there is True else d.masked_fill(~torch.as_tensor(there, device=d.device), torch.inf)
    far = torch.nn.functional.pad(far.contiguous().sort(1).values, (0, TIED + 1), value=torch.inf)
    at = torch.searchsorted(far.detach(), near.squeeze(1).detach().contiguous(), right=True)
    at = at.clamp(max=d.shape[1])
    found = [far.gather(1, at)]
    for step in range(1, TIED + 1):
        further = far.gather(1, at + step)
        tied = (further == found[0]) & (further < torch.inf)
        if not bool(tied.any()):
            return torch.stack(found, 1)
        found.append(further.masked_fill(~tied, torch.inf))
    return None


def shared(found: Tensor) -> Tensor:
    """(a, 1, m) of what `following` gives: one column in which the negatives that tie share the gradient."""
    there = found < torch.inf
    mean = found.masked_fill(~there, 0).sum(1, keepdim=True) / there.sum(1, keepdim=True).clamp(min=1)
    # The mean of equal numbers has the right gradient; its value may be off by a rounding.
    return torch.where(there[:, :1], mean + (found[:, :1].masked_fill(~there[:, :1], 0) - mean).detach(), torch.inf)
