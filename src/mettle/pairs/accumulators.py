"""Accumulators: add tiles to their rows, and propagate a row's gradient to the tile.

Each keeps one value per row (or m values, where a reduction has m of them). A pair has two ends: where a tile serves
both, it is added to the rows that it holds and to the rows that its columns stand for, so that one exponential feeds
two sums. A list of pairs is a tile of one column, each entry of which belongs to a row of its own. Both are described
by an `End`, so that every accumulator is written once.

| kind | value | gradient of the tile, with g the row's gradient |
|---|---|---|
| sum | Σ w·x | g·w |
| logsumexp | log Σ w·eˣ | g·w·eˣ⁻ᵛ, v the value |
| max | max x | g shared among the pairs that reach it |
| gather | every w·x | its own entry of g, times w |
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.interface import Reduction


@dataclass(frozen=True)
class TileEnd:
    """The rows of a tile (``dim`` 1: sums run along it), or the rows that its columns stand for (``dim`` 0)."""

    rows: slice
    dim: int

    def sum(self, y: Tensor) -> Tensor:
        """One value per row."""
        return y.sum(self.dim)

    def max(self, x: Tensor) -> Tensor:
        """One value per row."""
        return x.amax(self.dim)

    def expand(self, v: Tensor) -> Tensor:
        """A value per row, in a shape that broadcasts to the tile."""
        return v.unsqueeze(self.dim)


@dataclass(frozen=True)
class PairEnd:
    """The anchor of every pair of a list, (p,) positions among ``n`` rows."""

    anchors: Tensor
    n: int

    rows = slice(None)  # a list may reach any row

    def sum(self, y: Tensor) -> Tensor:
        """One value per row."""
        return y.new_zeros(self.n, *y.shape[2:]).index_add_(0, self.anchors, y.squeeze(1))

    def max(self, x: Tensor) -> Tensor:
        """One value per row, -inf where the list has no pair of it."""
        return x.new_full((self.n,), -torch.inf).scatter_reduce_(0, self.anchors, x.squeeze(1), "amax")

    def expand(self, v: Tensor) -> Tensor:
        """A value per row, as a column with one entry per pair."""
        return v[self.anchors].unsqueeze(1)


End = TileEnd | PairEnd
Ends = tuple[End, ...]
Gradients = tuple[Tensor, Tensor | None]
"""Gradient of a reduction's values, and of its weights where these have one."""


def make_accumulator(acc: Reduction, n: int, like: Tensor, max_entries: Callable[[], int]) -> "Accumulator":
    """The accumulator of a reduction for ``n`` rows; ``max_entries()``: the most positives of any row."""
    dtype = acc.values.dtype if isinstance(acc.values, Tensor) else like.dtype
    like = like.new_empty(0, dtype=dtype)
    shape = (n,) if not isinstance(acc.values, Tensor) else (n, *acc.values.shape[2:])
    if acc.kind == "sum":
        return Sum(shape, like)
    if acc.kind == "max":
        return Max(shape, like)
    if acc.kind == "gather":
        return Gather((n, max_entries()), like)
    # e^(x - bound) must neither overflow nor lose every entry of a row to underflow.
    exponent_range = 80.0 if dtype == torch.float32 else 700.0
    if acc.bound is not None and 2 * acc.bound <= exponent_range:
        return BoundedLogSumExp(shape, like, acc.bound)
    return OnlineLogSumExp(shape, like)


def effective_weight(acc: Reduction, w: Tensor | None) -> Tensor | None:
    """How much each pair counts: mask times weight, ``None`` for "every pair fully"."""
    part = None if acc.mask is True else acc.mask
    assert not isinstance(part, bool)
    if w is not None and acc.weighting in ("weight", "square"):
        power = w.square() if acc.weighting == "square" else w
        part = power if part is None else power * part
    elif w is not None and acc.weighting == "mask":
        part = (w != 0) if part is None else (w != 0) & part
    several = isinstance(acc.values, Tensor) and acc.values.ndim == 3
    return part[..., None] if several and part is not None else part


def masked_multiply(y: Tensor, weight: Tensor | None) -> Tensor:
    """``y`` where pairs count, scaled by how much."""
    if weight is None:
        return y
    return y.masked_fill(~weight, 0) if weight.dtype == torch.bool else y * weight


def masked_multiply_(y: Tensor, weight: Tensor | None) -> Tensor:
    """The same in place, for a ``y`` that nobody else holds."""
    if weight is None:
        return y
    return y.masked_fill_(~weight, 0) if weight.dtype == torch.bool else y.mul_(weight)


