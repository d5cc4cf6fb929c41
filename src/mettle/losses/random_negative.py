"""Drawing one negative per anchor without a stream: every pair has a lot, the highest wins.

A lot is a hash of (seed, anchor, reference), so every engine and every tiling draws the same negative, forward and
backward; the seed is taken from a generator once per call.
"""

from typing import Any

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs import Acc, Rows, Tile, peak, total

Random = Any
"""A ``torch.Generator``, or None for torch's own."""


def check(random: Random) -> None:
    """Refuse what nothing can be drawn from."""
    if random is not None and not isinstance(random, torch.Generator):
        raise InputError(
            f"random must be a torch.Generator, or None for torch's own, got {random!r}: leave it out of a recipe, "
            "where draws follow from the seed"
        )


def drawn(generator: torch.Generator | None) -> int:
    """A fresh seed."""
    return int(torch.randint(0, 2**31 - 1, (1,), generator=generator))


def highest(tile: Tile, seed: int) -> dict[str, Acc]:
    """The first pass: the highest lot among an anchor's negatives."""
    return {"lot": peak(lot(tile, seed), tile.neg)}


def winner(tile: Tile, rows: Rows, x: Tensor, seed: int) -> dict[str, Acc]:
    """The second pass: ``x`` of the negative that has the highest lot."""
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
