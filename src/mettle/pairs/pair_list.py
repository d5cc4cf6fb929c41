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
from mettle.pairs.interface import Measure, Tile
from mettle.pairs.problem import PairProblem, RowBlock, Side
from mettle.pairs.reference import reduce_problem
from mettle.pairs.similarity import prepare_sides, safe_sqrt


class PairListProblem(PairProblem):
    """Pairs (z_k, ref_k) in place of all of z against all of ref."""

    def tile(self, i: RowBlock, j: RowBlock, s: Tensor | None = None) -> Tile:
        """All pairs as one row."""
        assert self.ref is not None
        return super().tile(i, j, rowwise_similarity(self.z, self.ref, self.measure)[None])


def rowwise_similarity(a: Tensor, b: Tensor, measure: Measure) -> Tensor:
    """(n,) similarities of the rows of ``a`` with the same rows of ``b``."""
    if measure in ("squared", "l1"):
        delta = a - b
        return -(delta.square() if measure == "squared" else delta.abs()).sum(1)
    if measure == "euclidean":
        return -safe_sqrt((a - b).square().sum(1))
    return (a * b).sum(1)


def as_pair_list_loss(loss: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The loss as a function of (z1, z2, alike): a pairwise loss, or one that has this form already."""
    if not hasattr(loss, "passes"):
        return lambda z1, z2, alike: loss(z1, z2, alike.to(z1.dtype))
    if not getattr(loss, "takes_pair_lists", True):
        raise InputError(
            f"{type(loss).__name__} matches whole classes and has no form on a list of pairs: use Contrastive or "
            "Triplet"
        )

    def value(z1: Tensor, z2: Tensor, alike: Tensor) -> Tensor:
        right = Side(alike.long(), torch.arange(len(alike)))
        left = Side(torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        a, b = prepare_sides(z1, z2, loss.measure)
        return loss.row_loss(reduce_problem(PairListProblem(loss, loss.difficulty, left, right, a, b, None))).sum()

    return value
