"""Multi-similarity loss: a soft maximum over the hard positives and one over the hard negatives of an anchor."""

import math
from dataclasses import field

from torch import Tensor

from mettle.losses.base import PairwiseLoss, require, softplus
from mettle.pairs import (
    Difficulty,
    KernelWeights,
    Measure,
    Reduction,
    RowValues,
    Tile,
    TwoSidedSpec,
    logsumexp_over,
    sum_over,
)


class MultiSimilarity(PairwiseLoss):
    r"""Multi-similarity loss (Wang et al. 2019).

    Formula, s the cosine, α = ``alpha``, β = ``beta``, λ = ``base``:
        L_i = (1/α) log(1 + Σ_p e^{−α (s_ip − λ)}) + (1/β) log(1 + Σ_n e^{β (s_in − λ)})
    Needs:
        labels; at least two samples of a class in the batch. Embeddings are normalised inside.
    Use when:
        classes have several samples in a batch and a few hard pairs should count most.
    Relations:
        for large α and β it is [λ − min s_ip]₊ + [max s_in − λ]₊: batch-hard, with a fixed boundary at λ.
        `ProxyAnchor` has the same two sums, from class vectors to samples.
    """

    alpha: float = 2.0
    beta: float = 50.0
    base: float = 0.5
    difficulty: Difficulty | None = None
    measure: Measure = field(default="cosine", kw_only=True)  # type: ignore[misc]

    self_contained = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.alpha > 0, f"alpha must be above 0, got {self.alpha}")
        require(self.beta > 0, f"beta must be above 0, got {self.beta}")

    def reductions(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """Positives below the base, and negatives above it, count exponentially."""
        x, farthest = tile.similarity - self.base, 1 + abs(self.base) if self.measure == "cosine" else math.inf
        return {
            "positives": sum_over(1.0, tile.positive, weighting="mask"),
            "near": logsumexp_over(-self.alpha * x, tile.positive, bound=self.alpha * farthest),
            "far": logsumexp_over(self.beta * x, tile.negative, bound=self.beta * farthest),
        }

    def row_loss(self, row_values: RowValues) -> Tensor:
        """One logarithm for each side; an empty sum adds nothing."""
        return softplus(row_values["near"]) / self.alpha + softplus(row_values["far"]) / self.beta

    def kernel_spec(self, weights: KernelWeights | None) -> TwoSidedSpec:
        """Two sums of exponentials."""
        return TwoSidedSpec(self.alpha, self.beta, self.base, self.base, 1 / self.alpha, 1 / self.beta, weights)