def masked_values(acc: Reduction, w: Tensor | None) -> Tensor:
    """The values, -inf where a pair is absent."""
    weight = effective_weight(acc, w)
    assert isinstance(acc.values, Tensor)
    return acc.values if weight is None else acc.values.masked_fill(weight == 0, -torch.inf)


def expand_rows(v: Tensor, ends: Ends) -> Tensor:
    """A value per row in a shape that broadcasts to the tile, the ends added."""
    first, *rest = (end.expand(v[end.rows]) for end in ends)
    return first + rest[0] if rest else first


def split_gradient(acc: Reduction, w: Tensor | None, gx: Tensor, gw: Tensor, differentiable: bool) -> Gradients:
    """Gradients of values and weights, before masks and weights are applied; an absent pair gets none of either."""
    weight_gradient = None
    if differentiable:
        weight_gradient = masked_multiply(gw, effective_weight(replace(acc, weighting="mask"), w))
    return masked_multiply(gx, effective_weight(acc, w)), weight_gradient


class Sum:
    """Σ w·x."""

    def __init__(self, shape: tuple[int, ...], like: Tensor):
        self.sum = like.new_zeros(shape)

    def add(self, acc: Reduction, w: Tensor | None, ends: Ends, size: tuple[int, int]) -> None:
        """Add one tile of this size."""
        weight = effective_weight(acc, w)
        if isinstance(acc.values, Tensor):
            y = masked_multiply(acc.values, weight)
        elif weight is None:  # counting: every pair of the tile
            for end in ends:
                assert isinstance(end, TileEnd)
                self.sum[end.rows] += acc.values * size[end.dim]
            return
        else:
            y = weight.to(self.sum.dtype) if acc.values == 1.0 else weight * acc.values
        for end in ends:
            self.sum[end.rows] += end.sum(y.to(self.sum.dtype))

    def value(self) -> Tensor:
        """One per row."""
        return self.sum

    def gradient(self, acc: Reduction, w: Tensor | None, g: Tensor, ends: Ends, differentiable: bool) -> Gradients:
        """Of the tile's values, and of its weights."""
        c = expand_rows(g, ends)
        return split_gradient(acc, w, c, c * acc.values if differentiable else c, differentiable)


class BoundedLogSumExp:
    """Log Σ w·eˣ where x is known to stay within ±bound: a plain sum, one exponential for both ends."""

    def __init__(self, shape: tuple[int, ...], like: Tensor, bound: float):
        self.sum, self.bound = like.new_zeros(shape), bound

    def add(self, acc: Reduction, w: Tensor | None, ends: Ends, size: tuple[int, int]) -> None:
        """Add one tile."""
        y = masked_multiply_((acc.values - self.bound).exp_(), effective_weight(acc, w))  # type: ignore[union-attr]
        for end in ends:
            self.sum[end.rows] += end.sum(y)

    def value(self) -> Tensor:
        """One per row, -inf where nothing was added."""
        return self.sum.log() + self.bound

    def gradient(self, acc: Reduction, w: Tensor | None, g: Tensor, ends: Ends, differentiable: bool) -> Gradients:
        """Of the tile's values, and of its weights."""
        scale = (g / self.sum).masked_fill(self.sum == 0, 0)
        e = (acc.values - self.bound).exp_().mul_(expand_rows(scale, ends))  # type: ignore[union-attr]
        return split_gradient(acc, w, e, e, differentiable)


class OnlineLogSumExp:
    """Log Σ w·eˣ for any x: every row tracks its own maximum."""

    def __init__(self, shape: tuple[int, ...], like: Tensor):
        self.max, self.sum = like.new_full(shape, -torch.inf), like.new_zeros(shape)

    def add(self, acc: Reduction, w: Tensor | None, ends: Ends, size: tuple[int, int]) -> None:
        """Add one tile, rescaling the rows whose maximum rises."""
        weight, x = effective_weight(acc, w), masked_values(acc, w)
        for end in ends:
            before = self.max[end.rows]
            highest = torch.maximum(before, end.max(x))
            finite = highest.masked_fill(highest == -torch.inf, 0)
            y = masked_multiply_((x - end.expand(finite)).exp_(), weight)
            self.sum[end.rows] = self.sum[end.rows] * (before - finite).exp_() + end.sum(y)
            self.max[end.rows] = highest

    def value(self) -> Tensor:
        """One per row, -inf where nothing was added."""
        return self.sum.log() + self.max.masked_fill(self.max == -torch.inf, 0)

    def gradient(self, acc: Reduction, w: Tensor | None, g: Tensor, ends: Ends, differentiable: bool) -> Gradients:
        """Of the tile's values, and of its weights."""
        x, v = masked_values(acc, w), self.value()  # absent pairs may lie above a row's maximum: they are -inf here
        empty = v == -torch.inf
        v, g = v.masked_fill(empty, 0), g.masked_fill(empty, 0)
        parts = [(x - end.expand(v[end.rows])).exp_().mul_(end.expand(g[end.rows])) for end in ends]
        e = parts[0] if len(parts) == 1 else parts[0].add_(parts[1])
        return split_gradient(acc, w, e, e, differentiable)


