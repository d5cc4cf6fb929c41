"""Accumulators: fold a tile into its rows, and pull a row's gradient back onto the tile.

Each keeps one value per row (or m values, where a term has m of them). A pair has two ends: where a tile serves both,
``i`` are the rows it holds and ``j`` the rows that its columns stand for, so that one exponential feeds two sums.

| kind | value | pulled back, with g the row's gradient |
|---|---|---|
| total | Σ w·x | g·w |
| lse | log Σ w·eˣ | g·w·eˣ⁻ᵛ, v the value |
| peak | max x | g shared among the pairs that reach it |
| collect | every w·x | its own entry of g, times w |
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.interface import Acc

Ends = tuple[slice, slice | None]
Pulled = tuple[Tensor, Tensor | None]
"""Gradient of a term, and of its weights where they are live."""


def accumulator(acc: Acc, n: int, like: Tensor, most: Callable[[], int]) -> "Accumulator":
    """The accumulator that serves this kind of term for ``n`` rows; ``most()``: the most positives of any row."""
    dtype = acc.x.dtype if isinstance(acc.x, Tensor) else like.dtype
    like = like.new_empty(0, dtype=dtype)
    shape = (n,) if not isinstance(acc.x, Tensor) else (n, *acc.x.shape[2:])
    if acc.kind == "total":
        return Total(shape, like)
    if acc.kind == "peak":
        return Peak(shape, like)
    if acc.kind == "collect":
        return Collect((n, most()), like)
    # e^(x - ceiling) must neither overflow nor lose every term of a row to underflow.
    room = 80.0 if dtype == torch.float32 else 700.0
    if acc.ceiling is not None and 2 * acc.ceiling <= room:
        return BoundedLse(shape, like, acc.ceiling)
    return OnlineLse(shape, like)


def share(acc: Acc, w: Tensor | None) -> Tensor | None:
    """How much each pair counts: mask times weight, ``None`` for "every pair fully"."""
    part = None if acc.mask is True else acc.mask
    assert not isinstance(part, bool)
    if w is not None and acc.weigh == "full":
        part = w if part is None else w * part
    elif w is not None and acc.weigh == "present":
        part = (w != 0) if part is None else (w != 0) & part
    several = isinstance(acc.x, Tensor) and acc.x.ndim == 3
    return part[..., None] if several and part is not None else part


def times(y: Tensor, part: Tensor | None) -> Tensor:
    """``y`` where pairs count, scaled by how much."""
    if part is None:
        return y
    return y.masked_fill(~part, 0) if part.dtype == torch.bool else y * part


def times_(y: Tensor, part: Tensor | None) -> Tensor:
    """The same in place, for a ``y`` that nobody else holds."""
    if part is None:
        return y
    return y.masked_fill_(~part, 0) if part.dtype == torch.bool else y.mul_(part)


def weights_part(acc: Acc, w: Tensor | None, y: Tensor, live: bool) -> Tensor | None:
    """The gradient of the weights, where they have one: an absent pair gets none."""
    return times(y, share(replace(acc, weigh="present"), w)) if live else None


def spread(g: Tensor, ends: Ends) -> Tensor:
    """A row quantity laid over the tile, both ends added."""
    i, j = ends
    return g[i].unsqueeze(1) if j is None else g[i].unsqueeze(1) + g[j].unsqueeze(0)


class Total:
    """Σ w·x."""

    def __init__(self, shape: tuple[int, ...], like: Tensor):
        self.sum = like.new_zeros(shape)

    def fold(self, acc: Acc, w: Tensor | None, ends: Ends, size: tuple[int, int]) -> None:
        """Add one tile."""
        part, (i, j) = share(acc, w), ends
        if isinstance(acc.x, Tensor):
            y = times(acc.x, part)
        elif part is None:  # counting: every pair of the tile
            self.sum[i] += acc.x * size[1]
            if j is not None:
                self.sum[j] += acc.x * size[0]
            return
        else:
            y = part if acc.x == 1.0 else part * acc.x
        self.sum[i] += y.sum(1, dtype=self.sum.dtype)
        if j is not None:
            self.sum[j] += y.sum(0, dtype=self.sum.dtype)

    def fold_list(self, acc: Acc, w: Tensor | None, rows: Tensor) -> None:
        """Add a list of pairs, each to its row."""
        y = share(acc, w) if not isinstance(acc.x, Tensor) else times(acc.x, share(acc, w))
        assert y is not None
        y = y.to(self.sum.dtype) * (1.0 if isinstance(acc.x, Tensor) else acc.x)
        self.sum.index_add_(0, rows, y.squeeze(1))

    def pull_list(self, acc: Acc, w: Tensor | None, g: Tensor, rows: Tensor, live: bool = False) -> Pulled:
        """As `pull`, for a list of pairs."""
        c = g[rows, None]
        return times(c, share(acc, w)), weights_part(acc, w, c * acc.x if live else c, live)

    def value(self) -> Tensor:
        """One per row."""
        return self.sum

    def pull(self, acc: Acc, w: Tensor | None, g: Tensor, ends: Ends, live: bool = False) -> Pulled:
        """Gradient of the tile's x, and of its weights."""
        c = spread(g, ends)
        return times(c, share(acc, w)), weights_part(acc, w, c * acc.x if live else c, live)


