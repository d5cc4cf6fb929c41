"""The reference engine: the whole matrix at once, plain autograd.

It is what the other engines are compared with, and the fastest for small batches.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mettle.pairs.interface import Acc, Tile
from mettle.pairs.problem import Job


def rows(job: Job) -> dict[str, Tensor]:
    """Everything that the rows accumulate, (n,) or (n, m) each, with gradient."""
    tile = job.tile(*job.whole())
    known: dict[str, Tensor] = {}
    for step in job.steps():
        seen = {} if step.reads == "nothing" else known  # no more than a tile would see
        seen = seen if step.reads != "both" else known | {f"{k}ᵀ": v.transpose(0, 1) for k, v in known.items()}
        w = step.weigh(tile, seen)
        known |= {name: reduce(acc, w, tile, job.most_positives) for name, acc in step.terms(tile, seen).items()}
    return {name: value.squeeze(1) for name, value in known.items()}


def reduce(acc: Acc, w: Tensor | None, tile: Tile, most: Callable[[], int]) -> Tensor:
    """One accumulator over the whole tile, as a column (n, 1) or (n, 1, m)."""
    s = tile.s
    mask = torch.full(s.shape, acc.mask, device=s.device) if isinstance(acc.mask, bool) else acc.mask
    if acc.kind in ("total", "lse") and (w is None or acc.weigh == "none"):
        return _unweighted(acc, mask, s)
    w = s.new_ones(1, 1) if w is None or acc.weigh == "none" else w
    w = (w != 0).to(s.dtype) if acc.weigh == "present" else w
    x = acc.x if isinstance(acc.x, Tensor) else torch.full_like(s, acc.x)
    if x.ndim == 3:
        mask, w = mask[..., None], w[..., None]
    there = mask & (w != 0)
    if acc.kind == "total":
        return (w * x).masked_fill(~there, 0).sum(1, keepdim=True)
    if acc.kind == "collect":
        return _collected(w * x, mask, most())
    top = x.masked_fill(~there, -torch.inf).amax(1, keepdim=True)
    if acc.kind == "peak":
        ties = there & (x == top) & (top > -torch.inf)
        mean = x.masked_fill(~ties, 0).sum(1, keepdim=True) / ties.sum(1, keepdim=True).clamp(min=1)
        # The mean of the tied entries has the right gradient; its value may be off by a rounding.
        return torch.where(ties.any(1, keepdim=True), mean + (top - mean).detach(), -torch.inf)
    some = there.any(1, keepdim=True)
    safe = torch.where(some, top, 0).detach()
    e = w * (x - safe).masked_fill(~there, -torch.inf).exp()
    inside = e.masked_fill(~there, 0).sum(1, keepdim=True)
    return torch.where(some, torch.where(some, inside, 1).log() + safe, -torch.inf)


def _unweighted(acc: Acc, mask: Tensor, s: Tensor) -> Tensor:
    """A sum or a log-sum-exp in which every pair counts once: what small batches spend their time on."""
    if not isinstance(acc.x, Tensor):
        return mask.sum(1, keepdim=True).to(s.dtype) * acc.x
    absent = ~mask if acc.x.ndim == 2 else ~mask[..., None]
    if acc.kind == "total":
        return acc.x.masked_fill(absent, 0).sum(1, keepdim=True)
    return torch.logsumexp(acc.x.masked_fill(absent, -torch.inf), 1, keepdim=True)


def _collected(x: Tensor, mask: Tensor, most: int) -> Tensor:
    """(n, 1, most): the masked entries of each row first, zeros behind them."""
    first = torch.argsort(~mask, dim=1, stable=True)[:, :most]
    found = x.gather(1, first).masked_fill(~mask.gather(1, first), 0)
    return torch.nn.functional.pad(found, (0, most - found.shape[1])).unsqueeze(1)
