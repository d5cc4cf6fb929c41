"""Margin loss: a boundary between the distances of positives and of negatives, which is learned."""

from dataclasses import field
from typing import Literal

import torch
from torch import Tensor, nn

from mettle.difficulty.settings import validate_integers
from mettle.losses.base import PairwiseLoss, require
from mettle.losses.class_vectors import raise_out_of_range
from mettle.losses.distances import Metric, check_metric, tile_distance, tile_measure
from mettle.pairs import Difficulty, Measure, Pass, Reduction, RowValues, Tile, sum_over
from mettle.pairs.similarity import may_read

INACTIVE = 1e-30  # how much an anchor without active pairs counts: nothing beside others, enough for a mean of zeros


class Margin(PairwiseLoss):
    r"""Margin-based loss (Wu et al. 2017).

    Formula, d the Euclidean distance or another ``metric``, β the boundary, m = ``margin``:
        positives  l_ip = [d_ip − β + m]₊,   negatives  l_in = [β − d_in + m]₊
        L_i = Σ_pn (l_ip + l_in) / A_i + ν β,   A_i = Σ_pn 1[l_ip > 0] + 1[l_in > 0]
        The sums are over all triplets of an anchor, so that positives and negatives count alike; the mean over
        anchors is weighed by A_i: a mean over all active terms.
        ``boundary``: ``fixed``, ``one`` learned number, or one for each ``class`` (of the anchor). ν = ``nu`` pulls it
        down; ``beta`` is where it starts.
    Needs:
        labels; positives and negatives in the batch. One boundary per class needs ``num_classes`` and labels from 0 to
        C − 1. ``normalise`` puts embeddings on the unit sphere.
    Use when:
        classes differ in how far they spread, or one threshold on the distance is wanted and shall find itself.
    Relations:
        the pairs that are active are those of `Contrastive` in form ``linear`` with margins β − m and β + m. The paper
        draws one negative for each positive, by distance.
    """

    margin: float = 0.2
    beta: float = 1.2
    nu: float = 0.0
    boundary: Literal["fixed", "one", "class"] = "one"
    num_classes: int | None = None
    normalise: bool = True
    metric: Metric = field(default="euclidean", kw_only=True)
    difficulty: Difficulty | None = None

    self_contained = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_metric(self.metric, normalise=self.normalise, squared=False)
        require(self.margin >= 0, f"margin must be at least 0, got {self.margin}")
        require(self.nu >= 0, f"nu must be at least 0, got {self.nu}")
        count = 1
        if self.boundary == "class":
            require(self.num_classes is not None, "one boundary per class needs num_classes, the number of classes")
            validate_integers(num_classes=self.num_classes)
            count = int(self.num_classes or 0)
            require(count >= 1, f"num_classes must be at least 1, got {count}")
        start = None if self.boundary == "fixed" else nn.Parameter(torch.full((count,), float(self.beta)))
        self.register_parameter("boundaries", start)

    @property
    def reads_labels(self) -> bool:
        """Whether the class of an anchor matters."""
        return self.boundary == "class"

    @property
    def measure(self) -> Measure:  # type: ignore[override]
        """Cosine on the sphere, else the distance itself."""
        return tile_measure(self.metric, normalise=self.normalise)

    def passes(self) -> tuple[Pass, ...]:
        """One pass; a boundary of the anchor's class makes a pair look different from its two ends."""
        return (Pass(self.reductions, reads="anchor" if self.reads_labels else "none"),)

    def learned_boundaries(self) -> Tensor | None:
        """(1,) or (C,), a parameter; None where the boundary is a setting."""
        return self._parameters["boundaries"]

    def current_boundary(self, tile: Tile) -> Tensor | float:
        """The boundary of every anchor of a tile."""
        learned = self.learned_boundaries()
        if learned is None:
            return self.beta
        known = learned.to(tile.similarity.dtype)
        if not self.reads_labels:
            return known
        assert tile.anchor_label is not None
        label = tile.anchor_label.long()
        if may_read(label) and not label.is_cuda:
            raise_out_of_range(torch.stack(torch.aminmax(label)), len(known))
        inside = label.clamp(0, len(known) - 1)
        return torch.where(inside == label, known[inside], torch.nan)  # a GPU is not asked: a wrong label gives NaN

    def reductions(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """Hinges on both sides of the boundary, and which of them are active."""
        d, beta = tile_distance(tile, self.metric, self.measure), self.current_boundary(tile)
        pull, push = (d - beta + self.margin).clamp(min=0), (beta - d + self.margin).clamp(min=0)
        found = {
            "positives": sum_over(1.0, tile.positive, weighting="mask"),
            "positive weight": sum_over(1.0, tile.positive),
            "negative weight": sum_over(1.0, tile.negative),
            "pull": sum_over(pull, tile.positive),
            "push": sum_over(push, tile.negative),
            "pulled": sum_over((pull > 0).to(d.dtype), tile.positive),
            "pushed": sum_over((push > 0).to(d.dtype), tile.negative),
        }
        if self.nu and self.reads_labels:  # at any pair of a row, the same: its mean is the boundary of the anchor
            found["boundary"] = sum_over(beta + 0 * d.detach(), tile.positive, weighting="mask")
        return found

    def row_loss(self, row_values: RowValues) -> Tensor:
        """The mean over active terms, and the pull of the boundary."""
        positive, negative = row_values["positive weight"], row_values["negative weight"]
        value = (negative * row_values["pull"] + positive * row_values["push"]) / self.anchor_weight(row_values)
        learned = self.learned_boundaries()
        if not self.nu or learned is None:
            return value
        if not self.reads_labels:
            return value + self.nu * learned.to(value.dtype)
        return value + self.nu * row_values["boundary"] / row_values["positives"].clamp(min=1)

    def anchor_weight(self, row_values: RowValues) -> Tensor:
        """How many terms of its triplets are active."""
        positive, negative = row_values["positive weight"], row_values["negative weight"]
        return (negative * row_values["pulled"] + positive * row_values["pushed"]).clamp(min=INACTIVE)
