"""Distances from the similarities that tiles hold, safe where two points coincide."""

import torch
from torch import Tensor

from mettle.pairs import Measure


def squared_distance(s: Tensor, measure: Measure) -> Tensor:
    """d² from cosines of unit vectors (2 − 2s) or from negated squared distances; never below 0."""
    return (2 - 2 * s if measure == "cosine" else -s).clamp(min=0)


def distance(s: Tensor, measure: Measure) -> Tensor:
    """d, with gradient 0 where d is 0: two coincident points have no direction to move in."""
    if measure == "l1":
        return -s
    squared = squared_distance(s, measure)
    apart = squared > 0
    return torch.where(apart, torch.where(apart, squared, 1).sqrt(), 0)
