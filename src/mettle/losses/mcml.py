"""Maximally collapsing metric learning: each class a point, every other class infinitely far."""

import torch
from torch import Tensor

from mettle.losses.base import PairwiseLoss, log_add, zero_if_empty
from mettle.pairs import Difficulty, Measure, Reduction, RowValues, Tile, logsumexp_over, sum_over


class MCML(PairwiseLoss):
    r"""Maximally collapsing metric learning (Globerson and Roweis 2005).

    Formula, d² the squared distance of raw embeddings, P the positives of an anchor:
        L_i = (1/|P|) Σ_p d²_ip + log Σ_a e^{−d²_ia},  a over every other sample
        With a difficulty, weights enter both sums.
    Needs:
        labels; at least two samples of a class. No margin and no temperature: a linear map learns its own scale.
    Use when:
        learning a Mahalanobis matrix. For z = Lx the loss is convex in M = LᵀL, so a search has one valley to find.
    Relations:
        the ``out`` form of `SupCon` with −d² in place of cosine / temperature. With one positive per anchor it is
        neighbourhood components analysis in its logarithmic form.
    """

    difficulty: Difficulty | None = None

    @property
    def measure(self) -> Measure:  # type: ignore[override]
        """Minus the squared distance."""
        return "squared"

    def reductions(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """Pull of the positives; both parts of the denominator."""
        return {
            "pull": sum_over(-tile.similarity, tile.positive),
            "weight": sum_over(1.0, tile.positive),
            "near": logsumexp_over(tile.similarity, tile.positive),
            "far": logsumexp_over(tile.similarity, tile.negative),
            "positives": sum_over(1.0, tile.positive, weighting="mask"),
        }

    def row_loss(self, row_values: RowValues) -> Tensor:
        """Mean pull plus the logarithm of the denominator."""
        weight = torch.where(row_values["weight"] == 0, 1, row_values["weight"])
        return row_values["pull"] / weight + zero_if_empty(log_add(row_values["near"], row_values["far"]))
