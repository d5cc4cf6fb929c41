"""The tuples that a batch of HardnessAware holds, of either loss: who is compared with whom, who is pulled, and J."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from mettle.errors import InputError
from mettle.losses import NPair, Triplet, split_anchor_positive
from mettle.train.methods.synthesis import pulled

Rows = Mapping[str, Tensor]
"""Positions in the batch of each tuple's anchor and positive (and negative, where it has one of its own)."""


@dataclass(frozen=True)
class Triples:
    """Triples of a batch, and the triplet loss summed over them."""

    loss: Triplet

    def rows(self, labels: Tensor) -> Rows:
        """Neighbours of a class are anchor and positive; the class that follows in the batch gives the negative."""
        names, code, counts = labels.unique(return_inverse=True, return_counts=True)
        each = int(counts[0])
        if len(names) < 2 or each < 2 or bool((counts != each).any()):
            raise InputError(
                f"triples need batches of P classes x K samples, both at least 2, got {len(names)} classes of "
                f"{int(counts.min())} to {int(counts.max())} samples"
            )
        n = len(labels)
        first = torch.full((len(names),), n, device=labels.device).scatter_reduce(
            0, code, torch.arange(n, device=labels.device), "amin"
        )
        turn = first.argsort().argsort()  # classes in the order in which the batch has them, not that of their names
        groups = torch.argsort(turn[code], stable=True).view(len(names), each)[:, : each - each % 2]
        a, p = groups[:, 0::2].reshape(-1), groups[:, 1::2].reshape(-1)
        return {"anchor": a, "positive": p, "negative": groups.roll(-1, 0)[:, 0::2].reshape(-1)}

    def negatives(self, z: Tensor, rows: Rows) -> Tensor:
        """As they are."""
        return z[rows["negative"]]

    def pulled(self, z: Tensor, rows: Rows, level: float) -> tuple[Tensor, Tensor]:
        """One new point a triple, and the sample that it comes from."""
        source = rows["negative"]
        return pulled(z[rows["anchor"]], z[rows["positive"]], z[source], level), source

    def moved(self, z: Tensor, rows: Rows) -> Tensor:
        """Share of negatives beyond their positive, which are those that can be pulled."""
        a, p, n = (z.detach()[rows[name]] for name in ("anchor", "positive", "negative"))
        return ((a - n).square().sum(1) > (a - p).square().sum(1)).float().mean()

    def value(self, anchors: Tensor, positives: Tensor, negatives: Tensor, rows: Rows) -> Tensor:
        """Σ [d⁺ − d⁻ + m]₊."""
        a, p, n = anchors[rows["anchor"]], positives[rows["positive"]], negatives
        if self.loss.normalise:
            a, p, n = (normalize(x, dim=1) for x in (a, p, n))
        near, far = ((a - x).square().sum(1) for x in (p, n))
        if not self.loss.squared:
            near, far = (_root(x) for x in (near, far))
        return self.loss.margin_violation(near - far).sum()

    def kept(self, rows: Rows) -> Tensor:
        """Anchors and positives."""
        return torch.cat([rows["anchor"], rows["positive"]])

    def soft(self, kept: Tensor, kept_labels: Tensor, made: Tensor, labels: Tensor) -> Tensor:
        """One mean over all."""
        return cross_entropy(torch.cat([kept, made]), torch.cat([kept_labels, labels]))


@dataclass(frozen=True)
class Pairs:
    """Pairs of a batch, one a class, and the N-pair loss over them."""

    loss: NPair

    def rows(self, labels: Tensor) -> Rows:
        """The first row of a class is its anchor, the second its positive."""
        a, p = split_anchor_positive(labels)
        if len(a) < 2:
            raise InputError("the N-pair loss needs two classes or more in a batch, got one")
        return {"anchor": a, "positive": p}

    def negatives(self, z: Tensor, rows: Rows) -> Tensor:
        """(p · p, d) every positive for every anchor."""
        p = z[rows["positive"]]
        return p.expand(len(p), *p.shape).flatten(0, 1)

    def pulled(self, z: Tensor, rows: Rows, level: float) -> tuple[Tensor, Tensor]:
        """P² points: row by row, every class's positive as an anchor sees it; its own stays where it is."""
        a, p = z[rows["anchor"]], z[rows["positive"]]
        made = pulled(a[:, None], p[:, None], p[None], level)
        return made.flatten(0, 1), rows["positive"].repeat(len(p))

    def moved(self, z: Tensor, rows: Rows) -> Tensor:
        """Share of negatives beyond the positive."""
        a, p = z.detach()[rows["anchor"]], z.detach()[rows["positive"]]
        d = torch.cdist(a, p)
        return (d > d.diagonal()[:, None]).float().sum() / (len(a) * (len(a) - 1))

    def value(self, anchors: Tensor, positives: Tensor, negatives: Tensor, rows: Rows) -> Tensor:
        """Mean cross-entropy of an anchor against its own row, plus the norm term."""
        a = anchors[rows["anchor"]]
        row = negatives.view(len(a), len(a), -1)
        logits = torch.einsum("id,ijd->ij", a, row)
        own = row.diagonal(dim1=0, dim2=1).T
        norms = a.square().sum(1).mean() + own.square().sum(1).mean()
        return cross_entropy(logits, torch.arange(len(a), device=a.device)) + self.loss.norm_weight / 4 * norms

    def kept(self, rows: Rows) -> Tensor:
        """Anchors; positives are among the new points."""
        return rows["anchor"]

    def soft(self, kept: Tensor, kept_labels: Tensor, made: Tensor, labels: Tensor) -> Tensor:
        """A mean over anchors and one over new points."""
        return cross_entropy(kept, kept_labels) + cross_entropy(made, labels)


def layout(loss: Any) -> Triples | Pairs:
    """How a batch becomes tuples of this loss."""
    if not isinstance(loss, Triplet | NPair):
        raise InputError(f"HardnessAware takes a Triplet or an NPair loss, got {type(loss).__name__}")
    if loss.difficulty is not None:
        raise InputError("HardnessAware makes negatives harder itself: leave the loss without a difficulty")
    if isinstance(loss, Triplet):
        if loss.mining != "all":
            raise InputError(f"tuples of HardnessAware come with the batch: mining must be 'all', got {loss.mining!r}")
        return Triples(loss)
    return Pairs(loss)


def _root(square: Tensor) -> Tensor:
    """√, with gradient 0 at 0."""
    same = square == 0
    return torch.where(same, 0.0, torch.where(same, 1.0, square).sqrt())
