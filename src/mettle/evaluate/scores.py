"""Scores of pairs: exact cosines, streamed in tiles, counted by kind.

    Rows -> Unit (unit vectors on an integer grid) -> Design (which pairs) -> blocks ─┬─► Scores   sorted, in memory
                                                                                     └─► Counted  bins (counted.py)

**Why integers.** A matrix product rounds differently for different tile shapes, threads and devices, so equal
pairs would get unequal scores and a tie would depend on the batch size. Here unit vectors are rounded once to
multiples of 2⁻²⁶. Every product is then a multiple of 2⁻⁵² and, by Cauchy-Schwarz, every partial sum is at
most one in size: at most 2⁵² steps, which float64 holds exactly in any order of summation. The same pair has
the same score, bit for bit, in any tile, on any device. Rounding moves a cosine by about 1e-8, less than
float32 itself does, and the score is then stored as float32. For float64 rows a second limb continues each
component to 2⁻⁴⁶; scores are good to about 1e-14 and equal ones are those equal to 12 decimals.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mettle.errors import InputError
from mettle.evaluate.checks import Rows, both_kinds, codes

_HIGH, _LOW = 2.0**26, 2.0**46
_CACHE = 1 << 16  # components normalised at a time
WIDEST = 1 << 14  # columns of one tile


@dataclass(frozen=True, eq=False)
class Unit:
    """Unit vectors on an integer grid; :meth:`cosine` and :meth:`paired` are exact, hence order-free.

    Attributes:
        high: (n, d) float64, the components as multiples of 2⁻²⁶.
        low: (n, d) float64, the rest as multiples of 2⁻⁴⁶, or None for float32 rows.
    """

    high: np.ndarray
    low: np.ndarray | None

    @classmethod
    def of(cls, values: np.ndarray, double: bool | None = None) -> "Unit":
        """Normalise (n, d) rows; two limbs if ``double``, which defaults to float64 rows."""
        double = values.dtype == np.float64 if double is None else double
        high, low = np.empty(values.shape), np.empty(values.shape) if double else None
        for start in range(0, len(values), step := max(1, _CACHE // values.shape[1])):
            part = slice(start, start + step)
            x = values[part].astype(np.float64, order="C")  # one order, so that sums do not depend on the input's
            x /= np.maximum(x.max(axis=1), -x.min(axis=1))[:, None]  # so that squares neither overflow nor vanish
            x /= np.sqrt(np.square(x).sum(axis=1))[:, None]
            np.rint(np.multiply(x, _HIGH, out=high[part]), out=high[part])
            high[part] /= _HIGH
            if low is not None:
                np.subtract(x, high[part], out=x)
                np.rint(np.multiply(x, _LOW, out=low[part]), out=low[part])
                low[part] /= _LOW
        return cls(high, low)

    @property
    def dtype(self) -> type:
        """What scores are stored in: float64 for float64 rows, else float32."""
        return np.float32 if self.low is None else np.float64

    def __len__(self) -> int:
        return len(self.high)

    def vectors(self) -> np.ndarray:
        """The unit vectors in float64."""
        return self.high if self.low is None else self.high + self.low

    def rounded(self) -> np.ndarray:
        """The vectors in float32, for fast scores."""
        return self.vectors().astype(np.float32)

    def take(self, at: np.ndarray | slice) -> "Unit":
        """Some of the rows."""
        return Unit(self.high[at], None if self.low is None else self.low[at])

    def cosine(self, other: "Unit", room: np.ndarray | None = None) -> np.ndarray:
        """s_ij = <u_i, v_j> as an (a, b) tile; ``room`` is a float64 buffer for the product, to be used again."""
        shape = len(self), len(other)
        out = None if room is None else room[: shape[0] * shape[1]].reshape(shape)
        if self.low is None or other.low is None:
            return _finish(np.matmul(self.high, other.high.T, out=out))
        cross = np.hstack([self.high, self.low]) @ np.hstack([other.low, other.high]).T
        return _finish(self.high @ other.high.T, cross)

    def paired(self, other: "Unit") -> np.ndarray:
        """s_i = <u_i, v_i>, one per row of two equally long sets."""
        if self.low is None or other.low is None:
            return _finish(np.einsum("ij,ij->i", self.high, other.high))
        cross = np.einsum("ij,ij->i", self.high, other.low) + np.einsum("ij,ij->i", self.low, other.high)
        return _finish(np.einsum("ij,ij->i", self.high, other.high), cross)


def _finish(dot: np.ndarray, cross: np.ndarray | None = None) -> np.ndarray:
    """Round exact products to scores: float32 from one limb, 12 decimals of float64 from two."""
    if cross is None:
        s = dot.astype(np.float32)
        return np.clip(s, -1, 1, out=s)
    dot += cross
    return np.round(dot, 12, out=dot)


class Block(NamedTuple):
    """Some scored pairs; the subject columns are empty unless asked for."""

    genuine: np.ndarray
    genuine_subject: np.ndarray
    impostor: np.ndarray
    impostor_subjects: tuple[np.ndarray, np.ndarray]


Stream = Callable[[bool], Iterator[Block]]  # stream(with_subjects) replays all pairs from the start


@dataclass(frozen=True, eq=False)
class Scores:
    """All scores of one evaluation, sorted, and the way to walk through the pairs again.

    Attributes:
        genuine: genuine scores, ascending.
        impostor: impostor scores, ascending.
        subjects: how many subjects take part, 0 when unknown.
        stream: replays the pairs with subject codes 0 … subjects-1; what the bootstrap needs is not stored
            (two codes for each of 32 million pairs) but computed again, identically, when asked for.
    """

    genuine: np.ndarray
    impostor: np.ndarray
    subjects: int
    stream: Stream

    @classmethod
    def of(cls, stream: Stream, bound: tuple[int, int], dtype: type, subjects: int) -> "Scores":
        """Drain a stream of at most ``bound`` (genuine, impostor) pairs and sort it in place."""
        sides = tuple(np.empty(n, dtype) for n in bound)  # untouched pages of an upper bound cost nothing
        filled = [0, 0]
        for block in stream(False):
            for side, part in enumerate((block.genuine, block.impostor)):
                sides[side][filled[side] : filled[side] + len(part)] = part
                filled[side] += len(part)
        both_kinds(*filled)
        genuine, impostor = (a[:n] for a, n in zip(sides, filled, strict=True))
        genuine.sort()
        impostor.sort()
        return cls(genuine, impostor, subjects, stream)

    @property
    def impostors(self) -> int:
        """Number of impostor pairs."""
        return len(self.impostor)

    @property
    def dtype(self) -> np.dtype:
        """Of the scores."""
        return self.impostor.dtype

    @property
    def failed(self) -> int:
        """Pairs with a failed template, whose score is −∞."""
        return sum(int(np.searchsorted(a, a.dtype.type(-np.inf), side="right")) for a in (self.genuine, self.impostor))

    def below(self, thresholds: np.ndarray) -> np.ndarray:
        """#impostor < τ for each threshold."""
        return np.searchsorted(self.impostor, np.asarray(thresholds, self.dtype), side="left")

    def quantiles(self, ranks: np.ndarray) -> np.ndarray:
        """The impostor scores at these ascending ranks."""
        return self.impostor[np.clip(np.rint(ranks), 0, len(self.impostor) - 1).astype(np.int64)]


