"""Metrics that need no search: the inverse of a shrunk covariance, and the likelihood ratio of two covariances.

`fit_whitening` works in features divided by their standard deviations, so that its result does not depend on units. In
these, shrinking towards a multiple of the identity is shrinking towards independent features, each with its variance.
`likelihood_ratio` shrinks towards plain Euclidean distance, of the features as they are or of standardized ones.
"""

from dataclasses import dataclass

import numpy as np
from scipy.linalg import solve_triangular
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
    """Of points about the mean of their class."""
    labels = np.unique(labels, return_inverse=True)[1]
    x, counts = x - x.mean(0), np.bincount(labels)
    means = np.zeros((len(counts), x.shape[1]))
    np.add.at(means, labels, x)
    return Scatter(x - (means / counts[:, None])[labels], len(x) - len(counts), "the points of every class")


def pair_scatter(first: np.ndarray, second: np.ndarray) -> Scatter:
    """Of the two ends of pairs about their middle: (x − y)/√2 of similar pairs has the covariance of a class."""
    return Scatter((first - second) / np.sqrt(2), len(first), "the two ends of every similar pair")


def fit_whitening(x: np.ndarray, scatter: Scatter, shrinkage: float | None) -> Whitening:
    """The inverse of the spread's covariance, shrunk.

    Directions come widest first: by how much farther all points lie apart than the spread explains, in its units
    (Fisher's discriminants, for a spread about class means), or plainly by their variance where the spread is that of
    all points. A feature that never varies gets weight 0: nothing is known of its scale.

    Args:
        x: (n, d) all points.
        scatter: what should count as small.
        shrinkage: 0 (none) to 1 (independent features); None: as Ledoit and Wolf estimate.
    """
    varies = x.max(0) > x.min(0)
    if not varies.any():
        raise InputError(f"all {len(x)} points of X are the same: a metric needs points that differ")
    scale = x.std(0)[varies]
    u = scatter.deviations[:, varies] / scale
    covariance, used = _shrink_covariance(u, scatter, shrinkage)
    values, vectors = np.linalg.eigh(covariance)
    if values[0] <= max(len(values) * np.finfo(np.float64).eps * values[-1], NOTHING):
        raise InputError(
            f"the covariance of {scatter.of} has no inverse: they do not vary in every direction. "
            + ("Give more of them" if used else "Set shrinkage='auto', or give more of them")
        )
    white = (vectors / np.sqrt(values)).T
    if scatter.fisher:
        # Between = all − spread, both unshrunk: where shrinking widened the spread, a ratio to it would look small.
        seen = (x - x.mean(0))[:, varies] / scale @ white.T
        near = u @ white.T
        between = seen.T @ seen / (len(x) - 1) - near.T @ near / scatter.freedom
        white = np.linalg.eigh(between)[1].T @ white
    factor = np.zeros((len(white), x.shape[1]))
    factor[:, varies] = white[::-1] / scale
    return Whitening(fix_signs(factor), used)


def _shrink_covariance(u: np.ndarray, scatter: Scatter, shrinkage: float | None) -> tuple[np.ndarray, float]:
    if scatter.freedom < 1:
        raise InputError(f"no spread to measure in {scatter.of}: at least two samples of some class are needed")
    unbiased = len(u) / scatter.freedom
    if shrinkage is None:
        if len(u) < 2:
            raise InputError("one similar pair does not show a spread: give at least two, or a number for shrinkage")
        covariance, used = ledoit_wolf(u, assume_centered=True)
        return covariance * unbiased, float(used)
    return shrunk_covariance(u.T @ u / len(u), shrinkage) * unbiased, float(shrinkage)


@dataclass(frozen=True)
class TwoCovariances:
    """Points of classes as the sum of two normal variables: a class mean, and what varies inside a class.

    Matrices are (k, k), of the k features that vary, in units of ``scale``.
    """

    within: np.ndarray
    between: np.ndarray  # positive semi-definite: negative eigenvalues of the difference of two estimates are 0
    scale: np.ndarray  # (k,)
    varies: np.ndarray  # (d,) bool

    def shrink(self, within: float, between: float) -> tuple[np.ndarray, np.ndarray]:
        """Both, each moved that part of the way to the multiple of the identity that has its trace."""
        return _shrink_to_identity(self.within, within), _shrink_to_identity(self.between, between)


@dataclass(frozen=True)
class Shrinkage:
    """A place on the path between Euclid, (1, 1), and the plain likelihood ratio, (0, 0)."""

    standardize: bool
    within: float
    between: float


