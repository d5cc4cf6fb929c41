"""Who is positive or negative to whom.

Positive: same label. Negative: another label. A row is never paired with itself; against a reference set, pairs of
equal id are left out when ids are known. Rows are sorted by label first, so that nearly every tile is purely
negative and needs no mask at all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mettle.pairs.interface import Mask


@dataclass(frozen=True)
class Side:
    """The labels (and ids, where known) of one side of the comparison, in the order in which tiles are cut."""

    labels: Tensor
    at: Tensor  # where each row came from
    ids: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def spans(self, size: int) -> "list[Span]":
        """Cut into blocks of ``size`` rows, each with its smallest and largest label (one transfer for all)."""
        n = len(self)
        starts = range(0, n, size)
        low = torch.stack([self.labels[i : i + size].amin() for i in starts]).tolist()
        high = torch.stack([self.labels[i : i + size].amax() for i in starts]).tolist()
        return [Span(i, min(i + size, n), a, b) for i, a, b in zip(starts, low, high, strict=True)]


@dataclass(frozen=True)
class Span:
    """Rows ``start:stop`` and the range of their labels."""

    start: int
    stop: int
    low: int
    high: int

    @property
    def rows(self) -> slice:
        """The rows as a slice."""
        return slice(self.start, self.stop)


def masks(a: Side, b: Side, i: Span, j: Span, *, same_set: bool) -> tuple[Mask, Mask]:
    """``(pos, neg)`` of one tile; plain booleans where the label ranges already decide.

    ``same_set``: both sides are the same rows in the same order, so the diagonal pairs a row with itself.
    """
    if (i.high < j.low or j.high < i.low) and (a.ids is None or b.ids is None):
        return False, True
    same = a.labels[i.rows, None] == b.labels[None, j.rows]
    pos, neg = same, ~same
    if same_set:
        if i.start == j.start:
            pos = pos & ~torch.eye(i.stop - i.start, dtype=torch.bool, device=same.device)
    elif a.ids is not None and b.ids is not None:
        other = a.ids[i.rows, None] != b.ids[None, j.rows]
        pos, neg = pos & other, neg & other
    return pos, neg
