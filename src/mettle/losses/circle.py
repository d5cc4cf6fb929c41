"""Circle loss: every similarity is weighed by how far it is from its optimum."""

import torch
from torch import Tensor

from mettle.losses.base import PairwiseLoss, require, softplus, zero_if_empty
from mettle.pairs import (
    CircleSpec,
    Difficulty,
    KernelWeights,
    Reduction,
    RowValues,
    Tile,
    logsumexp_over,
    sum_over,
)


class Circle(PairwiseLoss):
    r"""Circle loss over the pairs of a batch (Sun et al. 2020).

    Formula, s the cosine, γ = ``gamma``:
        L_i = log(1 + Σ_n e^{γ a_in (s_in − m)} · Σ_p e^{−γ a_ip (s_ip − 1 + m)})
        a_ip = [1 + m − s_ip]₊,  a_in = [s_in + m]₊:  how far a similarity is from its optimum, 1 + m or −m
        As published, a is a constant for the gradient; ``stop_gradient=False`` differentiates it too.
    Needs:
        labels; positives and negatives in the batch. Embeddings are normalised inside. Without negatives it is 0.
    Use when:
        positives and negatives differ in how far they have come: each pair is pulled at its own pace.
    Relations:
        one positive and one negative: the loss is log 2 on the circle s_n² + (1 − s_p)² = 2m². With all a = 1 it is
        the softplus of γ (s_n − s_p + 1 − 2m), a plain margin.
    """

    m: float = 0.4
    gamma: float = 80.0
    difficulty: Difficulty | None = None
    stop_gradient: bool = True

    self_contained = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.m < 1, f"m must be in [0, 1), got {self.m}")
        require(self.gamma > 0, f"gamma must be above 0, got {self.gamma}")

    def reductions(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """Similarities times their distance to the optimum."""
        s, m = tile.similarity, self.m
        known = s.detach() if self.stop_gradient else s
        pull = (1 + m - known).clamp(min=0) * (s - 1 + m)
        push = (known + m).clamp(min=0) * (s - m)
        return {
            "positives": sum_over(1.0, tile.positive, weighting="mask"),
            "near": logsumexp_over(-self.gamma * pull, tile.positive),
            "far": logsumexp_over(self.gamma * push, tile.negative),
        }

    def row_loss(self, row_values: RowValues) -> Tensor:
        """Both sums against each other."""
        near, far = row_values["near"], row_values["far"]
        alone = (near == -torch.inf) | (far == -torch.inf)
        return softplus(zero_if_empty(near) + zero_if_empty(far)).masked_fill(alone, 0)

    def kernel_spec(self, weights: KernelWeights | None) -> CircleSpec:
        """The formula itself."""
        return CircleSpec(self.m, self.gamma, self.stop_gradient, weights)
