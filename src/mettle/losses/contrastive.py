"""Contrastive loss: positives closer than one margin, negatives farther than another."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mettle.losses.base import Pairwise, need
from mettle.pairs import Acc, Difficulty, HingeSpec, KernelWeights, Measure, NoKernel, Rows, Tile, total
from mettle.pairs.similarity import distance, squared_distance


@dataclass(frozen=True)
class Contrastive(Pairwise):
    r"""Contrastive loss with a positive and a negative margin (Hadsell et al. 2006 and variants).

    Formula, d the Euclidean distance, m₊ and m₋ the margins:
        squared   positives [d² − m₊²]₊     negatives [m₋² − d²]₊
        hadsell   positives [d − m₊]₊²      negatives [m₋ − d]₊²
        linear    positives [d − m₊]₊       negatives [m₋ − d]₊
        L_i = mean over positives + mean over negatives (a side that is absent adds 0)
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

    temperature = 1.0
    self_contained = True

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ("squared", "hadsell", "linear")
        need(self.form in known, f"form must be one of {known}, got {self.form!r}")
        need(self.negative > 0, f"negative margin must be above 0, got {self.negative}")
        need(
            self.positive >= 0 or self.form == "linear",
            f"positive margin must be at least 0 in form {self.form!r}, got {self.positive}",
        )
        need(
            not (self.l1 and self.form == "squared"),
            "form 'squared' has no L1 variant: use 'hadsell' or 'linear'",
        )

        need(not (self.l1 and self.normalise), "L1 distances are of raw embeddings: set normalise=False with l1=True")

    @property
    def measure(self) -> Measure:  # type: ignore[override]
        """Cosine on the sphere, else the distance itself."""
        return "l1" if self.l1 else "cosine" if self.normalise else "squared"

    def terms(self, tile: Tile, rows: Rows) -> dict[str, Acc]:
        """Hinges on both sides."""
        found = {
            "positives": total(1.0, tile.pos, weigh="present"),
            "near": total(1.0, tile.pos),
            "far": total(1.0, tile.neg),
        }
        if self.form == "squared":
            d = squared_distance(tile, self.measure)
            pull, push = d - self.positive**2, self.negative**2 - d
        else:
            d = distance(tile, self.measure)
            pull, push = d - self.positive, self.negative - d
        pull, push = pull.clamp(min=0), push.clamp(min=0)
        if self.form == "hadsell":
            pull, push = pull.square(), push.square()
        return found | {"pull": total(pull, tile.pos), "push": total(push, tile.neg)}

    def finish(self, rows: Rows) -> Tensor:
        """Mean over each side."""
        near, far = (torch.where(rows[side] == 0, 1, rows[side]) for side in ("near", "far"))
        return rows["pull"] / near + rows["push"] / far

    def kernel_spec(self, weights: KernelWeights | None) -> HingeSpec | NoKernel:
        """On the sphere, where all pairs count alike."""
        if weights is not None or self.measure != "cosine":
            return NoKernel("the kernels know hinges on unit vectors, without a difficulty")
        return HingeSpec(self.positive, self.negative, self.form)
