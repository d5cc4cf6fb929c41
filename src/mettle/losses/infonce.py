"""InfoNCE: one positive against the negatives; with a prior, debiased."""

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from mettle.losses.base import SoftmaxLoss, log_share, require, softplus
from mettle.pairs import (
    Difficulty,
    KernelWeights,
    NoKernel,
    PairStatistics,
    Pass,
    Reduction,
    RowValues,
    SoftmaxSpec,
    Tile,
    logsumexp_over,
    sum_over,
)
from mettle.pairs.declarations import declared_traits
from mettle.pairs.validation import stack_views


class InfoNCE(SoftmaxLoss):
    r"""InfoNCE, also called NT-Xent or the SimCLR loss; debiased contrastive loss with a ``prior``.

    Formula, with x = cosine / temperature, R = Σ_n w e^x over the negatives and N their number:
        L_ip = −log( e^{x_ip} / (e^{x_ip} + G) ),  G = R, or with a prior
        G = max( (R − prior·N·e^{x_ip}) / (1 − prior), N·e^{−1/temperature} )
        L_i = mean over positives p of L_ip: each positive alone against the negatives.
        The prior is the chance that a "negative" is really of the anchor's class; the maximum keeps the corrected sum
        above its smallest possible value, and where it acts the negatives get no gradient (``clamp_fraction``).
        With soft ``targets`` t in the call, a pair is a positive by t and a negative by 1 − t:
        R_i = Σ_j (1 − t_ij) e^{x_ij}, N = Σ_j (1 − t_ij), L_i = Σ_j t_ij L_ij / Σ_j t_ij.
    Needs:
        labels, or two views with the sample ids as labels. Embeddings are normalised inside.
    Use when:
        training without labels from augmented views.
    Pairs well with:
        `Importance` (hard-negative contrastive learning, HCL), `Relative` (difficulty-based debiasing, WCL).
    Relations:
        prior = 0: SimCLR. prior > 0: DCL as in *debiased* contrastive learning (Chuang et al. 2020), not the
        *decoupled* loss of the same acronym. ``count`` says what N is: ``weight`` counts a negative as often as it
        weighs, ``plain`` counts it once; by default the difficulty decides (importance weights: plain).
    """

    temperature: float = 0.5
    prior: float = 0.0
    difficulty: Difficulty | None = None
    count: Literal["plain", "weight"] | None = None

    self_contained = True
    takes_targets = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.prior < 1, f"prior is a probability in [0, 1), got {self.prior}")
        require(
            self.prior == 0 or self.measure == "cosine",
            f"a prior corrects a sum down to that of the least cosine: measure must be 'cosine', got {self.measure!r}",
        )

    @property
    def negative_count(self) -> Literal["plain", "weight"]:
        """How the prior counts negatives."""
        return self.count or declared_traits(self.difficulty).negatives

    def passes(self) -> tuple[Pass, ...]:
        """The negatives first, then every positive against them."""
        return Pass(self.reductions), Pass(self.positives, over="positives", reads="anchor")

    def reductions(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """The negatives of each anchor."""
        if tile.target is not None:
            rest = 1 - tile.target
            return {
                "negatives_lse": logsumexp_over(self.logits(tile) + log_share(rest), tile.negative),
                "negatives": sum_over(rest, tile.negative),
            }
        weighting = "weight" if self.negative_count == "weight" else "mask"
        return {
            "negatives_lse": logsumexp_over(self.logits(tile), tile.negative, bound=self.logit_bound),
            "negatives": sum_over(1.0, tile.negative, weighting=weighting),
        }

    def positives(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """Each positive alone against them."""
        x = self.logits(tile)
        far, clamped = self.debiased_log_sum(x, row_values["negatives_lse"], row_values["negatives"])
        # No negatives: nothing to be told apart from, so the loss is 0.
        alone = far == -torch.inf
        value = softplus(far.masked_fill(alone, 0) - x).masked_fill(alone, 0)
        share = 1.0 if tile.target is None else tile.target
        return {
            "value": sum_over(share * value, tile.positive),
            "positive_weight": sum_over(share, tile.positive),
            "positives": sum_over(1.0, tile.positive, weighting="mask"),
            "clamped": sum_over(clamped.to(x.dtype).expand_as(x), tile.positive, weighting="mask"),
        }

    def debiased_log_sum(self, x: Tensor, far: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Log G for each positive, and where the maximum holds it up."""
        if self.prior == 0:
            return far.expand_as(x), torch.zeros_like(x, dtype=torch.bool)
        there = far > -torch.inf
        far = far.masked_fill(~there, 0)
        floor = torch.where(there, count, 1).log() - 1 / self.current_temperature()
        taken = x + torch.where(there, count, 1).log() + math.log(self.prior) - far  # log of what is subtracted, over R
        left = taken < 0
        rest = torch.log1p(-torch.where(left, taken, -1).exp()) + far - math.log1p(-self.prior)
        free = left & (rest > floor)
        value = torch.where(free, torch.where(free, rest, 0), floor.expand_as(x))
        return torch.where(there, value, -torch.inf), there & ~free

    def row_loss(self, row_values: RowValues) -> Tensor:
        """Mean over positives."""
        weight = row_values["positive_weight"]
        return row_values["value"] / torch.where(weight == 0, 1, weight)

    def kernel_spec(self, weights: KernelWeights | None) -> SoftmaxSpec | NoKernel:
        """The same, with any weights."""
        if self.learn_temperature and self.prior > 0:
            return NoKernel("the least value of a debiased sum moves with a learned temperature")
        if (refusal := self.refuse_learning(weights)) is not None:
            return refusal
        return SoftmaxSpec(
            "infonce",
            self.temperature,
            weights,
            prior=self.prior,
            negatives=self.negative_count,
            log_temperature=self.learned_log_temperature(),
        )

    def statistics(
        self, embeddings: Tensor, labels: Tensor | None, *, views: bool = False, **options: Any
    ) -> PairStatistics:
        """What the difficulty did to this batch, and for which share of positive pairs the maximum acted."""
        if views:
            embeddings, labels, options["biased"] = stack_views(embeddings, labels, options.get("biased"))
        found = super().statistics(embeddings, labels, **options)
        row_values = self.row_values(embeddings, labels, **options)
        share = row_values["clamped"].sum() / row_values["positives"].sum().clamp(min=1)
        return replace(found, clamp_fraction=float(share))
