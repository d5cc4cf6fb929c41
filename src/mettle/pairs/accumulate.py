"""Accumulators: fold a tile into its rows, and pull a row's gradient back onto the tile.

Each keeps one value per row. A pair has two ends: where a tile serves both, ``i`` are the rows it holds and ``j``
the rows that its columns stand for, so that one exponential feeds two sums.

| kind | value | pulled back, with g the row's gradient |
|---|---|---|
| total | Σ w·x | g·w |
| lse | log Σ w·eˣ | g·w·eˣ⁻ᵛ, v the value |
| peak | max x | g shared among the pairs that reach it |
"""

from dataclasses import replace

import torch
from torch import Tensor

from mettle.pairs.contract import Acc

Ends = tuple[slice, slice | None]


def accumulator(acc: Acc, n: int, like: Tensor) -> "Total | BoundedLse | OnlineLse | Peak":
    """The accumulator that serves this kind of term for ``n`` rows."""
    if acc.kind == "total":
        return Total(n, like)
    if acc.kind == "peak":
        return Peak(n, like)
    # e^(x - ceiling) must neither overflow nor lose every term of a row to underflow.
    room = 80.0 if like.dtype == torch.float32 else 700.0
    if acc.ceiling is not None and 2 * acc.ceiling <= room:
        return BoundedLse(n, like, acc.ceiling)
    return OnlineLse(n, like)


def share(acc: Acc, w: Tensor | None) -> Tensor | None:
    """How much each pair counts: mask times weight, ``None`` for "every pair fully"."""
    part = None if acc.mask is True else acc.mask
    assert not isinstance(part, bool)
    if w is not None and acc.weigh == "full":
        part = w if part is None else w * part
    elif w is not None and acc.weigh == "present":
        part = (w != 0) if part is None else (w != 0) & part
    return part


def times(y: Tensor, part: Tensor | None) -> Tensor:
    """``y`` where pairs count, scaled by how much."""
    if part is None:
        return y
    return y.masked_fill(~part, 0) if part.dtype == torch.bool else y * part


def spread(g: Tensor, ends: Ends) -> Tensor:
    """A row quantity laid over the tile, both ends added."""
    i, j = ends
    return g[i, None] if j is None else g[i, None] + g[None, j]


class Total:
    """Σ w·x."""

    def __init__(self, n: int, like: Tensor):
        self.sum = like.new_zeros(n)

    def fold(self, acc: Acc, w: Tensor | None, ends: Ends, shape: tuple[int, int]) -> None:
        """Add one tile."""
        part, (i, j) = share(acc, w), ends
        if isinstance(acc.x, Tensor):
            y = times(acc.x, part)
        elif part is None:
            y = self.sum.new_full((1, 1), acc.x).expand(shape)
        else:
            y = part * acc.x
        self.sum[i] += y.sum(1, dtype=self.sum.dtype)
        if j is not None:
            self.sum[j] += y.sum(0, dtype=self.sum.dtype)

    def value(self) -> Tensor:
        """One per row."""
        return self.sum

    def pull(self, acc: Acc, w: Tensor | None, g: Tensor, ends: Ends) -> tuple[Tensor, Tensor]:
        """Gradient of the tile's x, and of its weights."""
        c = spread(g, ends)
        gw = times(c * acc.x, None if acc.mask is True else acc.mask)  # type: ignore[arg-type]
        return times(c * torch.ones_like(gw), share(acc, w)), gw


class BoundedLse:
    """Log Σ w·eˣ where x is known to stay within ±ceiling: a plain sum, one exponential for both ends."""

    def __init__(self, n: int, like: Tensor, ceiling: float):
        self.sum, self.ceiling = like.new_zeros(n), ceiling

    def fold(self, acc: Acc, w: Tensor | None, ends: Ends, shape: tuple[int, int]) -> None:
        """Add one tile."""
        i, j = ends
        y = times((acc.x - self.ceiling).exp_(), share(acc, w))  # type: ignore[union-attr]
        self.sum[i] += y.sum(1)
        if j is not None:
            self.sum[j] += y.sum(0)

    def value(self) -> Tensor:
        """One per row, -inf where nothing was added."""
        return self.sum.log() + self.ceiling

    def pull(self, acc: Acc, w: Tensor | None, g: Tensor, ends: Ends) -> tuple[Tensor, Tensor]:
        """Gradient of the tile's x, and of its weights."""
        scale = (g / self.sum).masked_fill(self.sum == 0, 0)
        e = (acc.x - self.ceiling).exp_().mul_(spread(scale, ends))  # type: ignore[union-attr]
        there = replace(acc, weigh="present")  # an absent pair gets no gradient, not even for its weight
        return times(e, share(acc, w)), times(e, share(there, w))


