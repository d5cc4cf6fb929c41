"""Indexes that look at little of each template first: a shortlist by an engine, then exact scores of the shortlist.

    kind        engine   shortlist scored from       memory per template      what it is for
    scan        codes    float32 rows                4.25 bytes x dim + 9     up to millions: robust, built in seconds
    compressed  codes    float16 rows                2.25 bytes x dim + 9     the same in half the memory
    ivf         cells    float32 rows                4.25 bytes x dim + 17    tens of millions
    hnsw        graph    float32 rows                6    bytes x dim + 280   low intrinsic dimension; slow to build

Scores that come out are exact cosines (from float16 rows: within 5e-4, nearly all within 1e-4); only the choice of the
shortlist is approximate. Engines can only append, so what is removed is struck out here, never comes out, and is
dropped when it outnumbers the rest; where too much of a shortlist is struck out, the probe is compared with all rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mettle.errors import InputError, nearest
from mettle.gallery.index.base import check_search, empty_result, rank_candidates
from mettle.gallery.index.exact import VectorTable, as_template_ids, find_present_rows
from mettle.gallery.index.faiss_index import FaissIndex, build_graph, train_cells, train_codes

MAX_APPROXIMATE_DIM = 4096  # dimensions; beyond, turning vectors at random costs more than it saves


BASE_COUNT = 10  # candidates for which an effort is measured


@dataclass(frozen=True)
class SearchParams:
    """How hard one search tries: length of the shortlist for up to ten candidates, and cells or nodes looked at."""

    shortlist: int
    reach: int = 0


@dataclass(frozen=True)
class IndexKind:
    """How an approximate index is made, and its efforts from the quickest to the most thorough."""

    engine: Callable[[np.ndarray], FaissIndex]
    dtype: type
    ladder: tuple[SearchParams, ...]


_LENGTHS = tuple(SearchParams(m) for m in (64, 128, 256, 512, 1024, 2048))


KINDS = {
    "scan": IndexKind(train_codes, np.float32, _LENGTHS),
    "compressed": IndexKind(train_codes, np.float16, _LENGTHS),
    "ivf": IndexKind(train_cells, np.float32, tuple(SearchParams(256, r) for r in (16, 32, 64, 128, 256, 512, 1024))),
    "hnsw": IndexKind(build_graph, np.float32, tuple(SearchParams(32, r) for r in (64, 128, 256, 512, 1024))),
}


class ApproximateIndex:
    """A shortlist by an engine, scored exactly."""

    def __init__(self, kind: str, rows: VectorTable, engine: FaissIndex, effort: SearchParams) -> None:
        self.kind, self.rows, self.engine, self.effort = kind, rows, engine, effort
        self.dim = rows.dim

    @classmethod
    def build(
        cls, kind: str, numbers: np.ndarray, vectors: np.ndarray, effort: SearchParams | None = None
    ) -> "ApproximateIndex":
        """An index of a kind over unit vectors (n, dim); without an effort, the most thorough one of its kind."""
        if kind not in KINDS:
            raise InputError(f"kind must be one of the approximate ones, got {kind!r}{nearest(kind, KINDS)}")
        how, dim = KINDS[kind], vectors.shape[1]
        if dim > MAX_APPROXIMATE_DIM:
            raise InputError(
                f"kind {kind!r} takes at most {MAX_APPROXIMATE_DIM} dimensions, got {dim}: use kind='exact'."
            )
        rows = VectorTable(dim, how.dtype)
        rows.append(*rows.check_rows(numbers, vectors))
        engine = how.engine(vectors)
        engine.append(vectors)
        return cls(kind, rows, engine, effort or how.ladder[-1])

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def bytes(self) -> int:
        """Memory it takes, about."""
        extra = {"scan": self.dim / 4, "compressed": self.dim / 4, "ivf": self.dim / 4 + 8, "hnsw": 2 * self.dim + 272}
        return self.rows.bytes + int(extra[self.kind] * self.rows.count)

    def with_params(self, effort: SearchParams) -> "ApproximateIndex":
        """The same index, searched with another effort."""
        return ApproximateIndex(self.kind, self.rows, self.engine, effort)

    def add(self, numbers: np.ndarray, vectors: np.ndarray) -> None:
        """Add unit vectors (n, dim) under new numbers (n,)."""
        numbers, vectors = self.rows.check_rows(numbers, vectors)
        if len(numbers):
            self.engine.append(vectors)
            self.rows.append(numbers, vectors)

    def remove(self, numbers: np.ndarray) -> int:
        """Remove these numbers; how many were there. Once most rows are struck out, the index is built anew."""
        rows = find_present_rows(self.rows, numbers)
        self.rows.mark_deleted(rows)
        if self.rows.dead > max(len(self.rows), 1024):
            fresh = self.compact()
            self.rows, self.engine = fresh.rows, fresh.engine
        return len(rows)

    def contains_ids(self, numbers: np.ndarray) -> np.ndarray:
        """Which of these numbers (n,) are in it: (n,) bool."""
        return self.rows.find_rows(as_template_ids(numbers)) >= 0

    def search(self, probes: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores (p, k) float32 and numbers (p, k) int64 of the best, padded by -inf and -1."""
        probes, k = check_search(probes, k, self.dim)
        size = len(self.rows)
        if not size or not len(probes):
            return empty_result(len(probes), k)
        wanted = min(k, size)
        length = max(self.effort.shortlist, -(-self.effort.shortlist * wanted // BASE_COUNT))
        length = -(-length * self.rows.count // size)  # some of it will have been struck out
        if length * 4 > self.rows.count:  # the shortlist would be no short one
            return self._search_thoroughly(probes, wanted, k)
        rows = self.engine.shortlist(probes, length, self.effort.reach)
        scores = self.rows.score_rows(probes, rows)
        found, who = rank_candidates(scores, self.rows.numbers[np.maximum(rows, 0)], k)
        poor = np.isfinite(scores).sum(1) < max(wanted, self.effort.shortlist // 2)
        if poor.any():
            found[poor], who[poor] = self._search_thoroughly(probes[poor], wanted, k)
        return found, who

    def _search_thoroughly(self, probes: np.ndarray, wanted: int, k: int) -> tuple[np.ndarray, np.ndarray]:
        scores, rows = self.rows.top_k(probes, wanted)
        return rank_candidates(scores, self.rows.numbers[rows], k)

    def compact(self) -> "ApproximateIndex":
        """The same content built anew without what was removed; itself where nothing was."""
        if not self.rows.dead:
            return self
        how, (numbers, vectors) = KINDS[self.kind], self.rows.live_rows()
        engine = how.engine(vectors)
        engine.append(vectors)
        return ApproximateIndex(self.kind, VectorTable.from_arrays(numbers, vectors), engine, self.effort)
