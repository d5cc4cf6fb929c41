"""How a batch becomes the tuples of a loss, real ones and ones whose negatives are pulled: one layout a kind of loss.

| loss | tuples of a batch | synthetic negatives |
|---|---|---|
| `Triplet` over all triplets, no difficulty | (anchor, positive, negative of the next class) | one a triple |
| `NPair` | an anchor and a positive of every class | every other class's positive, pulled for every anchor |
| any other pairwise loss | pairs (anchor, positive), each anchor against the positives of all pairs | the same |
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from mettle.difficulty import AdaptiveThreshold
from mettle.errors import InputError
from mettle.losses import NPair, PairwiseLoss, Triplet, split_anchor_positive
from mettle.pairs import iterate_parts, safe_sqrt
from mettle.train.methods.base import progress_option, uses_second_encoder

NormRows = Literal["synthetic", "positives"]
"""Whose lengths the norm term of `NPair` takes beside the anchors': all P² synthetic rows, or own positives alone."""


def pull_negatives(anchor: Tensor, positive: Tensor, negative: Tensor, level: float) -> Tensor:
    """Negatives pulled towards their anchors: ẑ⁻ above, with gradient to all three, safe where points coincide.

    Leading dimensions broadcast: (p, 1, d) anchors and positives with (1, p, d) negatives give all (p, p, d).
    """
    near, far = safe_distance(anchor, positive), safe_distance(anchor, negative)
    inside = far <= near  # false for NaN, which then comes out
    safe = torch.where(far == 0, 1.0, far)
    moved = anchor + ((level * far + (1 - level) * near) / safe)[..., None] * (negative - anchor)
    return torch.where(inside[..., None], negative.expand_as(moved), moved)


def safe_distance(a: Tensor, b: Tensor) -> Tensor:
    """Distance, with gradient 0 where it is 0."""
    return safe_sqrt((a - b).square().sum(-1))


TupleRows = Mapping[str, Tensor]
"""Positions in the batch of each tuple's anchor and positive (and negative, where it has one of its own)."""


class TupleLayout(Protocol):
    """The tuples of a batch, and a loss over them. ``rows`` is what `tuple_rows` gives."""

    def tuple_rows(self, labels: Tensor) -> TupleRows:
        """Which rows of a batch with these labels are anchors and positives."""
        ...

    def negatives(self, z: Tensor, rows: TupleRows) -> Tensor:
        """The real negatives, in the order of `synthesize_negatives`."""
        ...

    def synthesize_negatives(self, z: Tensor, rows: TupleRows, level: float) -> tuple[Tensor, Tensor]:
        """Pulled negatives, and the row of the batch that each comes from."""
        ...

    def share_movable(self, z: Tensor, rows: TupleRows) -> Tensor:
        """Share of negatives beyond their positive, which are those that can be pulled."""
        ...

    def tuple_loss(
        self, anchors: Tensor, positives: Tensor, negatives: Tensor, rows: TupleRows, progress: float = 1.0
    ) -> Tensor:
        """The loss J of tuples, a scalar: ``anchors`` and ``positives`` are embeddings of the whole batch."""
        ...

    def class_term_rows(self, rows: TupleRows) -> Tensor:
        """Rows that go into the class term of J_gen beside the new points."""
        ...

    def class_term(self, real: Tensor, real_labels: Tensor, made: Tensor, labels: Tensor) -> Tensor:
        """The cross-entropy of both, from logits."""
        ...


def group_classes(labels: Tensor) -> Tensor:
    """(P, K) rows of the batch, class by class in the order of the batch; where K is odd, the last is left out."""
    names, code, counts = labels.unique(return_inverse=True, return_counts=True)
    each = int(counts[0])
    if len(names) < 2 or each < 2 or bool((counts != each).any()):
        raise InputError(
            f"tuples need batches of P classes x K samples, both at least 2, got {len(names)} classes of "
            f"{int(counts.min())} to {int(counts.max())} samples"
        )
    n = len(labels)
    first = torch.full((len(names),), n, device=labels.device).scatter_reduce(
        0, code, torch.arange(n, device=labels.device), "amin"
    )
    turn = first.argsort().argsort()  # classes in the order in which the batch has them, not that of their names
    return torch.argsort(turn[code], stable=True).view(len(names), each)[:, : each - each % 2]


