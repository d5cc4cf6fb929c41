"""Similarities beside the cosine: dot products and distances, exact in the same sense.

| name | what is ranked | equal pairs are equal because |
|---|---|---|
| ``cosine`` | ⟨x, y⟩ / (‖x‖·‖y‖) | unit vectors lie on an integer grid, see :mod:`mettle.evaluate.scoring.cosine` |
| ``dot`` | ⟨x, y⟩ | all vectors are divided by the greatest length and lie on the same grid |
| ``l2`` | −‖x − y‖² | each pair is summed by itself, component after component, in float64 |
| ``l1`` | −Σ_k abs(x_k − y_k) | the same |
"""

import numpy as np

from mettle.evaluate.inputs import EmbeddingSet
from mettle.evaluate.scoring.cosine import HIGH, LOW, ExactUnitVectors
from mettle.evaluate.scoring.relevant_ranks import FastCosine, ScoreRows

SIMILARITIES = ("cosine", "dot", "l2", "l1")
_DISTANCES = {"l2": "sqeuclidean", "l1": "cityblock"}


def score_rows(query: EmbeddingSet, gallery: EmbeddingSet, similarity: str) -> tuple[ScoreRows, FastCosine | None]:
    """Scores of some queries against the gallery, higher meaning more alike, and the fast way where there is one."""
    if similarity in _DISTANCES:
        return _negative_distances(query, gallery, _DISTANCES[similarity]), None
    if similarity == "cosine":
        double = query.is_float64 or gallery.is_float64
        units = [
            ExactUnitVectors.from_rows(rows.values, double)
            for rows in ((query,) if gallery is query else (query, gallery))
        ]
    else:
        units = _scale_sides(*(rows.values for rows in ((query,) if gallery is query else (query, gallery))))
    fast = FastCosine.from_sets(units[0], units[-1])
    return fast.exact_scores, fast


def _scale_sides(*sides: np.ndarray) -> list[ExactUnitVectors]:
    """Vectors divided by the greatest length of all, on the grid of unit vectors."""
    greatest = max(float(np.abs(side).max()) for side in sides)
    sides = tuple(side.astype(np.float64) / greatest for side in sides)  # so that squares neither overflow nor vanish
    length = max(float(np.square(side).sum(axis=1).max()) for side in sides) ** 0.5
    found = []
    for side in sides:
        x = side / length
        high = np.rint(x * HIGH) / HIGH
        found.append(ExactUnitVectors(high, np.rint((x - high) * LOW) / LOW))
    return found


def _negative_distances(query: EmbeddingSet, gallery: EmbeddingSet, name: str) -> ScoreRows:
    from scipy.spatial.distance import cdist

    first, second = query.values.astype(np.float64), gallery.values.astype(np.float64)

    def score(rows: np.ndarray) -> np.ndarray:
        return -cdist(first[rows], second, name)  # type: ignore[call-overload]

    return score
