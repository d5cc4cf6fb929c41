"""Neighborhood components analysis: the map under which a point would most often pick a neighbor of its own class."""

import warnings
from typing import Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import logsumexp
from sklearn.exceptions import ConvergenceWarning

from mettle.errors import NumericError
from mettle.metric import validation
from mettle.metric.linear import LinearMetric, fix_signs
from mettle.metric.optimize import fit_lbfgs

TILE = 1024  # anchors that are compared with all points at once: memory is TILE · n


class NCA(LinearMetric):
    r"""Neighborhood components analysis (Goldberger, Roweis, Hinton and Salakhutdinov 2005).

    Formula:
        p_ij = e^{−‖Lx_i − Lx_j‖²} / Σ_{k≠i} e^{−‖Lx_i − Lx_k‖²}
        L maximizes  (1/n) Σ_i Σ_{j≠i, y_j=y_i} p_ij  −  penalty · ‖L‖²/d:  the expected leave-one-out accuracy of a
        neighbor that is drawn at random, nearer ones more often
    Needs:
        labels; classes of two or more samples.
    Use when:
        nearest neighbors of the classes that are given is what counts, and a class may have several clusters. Not
        convex: the result depends on ``init``. Nothing holds it to Euclid but ``penalty`` and few components: with few
        samples and many features it fits what it saw.
    Relations:
        `mettle.losses.MCML` pulls all of a class together and is convex in LᵀL. The measured comparison is in
        docs/metric.md.

    Args:
        n_components: rows of L; None for as many as features.
        init: ``identity``, or ``pca``: the directions in which points vary most. The same space if no row is left out.
        penalty: weight of the mean squared entry of each row.
        max_iter: steps of L-BFGS.
        tol: learning stops when no entry of the gradient is above this, or the objective no longer moves.

    Attributes:
        components_: (r, d) L.
        n_iter_: steps taken.
        objective_: the expected accuracy at the end, from 0 to 1, without the penalty.
        n_features_in_, feature_names_in_: as for every scikit-learn estimator.
    """

    def __init__(
        self,
        n_components: int | None = None,
        *,
        init: str = "pca",
        penalty: float = 0.0,
        max_iter: int = 100,
        tol: float = 1e-5,
    ) -> None:
        self.n_components = n_components
        self.init = init
        self.penalty = penalty
        self.max_iter = max_iter
        self.tol = tol

    def fit(self, X: ArrayLike, y: ArrayLike | None = None) -> Self:
        """Find L for X (n, d) with one label per row."""
        validation.check_numbers(self.get_params())
        validation.require(self.init in ("identity", "pca"), f"init must be 'identity' or 'pca', got {self.init!r}")
        x = self._validate_points(X, reset=True, ensure_min_samples=2)
        validation.check_components(self.n_components, x.shape[1])
        validation.check_range(x)
        labels = validation.encode_labels(validation.check_target(y, len(x), "NCA"), least_classes=2)
        # Distances of about 1 in the units of the search, whatever those of the features: a softmax over far larger
        # ones is flat nowhere and moves nothing.
        centered = x - x.mean(0)
        largest = np.abs(centered).max()
        validation.require(
            bool(largest > 0), f"all {len(x)} points of X are the same: a metric needs points that differ"
        )
        unit = largest * np.sqrt(((centered / largest) ** 2).sum(1).mean())
        z = centered / unit
        start = self._start(z)

        def evaluate(factor: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = expected_accuracy(factor, z, labels)
            if not np.isfinite(value):
                raise NumericError("NCA became NaN or infinite: scale the features")
            size = self.penalty / z.shape[1]
            return size * (factor**2).sum() - value, 2 * size * factor - gradient

        found = fit_lbfgs(evaluate, start, max_iter=self.max_iter, tol=self.tol)
        if not found.converged:
            warnings.warn(
                f"NCA stopped after max_iter={self.max_iter} iterations before it settled: raise max_iter, or tol",
                ConvergenceWarning,
                stacklevel=2,
            )
        self.components_ = fix_signs(found.factor / unit)
        self.n_iter_ = found.iterations
        self.objective_ = expected_accuracy(found.factor, z, labels)[0]
        return self

    def _start(self, z: np.ndarray) -> np.ndarray:
        """Rows of length 1, times what brings the nearest other point to a distance of about 1."""
        d = z.shape[1]
        r = d if self.n_components is None else self.n_components
        rows = np.eye(d)[:r]
        if self.init == "pca":
            rows = fix_signs(np.linalg.eigh(z.T @ z)[1].T[::-1])[:r]
        sample = z[:: max(1, len(z) // TILE)] @ rows.T
        size = (sample**2).sum(1)
        squared = size[:, None] + size - 2 * sample @ sample.T
        np.fill_diagonal(squared, np.inf)
        nearest = float(np.median(np.maximum(squared.min(1), 0)))
        return rows / np.sqrt(nearest) if nearest > 1e-12 else rows

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        return tags


def expected_accuracy(factor: np.ndarray, x: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
    """(1/n) Σ_i Σ_{j≠i, y_j=y_i} p_ij and its gradient in L, a tile of anchors at a time.

    With p_i the sum of an anchor and w_ij = p_ij (p_i − [y_j = y_i]), the gradient is (2/n) L Σ_ij w_ij δ_ij δ_ijᵀ.
    """
    n = len(x)
    z = x @ factor.T
    size = (z**2).sum(1)
    value, gradient = 0.0, np.zeros_like(factor)
    for begin in range(0, n, TILE):
        anchors = np.arange(begin, min(begin + TILE, n))
        score = 2 * z[anchors] @ z.T - size  # −d² but for a number per anchor, which the softmax does not see
        score[np.arange(len(anchors)), anchors] = -np.inf
        p = np.exp(score - logsumexp(score, axis=1, keepdims=True))
        positive = (labels[anchors, None] == labels) & (np.arange(n) != anchors[:, None])
        hit = np.where(positive, p, 0)
        mine = hit.sum(1)
        w = p * mine[:, None] - hit
        # Σ w δδᵀ = Σ_i w_i. x_i x_iᵀ + Σ_j w_.j x_j x_jᵀ − both mixed terms; w_i. is 0 because p sums to 1.
        mixed = w @ x
        gradient += (z.T * w.sum(0)) @ x - z[anchors].T @ mixed - (w @ z).T @ x[anchors]
        value += float(mine.sum())
    return value / n, 2 / n * gradient