@dataclass(frozen=True)
class TripletLayout:
    """Triples of a batch, and the triplet loss summed over them."""

    loss: Triplet

    def tuple_rows(self, labels: Tensor) -> TupleRows:
        """Neighbours of a class are anchor and positive; the class that follows in the batch gives the negative."""
        groups = group_classes(labels)
        a, p = groups[:, 0::2].reshape(-1), groups[:, 1::2].reshape(-1)
        return {"anchor": a, "positive": p, "negative": groups.roll(-1, 0)[:, 0::2].reshape(-1)}

    def negatives(self, z: Tensor, rows: TupleRows) -> Tensor:
        """As they are."""
        return z[rows["negative"]]

    def synthesize_negatives(self, z: Tensor, rows: TupleRows, level: float) -> tuple[Tensor, Tensor]:
        """One new point a triple, and the sample that it comes from."""
        source = rows["negative"]
        return pull_negatives(z[rows["anchor"]], z[rows["positive"]], z[source], level), source

    def share_movable(self, z: Tensor, rows: TupleRows) -> Tensor:
        """Share of negatives beyond their positive, which are those that can be pulled."""
        a, p, n = (z.detach()[rows[name]] for name in ("anchor", "positive", "negative"))
        return ((a - n).square().sum(1) > (a - p).square().sum(1)).float().mean()

    def tuple_loss(
        self, anchors: Tensor, positives: Tensor, negatives: Tensor, rows: TupleRows, progress: float = 1.0
    ) -> Tensor:
        """Σ [d⁺ − d⁻ + m]₊."""
        a, p, n = anchors[rows["anchor"]], positives[rows["positive"]], negatives
        if self.loss.normalise:
            a, p, n = (normalize(x, dim=1) for x in (a, p, n))
        near, far = ((a - x).square().sum(1) for x in (p, n))
        if not self.loss.squared:
            near, far = (safe_sqrt(x) for x in (near, far))
        return self.loss.margin_violation(near - far).sum()

    def class_term_rows(self, rows: TupleRows) -> Tensor:
        """Anchors and positives."""
        return torch.cat([rows["anchor"], rows["positive"]])

    def class_term(self, real: Tensor, real_labels: Tensor, made: Tensor, labels: Tensor) -> Tensor:
        """One mean over all."""
        return cross_entropy(torch.cat([real, made]), torch.cat([real_labels, labels]))


@dataclass(frozen=True)
class PairwiseLayout:
    """Pairs of a batch, and any pairwise loss of each anchor against the positives of all pairs.

    Of m pairs (a_i, p_i), row i of the references holds p_1 ... p_m as anchor i sees them: the positives of its own
    class where they are, those of other classes pulled towards a_i as far as d⁺ = |a_i − p_i| allows. The loss is
    asked once, for m anchors against m² references, and told that anchor i has pairs with row i alone.
    """

    loss: Any

    def tuple_rows(self, labels: Tensor) -> TupleRows:
        """Neighbours of a class are anchor and positive."""
        groups = group_classes(labels)
        a, p = groups[:, 0::2].reshape(-1), groups[:, 1::2].reshape(-1)
        return {"anchor": a, "positive": p, "label": labels[a]}

    def negatives(self, z: Tensor, rows: TupleRows) -> Tensor:
        """(m · m, d) every positive for every anchor."""
        p = z[rows["positive"]]
        return p.expand(len(p), *p.shape).flatten(0, 1)

    def synthesize_negatives(self, z: Tensor, rows: TupleRows, level: float) -> tuple[Tensor, Tensor]:
        """m² points: row by row, every positive as an anchor sees it; those of its class stay where they are."""
        a, p = z[rows["anchor"]], z[rows["positive"]]
        made = pull_negatives(a[:, None], p[:, None], p[None], level)
        made = torch.where(same_class(rows)[..., None], p[None], made)
        return made.flatten(0, 1), rows["positive"].repeat(len(p))

    def share_movable(self, z: Tensor, rows: TupleRows) -> Tensor:
        """Share of negatives beyond the positive."""
        a, p = z.detach()[rows["anchor"]], z.detach()[rows["positive"]]
        d, other = torch.cdist(a, p), ~same_class(rows)
        return ((d > d.diagonal()[:, None]) & other).float().sum() / other.sum()

    def tuple_loss(
        self, anchors: Tensor, positives: Tensor, negatives: Tensor, rows: TupleRows, progress: float = 1.0
    ) -> Tensor:
        """The loss's own mean over anchors."""
        same, labels = same_class(rows), rows["label"]
        m = len(labels)
        own = torch.eye(m, dtype=torch.bool, device=same.device)[:, :, None]  # of anchor i: row i of the references
        return self.loss(
            anchors[rows["anchor"]],
            labels,
            ref=(negatives, labels.repeat(m)),
            positives=(own & same).flatten(1),
            negatives=(own & ~same).flatten(1),
            **progress_option(self.loss, progress),
        )

    def class_term_rows(self, rows: TupleRows) -> Tensor:
        """Anchors; positives are among the new points."""
        return rows["anchor"]

    def class_term(self, real: Tensor, real_labels: Tensor, made: Tensor, labels: Tensor) -> Tensor:
        """A mean over anchors and one over new points."""
        return cross_entropy(real, real_labels) + cross_entropy(made, labels)


