"""Hard negatives by importance: exponential in similarity."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mettle.difficulty.settings import validate_fields
from mettle.errors import InputError
from mettle.pairs import ExponentialWeights, Reduction, RowValues, Tile, Traits, logsumexp_over, sum_over

MIN_LOG_WEIGHT = (
    -41.0
)  # log of the smallest weight: e^-41 is no more than a rounding in float64, and far from underflow


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
        validate_fields(self)
        if not self.beta >= 0:
            raise InputError(f"beta must be at least 0, got {self.beta}")

    def log_weight(self, tile: Tile) -> Tensor:
        """Log of the weight before division by the row's mean: lets the engine weigh without a pass for the mean."""
        return tile.similarity * (self.beta / tile.temperature)

    def log_weight_bound(self, temperature: float) -> float:
        """A bound of its size."""
        return self.beta / temperature

    def row_statistics(self, tile: Tile) -> dict[str, Reduction]:
        """The mean of the unnormalised weights."""
        power = self.beta / tile.temperature
        bound = None if isinstance(power, Tensor) else power  # a learned temperature has none
        log_sum = logsumexp_over(tile.similarity * power, tile.negative, bound=bound)
        return {"sum": log_sum, "count": sum_over(1.0, tile.negative)}

    def weights(self, tile: Tile, row_values: RowValues) -> Tensor:
        """(a, b) weights."""
        some = row_values["count"] > 0
        mean = torch.where(some, row_values["sum"], 0) - torch.where(some, row_values["count"], 1).log()
        # No negative can weigh more than all of them together; a positive could, and is not meant.
        most = torch.where(some, row_values["count"], 1).log() + 1
        # And none weighs nothing, because a weight of 0 means that the pair is not there.
        w = torch.minimum(tile.similarity * (self.beta / tile.temperature) - mean, most).clamp(min=MIN_LOG_WEIGHT).exp()
        return w if tile.positive is False else torch.where(tile.positive, 1, w)  # type: ignore[arg-type]

    def kernel_weights(self) -> ExponentialWeights:
        """The same exponential."""
        return ExponentialWeights(self.beta, differentiable=not self.detach)
