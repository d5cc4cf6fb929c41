"""Scores of pairs: exact cosines, streamed in tiles, counted by kind.

    Rows -> Unit (unit vectors on an integer grid) -> Design (which pairs) -> blocks -> Scores

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
        x = values.astype(np.float64)
        x /= np.abs(x).max(axis=1, keepdims=True)  # so that squares neither overflow nor vanish
        x /= np.sqrt(np.square(x).sum(axis=1, keepdims=True))
        high = np.rint(x * _HIGH) / _HIGH
        double = values.dtype == np.float64 if double is None else double
        return cls(high, np.rint((x - high) * _LOW) / _LOW if double else None)

    @property
    def dtype(self) -> type:
        """What scores are stored in: float64 for float64 rows, else float32."""
        return np.float32 if self.low is None else np.float64

    def __len__(self) -> int:
        return len(self.high)

    def take(self, at: np.ndarray | slice) -> "Unit":
        """Some of the rows."""
        return Unit(self.high[at], None if self.low is None else self.low[at])

    def cosine(self, other: "Unit") -> np.ndarray:
        """s_ij = <u_i, v_j> as an (a, b) tile."""
        if self.low is None or other.low is None:
            return _finish(self.high @ other.high.T)
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
    """

    probe: Unit
    gallery: Unit
    subject: tuple[np.ndarray, np.ndarray]
    ids: tuple[np.ndarray, np.ndarray] | None
    domain: tuple[np.ndarray, np.ndarray] | None
    keep: str
    chunk: int

    @classmethod
    def of(cls, probe: Rows, gallery: Rows | None, keep: str, chunk: int) -> "Design":
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
        return cls(first, second, subject, pick(probe.ids, other.ids), domain, keep, chunk)

    @property
    def own(self) -> bool:
        """Whether a set is compared with itself: every unordered pair once."""
        return self.probe is self.gallery

    def bound(self) -> tuple[int, int]:
        """Genuine and impostor pairs before ids and domains take any out."""
        a, b = self.subject
        size = 1 + max(int(a.max()), int(b.max()))
        per = np.bincount(a, minlength=size).astype(object), np.bincount(b, minlength=size).astype(object)
        genuine, every = sum(per[0] * per[1]), len(a) * len(b)
        if self.own:
            genuine, every = (genuine - len(a)) // 2, len(a) * (len(a) - 1) // 2
        return genuine, every - genuine

    def stream(self, with_subjects: bool) -> Iterator[Block]:
        """Score every kept pair, tile by tile."""
        for start in range(0, len(self.probe), self.chunk):
            rows = slice(start, min(start + self.chunk, len(self.probe)))
            cols = slice(start if self.own else 0, len(self.gallery))
            tile = self.probe.take(rows).cosine(self.gallery.take(cols))
            keep = self._kept(rows, cols, tile.shape)
            row, col = self.subject[0][rows, None], self.subject[1][None, cols]
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

    def _kept(self, rows: slice, cols: slice, shape: tuple[int, ...]) -> np.ndarray | None:
        """Mask of the tile's pairs that count, or None when all do."""
        keep = None
        if self.own:
            keep = np.ones(shape, bool)
            square = min(shape)
            keep[:, :square] = np.triu(keep[:, :square], 1)
        if self.domain is not None:
            equal = self.domain[0][rows, None] == self.domain[1][None, cols]
            keep = _both(keep, equal if self.keep == "within" else ~equal)
        if self.ids is not None:
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


def _both(a: np.ndarray | None, b: np.ndarray) -> np.ndarray:
    return b if a is None else a & b