class BoundedLse:
    """Log Σ w·eˣ where x is known to stay within ±ceiling: a plain sum, one exponential for both ends."""

    def __init__(self, shape: tuple[int, ...], like: Tensor, ceiling: float):
        self.sum, self.ceiling = like.new_zeros(shape), ceiling

    def fold(self, acc: Acc, w: Tensor | None, ends: Ends, size: tuple[int, int]) -> None:
        """Add one tile."""
        i, j = ends
        y = times_((acc.x - self.ceiling).exp_(), share(acc, w))  # type: ignore[union-attr]
        self.sum[i] += y.sum(1)
        if j is not None:
            self.sum[j] += y.sum(0)

    def fold_list(self, acc: Acc, w: Tensor | None, rows: Tensor) -> None:
        """Add a list of pairs, each to its row."""
        self.sum.index_add_(0, rows, times_((acc.x - self.ceiling).exp_(), share(acc, w)).squeeze(1))  # type: ignore[union-attr]

    def pull_list(self, acc: Acc, w: Tensor | None, g: Tensor, rows: Tensor, live: bool = False) -> Pulled:
        """As `pull`, for a list of pairs."""
        scale = (g / self.sum).masked_fill(self.sum == 0, 0)
        e = (acc.x - self.ceiling).exp_().mul_(scale[rows, None])  # type: ignore[union-attr]
        return times(e, share(acc, w)), weights_part(acc, w, e, live)

    def value(self) -> Tensor:
        """One per row, -inf where nothing was added."""
        return self.sum.log() + self.ceiling

    def pull(self, acc: Acc, w: Tensor | None, g: Tensor, ends: Ends, live: bool = False) -> Pulled:
        """Gradient of the tile's x, and of its weights; an absent pair gets none, not even for its weight."""
        scale = (g / self.sum).masked_fill(self.sum == 0, 0)
        e = (acc.x - self.ceiling).exp_().mul_(spread(scale, ends))  # type: ignore[union-attr]
        return times(e, share(acc, w)), weights_part(acc, w, e, live)


