"""Embeddings prepared for comparison; similarities and distances of a tile; nearest references.

Everything quadratic runs in float32 or better: a bfloat16 similarity matrix puts up to a quarter of error into the
gradient, bfloat16 *inputs* do not. Distances are safe where two points coincide and accurate where they nearly do.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.interface import Mask, Measure, Tile

ZERO_LENGTH = 1e-30  # rows shorter than this have no direction; they become the zero vector and receive no gradient
ORDINARY_LENGTH = 1e-12  # rows between this length and its inverse can be squared without a second thought
CLOSE = 2.0**-5  # d² / (|a|² + |b|²) below which a float32 product has lost too many digits of d²
EQUAL = 2.0**-44  # the same below which two rows are one: float32 rows have no finer distances
FEW_CLOSE_PAIRS = 64  # parts of a tile of which one may be close pairs, for taking these one by one
WITHOUT_FLOAT64 = {"mps"}  # kinds of devices
MAX_ROUNDINGS = 16  # by which products of the same rows may differ between engines, tiles and places in a tile


def at_least_float32(z: Tensor) -> Tensor:
    """Float32 for half precision, unchanged otherwise (float64 stays float64 throughout)."""
    return z.float() if z.dtype in (torch.float16, torch.bfloat16) else z


def widest_dtype(device: torch.device) -> torch.dtype:
    """Float64 where the device has it, else float32."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def normalize_rows(z: Tensor) -> Tensor:
    """Rows of length 1; rows without a direction become zero, with zero gradient.

    Dividing by the largest entry first keeps rows of length 1e-30 or 1e30 from under- or overflowing when squared; on
    the CPU, where looking costs nothing, rows of ordinary length skip that.
    """
    if can_read(z):
        length = torch.linalg.vector_norm(z, dim=1, keepdim=True)
        if ordinary_lengths(length):
            return z / length
    largest = z.detach().abs().amax(dim=1, keepdim=True)
    zero = largest < ZERO_LENGTH
    scaled = z / largest.masked_fill(zero, 1)
    length = scaled.masked_fill(zero, 1).norm(dim=1, keepdim=True)
    return (scaled / length).masked_fill(zero, 0)


def ordinary_lengths(length: Tensor) -> bool:
    """Whether rows of these lengths are finite and can be squared without a second thought."""
    low, high = torch.aminmax(length.detach())
    return low.item() > ORDINARY_LENGTH and high.item() < 1 / ORDINARY_LENGTH


def can_read(x: Tensor) -> bool:
    """Whether looking at a value now is possible and costs nothing.

    Not on a GPU, which would have to finish first, not while ``torch.compile`` traces, and not inside a transform of
    ``torch.func``, where there may be no value to look at.
    """
    return not x.is_cuda and may_read(x)


def may_read(x: Tensor) -> bool:
    """Whether looking at a value now is possible, though a GPU may have to finish first."""
    if x.is_meta or torch.compiler.is_compiling() or transforms_active():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def transforms_active() -> bool:
    """Whether a transform of ``torch.func`` (grad, jvp, vmap, ...) is active."""
    return torch._C._are_functorch_transforms_active()


def prepare_embeddings(z: Tensor, measure: Measure) -> Tensor:
    """What tiles of this measure are computed from."""
    return normalize_rows(at_least_float32(z)) if measure == "cosine" else at_least_float32(z)


def prepare_sides(anchors: Tensor, references: Tensor, measure: Measure) -> tuple[Tensor, Tensor]:
    """The same of both sides, where they may differ.

    The signal-to-noise distance is a product of two rows, which are d + 2 wide: with a and b less the mean of their
    entries, −|a − b|² / |a|² = (2a/|a|², −1/|a|², −1) · (b, |b|², 1). An anchor without variance has similarity 0.
    """
    a, b = prepare_embeddings(anchors, measure), prepare_embeddings(references, measure)
    if measure != "snr":
        return a, b
    a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    signal = a.square().sum(1, keepdim=True)
    flat = signal == 0
    inverse = torch.where(flat, 1, signal).reciprocal().masked_fill(flat, 0)
    left = torch.cat([2 * inverse * a, -inverse, -(~flat).to(a.dtype)], 1)
    return left, torch.cat([b, b.square().sum(1, keepdim=True), torch.ones_like(b[:, :1])], 1)


def similarity(a: Tensor, b: Tensor, measure: Measure) -> Tensor:
    """(len(a), len(b)) similarities of prepared rows, higher = more alike."""
    if measure == "l1":
        return -(a[:, None, :] - b[None, :, :]).abs().sum(-1)
    if measure == "euclidean":
        return -safe_sqrt(-similarity(a, b, "squared").clamp(max=0))
    s = a @ b.T
    if measure == "squared":
        return 2 * s - (a * a).sum(1, keepdim=True) - (b * b).sum(1)[None, :]
    return s


