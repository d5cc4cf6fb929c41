"""Re-ranking: rankings that are changed after the fact, by what the neighbours of a query have in common.

    query expansion   q' = q + Σ over its n nearest of max(s, 0)^α·g, and all cosines anew (α = 0: their plain sum)
    k-reciprocal      d = λ·d_cos + (1 − λ)·d_J, d_J the Jaccard distance of sets of neighbours that have each other
                      among their k₁ nearest (Zhong et al., 2017)

Both use the gallery of the test, and k-reciprocal re-ranking the other queries too: numbers with and without it are not
to be compared, and a result says which it is. Neighbours at the k-th place with equal scores all count, so that the
order of rows does not matter.
"""

from dataclasses import dataclass
from numbers import Real

import numpy as np

from mettle.errors import InputError
from mettle.evaluate.inputs import EmbeddingSet, check_int
from mettle.evaluate.scoring.cosine import ExactUnitVectors
from mettle.evaluate.scoring.relevant_ranks import FastCosine, ScoreRows

MOST = 20_000  # rows of k-reciprocal re-ranking, which holds all their distances
_CELLS = 1 << 22


@dataclass(frozen=True)
class QueryExpansion:
    """Every query moves towards its nearest candidates before it is ranked again.

    Attributes:
        top: n, how many candidates; more where the n-th and others score the same.
        alpha: α, the power of their cosines; 0 weighs them alike.
    """

    top: int = 10
    alpha: float = 3.0

    def __post_init__(self) -> None:
        check_int(self.top, "top", 1)
        if not isinstance(self.alpha, Real) or not 0 <= self.alpha < np.inf:
            raise InputError(f"alpha must be a finite number from 0 up: got {self.alpha!r}")

    def score_rows(self, query: EmbeddingSet, gallery: EmbeddingSet) -> tuple[ScoreRows, FastCosine | None]:
        """Cosines of the moved queries."""
        double = query.is_float64 or gallery.is_float64
        first, second = (
            ExactUnitVectors.from_rows(query.values, double),
            ExactUnitVectors.from_rows(gallery.values, double),
        )
        vectors, moved = second.vectors(), first.vectors().copy()
        step = max(1, _CELLS // len(second))
        for start in range(0, len(first), step):
            part = np.arange(start, min(start + step, len(first)))
            s = first.take(part).cosine(second).astype(np.float64)
            if query.ids is not None and gallery.ids is not None:
                s[query.ids[part, None] == gallery.ids[None]] = -np.inf
            edge = np.partition(s, -min(self.top, s.shape[1]), axis=1)[:, -min(self.top, s.shape[1]), None]
            near = (s >= edge) & np.isfinite(s)
            weights = np.where(near, np.maximum(np.where(near, s, 0), 0) ** self.alpha, 0)
            moved[part] += np.round(weights, 12) @ vectors
        fast = FastCosine.from_sets(ExactUnitVectors.from_rows(np.round(moved, 12), double), second)
        return fast.exact_scores, fast


@dataclass(frozen=True)
class KReciprocal:
    """Candidates are near where their neighbours are those of the query, and the other way round.

    Attributes:
        k1: neighbours among which two rows must have each other.
        k2: neighbours over which memberships are averaged; 1 for none.
        weight: λ, the share of the plain distance.
    """

    k1: int = 20
    k2: int = 6
    weight: float = 0.3

    def __post_init__(self) -> None:
        check_int(self.k1, "k1", 1)
        check_int(self.k2, "k2", 1)
        if not isinstance(self.weight, Real) or not 0 <= self.weight <= 1:
            raise InputError(f"weight must lie between 0 and 1: got {self.weight!r}")

    def score_rows(self, query: EmbeddingSet, gallery: EmbeddingSet) -> tuple[ScoreRows, FastCosine | None]:
        """Minus the new distances, all of them at once."""
        own = gallery is query
        rows = query.values if own else np.concatenate([query.values, gallery.values])
        if len(rows) > MOST:
            raise InputError(
                f"k-reciprocal re-ranking holds the distances of all rows: {len(rows)} are too many, at most {MOST}"
            )
        unit = ExactUnitVectors.from_rows(rows, query.is_float64 or gallery.is_float64)
        distance = np.maximum(2 - 2 * unit.cosine(unit).astype(np.float64), 0)
        distance /= distance.max(axis=1, keepdims=True)
        found = reciprocal_distances(distance, len(query), self.k1, self.k2, self.weight)
        found = found if own else found[:, len(query) :]

        def score(rows: np.ndarray) -> np.ndarray:
            return -found[rows]

        return score, None


def reciprocal_distances(distance: np.ndarray, queries: int, k1: int, k2: int, weight: float) -> np.ndarray:
    """(q, n) new distances of the first q rows to all n, from all (n, n) distances.

    With N(i, k) the row i and its k nearest, R(i, k) = {j ∈ N(i, k): i ∈ N(j, k)}, and R*(i) = R(i, k₁) with every
    R(j, k₁/2) of a j in it that shares more than two thirds of itself with R(i, k₁):

        V_ij = e^{−d_ij} for j ∈ R*(i), else 0, rows divided by their sum, then averaged over the k₂ nearest
        d_J(i, j) = 1 − Σ_l min(V_il, V_jl) / Σ_l max(V_il, V_jl)
    """
    from scipy.sparse import csc_matrix, csr_matrix

    def nearest(k: int) -> csr_matrix:
        edge = np.partition(distance, min(k, len(distance)) - 1, axis=1)[:, min(k, len(distance)) - 1, None]
        return csr_matrix((distance <= edge).astype(np.float64))

    near, half = nearest(k1 + 1), nearest(round(k1 / 2) + 1)
    reciprocal, inner = near.multiply(near.T).tocsr(), half.multiply(half.T).tocsr()
    overlap = (inner @ reciprocal.T).T.tocsr()  # of row i with the inner set of j, at (i, j)
    size = np.asarray(inner.sum(axis=1)).reshape(-1)
    enough = overlap.tocoo()
    keep = enough.data > 2 / 3 * size[enough.col]
    joined = csr_matrix((np.ones(keep.sum()), (enough.row[keep], enough.col[keep])), shape=overlap.shape)
    expanded = (reciprocal + reciprocal.multiply(joined) @ inner).tocoo()
    kernel = np.exp(-distance[expanded.row, expanded.col])
    member = csr_matrix((kernel, (expanded.row, expanded.col)), shape=distance.shape)
    member = _divide_rows(member)
    if k2 > 1:
        member = _divide_rows(nearest(k2)) @ member
    columns = csc_matrix(member)
    found = np.empty((queries, len(distance)))
    for i in range(queries):
        shared = np.zeros(len(distance))
        for at in range(member.indptr[i], member.indptr[i + 1]):
            part = slice(columns.indptr[member.indices[at]], columns.indptr[member.indices[at] + 1])
            shared[columns.indices[part]] += np.minimum(member.data[at], columns.data[part])
        found[i] = 1 - shared / (2 - shared)
    return np.round(weight * distance[:queries] + (1 - weight) * found, 12)


def _divide_rows(matrix):
    """Every row divided by its sum."""
    from scipy.sparse import diags

    return (diags(1 / np.asarray(matrix.sum(axis=1)).reshape(-1)) @ matrix).tocsr()