class Side(NamedTuple):
    """Cohort scores of each row of one side: their mean and one over their standard deviation, as columns."""

    mean: np.ndarray
    scale: np.ndarray

    def take(self, at: np.ndarray | slice) -> "Side":
        """Some of the rows."""
        return Side(self.mean[at], self.scale[at])


class Norm(NamedTuple):
    """Symmetric cohort normalisation s' = ½·((s − μ_i)/σ_i + (s − μ_j)/σ_j), element by element, in float64."""

    first: Side
    second: Side

    def tile(self, s: np.ndarray, rows: slice, cols: slice) -> np.ndarray:
        """A tile of scores."""
        (a, p), (b, q) = self.first.take(rows), self.second.take(cols)
        return _normal(s, a[:, None], p[:, None], b[None], q[None])

    def pairs(self, s: np.ndarray, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """Scores of listed pairs."""
        return _normal(s, *self.first.take(i), *self.second.take(j))

    def span(self) -> tuple[float, float]:
        """Numbers that no normalised score can leave."""
        low = [float(((-1 - side.mean) * side.scale).min()) for side in self]
        high = [float(((1 - side.mean) * side.scale).max()) for side in self]
        return sum(low) / 2, sum(high) / 2


def _normal(s: np.ndarray, a: np.ndarray, p: np.ndarray, b: np.ndarray, q: np.ndarray) -> np.ndarray:
    s = s.astype(np.float64)
    return np.round((s - a) * p * 0.5 + (s - b) * q * 0.5, 12)


@dataclass(frozen=True, eq=False)
class Design:
    """Which pairs are compared: probe rows x gallery rows, less what a mask takes out.

    Attributes:
        probe: unit vectors; ``gallery`` is the same object when a set is compared with itself.
        gallery: unit vectors.
        subject: subject codes of probe and gallery.
        ids: sample ids of both sides, or None: pairs of one id are left out.
        domain: domain codes of both sides, or None.
        keep: "all", "within" (one domain) or "across" (two domains).
        chunk: probe rows in one tile.
        norm: cohort normalisation of scores, or None.
    """

    probe: Unit
    gallery: Unit
    subject: tuple[np.ndarray, np.ndarray]
    ids: tuple[np.ndarray, np.ndarray] | None
    domain: tuple[np.ndarray, np.ndarray] | None
    keep: str
    chunk: int
    norm: "Norm | None" = None

    @classmethod
    def of(
        cls, probe: Rows, gallery: Rows | None, keep: str, chunk: int, norm: "tuple[Side, Side] | None" = None
    ) -> "Design":
        """Sort rows by label (neighbouring pairs are then of neighbouring subjects) and normalise once."""
        other = probe if gallery is None else gallery
        double = probe.values.dtype == np.float64 or other.values.dtype == np.float64
        orders = [np.argsort(r.labels, kind="stable") for r in (probe, other)]

        def pick(a: np.ndarray | None, b: np.ndarray | None) -> tuple[np.ndarray, np.ndarray] | None:
            return None if a is None or b is None else (a[orders[0]], b[orders[1]])

        first = Unit.of(probe.values[orders[0]], double)
        second = first if gallery is None else Unit.of(other.values[orders[1]], double)
        subject = pick(*codes(probe.labels, other.labels))
        domain = None
        if keep != "all" and probe.domains is not None and other.domains is not None:
            domain = pick(*codes(probe.domains, other.domains))
        assert subject is not None
        sides = None if norm is None else Norm(norm[0].take(orders[0]), norm[1].take(orders[1]))
        return cls(first, second, subject, pick(probe.ids, other.ids), domain, keep, chunk, sides)

    @property
    def own(self) -> bool:
        """Whether a set is compared with itself: every unordered pair once."""
        return self.probe is self.gallery

    @property
    def dtype(self) -> type:
        """What scores are stored in."""
        return self.probe.dtype if self.norm is None else np.float64

    def room(self) -> int:
        """Scores in the largest tile."""
        return min(self.chunk, len(self.probe)) * min(WIDEST, len(self.gallery))

    def bound(self) -> tuple[int, int]:
        """Genuine and impostor pairs before ids and domains take any out."""
        a, b = self.subject
        size = 1 + max(int(a.max()), int(b.max()))
        per = np.bincount(a, minlength=size).astype(object), np.bincount(b, minlength=size).astype(object)
        genuine, every = sum(per[0] * per[1]), len(a) * len(b)
        if self.own:
            genuine, every = (genuine - len(a)) // 2, len(a) * (len(a) - 1) // 2
        return genuine, every - genuine

    def tiles(self) -> Iterator[tuple[slice, slice, bool]]:
        """Rows and columns of each tile, and whether it may hold genuine pairs.

        Both sides are sorted by subject, so the subjects of some rows fill one range of columns. Only there can a
        pair be genuine, be a sample with itself or stand below the diagonal: all other tiles need no mask for that.
        """
        row, col = self.subject
        for start in range(0, len(self.probe), self.chunk):
            rows = slice(start, min(start + self.chunk, len(self.probe)))
            first = start if self.own else int(np.searchsorted(col, row[rows.start], side="left"))
            last = int(np.searchsorted(col, row[rows.stop - 1], side="right"))
            parts = [(first, last, True), (last, len(self.gallery), False)]
            if not self.own:
                parts.insert(0, (0, first, False))
            for low, high, mixed in parts:
                for at in range(low, high, WIDEST):
                    yield rows, slice(at, min(at + WIDEST, high)), mixed

    def stream(self, with_subjects: bool) -> Iterator[Block]:
        """Score every kept pair, tile by tile."""
        room = np.empty(self.room())
        for rows, cols, mixed in self.tiles():
            tile = self.score(rows, cols, room)
            keep = self._kept(rows, cols, tile.shape, mixed)
            row, col = self.subject[0][rows, None], self.subject[1][None, cols]
            if not mixed:
                yield _impostors(tile, keep, row, col, with_subjects)
                continue
            same = row == col
            other = ~same if keep is None else keep > same
            if keep is not None:
                same &= keep
            row, col = np.broadcast_to(row, tile.shape), np.broadcast_to(col, tile.shape)
            if with_subjects:
                yield Block(tile[same], row[same], tile[other], (row[other], col[other]))
            else:
                none = row[:0, 0]
                yield Block(tile[same], none, tile[other], (none, none))

    def score(self, rows: slice, cols: slice, room: np.ndarray | None = None) -> np.ndarray:
        """The scores of one tile."""
        tile = self.probe.take(rows).cosine(self.gallery.take(cols), room)
        return tile if self.norm is None else self.norm.tile(tile, rows, cols)

    def paired(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """The scores of some pairs, by position on either side: the same numbers that tiles hold."""
        s = self.probe.take(i).paired(self.gallery.take(j))
        return s if self.norm is None else self.norm.pairs(s, i, j)

    def genuine_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Positions of every genuine pair that is kept."""
        row, col = self.subject
        first, last = np.searchsorted(col, row, side="left"), np.searchsorted(col, row, side="right")
        if self.own:
            first = np.arange(1, len(row) + 1)
        count = last - first
        i = np.repeat(np.arange(len(row)), count)
        j = np.arange(len(i)) - np.repeat(np.cumsum(count) - count, count) + first[i]
        keep = np.ones(len(i), bool)
        if self.ids is not None:
            keep &= self.ids[0][i] != self.ids[1][j]
        if self.domain is not None:
            keep &= (self.domain[0][i] == self.domain[1][j]) == (self.keep == "within")
        return i[keep], j[keep]

    def absent(self, rows: slice, cols: slice, shape: tuple[int, ...], mixed: bool) -> np.ndarray | None:
        """Mask of the tile's pairs that are no impostor pairs, or None when all are."""
        keep = self._kept(rows, cols, shape, mixed)
        if not mixed:
            return None if keep is None else ~keep
        same = self.subject[0][rows, None] == self.subject[1][None, cols]
        return same if keep is None else same | ~keep

    def _kept(self, rows: slice, cols: slice, shape: tuple[int, ...], mixed: bool) -> np.ndarray | None:
        """Mask of the tile's pairs that count, or None when all do."""
        keep = None
        if self.own and mixed:
            keep = np.arange(rows.start, rows.stop)[:, None] < np.arange(cols.start, cols.stop)
        if self.domain is not None:
            equal = self.domain[0][rows, None] == self.domain[1][None, cols]
            keep = _both(keep, equal if self.keep == "within" else ~equal)
        if self.ids is not None and mixed:  # one id is one label
            keep = _both(keep, self.ids[0][rows, None] != self.ids[1][None, cols])
        return keep


@dataclass(frozen=True, eq=False)
class Listed:
    """Pairs named one by one: (m, 2) row numbers and the truth, with vectors or ready-made scores."""

    score: Callable[[slice], np.ndarray]
    target: np.ndarray
    subject: tuple[np.ndarray, np.ndarray] | None
    chunk: int = 1 << 18

    def stream(self, with_subjects: bool) -> Iterator[Block]:
        """Score the list, piece by piece."""
        if with_subjects and self.subject is None:
            raise InputError("intervals resample subjects: pass subjects, the (m, 2) labels of the scored pairs")
        for start in range(0, len(self.target), self.chunk):
            part = slice(start, start + self.chunk)
            s, t = self.score(part), self.target[part]
            if with_subjects and self.subject is not None:
                a, b = self.subject[0][part], self.subject[1][part]
            else:
                a = b = np.empty(len(t), np.int32)
            yield Block(s[t], a[t], s[~t], (a[~t], b[~t]))


def _impostors(tile: np.ndarray, keep: np.ndarray | None, row: np.ndarray, col: np.ndarray, named: bool) -> Block:
    """A tile without genuine pairs."""
    none = np.empty(0, row.dtype)
    flat = tile.ravel() if keep is None else tile[keep]
    if not named:
        return Block(tile[:0, 0], none, flat, (none, none))
    a, b = (np.broadcast_to(side, tile.shape) for side in (row, col))
    sides = (a.ravel(), b.ravel()) if keep is None else (a[keep], b[keep])
    return Block(tile[:0, 0], none, flat, sides)


def _both(a: np.ndarray | None, b: np.ndarray) -> np.ndarray:
    return b if a is None else a & b
