"""The self-supervised triplet loss without margin, which amplifies bias on purpose."""

from dataclasses import field
from typing import Literal

import torch
from torch import Tensor

from mettle.losses.base import PairwiseLoss, require
from mettle.pairs import Difficulty, Pass, Reduction, RowValues, Tile, sum_over
from mettle.pairs.random_negative import (
    HasGenerator,
    Random,
    draw_seed,
    max_hash,
    selected_negative,
    validate_generator,
)
from mettle.pairs.similarity import squared_distance


class SelfTriplet(HasGenerator, PairwiseLoss):
    r"""Self-supervised triplet loss for a bias-amplified encoder (Jang and Wang 2023).

    Formula, on unit vectors, p the prior, N the number of negatives, d₊ the distance to a positive (several positives:
    each alone, then their mean):
        sum_N    d₊² − (Σ_n d_n² − p·N·d₊²) / (1 − p)
        mean     d₊² − (mean_n d_n² − p·d₊²) / (1 − p)
        readme   d₊² − (Σ_n d_n² − p·d₊²) / (1 − p)
        paired   Σ_n (d₊² − d_n²), without a prior
        one_neg  as mean, with one negative drawn at random
    Needs:
        two views, sample ids as labels.
    Use when:
        training the second encoder of `Relative`: with no margin and no exponential, far (easy) negatives push
        hardest, so it settles for whatever separates most samples, the spurious attribute first.
    Relations:
        with prior = 0, sum_N is the non-debiased loss. In ``mean`` form the prior only rescales by 1 / (1 − p). Its
        size grows with N in the sum forms: give it an optimiser of its own.
    """

    prior: float = 0.0
    form: Literal["sum_N", "mean", "readme", "paired", "one_neg"] = "sum_N"
    difficulty: Difficulty | None = None
    random: Random = field(default=None, repr=False)

    self_contained = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.prior < 1, f"prior is a probability in [0, 1), got {self.prior}")
        require(self.form != "paired" or self.prior == 0, "form 'paired' has no debiased variant: prior must be 0")
        validate_generator(self.random)

    def passes(self) -> tuple[Pass, ...]:
        """One pass; a random negative needs one to draw it and one to look at it."""
        if self.form != "one_neg":
            return (Pass(self.reductions),)
        seed = draw_seed(self.random)
        return (
            Pass(lambda tile, row_values: max_hash(tile, seed), reads="anchor"),
            Pass(
                lambda tile, row_values: (
                    self.near(tile) | selected_negative(tile, row_values, self._negative_distance(tile), seed)
                ),
                reads="anchor",
            ),
        )

    def _negative_distance(self, tile: Tile) -> Tensor:
        return squared_distance(tile, self.measure)

    def near(self, tile: Tile) -> dict[str, Reduction]:
        """The positives of each anchor."""
        return {
            "near": sum_over(self._negative_distance(tile), tile.positive),
            "weight": sum_over(1.0, tile.positive),
            "positives": sum_over(1.0, tile.positive, weighting="mask"),
        }

    def reductions(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """Squared distances to both sides, and how many there are."""
        return self.near(tile) | {
            "far": sum_over(self._negative_distance(tile), tile.negative),
            "negatives": sum_over(1.0, tile.negative),
        }

    def row_loss(self, row_values: RowValues) -> Tensor:
        """One line per form."""
        near = row_values["near"] / torch.where(row_values["weight"] == 0, 1, row_values["weight"])
        n, far, p = row_values["negatives"], row_values["far"], self.prior
        mean = far / torch.where(n == 0, 1, n)
        some = (n > 0).to(near.dtype)  # without negatives there is nothing to correct
        if self.form == "sum_N":
            return near - (far - p * n * near) / (1 - p)
        if self.form == "readme":
            return near - (far - p * near * some) / (1 - p)
        if self.form == "paired":
            return n * near - far
        return near - (mean - p * near * some) / (1 - p)
