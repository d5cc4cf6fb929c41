"""Drawing one negative per anchor without a stream: every pair has a lot, the highest wins.

A lot is a hash of (seed, anchor, reference), so every engine and every tiling draws the same negative, forward and
backward; the seed is taken from a generator once per call.
"""

from typing import Any

import torch
from torch import Tensor

from mettle.pairs import Acc, Rows, Tile, peak, total

Random = Any
"""A ``torch.Generator``, or None for torch's own."""


def drawn(generator: torch.Generator | None) -> int:
    """A fresh seed."""
    return int(torch.randint(0, 2**31 - 1, (1,), generator=generator))


class chosen:
    """The two passes that find and read the drawn negative."""

    @staticmethod
    def lots(tile: Tile, seed: int) -> Acc:
        """The highest lot among an anchor's negatives."""
        return peak(lot(tile, seed), tile.neg)

    @staticmethod
    def terms(tile: Tile, rows: Rows, x: Tensor, seed: int) -> dict[str, Acc]:
        """``x`` of the negative that has it."""
        won = lot(tile, seed) == rows["lot"]
        return {
            "far": total(x * won, tile.neg, weigh="present"),
            "negatives": total(won.to(x.dtype), tile.neg, weigh="present"),
        }


def lot(tile: Tile, seed: int) -> Tensor:
    """(a, b) float64 numbers in [0, 1), equal only by a chance of 2⁻⁵³."""
    x = _mix(tile.i * 0x9E3779B97F4A7C1 + (seed * 0x2545F4914F6CDD1) % (1 << 62))
    x = _mix(x + tile.j * 0x632BE59BD9B4E01)
    return ((x >> 11) & ((1 << 53) - 1)).double() / (1 << 53)


def _mix(x: Tensor) -> Tensor:
    """Spread the bits of whole numbers (whose products wrap around)."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
