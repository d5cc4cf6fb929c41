"""Metrics that need no search: the inverse of a shrunk covariance, factored.

Everything happens in features divided by their standard deviations, so that no result depends on units. In these,
shrinking towards a multiple of the identity is shrinking towards independent features, each with its own variance.
"""

from dataclasses import dataclass

import numpy as np
from sklearn.covariance import ledoit_wolf, shrunk_covariance

from mettle.errors import InputError
from mettle.metric.linear import fix_signs

NOTHING = 1e-24  # a variance, where all points have 1: rounding leaves this much


@dataclass(frozen=True)
class Scatter:
    """Deviations that should count as small: from the mean, from class means, or between alike points."""

    deviations: np.ndarray  # (k, d)
    freedom: int  # Σ = deviationsᵀ deviations / freedom
    of: str  # what they are, for messages
    fisher: bool = True  # order directions by what all points vary beyond this, in its units


@dataclass(frozen=True)
class Whitening:
    """L (k, d) with LᵀL the inverse covariance of the features that vary, best directions first."""

    factor: np.ndarray
    shrinkage: float


def total_scatter(x: np.ndarray) -> Scatter:
    """Of all points about their mean."""
    return Scatter(x - x.mean(0), len(x) - 1, "the points", fisher=False)


def within_class_scatter(x: np.ndarray, labels: np.ndarray) -> Scatter:
    """Of points about the mean of their class (labels 0 .. C − 1)."""
    x, counts = x - x.mean(0), np.bincount(labels)
    means = np.zeros((len(counts), x.shape[1]))
    np.add.at(means, labels, x)
    return Scatter(x - (means / counts[:, None])[labels], len(x) - len(counts), "the points of every class")


def similar_pair_scatter(first: np.ndarray, second: np.ndarray) -> Scatter:
    """Of the two ends of alike pairs about their middle: (x − y)/√2 has the covariance of a class."""
    return Scatter((first - second) / np.sqrt(2), len(first), "the two ends of every alike pair")


def fit_whitening(x: np.ndarray, spread: Scatter, shrinkage: float | None) -> Whitening:
    """The inverse of the spread's covariance, shrunk.

    Directions come widest first: by how much farther all points lie apart than the spread explains, in its units
    (Fisher's discriminants, for a spread about class means), or plainly by their variance where the spread is that of
    all points. A feature that never varies gets weight 0: nothing is known of its scale.

    Args:
        x: (n, d) all points.
        spread: what should count as small.
        shrinkage: 0 (none) to 1 (independent features); None: as Ledoit and Wolf estimate.
    """
    varies = x.max(0) > x.min(0)
    if not varies.any():
        raise InputError(f"all {len(x)} points of X are the same: a metric needs points that differ")
    scale = x.std(0)[varies]
    u = spread.deviations[:, varies] / scale
    covariance, used = _shrink_covariance(u, spread, shrinkage)
    values, vectors = np.linalg.eigh(covariance)
    if values[0] <= max(len(values) * np.finfo(np.float64).eps * values[-1], NOTHING):
        raise InputError(
            f"the covariance of {spread.of} has no inverse: they do not vary in every direction. "
            + ("Give more of them" if used else "Set shrinkage='auto', or give more of them")
        )
    white = (vectors / np.sqrt(values)).T
    if spread.fisher:
        # Between = all − spread, both unshrunk: where shrinking widened the spread, a ratio to it would look small.
        seen = (x - x.mean(0))[:, varies] / scale @ white.T
        near = u @ white.T
        between = seen.T @ seen / (len(x) - 1) - near.T @ near / spread.freedom
        white = np.linalg.eigh(between)[1].T @ white
    factor = np.zeros((len(white), x.shape[1]))
    factor[:, varies] = white[::-1] / scale
    return Whitening(fix_signs(factor), used)


def _shrink_covariance(u: np.ndarray, spread: Scatter, shrinkage: float | None) -> tuple[np.ndarray, float]:
    if spread.freedom < 1:
        raise InputError(f"no spread to measure in {spread.of}: at least two samples of some class are needed")
    unbiased = len(u) / spread.freedom
    if shrinkage is None:
        if len(u) < 2:
            raise InputError("one alike pair does not show a spread: give at least two, or a number for shrinkage")
        covariance, used = ledoit_wolf(u, assume_centered=True)
        return covariance * unbiased, float(used)
    return shrunk_covariance(u.T @ u / len(u), shrinkage) * unbiased, float(shrinkage)
