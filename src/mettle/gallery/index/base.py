"""What every index of a gallery does, and the exact one.

An index answers "which templates are nearest to this probe". It is a view of the storage: it can be thrown away and
built again. Templates carry the 64-bit numbers of the storage. The laws, which tests/gallery/test_index.py runs on all
kinds:

    scores    = exact cosines of the templates that come out, best first, equal ones by rising number
    removed   = never comes out again, from the return of `remove` on
    added     = comes out from the return of `add` on
    short     = where fewer than k are enrolled the rest is -inf / -1, and -1 is never a template

Kinds: "exact" here, "scan", "compressed", "ivf" and "hnsw" in `approximate`; `choose` picks one.
"""

from typing import Protocol

import numpy as np

from mettle.errors import InputError


class Index(Protocol):
    """A view of all templates. Searches may run side by side; a change needs the caller's lock against them."""

    @property
    def kind(self) -> str:
        """Its name: "exact", "scan", ..."""
        ...

    @property
    def dim(self) -> int:
        """Dimension of the embedding."""
        ...

    @property
    def bytes(self) -> int:
        """Memory it takes, about."""
        ...

    def __len__(self) -> int: ...

    def add(self, numbers: np.ndarray, vectors: np.ndarray) -> None:
        """Add unit vectors (n, dim) under new numbers (n,)."""
        ...

    def remove(self, numbers: np.ndarray) -> int:
        """Remove these numbers; how many were there."""
        ...

    def search(self, probes: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores (p, k) float32 and numbers (p, k) int64 of the best, padded by -inf and -1."""
        ...

    def contains_ids(self, numbers: np.ndarray) -> np.ndarray:
        """Which of these numbers (n,) are in it: (n,) bool."""
        ...

    def compact(self) -> "Index":
        """An index with the same content in which nothing is left of what was removed; itself where that is so."""
        ...


def check_search(probes: np.ndarray, k: int, dim: int) -> tuple[np.ndarray, int]:
    """The arguments of a search, or an error that says what is wrong with them."""
    probes = np.asarray(probes, dtype=np.float32)
    if probes.ndim != 2 or probes.shape[1] != dim:
        raise InputError(f"probes must be (p, {dim}), as the index holds: got shape {probes.shape}.")
    if not np.isfinite(probes).all():
        raise InputError("probes must be finite: NaN or infinity came in; look at what computed the embedding.")
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise InputError(f"k must be a whole number from 1 on: got {k!r}.")
    return np.ascontiguousarray(probes), int(k)


def empty_result(probes: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The answer of an empty index."""
    return np.full((probes, k), -np.inf, np.float32), np.full((probes, k), -1, np.int64)


def rank_candidates(scores: np.ndarray, numbers: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Candidates (p, m) in any order, -inf for none -> the best k, best first, equal scores by rising number."""
    order = np.lexsort((numbers, -scores), axis=-1)[:, :k]
    out, who = empty_result(len(scores), k)
    probes, width = np.arange(len(scores))[:, None], order.shape[1]
    out[:, :width] = scores[probes, order]
    who[:, :width] = numbers[probes, order]
    who[np.isneginf(out)] = -1
    return out, who
