"""Cohort normalisation: how unusual a score is for the two samples that gave it.

Some samples score high against everybody. Against a cohort of people who take part in no trial, row i scores with
mean μ_i and standard deviation σ_i, over all of the cohort or over its k nearest members (adaptive normalisation):

    s' = ½·((s − μ_i)/σ_i + (s − μ_j)/σ_j)
"""

from typing import NamedTuple

import numpy as np

from mettle.errors import InputError
from mettle.evaluate.inputs import EmbeddingSet, check_int
from mettle.evaluate.scoring.cosine import DECIMALS, ExactUnitVectors


class CohortStatistics(NamedTuple):
    """Cohort scores of each row of one side: their mean and one over their standard deviation, as columns."""

    mean: np.ndarray
    scale: np.ndarray

    def take(self, at: np.ndarray | slice) -> "CohortStatistics":
        """Some of the rows."""
        return CohortStatistics(self.mean[at], self.scale[at])


class SNorm(NamedTuple):
    """Symmetric cohort normalisation s' = ½·((s − μ_i)/σ_i + (s − μ_j)/σ_j), element by element, in float64."""

    first: CohortStatistics
    second: CohortStatistics

    def normalize_tile(self, s: np.ndarray, rows: slice, cols: slice) -> np.ndarray:
        """A tile of scores."""
        (a, p), (b, q) = self.first.take(rows), self.second.take(cols)
        return _normalize_scores(s, a[:, None], p[:, None], b[None], q[None])

    def normalize_pairs(self, s: np.ndarray, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """Scores of listed pairs."""
        return _normalize_scores(s, *self.first.take(i), *self.second.take(j))

    def score_range(self) -> tuple[float, float]:
        """Numbers that no normalised score can leave."""
        low = [float(((-1 - side.mean) * side.scale).min()) for side in self]
        high = [float(((1 - side.mean) * side.scale).max()) for side in self]
        return sum(low) / 2, sum(high) / 2


def _normalize_scores(s: np.ndarray, a: np.ndarray, p: np.ndarray, b: np.ndarray, q: np.ndarray) -> np.ndarray:
    s = s.astype(np.float64)
    return np.round((s - a) * p * 0.5 + (s - b) * q * 0.5, DECIMALS)


def fit_snorm(
    probe: EmbeddingSet, gallery: EmbeddingSet | None, cohort: np.ndarray, top: int | None
) -> tuple[CohortStatistics, CohortStatistics]:
    """Mean and inverse deviation of the scores of every row, on both sides, with a sound matrix of others.

    Raises:
        InputError: a cohort of fewer than two, of another dimension, or that scores all alike with some row.
    """
    if cohort.shape[1] != probe.dim or len(cohort) < 2:
        raise InputError(f"cohort must be at least two embeddings of dimension {probe.dim}: got {cohort.shape}")
    if top is not None and check_int(top, "cohort_top", 2) > len(cohort):
        raise InputError(f"cohort_top must lie between 2 and the {len(cohort)} members of the cohort: got {top}")
    double = cohort.dtype == np.float64 or any(r.is_float64 for r in (probe, gallery) if r is not None)
    other = ExactUnitVectors.from_rows(cohort, double)
    first = _cohort_statistics(ExactUnitVectors.from_rows(probe.values, double), other, top)
    return first, first if gallery is None else _cohort_statistics(
        ExactUnitVectors.from_rows(gallery.values, double), other, top
    )


def _cohort_statistics(rows: ExactUnitVectors, cohort: ExactUnitVectors, top: int | None) -> CohortStatistics:
    mean, scale = np.empty(len(rows)), np.empty(len(rows))
    for start in range(0, len(rows), 512):
        part = slice(start, start + 512)
        s = np.sort(rows.take(part).cosine(cohort).astype(np.float64), axis=1)  # sorted: sums in one order
        s = s if top is None else s[:, -top:]
        mean[part], deviation = s.mean(axis=1), s.std(axis=1, ddof=1)
        if not (deviation > 0).all():
            at = start + int(np.argmin(deviation))
            raise InputError(f"row {at} scores alike with the whole cohort: its scores cannot be normalised")
        scale[part] = 1 / deviation
    return CohortStatistics(mean, scale)
