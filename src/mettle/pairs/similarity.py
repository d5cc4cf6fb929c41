"""Embeddings made ready for comparison, and their similarities one tile at a time.

Everything quadratic runs in float32 or better: a bfloat16 similarity matrix puts up to a quarter of error into the
gradient, bfloat16 *inputs* do not.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mettle.pairs.interface import Mask, Measure

ZERO = 1e-30  # rows shorter than this have no direction; they become the zero vector and receive no gradient
ORDINARY = 1e-12  # rows between this length and its inverse can be squared without a second thought
NEAR = 2.0**-5  # d² / (|a|² + |b|²) below which a float32 product has lost too many digits of d²
SAME = 2.0**-44  # the same below which two rows are one: float32 rows have no finer distances
FEW = 64  # parts of a tile of which one may be close pairs, for taking these one by one
SLACK = 16  # roundings by which products of the same rows may differ between engines, tiles and places in a tile


def widen(z: Tensor) -> Tensor:
    """Float32 for half precision, unchanged otherwise (float64 stays float64 throughout)."""
    return z.float() if z.dtype in (torch.float16, torch.bfloat16) else z


def unit(z: Tensor) -> Tensor:
    """Rows of length 1; rows without a direction become zero, with zero gradient.

    Dividing by the largest entry first keeps rows of length 1e-30 or 1e30 from under- or overflowing when squared; on
    the CPU, where looking costs nothing, rows of ordinary length skip that.
    """
    if not z.is_cuda:
        length = z.norm(dim=1, keepdim=True)
        low, high = (float(v) for v in torch.aminmax(length.detach()))
        if low > ORDINARY and high < 1 / ORDINARY:
            return z / length
    size = z.detach().abs().amax(dim=1, keepdim=True)
    zero = size < ZERO
    scaled = z / size.masked_fill(zero, 1)
    length = scaled.masked_fill(zero, 1).norm(dim=1, keepdim=True)
    return (scaled / length).masked_fill(zero, 0)


def ready(z: Tensor, measure: Measure) -> Tensor:
    """What tiles of this measure are computed from."""
    return unit(widen(z)) if measure == "cosine" else widen(z)


def similarity(a: Tensor, b: Tensor, measure: Measure) -> Tensor:
    """(len(a), len(b)) similarities of prepared rows, higher = more alike."""
    if measure == "l1":
        return -(a[:, None, :] - b[None, :, :]).abs().sum(-1)
    s = a @ b.T
    if measure == "squared":
        return 2 * s - (a * a).sum(1, keepdim=True) - (b * b).sum(1)[None, :]
    return s


@dataclass(frozen=True)
class Sides:
    """The prepared rows behind a tile, for what its similarities are too coarse to say. Nothing here has gradient."""

    z: Tensor
    ref: Tensor
    i: slice | Tensor  # the rows of a block, or tensors: a list of pairs
    j: slice | Tensor
    measure: Measure

    def turned(self) -> "Sides":
        """Seen from the other end."""
        return Sides(self.ref, self.z, self.j, self.i, self.measure)

    def sharpened(self, squared: Tensor, pos: Mask, neg: Mask) -> Tensor:
        """Squared distances that came from float32 products, with the digits that close pairs lost there.

        The gradient stays that of the product. A tile without close pairs costs one look; a few are taken one by one,
        many by a product in float64.
        """
        if squared.dtype != torch.float32:
            return squared
        plain, (a, b) = squared.detach(), self._squared_lengths()
        looking = not (plain.is_cuda and torch.cuda.is_current_stream_capturing())  # a graph cannot look: it computes
        if looking and bool(plain.amin() >= NEAR * (torch.max(a) + torch.max(b))):  # nearly every tile of strangers
            return squared
        near = plain < NEAR * (a + b)
        near = near if neg is True else near & (pos | neg)
        if looking and isinstance(self.i, slice) and (few := self._few(near)) is not None:
            i, j, exact = few
            return squared.index_put((i, j), exact + (squared[i, j] - plain[i, j]))
        return torch.where(near, self.squared() + (squared - plain), squared)

    def _few(self, near: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Where a block has near pairs and how far apart these are, one by one; None where they are too many."""
        i, j = near.nonzero(as_tuple=True)
        if len(i) * max(FEW, self.z.shape[1] // 8) > near.numel():
            return None
        pairs = replace(self, i=i + self.i.start, j=j + self.j.start)  # type: ignore[union-attr]
        return i, j, pairs.squared().squeeze(1)

    def squared(self) -> Tensor:
        """Squared distances good to the last digits of the rows; 0 for rows that are the same."""
        a, b = self.z.detach(), self.ref.detach()
        if isinstance(self.i, Tensor) and isinstance(self.j, Tensor):  # index_select: five times as fast as a[i] here
            return (a.index_select(0, self.i) - b.index_select(0, self.j)).square().sum(1, keepdim=True)
        a, b = a[self.i].double(), b[self.j].double()
        size = a.square().sum(1, keepdim=True) + b.square().sum(1)
        d = torch.addmm(size, a, b.T, alpha=-2)
        return d.masked_fill_(d < SAME * size, 0).to(self.z.dtype)

    def slack(self) -> Tensor | float:
        """How far two similarities may lie apart by rounding alone."""
        one = SLACK * torch.finfo(self.z.dtype).eps
        if self.measure == "l1":
            return 0.0
        if self.measure == "cosine":
            return one
        a, b = self._squared_lengths()
        return one * ((a * b).sqrt() if self.measure == "dot" else a + b)

    def _squared_lengths(self) -> tuple[Tensor, Tensor]:
        """Of the rows at both ends, as a column and a row."""
        if self.measure == "cosine":
            return self.z.new_ones(1, 1), self.z.new_ones(1, 1)
        a, b = (x[k].detach().square().sum(1) for x, k in ((self.z, self.i), (self.ref, self.j)))
        return a[:, None], b[:, None] if isinstance(self.j, Tensor) else b[None, :]