class Max:
    """The maximum over the pairs that are present."""

    def __init__(self, shape: tuple[int, ...], like: Tensor):
        self.max, self.ties = like.new_full(shape, -torch.inf), like.new_zeros(shape)

    def add(self, acc: Reduction, w: Tensor | None, ends: Ends, size: tuple[int, int]) -> None:
        """Raise the maximum of each row and count the pairs that reach it."""
        x = masked_values(acc, w)
        for end in ends:
            here, before = end.max(x), self.max[end.rows]
            count = end.sum((x == end.expand(here)).to(self.ties.dtype))
            highest = torch.maximum(before, here)
            self.ties[end.rows] = self.ties[end.rows] * (before == highest) + count * (here == highest)
            self.max[end.rows] = highest

    def value(self) -> Tensor:
        """One per row, -inf where no pair is present."""
        return self.max

    def gradient(self, acc: Reduction, w: Tensor | None, g: Tensor, ends: Ends, differentiable: bool) -> Gradients:
        """Of the tile's values; a maximum does not depend on weights."""
        x = masked_values(acc, w)
        g = (g / self.ties.clamp(min=1)).masked_fill(self.max == -torch.inf, 0)
        parts = [(x == end.expand(self.max[end.rows])) * end.expand(g[end.rows]) for end in ends]
        gx = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        return gx, torch.zeros_like(gx)


class Gather:
    """Every w·x, side by side: (n, max_entries), in the order in which tiles come."""

    def __init__(self, shape: tuple[int, ...], like: Tensor):
        self.entries = like.new_zeros(shape)
        self.count = torch.zeros(shape[0], dtype=torch.long, device=like.device)

    def add(self, acc: Reduction, w: Tensor | None, ends: Ends, size: tuple[int, int]) -> None:
        """Append the entries that each row has in the tile."""
        mask = torch.ones(size, dtype=torch.bool, device=self.entries.device) if acc.mask is True else acc.mask
        assert isinstance(mask, Tensor)
        one = torch.ones((), dtype=self.entries.dtype, device=self.entries.device)
        x = (acc.values if isinstance(acc.values, Tensor) else one * acc.values).expand(size)
        x = masked_multiply(x, effective_weight(replace(acc, mask=True), w))
        for end, row, slot, chosen in self._positions(mask, ends):
            self.entries[end.rows][row, slot] = (x if end.dim == 1 else x.T)[chosen]
            self.count[end.rows] += mask.sum(end.dim)

    def _positions(self, mask: Tensor, ends: Ends):
        """For each end: row and slot of every masked pair, and which pairs of the tile (or its transpose) these are."""
        for end in ends:
            if isinstance(end, PairEnd):
                raise InputError("gather_over needs a pass over all pairs: give its Pass over='all'")
            chosen = mask if end.dim == 1 else mask.T
            slot = chosen.cumsum(1) - 1 + self.count[end.rows].unsqueeze(1)
            yield end, chosen.nonzero()[:, 0], slot[chosen], chosen

    def value(self) -> Tensor:
        """(n, max_entries)."""
        return self.entries

    def rewind(self) -> None:
        """Start over, for a second loop over the same tiles."""
        self.count.zero_()

    def gradient(self, acc: Reduction, w: Tensor | None, g: Tensor, ends: Ends, differentiable: bool) -> Gradients:
        """Of the tile's values, and of its weights."""
        assert isinstance(acc.mask, Tensor)
        gx = torch.zeros(acc.mask.shape, dtype=self.entries.dtype, device=acc.mask.device)
        for end, row, slot, chosen in self._positions(acc.mask, ends):
            part = torch.zeros_like(gx if end.dim == 1 else gx.T)
            part[chosen] = g[end.rows][row, slot]
            gx += part if end.dim == 1 else part.T
            self.count[end.rows] += acc.mask.sum(end.dim)
        return masked_multiply(gx, effective_weight(acc, w)), gx * acc.values


Accumulator = Sum | BoundedLogSumExp | OnlineLogSumExp | Max | Gather
