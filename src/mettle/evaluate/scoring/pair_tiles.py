"""Which pairs are compared, tile by tile."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mettle.evaluate.inputs import EmbeddingSet, joint_codes
from mettle.evaluate.scoring.cosine import ExactUnitVectors
from mettle.evaluate.scoring.score_norm import CohortStatistics, SNorm
from mettle.evaluate.scoring.scores import ScoreBlock
from mettle.pairs.distributed import ALONE, RankGroup

WIDEST = 1 << 14  # columns of one tile


@dataclass(frozen=True, eq=False)
class PairTiles:
    """Which pairs are compared: probe rows x gallery rows, less what a mask takes out.

    Both sides are in the order of their labels: neighbouring pairs are then of neighbouring subjects.

    Attributes:
        rows: both sides as they came; one object twice when a set is compared with itself.
        order: where each position of either side came from.
        subject: subject codes of both sides, ascending.
        ids: sample ids of both sides, or None: pairs of one id are left out.
        domain: domain codes of both sides, or None.
        keep: "all", "within" (one domain) or "across" (two domains).
        chunk: probe rows in one tile.
        norm: cohort normalisation of scores, or None.
    """

    rows: tuple[EmbeddingSet, EmbeddingSet]
    order: tuple[np.ndarray, np.ndarray]
    subject: tuple[np.ndarray, np.ndarray]
    ids: tuple[np.ndarray, np.ndarray] | None
    domain: tuple[np.ndarray, np.ndarray] | None
    keep: str
    chunk: int
    norm: SNorm | None = None

    @classmethod
    def from_sets(
        cls,
        probe: EmbeddingSet,
        gallery: EmbeddingSet | None,
        keep: str,
        chunk: int,
        norm: tuple[CohortStatistics, CohortStatistics] | None = None,
    ) -> "PairTiles":
        """Sort both sides by label."""
        other = probe if gallery is None else gallery
        first = np.argsort(probe.labels, kind="stable")
        second = first if gallery is None else np.argsort(other.labels, kind="stable")

        def sort_columns(a: np.ndarray | None, b: np.ndarray | None) -> tuple[np.ndarray, np.ndarray] | None:
            return None if a is None or b is None else (a[first], b[second])

        subject = (
            _code_labels(probe.labels[first])
            if gallery is None
            else sort_columns(*joint_codes(probe.labels, other.labels))
        )
        domain = None
        if keep != "all" and probe.domains is not None and other.domains is not None:
            domain = sort_columns(*joint_codes(probe.domains, other.domains))
        assert subject is not None
        sides = None if norm is None else SNorm(norm[0].take(first), norm[1].take(second))
        return cls(
            (probe, other), (first, second), subject, sort_columns(probe.ids, other.ids), domain, keep, chunk, sides
        )

    @property
    def is_symmetric(self) -> bool:
        """Whether a set is compared with itself: every unordered pair once."""
        return self.rows[0] is self.rows[1]

    @property
    def is_float64(self) -> bool:
        """Whether scores are float64."""
        return any(rows.is_float64 for rows in self.rows)

    @property
    def dim(self) -> int:
        """Components of a vector."""
        return self.rows[0].dim

    @property
    def dtype(self) -> type:
        """What scores are stored in."""
        return np.float64 if self.is_float64 or self.norm is not None else np.float32

    @cached_property
    def probe(self) -> ExactUnitVectors:
        """Unit vectors, computed when first needed; an accelerator makes its own."""
        return ExactUnitVectors.from_rows(self.rows[0].values, self.is_float64, self.order[0])

    @cached_property
    def gallery(self) -> ExactUnitVectors:
        """Unit vectors; those of the probes themselves when a set is compared with itself."""
        return (
            self.probe
            if self.is_symmetric
            else ExactUnitVectors.from_rows(self.rows[1].values, self.is_float64, self.order[1])
        )

    def sample_side(self, side: int, count: int, seed: int = 0) -> "PairTiles":
        """One side in whole, against ``count`` rows of the other drawn at random."""
        other = 1 - side
        size = len(self.rows[other])
        at = np.sort(np.random.default_rng(seed).choice(size, min(count, size), replace=False))

        def pick_rows(pair: tuple[np.ndarray, np.ndarray] | None) -> tuple[np.ndarray, np.ndarray] | None:
            return None if pair is None else (pair[side], pair[other][at])

        drawn = self.rows[other].take(self.order[other][at])
        rows, order = (self.rows[side], drawn), (self.order[side], np.arange(len(drawn)))
        subject = self.subject[side], self.subject[other][at]
        return PairTiles(rows, order, subject, pick_rows(self.ids), pick_rows(self.domain), self.keep, self.chunk)

    def largest_tile(self) -> int:
        """Scores in the largest tile."""
        return min(self.chunk, len(self.rows[0])) * min(WIDEST, len(self.rows[1]))

    def max_pairs(self) -> tuple[int, int]:
        """Genuine and impostor pairs before ids and domains take any out."""
        a, b = self.subject
        size = 1 + max(int(a.max()), int(b.max()))
        per = np.bincount(a, minlength=size), np.bincount(b, minlength=size)
        genuine, every = int(per[0] @ per[1]), len(a) * len(b)
        if self.is_symmetric:
            genuine, every = (genuine - len(a)) // 2, len(a) * (len(a) - 1) // 2
        return genuine, every - genuine

    def tiles(self, chunk: int | None = None, some: slice = slice(None)) -> Iterator[tuple[slice, slice, bool]]:
        """Rows and columns of each tile, and whether it may hold genuine pairs; of all rows or of ``some``.

        Both sides are sorted by subject, so the subjects of some rows fill one range of columns. Only there can a
        pair be genuine, be a sample with itself or stand below the diagonal: all other tiles need no mask for that.
        """
        (row, col), step = self.subject, chunk or self.chunk
        begin, end, _ = some.indices(len(row))
        for start in range(begin, end, step):
            rows = slice(start, min(start + step, end))
            first = start if self.is_symmetric else int(np.searchsorted(col, row[rows.start], side="left"))
            last = int(np.searchsorted(col, row[rows.stop - 1], side="right"))
            parts = [(first, last, True), (last, len(col), False)]
            if not self.is_symmetric:
                parts.insert(0, (0, first, False))
            for low, high, mixed in parts:
                for at in range(low, high, WIDEST):
                    yield rows, slice(at, min(at + WIDEST, high)), mixed

    def stream(self, with_subjects: bool, ranks: RankGroup = ALONE) -> Iterator[ScoreBlock]:
        """Score every kept pair, tile by tile; of several ranks each its own tiles."""
        room = np.empty(self.largest_tile())
        for rows, cols, mixed in ranks.share(self.tiles()):
            yield self.split_tile(rows, cols, self.score_tile(rows, cols, room), mixed, with_subjects)

    def split_tile(self, rows: slice, cols: slice, tile: np.ndarray, mixed: bool, with_subjects: bool) -> ScoreBlock:
        """The kept pairs of a tile of scores, by kind."""
        keep = self._included_mask(rows, cols, tile.shape, mixed)
        row, col = self.subject[0][rows, None], self.subject[1][None, cols]
        if not mixed:
            return _impostor_block(tile, keep, row, col, with_subjects)
        same = row == col
        other = ~same if keep is None else keep > same
        if keep is not None:
            same &= keep
        row, col = np.broadcast_to(row, tile.shape), np.broadcast_to(col, tile.shape)
        if with_subjects:
            return ScoreBlock(tile[same], row[same], tile[other], (row[other], col[other]))
        none = row[:0, 0]
        return ScoreBlock(tile[same], none, tile[other], (none, none))

    def score_tile(self, rows: slice, cols: slice, room: np.ndarray | None = None) -> np.ndarray:
        """The scores of one tile."""
        tile = self.probe.take(rows).cosine(self.gallery.take(cols), room)
        return tile if self.norm is None else self.norm.normalize_tile(tile, rows, cols)

    def score_pairs(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """The scores of some pairs, by position on either side: the same numbers that tiles hold."""
        s = self.probe.take(i).rowwise_cosine(self.gallery.take(j))
        return s if self.norm is None else self.norm.normalize_pairs(s, i, j)

    def genuine_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Positions of every genuine pair that is kept."""
        row, col = self.subject
        first, last = np.searchsorted(col, row, side="left"), np.searchsorted(col, row, side="right")
        if self.is_symmetric:
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

    def excluded_mask(self, rows: slice, cols: slice, shape: tuple[int, ...], mixed: bool) -> np.ndarray | None:
        """Mask of the tile's pairs that are no impostor pairs, or None when all are."""
        keep = self._included_mask(rows, cols, shape, mixed)
        if not mixed:
            return None if keep is None else ~keep
        same = self.subject[0][rows, None] == self.subject[1][None, cols]
        return same if keep is None else same | ~keep

    def _included_mask(self, rows: slice, cols: slice, shape: tuple[int, ...], mixed: bool) -> np.ndarray | None:
        """Mask of the tile's pairs that count, or None when all do."""
        keep = None
        if self.is_symmetric and mixed:
            keep = np.arange(rows.start, rows.stop)[:, None] < np.arange(cols.start, cols.stop)
        if self.domain is not None:
            equal = self.domain[0][rows, None] == self.domain[1][None, cols]
            keep = _stack_sides(keep, equal if self.keep == "within" else ~equal)
        if self.ids is not None and mixed:  # one id is one label
            keep = _stack_sides(keep, self.ids[0][rows, None] != self.ids[1][None, cols])
        return keep


def _code_labels(ascending: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes of sorted labels, from 0 up, for both sides of a set that is compared with itself."""
    code = np.cumsum(np.append(False, ascending[1:] != ascending[:-1])).astype(np.int32)
    return code, code


def _impostor_block(
    tile: np.ndarray, keep: np.ndarray | None, row: np.ndarray, col: np.ndarray, named: bool
) -> ScoreBlock:
    """A tile without genuine pairs; with subjects and nothing to leave out, it stays a tile."""
    none = np.empty(0, row.dtype)
    if not named:
        return ScoreBlock(tile[:0, 0], none, tile.ravel() if keep is None else tile[keep], (none, none))
    if keep is None:
        return ScoreBlock(tile[:0, 0], none, tile, (row, col))
    a, b = (np.broadcast_to(side, tile.shape)[keep] for side in (row, col))
    return ScoreBlock(tile[:0, 0], none, tile[keep], (a, b))


def _stack_sides(a: np.ndarray | None, b: np.ndarray) -> np.ndarray:
    return b if a is None else a & b