class OnlineLse:
    """Log Σ w·eˣ for any x: every row tracks its own maximum."""

    def __init__(self, shape: tuple[int, ...], like: Tensor):
        self.top, self.sum = like.new_full(shape, -torch.inf), like.new_zeros(shape)

    def fold(self, acc: Acc, w: Tensor | None, ends: Ends, size: tuple[int, int]) -> None:
        """Add one tile, rescaling the rows whose maximum rises."""
        part, x = share(acc, w), _present(acc, w)
        for rows, dim in zip(ends, (1, 0), strict=True):
            if rows is None:
                continue
            top = torch.maximum(self.top[rows], x.amax(dim))
            safe = top.masked_fill(top == -torch.inf, 0)
            y = times_((x - safe.unsqueeze(dim)).exp_(), part)
            old = (self.top[rows] - safe).exp_()
            self.sum[rows] = self.sum[rows] * old + y.sum(dim)
            self.top[rows] = top

    def fold_list(self, acc: Acc, w: Tensor | None, rows: Tensor) -> None:
        """Add a list of pairs, each to its row."""
        x = _present(acc, w)
        top = self.top.scatter_reduce(0, rows, x.squeeze(1), "amax")
        safe = top.masked_fill(top == -torch.inf, 0)
        y = times_((x - safe[rows, None]).exp_(), share(acc, w))
        self.sum = (self.sum * (self.top - safe).exp_()).index_add_(0, rows, y.squeeze(1))
        self.top = top

    def pull_list(self, acc: Acc, w: Tensor | None, g: Tensor, rows: Tensor, live: bool = False) -> Pulled:
        """As `pull`, for a list of pairs."""
        x, v = _present(acc, w), self.value()
        v, g = v.masked_fill(v == -torch.inf, 0), g.masked_fill(v == -torch.inf, 0)
        e = (x - v[rows, None]).exp_().mul_(g[rows, None])
        return times(e, share(acc, w)), weights_part(acc, w, e, live)

    def value(self) -> Tensor:
        """One per row, -inf where nothing was added."""
        return self.sum.log() + self.top.masked_fill(self.top == -torch.inf, 0)

    def pull(self, acc: Acc, w: Tensor | None, g: Tensor, ends: Ends, live: bool = False) -> Pulled:
        """Gradient of the tile's x, and of its weights."""
        (i, j), x = ends, _present(acc, w)  # absent pairs may lie above a row's maximum: they are -inf here
        v = self.value()
        v, g = v.masked_fill(v == -torch.inf, 0), g.masked_fill(v == -torch.inf, 0)
        e = (x - v[i].unsqueeze(1)).exp_().mul_(g[i].unsqueeze(1))
        if j is not None:
            e += (x - v[j].unsqueeze(0)).exp_().mul_(g[j].unsqueeze(0))
        return times(e, share(acc, w)), weights_part(acc, w, e, live)


class Peak:
    """Max x over the pairs that are present."""

    def __init__(self, shape: tuple[int, ...], like: Tensor):
        self.top, self.ties = like.new_full(shape, -torch.inf), like.new_zeros(shape)

    def fold(self, acc: Acc, w: Tensor | None, ends: Ends, size: tuple[int, int]) -> None:
        """Raise the maximum of each row and count who reaches it."""
        x = _present(acc, w)
        for rows, dim in zip(ends, (1, 0), strict=True):
            if rows is None:
                continue
            here = x.amax(dim)
            count = (x == here.unsqueeze(dim)).sum(dim).to(self.ties.dtype)
            old, top = self.top[rows], torch.maximum(self.top[rows], here)
            self.ties[rows] = self.ties[rows] * (old == top) + count * (here == top)
            self.top[rows] = top

    def fold_list(self, acc: Acc, w: Tensor | None, rows: Tensor) -> None:
        """Add a list of pairs, each to its row."""
        x = _present(acc, w).squeeze(1)
        top = self.top.scatter_reduce(0, rows, x, "amax")
        self.ties = (self.ties * (self.top == top)).index_add_(0, rows, (x == top[rows]).to(self.ties.dtype))
        self.top = top

    def pull_list(self, acc: Acc, w: Tensor | None, g: Tensor, rows: Tensor, live: bool = False) -> Pulled:
        """As `pull`, for a list of pairs."""
        g = (g / self.ties.clamp(min=1)).masked_fill(self.top == -torch.inf, 0)
        gx = (_present(acc, w) == self.top[rows, None]) * g[rows, None]
        return gx, torch.zeros_like(gx)

    def value(self) -> Tensor:
        """One per row, -inf where no pair is present."""
        return self.top

    def pull(self, acc: Acc, w: Tensor | None, g: Tensor, ends: Ends, live: bool = False) -> Pulled:
        """Gradient of the tile's x; a maximum does not depend on weights."""
        (i, j), x = ends, _present(acc, w)
        g = (g / self.ties.clamp(min=1)).masked_fill(self.top == -torch.inf, 0)
        gx = (x == self.top[i].unsqueeze(1)) * g[i].unsqueeze(1)
        if j is not None:
            gx = gx + (x == self.top[j].unsqueeze(0)) * g[j].unsqueeze(0)
        return gx, torch.zeros_like(gx)


