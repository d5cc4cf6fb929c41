"""Similarity regression: a similarity that equals a given grade."""

from typing import ClassVar

import torch
from torch import Tensor

from mettle.difficulty.settings import SettingsModule
from mettle.losses.given_pairs import (
    DISTANCES,
    RANGE,
    Likeness,
    check_rows,
    check_target,
    similarity,
    weighted_mean,
)


class SimilarityRegression(SettingsModule):
    r"""Squared error of the similarity of a given pair.

    Formula:
        ℓ = (f(x₁, x₂) − y)²,   f the cosine, the dot product, or minus a distance
    Needs:
        pairs with a grade y: in [−1, 1] for cosines, at most 0 for distances (pass minus the distance), any number
        for dot products.
    Use when:
        grades are more than yes and no: ratings of likeness, measured overlaps, distances to be kept.
    Relations:
        the only one of the three that fixes the scale of f: adding a constant to f changes it.
    """

    measure: Likeness = "cosine"

    takes: ClassVar[str] = "pairs"
    by_row: ClassVar[bool] = True  # items do not see each other: ranks need only their own
    self_contained: ClassVar[bool] = True

    @property
    def range(self) -> tuple[float, float]:
        """The grades that this similarity can reach."""
        return RANGE.get(self.measure, DISTANCES)

    def similarity(self, x1: Tensor, x2: Tensor) -> Tensor:
        """(n,) f(x₁, x₂)."""
        check_rows(x1=x1, x2=x2)
        return similarity(x1, x2, self.measure)

    def from_similarity(self, f: Tensor, target: Tensor) -> Tensor:
        """(n,) one value per pair, from similarities that came from anywhere."""
        return (f - check_target(f, target, *self.range)).square()

    def per_item(self, x1: Tensor, x2: Tensor, target: Tensor) -> Tensor:
        """(n,) one value per pair."""
        return self.from_similarity(self.similarity(x1, x2), target)

    def forward(self, x1: Tensor, x2: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        """The mean over pairs, a scalar with gradient; ``weight`` (n,) counts a pair that often."""
        return weighted_mean(self.per_item(x1, x2, target), weight)

    @torch.no_grad()
    def statistics(self, x1: Tensor, x2: Tensor, target: Tensor) -> dict[str, float]:
        """Mean similarity and root mean squared error of these pairs."""
        f = self.similarity(x1, x2)
        return {"similarity": float(f.mean()), "error": float(self.from_similarity(f, target).mean().sqrt())}