@dataclass(frozen=True)
class NPairLayout(PairwiseLayout):
    """Pairs of a batch, one a class, and the N-pair loss over them as published."""

    loss: NPair
    norm_rows: NormRows = "synthetic"

    def tuple_rows(self, labels: Tensor) -> TupleRows:
        """The first row of a class is its anchor, the second its positive."""
        a, p = split_anchor_positive(labels)
        if len(a) < 2:
            raise InputError("the N-pair loss needs two classes or more in a batch, got one")
        return {"anchor": a, "positive": p, "label": labels[a]}

    def tuple_loss(
        self, anchors: Tensor, positives: Tensor, negatives: Tensor, rows: TupleRows, progress: float = 1.0
    ) -> Tensor:
        """Mean cross-entropy of an anchor against its own row, plus the norm term."""
        a = anchors[rows["anchor"]]
        row = negatives.view(len(a), len(a), -1)
        logits = torch.einsum("id,ijd->ij", a, row)
        counted = negatives if self.norm_rows == "synthetic" else row.diagonal(dim1=0, dim2=1).T
        norms = a.square().sum(1).mean() + counted.square().sum(1).mean()
        return cross_entropy(logits, torch.arange(len(a), device=a.device)) + self.loss.norm_weight / 4 * norms


def same_class(rows: TupleRows) -> Tensor:
    """(m, m) whether two pairs are of one class."""
    return rows["label"][:, None] == rows["label"][None, :]


def tuple_layout(loss: Any, norm_rows: NormRows = "synthetic") -> TupleLayout:
    """How a batch becomes tuples of this loss."""
    name = type(loss).__name__
    if not isinstance(loss, PairwiseLoss):
        raise InputError(f"HardnessAware makes negatives for a loss over the pairs of a batch, got {name}")
    if uses_second_encoder(loss):
        raise InputError("a Relative difficulty compares two encoders, of which HardnessAware has one: use TwoEncoder")
    difficulty = getattr(loss, "difficulty", None)
    if any(isinstance(part, AdaptiveThreshold) for part in iterate_parts(difficulty)):
        raise InputError("AdaptiveThreshold follows the pairs of a whole batch, which tuples are not: use Threshold")
    if isinstance(loss, NPair) and difficulty is not None:
        raise InputError("HardnessAware makes the negatives of NPair harder itself: leave it without a difficulty")
    published = isinstance(loss, Triplet) and loss.mining == "all" and difficulty is None
    published = published and loss.metric == "euclidean"
    if (published or isinstance(loss, NPair)) and loss.reduction != "mean":
        raise InputError(f"HardnessAware reduces {name} itself: reduction must be 'mean', got {loss.reduction!r}")
    if isinstance(loss, NPair):
        return NPairLayout(loss, norm_rows)
    if isinstance(loss, Triplet) and published:
        return TripletLayout(loss)
    layout = PairwiseLayout(loss)
    try_layout(layout)
    return layout


def try_layout(layout: PairwiseLayout) -> None:
    """Refuse a loss that cannot take the negatives of each anchor as references, on two pairs of two classes."""
    loss = copy.deepcopy(layout.loss)  # it may draw random numbers
    place = next(loss.parameters(), torch.empty(0)).device
    z, labels = torch.eye(4, device=place), torch.tensor([0, 0, 1, 1], device=place)
    layout = PairwiseLayout(loss)
    rows = layout.tuple_rows(labels)
    try:
        with torch.no_grad():
            layout.tuple_loss(z, z, layout.negatives(z, rows), rows)
    except InputError as error:
        name = type(loss).__name__
        raise InputError(f"HardnessAware gives {name} negatives as references of each anchor: {error}") from None
