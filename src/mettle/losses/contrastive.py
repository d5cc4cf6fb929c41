"""Contrastive loss: positives closer than one margin, negatives farther than another."""

from dataclasses import field
from typing import Literal

import torch
from torch import Tensor

from mettle.losses.base import PairwiseLoss, require
from mettle.losses.distances import Metric, check_metric, tile_distance, tile_measure
from mettle.pairs import Difficulty, HingeSpec, KernelWeights, Measure, NoKernel, Reduction, RowValues, Tile, sum_over
from mettle.pairs.similarity import squared_distance


class Contrastive(PairwiseLoss):
    r"""Contrastive loss with a positive and a negative margin (Hadsell et al. 2006 and variants).

    Formula, d the Euclidean distance or another ``metric``, m₊ and m₋ the margins:
        squared   positives [d² − m₊²]₊     negatives [m₋² − d²]₊
        hadsell   positives [d − m₊]₊²      negatives [m₋ − d]₊²
        linear    positives [d − m₊]₊       negatives [m₋ − d]₊
        L_i = mean over positives + mean over negatives; without negatives, the mean over positives alone. An anchor
        without positives is left out of the mean, as in every pairwise loss.
    Needs:
        labels. ``normalise`` puts embeddings on the unit sphere, where distances are at most 2.
    Use when:
        pairs are all there is, or a fixed threshold on distance is wanted. Prefer ``hadsell`` or ``linear``: the
        push of ``squared`` fades as a negative nears its anchor, so it hardly escapes. (Exactly coincident points
        have no direction to move in, in any form.)
    Relations:
        the three forms agree on which pairs are active. A positive margin above 0 keeps some spread inside a class.
    """

    positive: float = 0.0
    negative: float = 1.0
    form: Literal["squared", "hadsell", "linear"] = "hadsell"
    normalise: bool = True
    difficulty: Difficulty | None = None
    l1: bool = False  # L1 distance of raw embeddings instead of Euclidean (dense engine only)
    metric: Metric = field(default="euclidean", kw_only=True)

    self_contained = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_metric(self.metric, normalise=self.normalise, squared=self.form == "squared")
        require(not (self.l1 and self.metric != "euclidean"), "l1 and metric both name a distance: give one of them")
        require(self.negative > 0 or self.metric == "dot", f"negative margin must be above 0, got {self.negative}")
        require(
            self.positive >= 0 or self.form == "linear",
            f"positive margin must be at least 0 in form {self.form!r}, got {self.positive}",
        )
        require(
            not (self.l1 and self.form == "squared"),
            "form 'squared' has no L1 variant: use 'hadsell' or 'linear'",
        )

        require(
            not (self.l1 and self.normalise), "L1 distances are of raw embeddings: set normalise=False with l1=True"
        )

    @property
    def measure(self) -> Measure:  # type: ignore[override]
        """Cosine on the sphere, else the distance itself."""
        return "l1" if self.l1 else tile_measure(self.metric, normalise=self.normalise)

    def reductions(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """Hinges on both sides."""
        found = {
            "positives": sum_over(1.0, tile.positive, weighting="mask"),
            "positive_weight": sum_over(1.0, tile.positive),
            "negative_weight": sum_over(1.0, tile.negative),
        }
        if self.form == "squared":
            d = squared_distance(tile, self.measure)
            pull, push = d - self.positive**2, self.negative**2 - d
        else:
            d = tile_distance(tile, self.metric, self.measure)
            pull, push = d - self.positive, self.negative - d
        pull, push = pull.clamp(min=0), push.clamp(min=0)
        if self.form == "hadsell":
            pull, push = pull.square(), push.square()
        return found | {"pull": sum_over(pull, tile.positive), "push": sum_over(push, tile.negative)}

    def row_loss(self, row_values: RowValues) -> Tensor:
        """Mean over each side."""
        positive, negative = (row_values[f"{side}_weight"] for side in ("positive", "negative"))
        pull = row_values["pull"] / torch.where(positive == 0, 1, positive)
        return pull + row_values["push"] / torch.where(negative == 0, 1, negative)

    def kernel_spec(self, weights: KernelWeights | None) -> HingeSpec | NoKernel:
        """On the sphere, where all pairs count alike."""
        if weights is not None or self.measure != "cosine" or self.metric != "euclidean":
            return NoKernel("the kernels know hinges on unit vectors, without a difficulty")
        return HingeSpec(self.positive, self.negative, self.form)
