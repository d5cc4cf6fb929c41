"""Similarity ranking: of two samples, the one that is more like a third."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from mettle.difficulty.settings import SettingsModule
from mettle.losses.base import require, softplus
from mettle.losses.given_pairs import Likeness, check_rows, similarity, weighted_mean


class SimilarityRanking(SettingsModule):
    r"""The order of two similarities, over given triplets.

    Formula, g = f(x, x₊) − f(x, x₋), m the margin, t the temperature:
        hinge      ℓ = [m − g]₊
        logistic   ℓ = log(1 + e^{−g/t})
        softmax    ℓ = σ(−g/t)²          the triplet network of Hoffer and Ailon, up to its factor 2
    Needs:
        triplets (x, x₊, x₋): x is more like x₊ than like x₋. No grades, no classes.
    Use when:
        people can say which of two is closer, but not how close; or when clicks say it.
    Relations:
        only the gap counts: adding a constant to f changes nothing. ``logistic`` at t = 1 with a distance is
        −log softmax(−d₊, −d₋), NCA with one negative; with cosines it is SupCon at temperature t with one positive
        and one negative. ``hinge`` with a distance is the triplet loss over given triplets.
    """

    form: Literal["hinge", "logistic", "softmax"] = "logistic"
    margin: float = 0.2  # of the hinge
    temperature: float = 0.1  # of the other two
    measure: Likeness = "cosine"

    takes: ClassVar[str] = "triplets"
    by_row: ClassVar[bool] = True  # items do not see each other: ranks need only their own
    self_contained: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.margin >= 0, f"margin must be at least 0, got {self.margin}")
        require(self.temperature > 0, f"temperature must be above 0, got {self.temperature}")

    def similarities(self, x: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        """(n,) f(x, x₊) and (n,) f(x, x₋)."""
        check_rows(x=x, positive=positive, negative=negative)
        return similarity(x, positive, self.measure), similarity(x, negative, self.measure)

    def from_similarity(self, near: Tensor, far: Tensor) -> Tensor:
        """(n,) one value per triplet, from similarities that came from anywhere."""
        gap = near - far
        if self.form == "hinge":
            return (self.margin - gap).clamp(min=0)
        return (
            softplus(-gap / self.temperature) if self.form == "logistic" else (-gap / self.temperature).sigmoid() ** 2
        )

    def per_item(self, x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """(n,) one value per triplet."""
        return self.from_similarity(*self.similarities(x, positive, negative))

    def forward(self, x: Tensor, positive: Tensor, negative: Tensor, weight: Tensor | None = None) -> Tensor:
        """The mean over triplets, a scalar with gradient; ``weight`` (n,) counts a triplet that often."""
        return weighted_mean(self.per_item(x, positive, negative), weight)

    @torch.no_grad()
    def statistics(self, x: Tensor, positive: Tensor, negative: Tensor) -> dict[str, float]:
        """The share of these triplets in the right order (ties count one half), and the mean gap."""
        near, far = self.similarities(x, positive, negative)
        gap = near - far
        right = torch.where(gap.isnan(), torch.nan, (gap > 0).to(gap.dtype) + 0.5 * (gap == 0))
        return {"ordered": float(right.mean()), "gap": float(gap.mean())}