class Collect:
    """Every w·x, side by side: (n, most), in the order in which tiles come."""

    def __init__(self, shape: tuple[int, ...], like: Tensor):
        self.found = like.new_zeros(shape)
        self.filled = torch.zeros(shape[0], dtype=torch.long, device=like.device)

    def fold(self, acc: Acc, w: Tensor | None, ends: Ends, size: tuple[int, int]) -> None:
        """Append what each row finds in the tile."""
        mask = torch.ones(size, dtype=torch.bool, device=self.found.device) if acc.mask is True else acc.mask
        assert isinstance(mask, Tensor)
        one = torch.ones((), dtype=self.found.dtype, device=self.found.device)
        x = (acc.x if isinstance(acc.x, Tensor) else one * acc.x).expand(size)
        x = times(x, share(replace(acc, mask=True), w))
        for rows, places, where in self._places(mask, ends):
            side = x if where == 1 else x.T
            self.found[rows][places[0], places[1]] = side[places[2]]
            self.filled[rows] += mask.sum(where)

    def _places(self, mask: Tensor, ends: Ends):
        """For each end: its rows, (row, slot, which pairs) of every masked pair, and the dimension it runs along."""
        for rows, dim in zip(ends, (1, 0), strict=True):
            if rows is not None:
                side = mask if dim == 1 else mask.T
                slot = side.cumsum(1) - 1 + self.filled[rows].unsqueeze(1)
                yield rows, (side.nonzero()[:, 0], slot[side], side), dim

    def fold_list(self, acc: Acc, w: Tensor | None, rows: Tensor) -> None:
        """Collecting is for sweeps over all pairs."""
        raise InputError("collect needs a sweep over all pairs: give its Sweep over='all'")

    def pull_list(self, acc: Acc, w: Tensor | None, g: Tensor, rows: Tensor, live: bool = False) -> Pulled:
        """Collecting is for sweeps over all pairs."""
        raise InputError("collect needs a sweep over all pairs: give its Sweep over='all'")

    def value(self) -> Tensor:
        """(n, most)."""
        return self.found

    def rewind(self) -> None:
        """Start over, for a second walk through the same tiles."""
        self.filled.zero_()

    def pull(self, acc: Acc, w: Tensor | None, g: Tensor, ends: Ends, live: bool = False) -> Pulled:
        """Gradient of the tile's x, and of its weights."""
        assert isinstance(acc.mask, Tensor)
        mask = acc.mask
        gx = torch.zeros(mask.shape, dtype=self.found.dtype, device=mask.device)
        for rows, places, dim in self._places(mask, ends):
            part = torch.zeros_like(gx if dim == 1 else gx.T)
            part[places[2]] = g[rows][places[0], places[1]]
            gx += part if dim == 1 else part.T
            self.filled[rows] += mask.sum(dim)
        return times(gx, share(acc, w)), gx * acc.x


Accumulator = Total | BoundedLse | OnlineLse | Peak | Collect


def _present(acc: Acc, w: Tensor | None) -> Tensor:
    """X, -inf where a pair is absent."""
    part = share(acc, w)
    assert isinstance(acc.x, Tensor)
    return acc.x if part is None else acc.x.masked_fill(part == 0, -torch.inf)
