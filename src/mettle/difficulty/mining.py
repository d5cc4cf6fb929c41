"""Mining as weights of 0 and 1: the hardest pairs of each anchor, or those near the hardest ones of the other side."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mettle.difficulty.settings import validate_fields
from mettle.errors import InputError
from mettle.pairs import HardestWeights, MultiSimilarityWeights, NoKernel, Reduction, RowValues, Tile, Traits, max_over


@dataclass(frozen=True)
class Hardest:
    r"""Weight 1 for the least similar positive and the most similar negative of each anchor, 0 for the rest.

    ``side`` mines only ``positives`` or only ``negatives`` and keeps the other side whole. Where several pairs tie,
    all of them stay.
    """

    side: Literal["both", "positives", "negatives"] = "both"
    detach: bool = True

    traits = Traits(trusted=True, self_contained=True)

    def __post_init__(self) -> None:
        known = ("both", "positives", "negatives")
        if self.side not in known:
            raise InputError(f"side must be one of {known}, got {self.side!r}")

    def row_statistics(self, tile: Tile) -> dict[str, Reduction]:
        """The extremes of each row."""
        return row_extremes(tile)

    def weights(self, tile: Tile, row_values: RowValues) -> Tensor:
        """(a, b) weights."""
        s, slack = tile.similarity, tile.rounding_error()  # duplicates of one sample are tied in every engine
        pos = -s >= row_values["far"] - slack if self.side != "negatives" else torch.ones_like(s, dtype=torch.bool)
        neg = s >= row_values["near"] - slack if self.side != "positives" else torch.ones_like(s, dtype=torch.bool)
        return weigh_sides(tile, pos, neg)

    def kernel_weights(self) -> HardestWeights | NoKernel:
        """The kernels mine both sides."""
        return HardestWeights() if self.side == "both" else NoKernel("the kernels mine both sides, not one")


@dataclass(frozen=True)
class SemiHard:
    r"""Weight 1 for negatives a little less similar than the anchor's least similar positive, 0 for other negatives.

    Formula, s₊ the similarity of the anchor's hardest positive:
        negatives  w = 1 if s₊ − margin <= s < s₊, else 0;  positives  w = 1
    Negatives that are closer than a positive are left out: early in training they are often label errors, and they
    can collapse the embedding.
    """

    margin: float = 0.2
    detach: bool = True

    traits = Traits(trusted=True, self_contained=True)

    def __post_init__(self) -> None:
        validate_fields(self)
        if not self.margin > 0:
            raise InputError(f"margin must be above 0, got {self.margin}")

    def row_statistics(self, tile: Tile) -> dict[str, Reduction]:
        """The hardest positive of each row."""
        return {"far": max_over(-tile.similarity, tile.positive)}

    def weights(self, tile: Tile, row_values: RowValues) -> Tensor:
        """(a, b) weights."""
        hardest = -row_values["far"]
        keep = (tile.similarity < hardest) & (tile.similarity >= hardest - self.margin)
        return (keep if tile.positive is False else keep | tile.positive).to(tile.similarity.dtype)


@dataclass(frozen=True)
class MultiSimilarityMining:
    r"""The pair mining of the multi-similarity loss (Wang et al. 2019): pairs close to the hardest of the other side.

    Formula, s₊ the similarity of the anchor's hardest positive, s₋ that of its hardest negative:
        negatives  w = 1 if s + epsilon > s₊, else 0
        positives  w = 1 if s − epsilon < s₋, else 0
    An anchor without positives or without negatives keeps no pair.
    """

    epsilon: float = 0.1
    detach: bool = True

    traits = Traits(trusted=True, self_contained=True)

    def __post_init__(self) -> None:
        validate_fields(self)
        if not self.epsilon >= 0:
            raise InputError(f"epsilon must be at least 0, got {self.epsilon}")

    def row_statistics(self, tile: Tile) -> dict[str, Reduction]:
        """The hardest positive and the hardest negative of each row."""
        return row_extremes(tile)

    def weights(self, tile: Tile, row_values: RowValues) -> Tensor:
        """(a, b) weights."""
        s = tile.similarity
        positive, negative = s - self.epsilon < row_values["near"], s + self.epsilon > -row_values["far"]
        return weigh_sides(tile, positive, negative)

    def kernel_weights(self) -> MultiSimilarityWeights:
        """Two thresholds of each row."""
        return MultiSimilarityWeights(float(self.epsilon))


def row_extremes(tile: Tile) -> dict[str, Reduction]:
    """The hardest positive of each row, ``far``, as minus its similarity, and its hardest negative, ``near``."""
    return {"far": max_over(-tile.similarity, tile.positive), "near": max_over(tile.similarity, tile.negative)}


def weigh_sides(tile: Tile, positive: Tensor, negative: Tensor) -> Tensor:
    """Weights of 0 and 1: which positives stay, and which negatives, (a, b) booleans each."""
    keep = negative if tile.positive is False else torch.where(tile.positive, positive, negative)  # type: ignore[arg-type]
    return keep.to(tile.similarity.dtype)
