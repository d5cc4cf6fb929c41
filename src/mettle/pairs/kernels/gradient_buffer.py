"""Class vectors of one length, until the way back needs them again: where their gradient will be.

To bring a million vectors to length 1 takes as long as to read and write them, so twice is a waste; to hold a copy is
memory. Their gradient needs room anyway, and has nothing to say before the way back.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class Vectors(NamedTuple):
    """Class vectors of one length in the operands' precision, padded, and 1 / the lengths they had."""

    high: Tensor
    low: Tensor
    inverse: Tensor


@dataclass(frozen=True)
class Waiting:
    """What lies at the end of each chunk's gradient.

    The way back reads from the first vector to the last and writes gradients behind itself.
    """

    gradient: Tensor  # (C, d)
    chunk: int  # vectors that are brought to length 1 at once
    step: int  # vectors that are read at once, and then written over
    kept: dict[int, Vectors] = field(default_factory=dict)

    def room(self, place: slice, rows: int, like: Tensor) -> Tensor | None:
        """For so many rows ``like`` these; None where gradients would be written over what is not read yet."""
        n = place.stop - place.start
        own, row = (x.shape[1] * x.element_size() for x in (like, self.gradient))
        begin = (n * row - rows * own) // 16 * 16
        last = (n - 1) // self.step * self.step  # the gap closes: there it is smallest
        if self.chunk % self.step or begin + last * own < last * row:
            return None
        there = self.gradient[place].view(-1).view(torch.uint8)[begin : begin + rows * own]
        return there.view(like.dtype).view(rows, -1)

    def keep(self, place: slice, made: Vectors) -> None:
        """Remember a chunk that was put into its `room`."""
        self.kept[place.start // self.chunk] = made

    def read(self, place: slice, rows: int) -> Vectors | None:
        """A part of a chunk, or None where it is not here."""
        k, start = divmod(place.start, self.chunk)
        return Vectors(*(x[start : start + rows] for x in self.kept[k])) if k in self.kept else None
