"""Local Fisher discriminant analysis: Fisher's, but only neighbors of a class have to stay together."""

from typing import Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg import eigh

from mettle.errors import InputError
from mettle.metric import validation
from mettle.metric.linear import LinearMetric, fix_signs


class LFDA(LinearMetric):
    r"""Local Fisher discriminant analysis (Sugiyama 2007).

    Formula, affinity a_ij = e^{−‖x_i − x_j‖²/(σ_i σ_j)} of points of one class, σ_i the distance of x_i to its k-th
    neighbor in its class, n_c the size of the class:
        S_w = ½ Σ_ij (a_ij/n_c)[y_i = y_j] δδᵀ
        S_b = ½ Σ_ij (a_ij (1/n − 1/n_c)[y_i = y_j] + (1/n)[y_i ≠ y_j]) δδᵀ
        rows of L solve S_b l = λ S_w l with lᵀS_w l = 1, the largest λ first; ``weighted`` multiplies them by √λ
    Needs:
        labels; classes of two or more samples.
    Use when:
        classes have several clusters that need not be brought together. With a_ij = 1 it is Fisher's analysis, but not
        limited to as many directions as classes less one.
    Relations:
        S_w + S_b is the local mixture scatter. There is no search: one generalized eigenvalue problem.

    Args:
        n_components: rows of L; None for as many as features that vary.
        k: which neighbor in its class sets the scale of a point; at most the class size less one.
        embedding: ``weighted`` (by √λ), ``orthonormal`` (an orthonormal basis of the same space) or ``plain``.
        shrinkage: of S_w towards the multiple of the identity that has its trace; 0 needs points in every direction.

    Attributes:
        components_: (r, d) L.
        eigenvalues_: (r,) λ.
        n_features_in_, feature_names_in_: as for every scikit-learn estimator.
    """

    def __init__(
        self,
        n_components: int | None = None,
        *,
        k: int = 7,
        embedding: str = "weighted",
        shrinkage: float = 0.1,
    ) -> None:
        self.n_components = n_components
        self.k = k
        self.embedding = embedding
        self.shrinkage = shrinkage

    def fit(self, X: ArrayLike, y: ArrayLike | None = None) -> Self:
        """Find L for X (n, d) with one label per row."""
        validation.check_numbers(self.get_params())
        kinds = ("weighted", "orthonormal", "plain")
        validation.require(
            self.embedding in kinds, f"embedding must be one of {', '.join(kinds)}, got {self.embedding!r}"
        )
        validation.check_count("k", self.k)
        validation.check_share("shrinkage", self.shrinkage)
        x = self._validate_points(X, reset=True, ensure_min_samples=2)
        validation.check_components(self.n_components, x.shape[1])
        validation.check_range(x)
        labels = validation.encode_labels(validation.check_target(y, len(x), "LFDA"), least_classes=2)
        varies = x.max(0) > x.min(0)
        validation.require(
            bool(varies.any()), f"all {len(x)} points of X are the same: a metric needs points that differ"
        )
        x = (x - x.mean(0))[:, varies]
        unit = np.abs(x).max()  # squares of the largest numbers that are allowed would add up to infinity
        within, between = local_scatters(x / unit, labels, self.k)
        values, rows = self._solve(within, between)
        if self.embedding == "orthonormal":
            rows = np.linalg.qr(rows.T)[0].T  # a basis has no unit
        else:
            rows = rows / unit
            if self.embedding == "weighted":
                rows = rows * np.sqrt(np.maximum(values, 0))[:, None]
        self.components_ = np.zeros((len(rows), len(varies)))
        self.components_[:, varies] = rows
        self.components_, self.eigenvalues_ = fix_signs(self.components_), values
        return self

    def _solve(self, within: np.ndarray, between: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        d = len(within)
        r = d if self.n_components is None else min(self.n_components, d)
        shrunk = (1 - self.shrinkage) * within + self.shrinkage * np.trace(within) / d * np.eye(d)
        spread = np.linalg.eigvalsh(shrunk)
        if spread[0] <= max(d * np.finfo(np.float64).eps * spread[-1], 0):
            raise InputError(
                "the local scatter inside classes has no inverse: points of a class do not vary in every direction. "
                + ("Give more samples" if self.shrinkage else "Set shrinkage above 0, or give more samples")
            )
        values, vectors = eigh(between, shrunk)
        return values[::-1][:r], vectors.T[::-1][:r]

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        return tags


def local_scatters(x: np.ndarray, labels: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """S_w and S_b (d, d). Classes are taken one by one, so memory goes with the square of the largest."""
    n, x = len(x), x - x.mean(0)
    within, local = np.zeros((x.shape[1],) * 2), np.zeros((x.shape[1],) * 2)
    for c in np.unique(labels):
        members = x[labels == c]
        everyone = members - members.mean(0)
        near = _weighted_scatter(members, local_affinity(members, k))
        within += near / len(members)
        local += (near - len(members) * everyone.T @ everyone) / n
    # ½ Σ_ij (1/n) δδᵀ over all pairs is the scatter about the mean; pairs of one class count by affinity instead.
    return within, x.T @ x + local - within


def local_affinity(x: np.ndarray, k: int) -> np.ndarray:
    """(n, n) e^{−d²/(σ_i σ_j)}; a point with k copies takes the scale of its nearest neighbor that is none."""
    size = (x**2).sum(1)
    squared = np.maximum(size[:, None] + size - 2 * x @ x.T, 0)
    np.fill_diagonal(squared, 0)
    at = min(k, len(x) - 1)
    kth = np.partition(squared, at, axis=1)[:, at]  # row i holds x_i itself, at distance 0
    nearest = np.where(squared > 0, squared, np.inf).min(1)
    sigma = np.sqrt(np.where((kth == 0) & np.isfinite(nearest), nearest, kth))
    scale = sigma[:, None] * sigma
    apart = np.divide(squared, scale, out=np.where(squared > 0, np.inf, 0.0), where=scale > 0)
    return np.exp(-apart)


def _weighted_scatter(x: np.ndarray, affinity: np.ndarray) -> np.ndarray:
    """½ Σ_ij a_ij (x_i − x_j)(x_i − x_j)ᵀ."""
    return (x.T * affinity.sum(1)) @ x - x.T @ affinity @ x
