"""The self-supervised triplet loss without margin, which amplifies bias on purpose."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from mettle.losses.base import Pairwise, need
from mettle.losses.random_negative import Random, check, drawn, highest, winner
from mettle.pairs import Acc, Difficulty, Rows, Sweep, Tile, total
from mettle.pairs.similarity import squared_distance


@dataclass(frozen=True)
class SelfTriplet(Pairwise):
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

    temperature = 1.0
    self_contained = True

    def __post_init__(self) -> None:
        super().__post_init__()
        need(0 <= self.prior < 1, f"prior is a probability in [0, 1), got {self.prior}")
        known = ("sum_N", "mean", "readme", "paired", "one_neg")
        need(self.form in known, f"form must be one of {known}, got {self.form!r}")
        need(self.form != "paired" or self.prior == 0, "form 'paired' has no debiased variant: prior must be 0")
        check(self.random)

    def sweeps(self) -> tuple[Sweep, ...]:
        """One pass; a random negative needs one to draw it and one to look at it."""
        if self.form != "one_neg":
            return (Sweep(self.terms),)
        seed = drawn(self.random)
        return (
            Sweep(lambda tile, rows: highest(tile, seed), reads="rows"),
            Sweep(lambda tile, rows: self.near(tile) | winner(tile, rows, self._far(tile), seed), reads="rows"),
        )

    def _far(self, tile: Tile) -> Tensor:
        return squared_distance(tile, self.measure)

    def near(self, tile: Tile) -> dict[str, Acc]:
        """The positives of each anchor."""
        return {
            "near": total(self._far(tile), tile.pos),
            "weight": total(1.0, tile.pos),
            "positives": total(1.0, tile.pos, weigh="present"),
        }

    def terms(self, tile: Tile, rows: Rows) -> dict[str, Acc]:
        """Squared distances to both sides, and how many there are."""
        return self.near(tile) | {"far": total(self._far(tile), tile.neg), "negatives": total(1.0, tile.neg)}

    def finish(self, rows: Rows) -> Tensor:
        """One line per form."""
        near = rows["near"] / torch.where(rows["weight"] == 0, 1, rows["weight"])
        n, far, p = rows["negatives"], rows["far"], self.prior
        mean = far / torch.where(n == 0, 1, n)
        some = (n > 0).to(near.dtype)  # without negatives there is nothing to correct
        if self.form == "sum_N":
            return near - (far - p * n * near) / (1 - p)
        if self.form == "readme":
            return near - (far - p * near * some) / (1 - p)
        if self.form == "paired":
            return n * near - far
        return near - (mean - p * near * some) / (1 - p)
