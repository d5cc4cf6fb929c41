"""Mining: only the hardest pairs of each anchor."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

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
