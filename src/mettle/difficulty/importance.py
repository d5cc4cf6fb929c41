"""Hard negatives by importance: exponential in similarity."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mettle.difficulty.validation import settings
from mettle.errors import InputError
from mettle.pairs import Acc, ExponentialWeights, Rows, Tile, Traits, lse, total

LEAST = -41.0  # log of the smallest weight: e^-41 is no more than a rounding in float64, and far from underflow


@dataclass(frozen=True)
class Importance:
    r"""Weights of hard-negative contrastive learning (HCL, Robinson et al. 2021).

    Formula:
        negatives  w_ij = e^{beta·s_ij/t} / mean over the anchor's negatives of the same, t the loss's temperature
        positives  w = 1
    Use when:
        training without labels and negatives are plenty. Published values lie between 0.5 and 2; too much hurts.
    Relations:
        beta = 0 changes nothing; beta → ∞ leaves the hardest negative, N times. Not detached, as published.
    """

    beta: float = 1.0
    detach: bool = False

    # The number of negatives is not what they weigh: the weights re-sample the same negatives.
    traits = Traits(trusted=True, self_contained=True, negatives="plain")

    def __post_init__(self) -> None:
        settings(self)
        if not self.beta >= 0:
            raise InputError(f"beta must be at least 0, got {self.beta}")

    def log_weight(self, tile: Tile) -> Tensor:
        """Log of the weight before division by the row's mean: lets the engine weigh without a pass for the mean."""
        return tile.s * (self.beta / tile.temperature)

    def ceiling(self, temperature: float) -> float:
        """A bound of its size."""
        return self.beta / temperature

    def stats(self, tile: Tile) -> dict[str, Acc]:
        """The mean of the unnormalised weights."""
        power = self.beta / tile.temperature
        return {"sum": lse(tile.s * power, tile.neg, ceiling=power), "count": total(1.0, tile.neg)}

    def weigh(self, tile: Tile, rows: Rows) -> Tensor:
        """(a, b) weights."""
        some = rows["count"] > 0
        mean = torch.where(some, rows["sum"], 0) - torch.where(some, rows["count"], 1).log()
        # No negative can weigh more than all of them together; a positive could, and is not meant.
        most = torch.where(some, rows["count"], 1).log() + 1
        # And none weighs nothing, because a weight of 0 means that the pair is not there.
        w = torch.minimum(tile.s * (self.beta / tile.temperature) - mean, most).clamp(min=LEAST).exp()
        return w if tile.pos is False else torch.where(tile.pos, 1, w)  # type: ignore[arg-type]

    def kernel_weights(self) -> ExponentialWeights:
        """The same exponential."""
        return ExponentialWeights(self.beta, differentiable=not self.detach)
