"""Distances from the similarities that tiles hold, safe where two points coincide and accurate where they nearly do."""

import torch
from torch import Tensor

from mettle.pairs import Measure, Tile


def squared_distance(tile: Tile | Tensor, measure: Measure) -> Tensor:
    """d² from cosines of unit vectors (2 − 2s) or from negated squared distances; never below 0.

    In float32, 2 − 2s has no digits left for points closer than 3e-4. A tile knows its rows and puts the digits back;
    similarities alone, without a tile, cannot.
    """
    s = tile.s if isinstance(tile, Tile) else tile
    if measure != "cosine":
        return (-s).clamp(min=0)
    squared = 2 - 2 * s
    if isinstance(tile, Tile) and tile.sides is not None:
        squared = tile.sides.sharpened(squared, tile.pos, tile.neg)
    return squared.clamp(min=0)


def distance(tile: Tile | Tensor, measure: Measure) -> Tensor:
    """d, with gradient 0 where d is 0: two coincident points have no direction to move in."""
    s = tile.s if isinstance(tile, Tile) else tile
    if measure == "l1":
        return -s
    if torch._C._are_functorch_transforms_active():  # torch.func goes through steps that it knows
        squared = squared_distance(tile, measure)
        together = squared == 0
        return torch.where(together, 0, torch.where(together, 1, squared).sqrt())
    return _Distance.apply(s, tile, measure)


class _Distance(torch.autograd.Function):
    """d of s, one node of the graph: d² is 2 - 2s or -s, and half a dozen elementwise steps less to go back through."""

    @staticmethod
    def forward(ctx, s: Tensor, tile: Tile | Tensor, measure: Measure) -> Tensor:  # type: ignore[override]
        d = squared_distance(tile, measure).sqrt_()  # a fresh tensor
        ctx.save_for_backward(d)
        ctx.slope = -1.0 if measure == "cosine" else -0.5
        return d

    @staticmethod
    def backward(ctx, g: Tensor):  # type: ignore[override]
        (d,) = ctx.saved_tensors
        return ctx.slope * g / d.masked_fill(d == 0, torch.inf), None, None
