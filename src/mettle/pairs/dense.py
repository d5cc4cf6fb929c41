"""The reference engine: the whole matrix at once, plain autograd.

It is what the other engines are compared with, and the fastest for small batches.
"""

import torch
from torch import Tensor

from mettle.pairs.contract import Acc, Tile
from mettle.pairs.job import Job


def rows(job: Job) -> dict[str, Tensor]:
    """Everything that the rows accumulate, (n,) each, with gradient."""
    tile = job.tile(*job.whole())
    known: dict[str, Tensor] = {}
    for step in job.steps():
        w = step.weigh(tile, known)
        known |= {name: reduce(acc, w, tile) for name, acc in step.terms(tile, known).items()}
    return {name: value.squeeze(1) for name, value in known.items()}


def reduce(acc: Acc, w: Tensor | None, tile: Tile) -> Tensor:
    """One accumulator over the whole tile, as a column (n, 1)."""
    shape, s = tile.s.shape, tile.s
    mask = torch.full(shape, acc.mask, device=s.device) if isinstance(acc.mask, bool) else acc.mask
    w = torch.ones_like(s) if w is None or acc.weigh == "none" else w
    w = (w != 0).to(s.dtype) if acc.weigh == "present" else w
    x = acc.x if isinstance(acc.x, Tensor) else torch.full_like(s, acc.x)
    there = mask & (w > 0)
    if acc.kind == "total":
        return (w * x).masked_fill(~mask, 0).sum(1, keepdim=True)
    top = x.masked_fill(~there, -torch.inf).amax(1, keepdim=True)
    if acc.kind == "peak":
        ties = there & (x == top)
        share = (x * ties).sum(1, keepdim=True) / ties.sum(1, keepdim=True).clamp(min=1)
        # The mean of the tied entries has the right gradient; its value may be off by a rounding.
        return torch.where(ties.any(1, keepdim=True), share + (top - share).detach(), -torch.inf)
    some = there.any(1, keepdim=True)
    safe = torch.where(some, top, 0).detach()
    e = w * (x - safe).masked_fill(~there, -torch.inf).exp()
    inside = e.masked_fill(~there, 0).sum(1, keepdim=True)
    return torch.where(some, torch.where(some, inside, 1).log() + safe, -torch.inf)
