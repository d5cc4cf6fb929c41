"""Any pairwise loss on a plain list of pairs.

A list says which pairs are alike and which are not, and nothing about all others. To the engine it is one row: one
anchor whose positives are the alike pairs and whose negatives are the unalike ones. So every alike pair is compared
with every unalike pair, as befits one distance with one threshold for all.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.losses import NPair
from mettle.pairs import Measure, Tile
from mettle.pairs.problem import Job, Side, Span
from mettle.pairs.reference import rows
from mettle.pairs.similarity import ready


class PairList(Job):
    """Pairs (z_k, ref_k) in place of all of z against all of ref."""

    def tile(self, i: Span, j: Span, s: Tensor | None = None) -> Tile:
        """All pairs as one row."""
        assert self.ref is not None
        return super().tile(i, j, between(self.z, self.ref, self.measure)[None])


def between(a: Tensor, b: Tensor, measure: Measure) -> Tensor:
    """(n,) similarities of the rows of ``a`` with the same rows of ``b``."""
    if measure in ("squared", "l1"):
        delta = a - b
        return -(delta.square() if measure == "squared" else delta.abs()).sum(1)
    return (a * b).sum(1)


def on_pairs(loss: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The loss as a function of (z1, z2, alike): a pairwise loss, or one that has this form already."""
    if not hasattr(loss, "sweeps"):
        return lambda z1, z2, alike: loss(z1, z2, alike.to(z1.dtype))
    if isinstance(loss, NPair):
        raise InputError("NPair matches whole classes and has no form on a list of pairs: use Contrastive or Triplet")

    def value(z1: Tensor, z2: Tensor, alike: Tensor) -> Tensor:
        right = Side(alike.long(), torch.arange(len(alike)))
        left = Side(torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        a, b = ready(z1, loss.measure), ready(z2, loss.measure)
        return loss.finish(rows(PairList(loss, loss.difficulty, left, right, a, b, None))).sum()

    return value
