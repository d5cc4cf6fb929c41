"""Lifted structure: each positive pair against the negatives of both of its ends."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.losses.base import Pairwise, log_add, need
from mettle.pairs import Acc, Difficulty, Measure, PairOutput, Rows, Sweep, Tile, lse, total
from mettle.pairs.similarity import distance


@dataclass(frozen=True)
class LiftedStructure(Pairwise):
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

    temperature = 1.0
    self_contained = True

    def __post_init__(self) -> None:
        super().__post_init__()
        need(self.margin >= 0, f"margin must be at least 0, got {self.margin}")

    @property
    def measure(self) -> Measure:  # type: ignore[override]
        """Cosine on the sphere, else the distance itself."""
        return "cosine" if self.normalise else "squared"

    def sweeps(self) -> tuple[Sweep, ...]:
        """The negatives of every row, then the positive pairs between rows."""
        return Sweep(self.terms), Sweep(self.lifted, over="positives", reads="both")

    def terms(self, tile: Tile, rows: Rows) -> dict[str, Acc]:
        """Soft maximum over the negatives of a row."""
        top = max(self.margin, 2 - self.margin) if self.normalise else None  # on the sphere no distance is above 2
        return {"far": lse(self.margin - distance(tile, self.measure), tile.neg, ceiling=top)}

    def lifted(self, tile: Tile, rows: Rows) -> dict[str, Acc]:
        """Each positive pair against the negatives of both ends."""
        far = log_add(*torch.broadcast_tensors(rows["far"], rows["farᵀ"]))
        alone = far == -torch.inf
        j = (distance(tile, self.measure) + far.masked_fill(alone, 0)).clamp(min=0).square()
        return {
            "value": total(j.masked_fill(alone, 0), tile.pos),
            "weight": total(1.0, tile.pos),
            "positives": total(1.0, tile.pos, weigh="present"),
        }

    def finish(self, rows: Rows) -> Tensor:
        """Half the mean over positives."""
        weight = rows["weight"]
        return rows["value"] / (2 * torch.where(weight == 0, 1, weight))

    def share(self, rows: Rows) -> Tensor:
        """The published loss is a mean over positive pairs, so an anchor counts as often as it has positives."""
        return rows["weight"]

    def output(self, embeddings: Tensor, labels: Tensor, **options) -> PairOutput:  # type: ignore[override]
        """As for every pairwise loss, but never against a reference set."""
        if options.get("ref") is not None:
            raise InputError(
                "the lifted structured loss has no form against a reference set: compare a batch with itself"
            )
        return super().output(embeddings, labels, **options)
