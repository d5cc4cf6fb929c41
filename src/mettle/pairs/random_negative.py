"""Drawing one negative per anchor without a stream: every pair has a lot, the highest wins.

A lot is a hash of (seed, anchor, reference), so every engine and every tiling draws the same negative, forward and
backward; the seed is taken from a generator once per call.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mettle.errors import InputError
from mettle.pairs.interface import Reduction, RowValues, Tile, max_over, sum_over
from mettle.pairs.similarity import widest_dtype

Random = Any
"""A ``torch.Generator``, or None for torch's own."""


class HasGenerator(nn.Module):
    """A loss or a difficulty whose field ``random`` is a generator: where it stands is saved and resumed with it."""

    def get_extra_state(self) -> Tensor:
        """The state of the generator, on the CPU whatever the module is moved to; empty for torch's own."""
        random = getattr(self, "random", None)
        return torch.empty(0, dtype=torch.uint8) if random is None else random.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """The inverse."""
        random = getattr(self, "random", None)
        if random is not None and len(state):
            random.set_state(state.cpu())


def validate_generator(random: Random) -> None:
    """Refuse what nothing can be drawn from."""
    if random is not None and not isinstance(random, torch.Generator):
        raise InputError(
            f"random must be a torch.Generator, or None for torch's own, got {random!r}: leave it out of a recipe, "
            "where draws follow from the seed"
        )


def draw_seed(generator: torch.Generator | None) -> int:
    """A fresh seed."""
    return int(torch.randint(0, 2**31 - 1, (1,), generator=generator))


def max_hash(tile: Tile, seed: int) -> dict[str, Reduction]:
    """The first pass: the highest lot among an anchor's negatives."""
    return {"lot": max_over(pair_hash(tile, seed), tile.negative)}


def selected_negative(tile: Tile, row_values: RowValues, x: Tensor, seed: int) -> dict[str, Reduction]:
    """The second pass: ``x`` of the negative that has the highest lot."""
    won = pair_hash(tile, seed) == row_values["lot"]
    return {
        "far": sum_over(x * won, tile.negative, weighting="mask"),
        "negatives": sum_over(won.to(x.dtype), tile.negative, weighting="mask"),
    }


def pair_hash(tile: Tile, seed: int) -> Tensor:
    """(a, b) numbers in [0, 1), equal only by a chance of 2⁻⁵³; of 2⁻²⁴ on a device without float64."""
    x = _mix_bits(tile.anchor_index * 0x9E3779B97F4A7C1 + (seed * 0x2545F4914F6CDD1) % (1 << 62))
    x = _mix_bits(x + tile.reference_index * 0x632BE59BD9B4E01)
    dtype = widest_dtype(x.device)
    bits = 53 if dtype == torch.float64 else 24
    return ((x >> (64 - bits)) & ((1 << bits) - 1)).to(dtype) / (1 << bits)


def _mix_bits(x: Tensor) -> Tensor:
    """Spread the bits of whole numbers (whose products wrap around)."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
