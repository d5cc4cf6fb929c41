"""Mining as weights of 0 and 1: the hardest pairs of each anchor, or negatives just beyond the positives."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mettle.difficulty.validation import settings
from mettle.errors import InputError
from mettle.pairs import Acc, HardestWeights, NoKernel, Rows, Tile, Traits, peak


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

    def stats(self, tile: Tile) -> dict[str, Acc]:
        """The extremes of each row."""
        return {"far": peak(-tile.s, tile.pos), "near": peak(tile.s, tile.neg)}

    def weigh(self, tile: Tile, rows: Rows) -> Tensor:
        """(a, b) weights."""
        s, slack = tile.s, tile.slack()  # of one rounding: duplicates of one sample are tied in every engine
        pos = -s >= rows["far"] - slack if self.side != "negatives" else torch.ones_like(s, dtype=torch.bool)
        neg = s >= rows["near"] - slack if self.side != "positives" else torch.ones_like(s, dtype=torch.bool)
        keep = neg if tile.pos is False else torch.where(tile.pos, pos, neg)  # type: ignore[arg-type]
        return keep.to(s.dtype)

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
        settings(self)
        if not self.margin > 0:
            raise InputError(f"margin must be above 0, got {self.margin}")

    def stats(self, tile: Tile) -> dict[str, Acc]:
        """The hardest positive of each row."""
        return {"far": peak(-tile.s, tile.pos)}

    def weigh(self, tile: Tile, rows: Rows) -> Tensor:
        """(a, b) weights."""
        hardest = -rows["far"]
        keep = (tile.s < hardest) & (tile.s >= hardest - self.margin)
        return (keep if tile.pos is False else keep | tile.pos).to(tile.s.dtype)