EUCLID = Shrinkage(False, 1.0, 1.0)
UNKNOWN = Shrinkage(True, 0.5, 0.5)  # where the data are too few to choose from
# From most to least shrunk: of equally good ones the first is taken. What matters is the between-class covariance of
# few classes, and the within-class covariance of few points.
PATH = tuple(
    Shrinkage(standardize, within, between)
    for standardize in (False, True)
    for within in (1.0, 0.9, 0.7, 0.5, 0.3, 0.1, 0.01)
    for between in (1.0, 0.6, 0.3, 0.03, 0.0)
)


@dataclass(frozen=True)
class LikelihoodRatio:
    """M = W⁻¹ − (W + B)⁻¹ as weights of directions: L = diag(weights) · directions, the most telling first.

    In the coordinates ``directions`` W is the identity and B is diagonal, with entries b; a weight is √(b/(1 + b)).
    """

    directions: np.ndarray  # (k, d)
    weights: np.ndarray  # (k,)

    @property
    def factor(self) -> np.ndarray:
        """L (k, d)."""
        return self.weights[:, None] * self.directions


def two_covariances(x: np.ndarray, scatter: Scatter, contrast: Scatter, *, standardize: bool) -> TwoCovariances:
    """Covariances within and between classes.

    Args:
        x: (n, d) all points.
        scatter: inside classes, or of the ends of similar pairs.
        contrast: of all points, or of the ends of dissimilar pairs: what the two covariances add up to.
        standardize: divide features by their standard deviations; False: all by one number.
    """
    varies = x.max(0) > x.min(0)
    if not varies.any():
        raise InputError(f"all {len(x)} points of X are the same: a metric needs points that differ")
    if scatter.freedom < 1:
        raise InputError(f"no spread to measure in {scatter.of}: at least two samples of some class are needed")
    deviation = x.std(0)[varies]
    largest = deviation.max()  # squares of the largest numbers that are allowed would add up to infinity
    scale = (
        deviation if standardize else np.full_like(deviation, largest * np.sqrt(((deviation / largest) ** 2).mean()))
    )
    inside, total = (s.deviations[:, varies] / scale for s in (scatter, contrast))
    within = inside.T @ inside / scatter.freedom
    if np.trace(within) <= NOTHING:
        raise InputError(
            f"the covariance of {scatter.of} has no inverse: they do not vary in any direction. Give more of them"
        )
    values, vectors = np.linalg.eigh(total.T @ total / max(contrast.freedom, 1) - within)
    between = (vectors * np.maximum(values, 0)) @ vectors.T
    if values[-1] <= 0:  # classes differ by less than their points let expect: nothing prefers one direction
        between = np.trace(within) / len(within) * np.eye(len(within))
    return TwoCovariances(within, between, scale, varies)


def likelihood_ratio(model: TwoCovariances, shrinkage: Shrinkage) -> LikelihoodRatio:
    """The quadratic form that tells best whether two points are of one class, for normal classes.

    For a difference δ of two points of one class δ ~ N(0, 2W), of two classes δ ~ N(0, 2W + 2B): the logarithm of the
    ratio of the densities is −½ δᵀ(W⁻¹ − (W + B)⁻¹)δ / 2 plus a constant.
    """
    within, between = model.shrink(shrinkage.within, shrinkage.between)
    values, vectors = np.linalg.eigh(within)
    if values[0] <= max(len(values) * np.finfo(np.float64).eps * values[-1], NOTHING):
        raise InputError(
            "the covariance inside classes has no inverse: they do not vary in every direction. Set shrinkage='auto', "
            "or above 0, or give more samples"
        )
    white = (vectors / np.sqrt(values)).T
    ratio, turn = np.linalg.eigh(white @ between @ white.T)
    ratio = np.maximum(ratio[::-1], 0)
    directions = np.zeros((len(white), len(model.varies)))
    directions[:, model.varies] = (turn.T @ white)[::-1] / model.scale
    return LikelihoodRatio(fix_signs(directions), np.sqrt(ratio / (1 + ratio)))


def likelihood_ratio_coordinates(
    model: TwoCovariances, shrinkage: Shrinkage, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(n, k) u and v with δᵀMδ = ‖δu‖² − ‖δv‖²: two triangular factors, cheaper than the eigenvectors of L."""
    within, between = model.shrink(shrinkage.within, shrinkage.between)
    z = x[:, model.varies].T / model.scale[:, None]
    first, second = np.linalg.cholesky(within), np.linalg.cholesky(within + between)
    return solve_triangular(first, z, lower=True).T, solve_triangular(second, z, lower=True).T


def _shrink_to_identity(covariance: np.ndarray, amount: float) -> np.ndarray:
    return (1 - amount) * covariance + amount * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
