"""Both passes of the histogram store on the CPU: over exact scores, or over fast ones with a known error.

A fast score is a product in the precision of the input: d products and as many sums of unit vectors, each rounded once,
and the rounding of its bin, so it is off by at most δ = (d + 16)·2⁻²⁴ in float32.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from mettle.evaluate.scoring.bins import Bins, EvenBins, ScoreWindow, WindowCollector
from mettle.evaluate.scoring.pair_tiles import PairTiles
from mettle.evaluate.scoring.rank_parts import merge_windows, pack_windows
from mettle.evaluate.scoring.scores import ScoreBlock
from mettle.evaluate.scoring.tile_threads import count_threads, map_in_threads
from mettle.pairs.distributed import ALONE, RankGroup

ABSENT = -1.5  # what a masked cell of a tile is set to where bins do not matter: below every cosine
LEAST = -1.00005  # a little below every cosine, and above what is absent
DEAR = 16  # scoring a listed pair costs about as much as so many in a tile

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class ExactPasses:
    """Both passes over exact scores."""

    design: PairTiles
    bins: Bins
    ranks: RankGroup = ALONE  # of all tiles, those of this rank

    def count_bins(self) -> np.ndarray:
        """Pass 1."""
        tally = np.zeros(len(self.bins.edges) - 1, np.int64)
        for block in self.design.stream(False, self.ranks):
            tally += np.bincount(self.bins(block.impostor), minlength=len(tally))
        return tally

    def refine_windows(self, windows: Sequence[tuple[float, float]]) -> list[ScoreWindow]:
        """Pass 2."""
        sieves = [WindowCollector(*w, np.dtype(self.design.dtype)) for w in windows]
        for block in self.design.stream(False, self.ranks):
            for sieve in sieves:
                sieve.add(block.impostor)
        return [sieve.window() for sieve in sieves]


@dataclass(frozen=True, eq=False)
class FastPasses:
    """Both passes over products in the precision of the input, decided by exact scores in pass 2."""

    design: PairTiles
    ranks: RankGroup = ALONE  # of all tiles and genuine pairs, those of this rank
    sides: tuple[np.ndarray, np.ndarray] | None = None  # in the precision of the products, where that is at hand

    def map_parts(self, work: Callable[["FastPasses"], Result]) -> list[Result]:
        """``work`` of every part of these tiles, a thread for each; together they have every tile once."""
        size = len(self.design.rows[0]) * len(self.design.rows[1]) // (1 + self.design.is_symmetric)
        count, sides = count_threads(size // self.ranks.size), self._round_sides()
        parts = [replace(self, ranks=part, sides=sides) for part in self.ranks.split(count)]
        return list(map_in_threads(work, parts, count))

    @property
    def score_dtype(self) -> np.dtype:
        """Of the fast scores."""
        return np.dtype(np.float64 if self.design.is_float64 else np.float32)

    @property
    def score_error_bound(self) -> float:
        """δ: how far a fast score can be from the exact one."""
        if self.score_dtype == np.float32:
            return (self.design.dim + 16) * 2.0**-24
        return (self.design.dim + 16) * 2.0**-53 + 1e-12  # float64 scores have 12 decimals

    def genuine_scores(self) -> np.ndarray:
        """Every genuine score, exactly, ascending."""
        parts = [block.genuine for block in self.genuine_blocks()]
        return np.sort(np.concatenate(parts)) if parts else np.empty(0, self.design.dtype)

    def genuine_blocks(self) -> Iterator[ScoreBlock]:
        """Every genuine score, exactly, with its subject."""
        i, j = self.design.genuine_pairs()
        none = np.empty(0, np.int32)
        for at in self.ranks.share(range(0, len(i), step := 1 << 14)):
            first, second = i[at : at + step], j[at : at + step]
            score = self.design.score_pairs(first, second)
            yield ScoreBlock(score, self.design.subject[0][first], score[:0], (none, none))

    def stream(self, with_subjects: bool) -> Iterator[ScoreBlock]:
        """Genuine scores, exactly, and fast scores of every impostor pair: what resampling is content with."""
        yield from self.genuine_blocks()
        yield from self.impostor_blocks(with_subjects)

    def impostor_blocks(self, with_subjects: bool) -> Iterator[ScoreBlock]:
        """Fast scores of every impostor pair, tile by tile, in one buffer that is used again."""
        for rows, cols, mixed, tile in self._product_tiles():
            block = self.design.split_tile(rows, cols, tile, mixed, with_subjects)
            yield block._replace(genuine=block.genuine[:0], genuine_subject=block.genuine_subject[:0])

    def tiles(self, absent: float = ABSENT) -> Iterator[tuple[slice, slice, np.ndarray]]:
        """Fast scores, tile by tile, in one buffer that is used again; ``absent`` marks what is no impostor pair."""
        for rows, cols, mixed, tile in self._product_tiles():
            out = self.design.excluded_mask(rows, cols, tile.shape, mixed)
            if out is not None:
                tile[out] = absent
            yield rows, cols, tile

    def _product_tiles(self) -> Iterator[tuple[slice, slice, bool, np.ndarray]]:
        design, (first, second) = self.design, self.sides or self._round_sides()
        room = np.empty(design.largest_tile(), self.score_dtype)
        for rows, cols, mixed in self.ranks.share(design.tiles()):
            shape = (rows.stop - rows.start, cols.stop - cols.start)
            yield (
                rows,
                cols,
                mixed,
                np.matmul(first[rows], second[cols].T, out=room[: shape[0] * shape[1]].reshape(shape)),
            )

    def _round_sides(self) -> tuple[np.ndarray, np.ndarray]:
        """Both sides in the precision of the products."""
        first = self.design.probe.vectors().astype(self.score_dtype)
        return first, first if self.design.is_symmetric else self.design.gallery.vectors().astype(self.score_dtype)

    def count_bins(self, bins: EvenBins) -> np.ndarray:
        """Pass 1."""
        return np.sum(self.map_parts(lambda part: part._count_part(bins)), axis=0)

    def _count_part(self, bins: EvenBins) -> np.ndarray:
        tally = torch.zeros(bins.count, dtype=torch.int64)
        scale, shift = self.score_dtype.type(bins.scale), self.score_dtype.type(bins.shift)
        index = np.empty(self.design.largest_tile(), np.int32)
        for _, _, tile in self.tiles(bins.unreached_score):
            flat = tile.reshape(-1)
            flat *= scale
            flat += shift
            np.copyto(index[: len(flat)], flat, casting="unsafe")
            tally += torch.bincount(torch.from_numpy(index[: len(flat)]), minlength=bins.count)
        found = tally.numpy()
        found[0] = 0  # what was absent
        return found

    def refine_windows(self, windows: Sequence[tuple[float, float]]) -> list[ScoreWindow]:
        """Pass 2."""
        parts = self.map_parts(lambda part: part._refine_part(windows))
        return parts[0] if len(parts) == 1 else merge_windows(windows, [pack_windows(part) for part in parts])

    def _refine_part(self, windows: Sequence[tuple[float, float]]) -> list[ScoreWindow]:
        sieves = [WindowCollector(*w, np.dtype(self.design.dtype)) for w in windows]
        room, flag = np.empty(self.design.largest_tile(), self.score_dtype), np.empty(self.design.largest_tile(), bool)
        for rows, cols, tile in self.tiles():
            flat = tile.reshape(-1)
            away, inside = room[: len(flat)], flag[: len(flat)]
            for sieve in sieves:
                low, high = (max(end, LEAST) for end in sieve.ends)
                top = self.score_dtype.type(
                    np.nextafter(self.score_dtype.type(high + self.score_error_bound), self.score_dtype.type(4))
                )
                sieve.above += int(np.count_nonzero(np.greater(flat, top, out=inside)))
                np.subtract(flat, self.score_dtype.type((low + high) / 2), out=away)
                np.abs(away, out=away)
                half = (high - low) / 2 + self.score_error_bound * 1.01 + 4 * float(np.finfo(self.score_dtype).eps)
                at = np.flatnonzero(np.less_equal(away, self.score_dtype.type(half), out=inside))
                sieve.add(self.exact_scores(rows, cols, at[flat[at] <= top]))
        return [sieve.window() for sieve in sieves]

    def exact_scores(self, rows: slice, cols: slice, at: np.ndarray) -> np.ndarray:
        """The exact scores at some places of a tile."""
        width = cols.stop - cols.start
        if len(at) * DEAR > (rows.stop - rows.start) * width:
            return self.design.score_tile(rows, cols).reshape(-1)[at]
        i, j = np.divmod(at, width)
        return self.design.score_pairs(rows.start + i, cols.start + j)
