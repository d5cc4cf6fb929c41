"""Lifted structure: each positive pair against the negatives of both of its ends."""

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.losses.base import PairwiseLoss, log_add, require
from mettle.pairs import Difficulty, Measure, PairOutput, Pass, Reduction, RowValues, Tile, logsumexp_over, sum_over
from mettle.pairs.similarity import distance


class LiftedStructure(PairwiseLoss):
    r"""Lifted structured loss (Oh Song et al. 2016).

    Formula, D the distance, m the margin, P the positive pairs:
        J_ij = D_ij + log( Σ_{k∈N(i)} e^{m − D_ik} + Σ_{l∈N(j)} e^{m − D_jl} )
        L_i = Σ_j [J_ij]₊² / (2 |P(i)|);  L = Σ over all positive pairs [J]₊² / (2 |P|)
    Needs:
        labels. Embeddings are used as they are unless ``normalise``.
    Use when:
        a soft maximum over all negatives is wanted in place of the single hardest one.
    Relations:
        the log-sum-exp is an upper bound of the hardest negative's m − D. Not available against a reference set:
        the negatives of a reference would be needed too.
    """

    margin: float = 1.0
    normalise: bool = False
    difficulty: Difficulty | None = None

    self_contained = True
    takes_references = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.margin >= 0, f"margin must be at least 0, got {self.margin}")

    @property
    def measure(self) -> Measure:  # type: ignore[override]
        """Cosine on the sphere, else the distance itself."""
        return "cosine" if self.normalise else "squared"

    def passes(self) -> tuple[Pass, ...]:
        """The negatives of every row, then the positive pairs between rows."""
        return Pass(self.reductions), Pass(self.positive_reductions, over="positives", reads="both")

    def reductions(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """Soft maximum over the negatives of a row."""
        top = max(self.margin, 2 - self.margin) if self.normalise else None  # on the sphere no distance is above 2
        return {"far": logsumexp_over(self.margin - distance(tile, self.measure), tile.negative, bound=top)}

    def positive_reductions(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """Each positive pair against the negatives of both ends."""
        far = log_add(*torch.broadcast_tensors(row_values["far"], row_values["farᵀ"]))
        alone = far == -torch.inf
        j = (distance(tile, self.measure) + far.masked_fill(alone, 0)).clamp(min=0).square()
        return {
            "value": sum_over(j.masked_fill(alone, 0), tile.positive),
            "weight": sum_over(1.0, tile.positive),
            "positives": sum_over(1.0, tile.positive, weighting="mask"),
        }

    def row_loss(self, row_values: RowValues) -> Tensor:
        """Half the mean over positives."""
        weight = row_values["weight"]
        return row_values["value"] / (2 * torch.where(weight == 0, 1, weight))

    def anchor_weight(self, row_values: RowValues) -> Tensor:
        """The published loss is a mean over positive pairs, so an anchor counts as often as it has positives."""
        return row_values["weight"]

    def output(self, embeddings: Tensor, labels: Tensor, **options) -> PairOutput:  # type: ignore[override]
        """As for every pairwise loss, but never against a reference set."""
        if options.get("ref") is not None:
            raise InputError(
                "the lifted structured loss has no form against a reference set: compare a batch with itself"
            )
        return super().output(embeddings, labels, **options)
