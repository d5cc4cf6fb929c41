"""Hard positives below one similarity, hard negatives above another."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mettle.difficulty.validation import settings
from mettle.errors import InputError
from mettle.pairs import Acc, LinearWeights, Rows, Tile, Traits


@dataclass(frozen=True)
class Threshold:
    r"""Weights that grow with the distance from a threshold.

    Formula:
        positives  w = 1 + alpha · [(positive − s) / positive]₊     (1 once s reaches ``positive``)
        negatives  w = 1 + beta · [(s − negative) / (1 − negative)]₊   (1 while s stays below ``negative``)
        ``form="literal"`` leaves out the [·]₊: easy pairs then count less than 1. Positive weights may turn negative,
        as printed; negative ones stop at 0, because they multiply terms of a sum under a logarithm.
    Use when:
        similarities are cosines and a few pairs stay hard: recognition across devices, sessions, domains.
    Relations:
        alpha = beta = 0 changes nothing. Inside a softmax denominator a weight is an additive margin of
        temperature · log w, at most temperature · log(1 + beta).
    """

    alpha: float = 1.0
    beta: float = 2.0
    positive: float = 0.7
    negative: float = 0.3
    form: Literal["hinge", "literal"] = "hinge"
    detach: bool = True

    # SupCon lets its positive weights act in the numerator: difficulty-aware SupCon.
    traits = Traits(symmetric=True, trusted=True, self_contained=True, positive_weights="numerator")

    def __post_init__(self) -> None:
        settings(self)
        if not (self.alpha >= 0 and self.beta >= 0):
            raise InputError(f"alpha and beta must be at least 0, got {self.alpha} and {self.beta}")
        if not 0 < self.positive <= 1:
            raise InputError(f"positive is a cosine in (0, 1], got {self.positive}")
        if not -1 <= self.negative < 1:
            raise InputError(f"negative is a cosine in [-1, 1), got {self.negative}")
        if self.form not in ("hinge", "literal"):
            raise InputError(f"form must be 'hinge' or 'literal', got {self.form!r}")

    def stats(self, tile: Tile) -> dict[str, Acc]:
        """No row facts are needed."""
        return {}

    def weigh(self, tile: Tile, rows: Rows) -> Tensor:
        """(a, b) weights."""
        if tile.pos is False:
            return self._negative(tile.s)
        return torch.where(tile.pos, self._positive(tile.s), self._negative(tile.s))  # type: ignore[arg-type]

    def _positive(self, s: Tensor) -> Tensor:
        excess = (self.positive - s) * (self.alpha / self.positive)
        return 1 + (excess.clamp(min=0) if self.form == "hinge" else excess)

    def _negative(self, s: Tensor) -> Tensor:
        excess = (s - self.negative) * (self.beta / (1 - self.negative))
        return 1 + excess.clamp(min=0 if self.form == "hinge" else -1)

    def kernel_weights(self) -> LinearWeights:
        """Two lines, each with its floor."""
        hinge = self.form == "hinge"
        return LinearWeights(
            negative_slope=self.beta / (1 - self.negative),
            negative_threshold=self.negative,
            negative_floor=0.0 if hinge else -1.0,
            positive_slope=self.alpha / self.positive,
            positive_threshold=self.positive,
            positive_floor=0.0 if hinge else -float("inf"),
            differentiable=not self.detach,
        )
