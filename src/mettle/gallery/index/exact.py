"""A growing table of numbered unit vectors, and scores against it.

What every index of a gallery does, and the exact one.

An index answers "which templates are nearest to this probe". It is a view of the storage: it can be thrown away and
built again. Templates carry the 64-bit numbers of the storage. The laws, which tests/gallery/test_index.py runs on all
kinds:

    scores    = exact cosines of the templates that come out, best first, equal ones by rising number
    removed   = never comes out again, from the return of `remove` on
    added     = comes out from the return of `add` on
    short     = where fewer than k are enrolled the rest is -inf / -1, and -1 is never a template

Kinds: "exact" here, "scan", "compressed", "ivf" and "hnsw" in `approximate`; `choose` picks one.
"""

import numpy as np

from mettle.errors import InputError
from mettle.gallery.index.base import check_search, empty_result, rank_candidates
from mettle.gallery.index.faiss_index import knn

SHORT = 1 << 24  # numbers of a table, and


MAX_KNN = 256  # candidates, up to which one thread compares a probe sooner than BLAS gets going


AT_ONCE = 1 << 24  # scores held at one time: 64 MB


WIDEN = 1 << 14  # half-precision rows widened at one time


class VectorTable:
    """Vectors (n, dim) in float32 or float16 with their numbers, row by row; removed rows are blanked or filled."""

    def __init__(self, dim: int, dtype: type = np.float32) -> None:
        self.dim = dim
        self.count = 0  # rows in use, dead ones included
        self.dead = 0
        self._numbers = np.empty(0, np.int64)
        self._vectors = np.empty((0, dim), dtype)
        self._alive = np.empty(0, np.bool_)
        self._rising = True  # numbers rise with the rows: they can be found by bisection
        self._order: np.ndarray | None = None  # otherwise by this order, made when needed

    @classmethod
    def from_arrays(cls, numbers: np.ndarray, vectors: np.ndarray) -> "VectorTable":
        """A table around arrays that are handed over, not copied; the dtype of the vectors stays."""
        rows = cls(vectors.shape[1])
        rows.count = len(numbers)
        rows._numbers, rows._vectors = numbers, vectors
        rows._alive = np.ones(len(numbers), np.bool_)
        rows._rising = bool((np.diff(numbers) > 0).all())
        return rows

    def __len__(self) -> int:
        return self.count - self.dead

    @property
    def numbers(self) -> np.ndarray:
        """Numbers of all rows in use (a view)."""
        return self._numbers[: self.count]

    @property
    def vectors(self) -> np.ndarray:
        """Vectors of all rows in use (a view)."""
        return self._vectors[: self.count]

    @property
    def alive(self) -> np.ndarray:
        """Which rows in use were not removed (a view)."""
        return self._alive[: self.count]

    @property
    def bytes(self) -> int:
        """Memory of the table."""
        return self._vectors.nbytes + self._numbers.nbytes + self._alive.nbytes

    @property
    def _is_contiguous(self) -> bool:
        return self._vectors.dtype == np.float32 and not self.dead

    def check_rows(self, numbers: np.ndarray, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What may be appended: new, distinct, non-negative numbers and finite vectors, unit ones or means of such."""
        numbers, vectors = as_template_ids(numbers), np.asarray(vectors)
        if vectors.shape != (len(numbers), self.dim):
            raise InputError(
                f"vectors must be ({len(numbers)}, {self.dim}), one per number: got shape {vectors.shape}."
            )
        length = np.einsum("nd,nd->n", vectors, vectors)
        if not (length < 1 + 1e-2).all():  # NaN fails too
            raise InputError("vectors must be finite and at most of unit length: divide each by its norm first.")
        if numbers.size and numbers.min() < 0:
            raise InputError(f"numbers must not be negative: got {numbers.min()}.")
        if len(np.unique(numbers)) < len(numbers) or (self.find_rows(numbers) >= 0).any():
            raise InputError("numbers must be new and distinct: one of them is in the index already; remove it first.")
        return numbers, vectors

    def append(self, numbers: np.ndarray, vectors: np.ndarray) -> None:
        """Add rows that passed `check`."""
        need = self.count + len(numbers)
        if need > len(self._numbers):
            self._grow(max(need, len(self._numbers) * 5 // 4 if self.count else need))
        self._rising = self._rising and (
            not len(numbers)
            or (bool((np.diff(numbers) > 0).all()) and (not self.count or int(self.numbers[-1]) < int(numbers[0])))
        )
        self._order = None
        self._numbers[self.count : need] = numbers
        self._vectors[self.count : need] = vectors
        self._alive[self.count : need] = True
        self.count = need

    def _grow(self, capacity: int) -> None:
        for name in ("_numbers", "_vectors", "_alive"):
            old = getattr(self, name)
            new = np.empty((capacity, *old.shape[1:]), old.dtype)
            new[: self.count] = old[: self.count]
            setattr(self, name, new)

    def find_rows(self, numbers: np.ndarray) -> np.ndarray:
        """Row of each number, -1 where it is not (or no longer) there."""
        if not self.count:
            return np.full(len(numbers), -1, np.int64)
        if not self._rising and self._order is None:
            self._order = np.argsort(self.numbers, kind="stable")  # quick: they nearly rise
        at = np.searchsorted(self.numbers, numbers, side="right", sorter=self._order) - 1
        rows = np.maximum(at, 0) if self._order is None else self._order[np.maximum(at, 0)]
        return np.where((at >= 0) & (self.numbers[rows] == numbers) & self.alive[rows], rows, -1)

    def mark_deleted(self, rows: np.ndarray) -> None:
        """Remove rows but keep their places: the vector is blanked, so it is gone from memory at once."""
        self._alive[rows] = False
        self._vectors[rows] = 0
        self.dead += len(rows)

    def swap_remove(self, rows: np.ndarray) -> None:
        """Remove rows; the last ones move into their places."""
        for row in np.sort(rows)[::-1]:
            last = self.count - 1
            for table in (self._numbers, self._vectors, self._alive):
                table[row] = table[last]
            self._vectors[last] = 0
            self.count, self._rising = last, self._rising and row == last
        self._order = None

    def live_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Numbers and vectors of the rows that are alive (copies where some are not)."""
        if not self.dead:
            return self.numbers, self.vectors
        return self.numbers[self.alive], self.vectors[self.alive]

    def score_rows(self, probes: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Exact scores (p, m) of chosen rows (p, m); -inf where the row is -1 or dead."""
        scores = np.empty(rows.shape, np.float32)
        step = max(1, AT_ONCE // (max(1, rows.shape[1]) * self.dim))
        for a in range(0, len(probes), step):
            part = rows[a : a + step]
            near = self._vectors[np.maximum(part, 0)].astype(np.float32, copy=False)
            scores[a : a + step] = np.einsum("pmd,pd->pm", near, probes[a : a + step])  # no BLAS: too little to share
        scores[(rows < 0) | ~self._alive[np.maximum(rows, 0)]] = -np.inf
        return scores

    def score_all(self, probes: np.ndarray) -> np.ndarray:
        """Exact scores (p, n) of all rows in use; -inf for dead ones."""
        if self._vectors.dtype == np.float32:
            scores = probes @ self.vectors.T
        else:
            scores = np.empty((len(probes), self.count), np.float32)
            for a in range(0, self.count, WIDEN):
                scores[:, a : a + WIDEN] = probes @ self.vectors[a : a + WIDEN].astype(np.float32).T
        if self.dead:
            scores[:, ~self.alive] = -np.inf
        return scores

    def top_k(self, probes: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores and rows (p, k) of the k best rows of all, in no order; k is at most the number of rows in use."""
        if len(probes) <= 4 and k <= MAX_KNN and self._is_contiguous and self.vectors.size <= SHORT:
            return knn(probes, self.vectors, k)
        scores, rows = np.empty((len(probes), k), np.float32), np.empty((len(probes), k), np.int64)
        step = max(1, AT_ONCE // max(1, self.count))
        for a in range(0, len(probes), step):
            part = self.score_all(probes[a : a + step])
            best = np.argpartition(part, self.count - k, axis=1)[:, self.count - k :]
            rows[a : a + step], scores[a : a + step] = best, np.take_along_axis(part, best, axis=1)
        return scores, rows


def as_template_ids(numbers: np.ndarray) -> np.ndarray:
    """Numbers as (n,) int64; anything that is not whole is refused, never rounded."""
    numbers = np.atleast_1d(np.asarray(numbers))
    if numbers.ndim != 1 or (numbers.dtype.kind not in "iu" and numbers.size):
        raise InputError(f"numbers must be (n,) integers: got {numbers.dtype} of shape {numbers.shape}.")
    return numbers.astype(np.int64)


class ExactIndex:
    """Compares a probe with every template. Nothing is missed; the time grows with the size."""

    kind = "exact"

    def __init__(self, dim: int, rows: VectorTable | None = None) -> None:
        self.dim = dim
        self.rows = VectorTable(dim) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def bytes(self) -> int:
        """Memory it takes."""
        return self.rows.bytes

    def add(self, numbers: np.ndarray, vectors: np.ndarray) -> None:
        """Add unit vectors (n, dim) under new numbers (n,)."""
        self.rows.append(*self.rows.check_rows(numbers, vectors))

    def remove(self, numbers: np.ndarray) -> int:
        """Remove these numbers; how many were there."""
        rows = find_present_rows(self.rows, numbers)
        self.rows.swap_remove(rows)
        return len(rows)

    def search(self, probes: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores (p, k) float32 and numbers (p, k) int64 of the best, padded by -inf and -1."""
        probes, k = check_search(probes, k, self.dim)
        if not len(self.rows):
            return empty_result(len(probes), k)
        scores, rows = self.rows.top_k(probes, min(k, len(self.rows)))
        return rank_candidates(scores, self.rows.numbers[rows], k)

    def contains_ids(self, numbers: np.ndarray) -> np.ndarray:
        """Which of these numbers (n,) are in it: (n,) bool."""
        return self.rows.find_rows(as_template_ids(numbers)) >= 0

    def compact(self) -> "ExactIndex":
        """Itself: what is removed is gone at once."""
        return self


def find_present_rows(rows: VectorTable, numbers: np.ndarray) -> np.ndarray:
    """Rows of those numbers that are there, each once."""
    found = rows.find_rows(np.unique(as_template_ids(numbers)))
    return found[found >= 0]
