"""Mining: negatives just beyond the positives."""

from dataclasses import dataclass

from torch import Tensor

from mettle.difficulty.validation import settings
from mettle.errors import InputError
from mettle.pairs import Acc, Rows, Tile, Traits, peak


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
