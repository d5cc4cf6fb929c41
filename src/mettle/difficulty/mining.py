"""Mining as weights of 0 and 1: the hardest pairs of each anchor, or those near the hardest ones of the other side."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mettle.difficulty.miner import Miner
from mettle.difficulty.settings import validate_fields
from mettle.errors import InputError
from mettle.pairs import (
    HardestWeights,
    MultiSimilarityWeights,
    NoKernel,
    Pass,
    Reduction,
    RowValues,
    Tile,
    Traits,
    max_over,
)


@dataclass(frozen=True)
class Hardest(Miner):
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
class SemiHard(Miner):
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
class MultiSimilarityMining(Miner):
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


@dataclass(frozen=True)
class EasyHard(Miner):
    r"""One positive and one negative for each anchor: the hardest, the easiest, or the hardest beyond the other one.

    Formula, s_p and s_n the similarities of the positive and the negative that stay (Xuan et al. 2020):
        positives  "hard": the least similar, "easy": the most similar, "semihard": the least similar with s > s_n
        negatives  "hard": the most similar, "easy": the least similar, "semihard": the most similar with s < s_p
        "all"      the whole side
    An anchor that finds no pair on one of two mined sides keeps none. Where several pairs tie, all of them stay.
    """

    positives: Literal["easy", "semihard", "hard", "all"] = "easy"
    negatives: Literal["easy", "semihard", "hard", "all"] = "semihard"
    detach: bool = True

    traits = Traits(trusted=True, self_contained=True)

    def __post_init__(self) -> None:
        validate_fields(self)
        if "semihard" in (self.positives, self.negatives):
            other = self.negatives if self.positives == "semihard" else self.positives
            if other in ("semihard", "all"):
                raise InputError(
                    "semihard looks for pairs beyond the one of the other side, which must be 'easy' or 'hard', got "
                    f"positives={self.positives!r}, negatives={self.negatives!r}"
                )

    def row_statistics(self, tile: Tile) -> dict[str, Reduction]:
        """The extremes of the sides that do not depend on the other one."""
        return {
            side: max_over(self._rank_values(tile, side), mask)
            for side, mask in (("positives", tile.positive), ("negatives", tile.negative))
            if getattr(self, side) != "semihard"
        }

    def statistic_passes(self) -> tuple[Pass, ...]:
        """Semi-hard pairs are looked for once the other side is known."""
        first = Pass(lambda tile, _: self.row_statistics(tile))
        if "semihard" not in (self.positives, self.negatives):
            return (first,)
        return first, Pass(self._find_semihard, reads="anchor")

    def _find_semihard(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """The hardest pair of a semi-hard side, among those that are easier than the pair of the other side."""
        if self.positives == "semihard":
            side, mask = "positives", tile.positive
        else:
            side, mask = "negatives", tile.negative
        order = self._rank_values(tile, side).masked_fill(~self._is_easier(tile, row_values, side), -torch.inf)
        return {side: max_over(order, mask)}

    def _is_easier(self, tile: Tile, row_values: RowValues, side: str) -> Tensor:
        """Pairs that are easier than the pair that stays on the other side, by more than a rounding."""
        other = "negatives" if side == "positives" else "positives"
        chosen = row_values[other] if self._prefers_similar(other) else -row_values[other]
        sign = 1 if side == "positives" else -1
        return sign * (tile.similarity - chosen) > tile.rounding_error()

    def _prefers_similar(self, side: str) -> bool:
        """Whether the most similar pair of a side is the one that stays."""
        return (getattr(self, side) == "easy") == (side == "positives")

    def _rank_values(self, tile: Tile, side: str) -> Tensor:
        """Of the pairs of a side, the one that comes out highest stays."""
        return tile.similarity if self._prefers_similar(side) else -tile.similarity

    def weights(self, tile: Tile, row_values: RowValues) -> Tensor:
        """(a, b) weights."""
        positive, negative = (self._selects(tile, row_values, side) for side in ("positives", "negatives"))
        if "all" not in (self.positives, self.negatives):
            found = (row_values["positives"] > -torch.inf) & (row_values["negatives"] > -torch.inf)
            positive, negative = positive & found, negative & found
        return weigh_sides(tile, positive, negative)

    def _selects(self, tile: Tile, row_values: RowValues, side: str) -> Tensor:
        """Which pairs of a side reach its extreme, or all of them."""
        s, how = tile.similarity, getattr(self, side)
        if how == "all":
            return torch.ones_like(s, dtype=torch.bool)
        reached = self._rank_values(tile, side) >= row_values[side] - tile.rounding_error()
        return reached & self._is_easier(tile, row_values, side) if how == "semihard" else reached


@dataclass(frozen=True)
class PairMargin(Miner):
    r"""Positives that are less similar than one number and negatives that are more similar than another.

    Formula:
        positives  w = 1 if s < positive, else 0
        negatives  w = 1 if s > negative, else 0
    """

    positive: float = 0.98
    negative: float = 0.68
    detach: bool = True

    traits = Traits(symmetric=True, trusted=True, self_contained=True)

    def __post_init__(self) -> None:
        validate_fields(self)

    def row_statistics(self, tile: Tile) -> dict[str, Reduction]:
        """Nothing of a row is needed."""
        return {}

    def weights(self, tile: Tile, row_values: RowValues) -> Tensor:
        """(a, b) weights."""
        return weigh_sides(tile, tile.similarity < self.positive, tile.similarity > self.negative)


def row_extremes(tile: Tile) -> dict[str, Reduction]:
    """The hardest positive of each row, ``far``, as minus its similarity, and its hardest negative, ``near``."""
    return {"far": max_over(-tile.similarity, tile.positive), "near": max_over(tile.similarity, tile.negative)}


def max_over_columns(values: Tensor) -> Reduction:
    """The maximum of m values of each row that a tile was reduced to before, (a, 1, m): no (a, b, m) is held."""
    return Reduction("max", values, torch.ones_like(values[..., 0], dtype=torch.bool), "none")


def require_rows(tile: Tile, whose: str) -> None:
    """Refuse tiles that do not know their rows: those of class vectors and of lists of pairs."""
    if tile.operands is None and tile.similarity.numel() > 1:  # one pair: what the engine asks for its reductions
        raise InputError(f"{whose} compares embeddings with one another, and here are class vectors or given pairs")


def weigh_sides(tile: Tile, positive: Tensor, negative: Tensor) -> Tensor:
    """Weights of 0 and 1: which positives stay, and which negatives, (a, b) booleans each."""
    keep = negative if tile.positive is False else torch.where(tile.positive, positive, negative)  # type: ignore[arg-type]
    return keep.to(tile.similarity.dtype)