class OnlineLse:
    """Log Σ w·eˣ for any x: every row tracks its own maximum."""

    def __init__(self, n: int, like: Tensor):
        self.top, self.sum = like.new_full((n,), -torch.inf), like.new_zeros(n)

    def fold(self, acc: Acc, w: Tensor | None, ends: Ends, shape: tuple[int, int]) -> None:
        """Add one tile, rescaling the rows whose maximum rises."""
        part, x = share(acc, w), acc.x
        assert isinstance(x, Tensor)
        if part is not None:
            x = x.masked_fill(part == 0, -torch.inf)
        for rows, dim in zip(ends, (1, 0), strict=True):
            if rows is None:
                continue
            top = torch.maximum(self.top[rows], x.amax(dim))
            safe = top.masked_fill(top == -torch.inf, 0)
            y = times((x - safe.unsqueeze(dim)).exp_(), part)
            old = (self.top[rows] - safe).exp_()
            self.sum[rows] = self.sum[rows] * old + y.sum(dim)
            self.top[rows] = top

    def value(self) -> Tensor:
        """One per row, -inf where nothing was added."""
        return self.sum.log() + self.top.masked_fill(self.top == -torch.inf, 0)

    def pull(self, acc: Acc, w: Tensor | None, g: Tensor, ends: Ends) -> tuple[Tensor, Tensor]:
        """Gradient of the tile's x, and of its weights."""
        (i, j), x, part = ends, acc.x, share(acc, w)
        assert isinstance(x, Tensor)
        if part is not None:
            x = x.masked_fill(part == 0, -torch.inf)  # absent pairs may lie above a row's maximum
        v = self.value()
        v, g = v.masked_fill(v == -torch.inf, 0), g.masked_fill(v == -torch.inf, 0)
        e = (x - v[i, None]).exp_().mul_(g[i, None])
        if j is not None:
            e = e + (x - v[None, j]).exp_().mul_(g[None, j])
        there = replace(acc, weigh="present")
        return times(e, part), times(e, share(there, w))


class Peak:
    """Max x over the pairs that are present."""

    def __init__(self, n: int, like: Tensor):
        self.top, self.ties = like.new_full((n,), -torch.inf), like.new_zeros(n)

    def fold(self, acc: Acc, w: Tensor | None, ends: Ends, shape: tuple[int, int]) -> None:
        """Raise the maximum of each row and count who reaches it."""
        x = self._present(acc, w)
        for rows, dim in zip(ends, (1, 0), strict=True):
            if rows is None:
                continue
            here = x.amax(dim)
            count = (x == here.unsqueeze(dim)).sum(dim).to(self.ties.dtype)
            old, top = self.top[rows], torch.maximum(self.top[rows], here)
            self.ties[rows] = self.ties[rows] * (old == top) + count * (here == top)
            self.top[rows] = top

    def value(self) -> Tensor:
        """One per row, -inf where no pair is present."""
        return self.top

    def pull(self, acc: Acc, w: Tensor | None, g: Tensor, ends: Ends) -> tuple[Tensor, Tensor]:
        """Gradient of the tile's x; a maximum does not depend on weights."""
        (i, j), x = ends, self._present(acc, w)
        g = (g / self.ties.clamp(min=1)).masked_fill(self.top == -torch.inf, 0)
        gx = (x == self.top[i, None]) * g[i, None]
        if j is not None:
            gx = gx + (x == self.top[None, j]) * g[None, j]
        return gx, torch.zeros_like(gx)

    @staticmethod
    def _present(acc: Acc, w: Tensor | None) -> Tensor:
        part = share(acc, w)
        assert isinstance(acc.x, Tensor)
        return acc.x if part is None else acc.x.masked_fill(part == 0, -torch.inf)