@dataclass(frozen=True)
class TileOperands:
    """The prepared rows behind a tile, for what its similarities are too coarse to say. Nothing here has gradient."""

    z: Tensor
    ref: Tensor
    i: slice | Tensor  # the rows of a block, or tensors: a list of pairs
    j: slice | Tensor
    measure: Measure

    def transpose(self) -> "TileOperands":
        """Seen from the other end."""
        return TileOperands(self.ref, self.z, self.j, self.i, self.measure)

    def refine_small_distances(self, squared: Tensor, pos: Mask, neg: Mask) -> Tensor:
        """Squared distances that came from float32 products, with the digits that close pairs lost there.

        The gradient stays that of the product. A tile without close pairs costs one look; a few are taken one by one,
        many by a product in float64.
        """
        if squared.dtype != torch.float32:
            return squared
        plain, looking = squared.detach(), may_read(squared)  # where it may not look, it computes
        if looking and self._count_below(plain) == self._count_self_pairs():  # nearly every tile of strangers
            return squared
        close = plain < CLOSE * self._squared_length_sum()
        close = close if neg is True else close & (pos | neg)
        if looking and isinstance(self.i, slice) and (few := self._few_close_pairs(close)) is not None:
            i, j, exact = few
            return squared.index_put((i, j), exact + (squared[i, j] - plain[i, j]))
        return torch.where(close, self.squared() + (squared - plain), squared)

    def _count_below(self, squared: Tensor) -> int:
        """How many entries are close for lengths as large as the largest ones here: no fewer than there are."""
        if self.measure == "cosine":
            return int((squared < CLOSE * 2).sum())
        a, b = self._squared_lengths()
        return int((squared < CLOSE * (torch.max(a) + torch.max(b))).sum())

    def _count_self_pairs(self) -> int:
        """How many entries of a block pair a row with itself."""
        same_block = self.z is self.ref and isinstance(self.i, slice) and self.i == self.j
        return len(range(*self.i.indices(len(self.z)))) if same_block else 0  # type: ignore[union-attr]

    def _squared_length_sum(self) -> Tensor | float:
        """|a|² + |b|² of every pair."""
        if self.measure == "cosine":
            return 2.0
        a, b = self._squared_lengths()
        return a + b

    def _few_close_pairs(self, close: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Where a block has close pairs and how far apart these are, one by one; None where they are too many."""
        i, j = close.nonzero(as_tuple=True)
        if len(i) * max(FEW_CLOSE_PAIRS, self.z.shape[1] // 8) > close.numel():
            return None
        pairs = replace(self, i=i + self.i.start, j=j + self.j.start)  # type: ignore[union-attr]
        return i, j, pairs.squared().squeeze(1)

    def squared(self) -> Tensor:
        """Squared distances good to the last digits of the rows; 0 for rows that are the same."""
        a, b = self.z.detach(), self.ref.detach()
        if isinstance(self.i, Tensor) and isinstance(self.j, Tensor):  # index_select: five times as fast as a[i] here
            return (a.index_select(0, self.i) - b.index_select(0, self.j)).square().sum(1, keepdim=True)
        dtype = widest_dtype(a.device)
        a, b = a[self.i].to(dtype), b[self.j].to(dtype)
        size = a.square().sum(1, keepdim=True) + b.square().sum(1)
        d = torch.addmm(size, a, b.T, alpha=-2)
        return d.masked_fill_(d < EQUAL * size, 0).to(self.z.dtype)

    def rounding_error(self, s: Tensor) -> Tensor | float:
        """How far two of the similarities ``s`` may lie apart by rounding alone."""
        one = MAX_ROUNDINGS * torch.finfo(self.z.dtype).eps
        if self.measure == "l1":
            return 0.0
        if self.measure == "cosine":
            return one
        a, b = self._squared_lengths()
        if self.measure in ("dot", "snr"):
            return one * (a * b).sqrt()
        error = one * (a + b)
        if self.measure == "squared":
            return error
        return error / (2 * torch.maximum(s.detach().abs(), error.sqrt()).clamp(min=torch.finfo(s.dtype).tiny))

    def _squared_lengths(self) -> tuple[Tensor, Tensor]:
        """Of the rows at both ends, as a column and a row."""
        if self.measure == "cosine":
            return self.z.new_ones(1, 1), self.z.new_ones(1, 1)
        a, b = (x[k].detach().square().sum(1) for x, k in ((self.z, self.i), (self.ref, self.j)))
        return a[:, None], b[:, None] if isinstance(self.j, Tensor) else b[None, :]


def squared_distance(tile: Tile | Tensor, measure: Measure) -> Tensor:
    """d² from cosines of unit vectors (2 − 2s) or from negated squared distances; never below 0.

    In float32, 2 − 2s has no digits left for points closer than 3e-4. A tile knows its rows and puts the digits back;
    similarities alone, without a tile, cannot.
    """
    s = tile.similarity if isinstance(tile, Tile) else tile
    if measure == "euclidean":
        return s.square()
    if measure != "cosine":
        return (-s).clamp(min=0)
    squared = torch.rsub(s, 2, alpha=2)  # 2 − 2s in one step
    if isinstance(tile, Tile) and tile.operands is not None:
        squared = tile.operands.refine_small_distances(squared, tile.positive, tile.negative)
    return squared.clamp(min=0)


def distance(tile: Tile | Tensor, measure: Measure) -> Tensor:
    """d, with gradient 0 where d is 0: two coincident points have no direction to move in."""
    s = tile.similarity if isinstance(tile, Tile) else tile
    if measure in ("l1", "euclidean"):
        return -s
    if transforms_active() or torch.compiler.is_compiling():  # torch.func goes through steps that it knows
        return safe_sqrt(squared_distance(tile, measure))
    return _DistanceFunction.apply(s, tile, measure)


def safe_sqrt(x: Tensor) -> Tensor:
    """Square roots, with gradient 0 at 0."""
    zero = x == 0
    return torch.where(zero, 0, torch.where(zero, 1, x).sqrt())


class _DistanceFunction(torch.autograd.Function):
    """d of s, one node of the graph: d² is 2 - 2s or -s, and half a dozen elementwise steps less to go back through."""

    @staticmethod
    def forward(ctx, s: Tensor, tile: Tile | Tensor, measure: Measure) -> Tensor:  # type: ignore[override]
        d = squared_distance(tile, measure).sqrt_()  # a fresh tensor
        ctx.save_for_backward(d)
        ctx.slope = -1.0 if measure == "cosine" else -0.5
        return d

    @staticmethod
    def backward(ctx, g: Tensor):  # type: ignore[override]
        (d,) = ctx.saved_tensors
        return ctx.slope * g / d.masked_fill(d == 0, torch.inf), None, None


QUERIES, GALLERY = 4096, 16384  # rows of one block


@torch.no_grad()
def topk(q: Tensor, ref: Tensor, k: int, *, measure: Measure = "cosine") -> tuple[Tensor, Tensor]:
    """The ``k`` most similar references of every query: scores and positions, best first; NaN counts as best."""
    if measure not in get_args(Measure):
        raise InputError(f"measure must be one of {', '.join(get_args(Measure))}: got {measure!r}")
    if not (q.ndim == ref.ndim == 2 and q.shape[1] == ref.shape[1] and k >= 1):
        shapes = f"{tuple(q.shape)} and {tuple(ref.shape)}"
        raise InputError(f"topk needs queries (n, d), references (m, d) and k of 1 or more: got {shapes}, k = {k}")
    a, b = prepare_sides(q, ref, measure)
    k = min(k, len(b))
    scores = a.new_empty(len(a), k)
    found = torch.empty(len(a), k, dtype=torch.int64, device=a.device)
    for i in range(0, len(a), QUERIES):
        rows = slice(i, i + QUERIES)
        best, at = a.new_empty(len(a[rows]), 0), found.new_empty(len(a[rows]), 0)
        for j in range(0, len(b), GALLERY):
            part = b[j : j + GALLERY]
            s = -torch.cdist(a[rows], part, p=1) if measure == "l1" else similarity(a[rows], part, measure)
            s, here = s.topk(min(k, len(part)), dim=1)
            best, at = torch.cat([best, s], 1), torch.cat([at, here + j], 1)
            best, keep = best.topk(min(k, best.shape[1]), dim=1)
            at = at.gather(1, keep)
        scores[rows], found[rows] = best, at
    return scores, found


def warn_dense_recomputation(rows: int, columns: int) -> None:
    """Say what a second derivative costs where the first one holds no matrix."""
    warnings.warn(
        f"create_graph=True computes the {rows} x {columns} similarities again as one matrix with a graph, about "
        f"{rows * columns * 40 / 2**20:.0f} MB in float32: a smaller batch, or engine='dense', costs less",
        stacklevel=4,
    )


def differentiable_gradients(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of ``inputs`` with a graph of their own; None for an input that wants none or is None.

    Outputs without a gradient, or without a graph, are left out. For custom backward passes under ``create_graph``.
    """
    pairs = [(x, g) for x, g in zip(outputs, gradients, strict=True) if g is not None and x.requires_grad]
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    if not pairs or not wanted:
        return [None for _ in inputs]
    found = iter(
        torch.autograd.grad([x for x, _ in pairs], wanted, [g for _, g in pairs], create_graph=True, allow_unused=True)
    )
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]
