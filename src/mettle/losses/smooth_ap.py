"""Smooth-AP: average precision with a sigmoid in place of the comparison of two similarities."""

from dataclasses import field

import torch
from torch import Tensor

from mettle.losses.base import PairwiseLoss, require
from mettle.pairs import Difficulty, Measure, Pass, Reduction, RowValues, Tile, gather_over, sum_over


class SmoothAP(PairwiseLoss):
    r"""Smoothed average precision (Brown et al. 2020).

    Formula, s the cosine, σ the sigmoid, t = ``temperature``, each anchor the query of a search among all others:
        R(p, S) = 1 + Σ_{j∈S, j≠p} σ((s_ij − s_ip) / t)      the smooth rank of positive p among S
        L_i = 1 − (1/|P|) Σ_p R(p, P) / R(p, P ∪ N)
    Needs:
        labels; classes may differ in size. Embeddings are normalised inside.
    Use when:
        retrieval is judged by average precision. Batches should hold several samples of a class.
    Relations:
        t → 0: one minus the average precision of the anchor. With a single positive it is 1 − 1/R, which no
        difference of two similarities beyond a few t changes any more.
    """

    temperature: float = 0.01
    difficulty: Difficulty | None = None
    measure: Measure = field(default="cosine", kw_only=True)  # type: ignore[misc]

    self_contained = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.temperature > 0, f"temperature must be above 0, got {self.temperature}")

    def passes(self) -> tuple[Pass, ...]:
        """The positives of every row, then the negatives that stand before each of them."""
        return Pass(self.positive_similarities), Pass(self.reductions, reads="anchor")

    def positive_similarities(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """The positives of each anchor and their weights."""
        return {
            "positives": sum_over(1.0, tile.positive, weighting="mask"),
            "near": gather_over(tile.similarity, tile.positive),
            "near weight": gather_over(1.0, tile.positive, weighting="weight"),
        }

    def reductions(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """How many negatives stand before each positive."""
        before = torch.sigmoid((tile.similarity[..., None] - row_values["near"]) / self.temperature)
        return {"negatives before": sum_over(before, tile.negative)}

    def row_loss(self, row_values: RowValues) -> Tensor:
        """One minus the mean precision at the positives.

        A positive stands before itself with σ(0) = ½, so that its rank is ½ plus the sum over all positives, itself
        included: with that, a positive of weight 2 ranks as if it were listed twice.
        """
        near, weight = row_values["near"], row_values["near weight"]
        before = torch.sigmoid((near[:, None, :] - near[:, :, None]) / self.temperature)
        rank = 0.5 + (before * weight[:, None, :]).sum(2)
        precision = rank / (rank + row_values["negatives before"])
        total = weight.sum(1)
        return 1 - (precision * weight).sum(1) / torch.where(total == 0, 1, total)
