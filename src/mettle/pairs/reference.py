"""The reference engine: the whole matrix at once, plain autograd.

It is what the other engines are compared with, and the fastest for small batches.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mettle.pairs.interface import Reduction, Tile
from mettle.pairs.problem import PairProblem, ResolvedPass


def reduce_problem(problem: PairProblem) -> dict[str, Tensor]:
    """Everything that the rows accumulate, (n,) or (n, m) each, with gradient."""
    row_values = run_passes(problem, problem.resolve_passes(), problem.tile(*problem.whole_blocks()))
    return {name: value.squeeze(1) for name, value in row_values.items()}


def run_passes(problem: PairProblem, passes: list[ResolvedPass], tile: Tile) -> dict[str, Tensor]:
    """What passes over the whole matrix accumulate, as columns."""
    row_values: dict[str, Tensor] = {}
    for current_pass in passes:
        visible = {} if current_pass.reads == "none" else row_values  # no more than a tile would see
        if current_pass.reads == "both":
            visible = row_values | {f"{k}ᵀ": v.transpose(0, 1) for k, v in row_values.items()}
        w = current_pass.weights(tile, visible)
        reductions = current_pass.reductions(tile, visible)
        row_values |= {name: reduce_tile(acc, w, tile, problem.max_positives) for name, acc in reductions.items()}
    return row_values


def reduce_tile(acc: Reduction, w: Tensor | None, tile: Tile, max_entries: Callable[[], int]) -> Tensor:
    """One reduction over the whole tile, as a column (n, 1) or (n, 1, m)."""
    s = tile.similarity
    if acc.kind == "max" and (w is None or acc.weighting == "none") and isinstance(acc.mask, Tensor):
        return _reduce_unweighted(acc, acc.mask, s)
    mask = torch.full(s.shape, acc.mask, device=s.device) if isinstance(acc.mask, bool) else acc.mask
    if acc.kind in ("sum", "logsumexp") and (w is None or acc.weighting == "none"):
        return _reduce_unweighted(acc, mask, s)
    w = s.new_ones(1, 1) if w is None or acc.weighting == "none" else w
    w = (w != 0).to(s.dtype) if acc.weighting == "mask" else w
    w = w.square() if acc.weighting == "square" else w
    x = acc.values if isinstance(acc.values, Tensor) else torch.full_like(s, acc.values)
    if x.ndim == 3:
        mask, w = mask[..., None], w[..., None]
    present = mask & (w != 0)
    if acc.kind == "sum":
        return (w * x).masked_fill(~present, 0).sum(1, keepdim=True)
    if acc.kind == "gather":
        return _gather_masked(w * x, mask, max_entries())
    top = x.masked_fill(~present, -torch.inf).amax(1, keepdim=True)
    if acc.kind == "max":
        ties = present & (x == top) & (top > -torch.inf)
        mean = x.masked_fill(~ties, 0).sum(1, keepdim=True) / ties.sum(1, keepdim=True).clamp(min=1)
        # The mean of the tied entries has the right gradient; its value may be off by a rounding.
        return torch.where(ties.any(1, keepdim=True), mean + (top - mean).detach(), -torch.inf)
    some = present.any(1, keepdim=True)
    safe = torch.where(some, top, 0).detach()
    e = w * (x - safe).masked_fill(~present, -torch.inf).exp()
    inside = e.masked_fill(~present, 0).sum(1, keepdim=True)
    return torch.where(some, torch.where(some, inside, 1).log() + safe, -torch.inf)


def _reduce_unweighted(acc: Reduction, mask: Tensor, s: Tensor) -> Tensor:
    """A sum, a log-sum-exp or a maximum in which every pair counts once: what small batches spend their time on."""
    if not isinstance(acc.values, Tensor):
        count = mask.sum(1, keepdim=True, dtype=s.dtype)
        return count if acc.values == 1 else count * acc.values
    absent = ~mask if acc.values.ndim == 2 else ~mask[..., None]
    if acc.kind == "sum":
        return acc.values.masked_fill(absent, 0).sum(1, keepdim=True)
    if acc.kind == "max":  # torch shares the gradient equally among those that reach it
        return acc.values.masked_fill(absent, -torch.inf).amax(1, keepdim=True)
    # Rows without any entry are taken out: the second derivatives of a log-sum-exp over nothing are NaN.
    empty = absent.all(1, keepdim=True)
    x = acc.values.masked_fill(absent, -torch.inf).masked_fill(empty, 0)
    return torch.logsumexp(x, 1, keepdim=True).masked_fill(empty, -torch.inf)


def _gather_masked(x: Tensor, mask: Tensor, max_entries: int) -> Tensor:
    """(n, 1, max_entries): the masked entries of each row first, zeros behind them."""
    first = torch.argsort(~mask, dim=1, stable=True)[:, :max_entries]
    found = x.gather(1, first).masked_fill(~mask.gather(1, first), 0)
    return torch.nn.functional.pad(found, (0, max_entries - found.shape[1])).unsqueeze(1)
