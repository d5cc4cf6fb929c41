"""InfoNCE: one positive against the negatives; with a prior, debiased."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mettle.losses.base import Pairwise, need, softplus
from mettle.pairs import Acc, Difficulty, KernelWeights, PairFacts, Rows, SoftmaxSpec, Sweep, Tile, lse, total
from mettle.pairs.declarations import traits_of
from mettle.pairs.validation import stacked


@dataclass(frozen=True)
class InfoNCE(Pairwise):
    r"""InfoNCE, also called NT-Xent or the SimCLR loss; debiased contrastive loss with a ``prior``.

    Formula, with x = cosine / temperature, R = Σ_n w e^x over the negatives and N their number:
        L_ip = −log( e^{x_ip} / (e^{x_ip} + G) ),  G = R, or with a prior
        G = max( (R − prior·N·e^{x_ip}) / (1 − prior), N·e^{−1/temperature} )
        L_i = mean over positives p of L_ip: each positive alone against the negatives.
        The prior is the chance that a "negative" is really of the anchor's class; the maximum keeps the corrected sum
        above its smallest possible value, and where it acts the negatives get no gradient (``clamp_fraction``).
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

    def __post_init__(self) -> None:
        super().__post_init__()
        need(self.temperature > 0, f"temperature must be above 0, got {self.temperature}")
        need(0 <= self.prior < 1, f"prior is a probability in [0, 1), got {self.prior}")
        known = (None, "plain", "weight")
        need(self.count in known, f"count must be one of {known}, got {self.count!r}")

    @property
    def counted(self) -> Literal["plain", "weight"]:
        """How the prior counts negatives."""
        return self.count or traits_of(self.difficulty).negatives

    def sweeps(self) -> tuple[Sweep, ...]:
        """The negatives first, then every positive against them."""
        return Sweep(self.terms), Sweep(self.positives, over="positives", reads="rows")

    def terms(self, tile: Tile, rows: Rows) -> dict[str, Acc]:
        """The negatives of each anchor."""
        weigh = "full" if self.counted == "weight" else "present"
        return {
            "far": lse(tile.s / self.temperature, tile.neg, ceiling=1 / self.temperature),
            "negatives": total(1.0, tile.neg, weigh=weigh),
        }

    def positives(self, tile: Tile, rows: Rows) -> dict[str, Acc]:
        """Each positive alone against them."""
        x = tile.s / self.temperature
        far, clamped = self.against(x, rows["far"], rows["negatives"])
        # No negatives: nothing to be told apart from, so the loss is 0.
        alone = far == -torch.inf
        value = softplus(far.masked_fill(alone, 0) - x).masked_fill(alone, 0)
        return {
            "value": total(value, tile.pos),
            "weight": total(1.0, tile.pos),
            "positives": total(1.0, tile.pos, weigh="present"),
            "clamped": total(clamped.to(x.dtype).expand_as(x), tile.pos, weigh="present"),
        }

    def against(self, x: Tensor, far: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Log G for each positive, and where the maximum holds it up."""
        if self.prior == 0:
            return far.expand_as(x), torch.zeros_like(x, dtype=torch.bool)
        there = far > -torch.inf
        far = far.masked_fill(~there, 0)
        floor = torch.where(there, count, 1).log() - 1 / self.temperature
        taken = x + torch.where(there, count, 1).log() + math.log(self.prior) - far  # log of what is subtracted, over R
        left = taken < 0
        rest = torch.log1p(-torch.where(left, taken, -1).exp()) + far - math.log1p(-self.prior)
        free = left & (rest > floor)
        value = torch.where(free, torch.where(free, rest, 0), floor.expand_as(x))
        return torch.where(there, value, -torch.inf), there & ~free

    def finish(self, rows: Rows) -> Tensor:
        """Mean over positives."""
        weight = rows["weight"]
        return rows["value"] / torch.where(weight == 0, 1, weight)

    def kernel_spec(self, weights: KernelWeights | None) -> SoftmaxSpec:
        """The same, with any weights."""
        return SoftmaxSpec("infonce", self.temperature, weights, prior=self.prior, negatives=self.counted)

    def facts(self, embeddings: Tensor, labels: Tensor, *, views: bool = False, **options: Any) -> PairFacts:
        """What the difficulty did to this batch, and for which share of positive pairs the maximum acted."""
        if views:
            embeddings, labels, options["biased"] = stacked(embeddings, labels, options.get("biased"))
        found = super().facts(embeddings, labels, **options)
        rows = self.rows(embeddings, labels, **options)
        share = rows["clamped"].sum() / rows["positives"].sum().clamp(min=1)
        return replace(found, clamp_fraction=float(share))
