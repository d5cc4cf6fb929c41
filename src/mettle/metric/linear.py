"""What every learned linear metric does once it has its factor L: d(x, y) = ‖Lx − Ly‖."""

from collections.abc import Callable
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_array
from sklearn.utils.validation import check_is_fitted, validate_data

from mettle.errors import InputError
from mettle.metric.validation import as_input_error, require


class LinearMetric(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """The fitted half of an estimator of a linear metric: ``fit`` of a subclass sets ``components_``, L (r, d)."""

    components_: np.ndarray

    @classmethod
    def from_components(cls, components: ArrayLike) -> Self:
        """A fitted metric with this L (r, d): one kept from ``components_``, say."""
        factor = np.array(components, dtype=np.float64)
        if factor.ndim != 2 or not factor.size or not np.isfinite(factor).all():
            raise InputError(f"components must be a finite (r, d) array, got shape {factor.shape}")
        found = cls()
        found.components_ = factor
        found.n_features_in_ = factor.shape[1]  # type: ignore[attr-defined]
        return found

    @classmethod
    def from_matrix(cls, matrix: ArrayLike) -> Self:
        """A fitted metric with this M (d, d), symmetric and positive semi-definite."""
        return cls.from_components(factor_matrix(matrix))

    def transform(self, X: ArrayLike) -> np.ndarray:
        """(n, r) Lx: where plain L2 distance is this metric. Faiss and k-d trees need nothing else."""
        check_is_fitted(self)
        return self._validate_points(X) @ self.components_.T

    def pair_distance(self, X: ArrayLike, Y: ArrayLike | None = None, *, squared: bool = False) -> np.ndarray:
        """(n,) distances of pairs: X (n, 2, d), or X and Y (n, d) row by row. The squared form is no metric."""
        check_is_fitted(self)
        first, second = self._validate_pairs(X, Y)
        found = squared_form(first - second, self.components_)
        return found if squared else np.sqrt(found)

    def pair_score(self, X: ArrayLike, Y: ArrayLike | None = None) -> np.ndarray:
        """(n,) −d of pairs, higher = more alike: ready for a ROC curve. Arguments as for `pair_distance`."""
        return -self.pair_distance(X, Y)

    def get_metric(self) -> Callable[..., float]:
        """The distance of two vectors as a function (u, v, squared=False), for whatever takes a callable metric.

        It keeps the L of now: fitting again does not change it. A search among points that `transform` maps is
        faster than one that calls it.
        """
        check_is_fitted(self)
        return PointDistance(self.components_.copy())

    def get_mahalanobis_matrix(self) -> np.ndarray:
        """M (d, d) = LᵀL."""
        check_is_fitted(self)
        return self.components_.T @ self.components_

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def _validate_pairs(self, X: Any, Y: Any, *, reset: bool = False) -> tuple[np.ndarray, np.ndarray]:
        if Y is not None:
            first, second = self._validate_points(X), self._validate_points(Y)
            rows = len(first), len(second)
            require(rows[0] == rows[1], f"pairs go row by row: X has {rows[0]} rows, Y has {rows[1]}")
            return first, second
        with as_input_error():
            pairs: Any = check_array(X, allow_nd=True, dtype=np.float64)  # type: ignore[arg-type]
        require(
            pairs.ndim == 3 and pairs.shape[1] == 2,
            f"pairs have shape (n, 2, d), got {pairs.shape}; or pass two arrays (n, d) to compare row by row",
        )
        if reset:
            self._validate_points(pairs.reshape(-1, pairs.shape[2]), reset=True)
        wanted = self.n_features_in_  # type: ignore[attr-defined]
        # Checked by hand: three axes have no column names, and scikit-learn would warn of their absence.
        require(
            pairs.shape[2] == wanted,
            f"X has {pairs.shape[2]} features, but {type(self).__name__} is expecting {wanted} features as input",
        )
        return pairs[:, 0], pairs[:, 1]

    def _validate_points(self, X: Any, *, reset: bool = False, ensure_min_samples: int = 1) -> np.ndarray:
        with as_input_error():
            found: Any = validate_data(self, X, reset=reset, dtype=np.float64, ensure_min_samples=ensure_min_samples)
        return found


class PointDistance:
    """d(u, v) = ‖L(u − v)‖ of two vectors (d,); a class, so that it can be pickled."""

    def __init__(self, components: np.ndarray) -> None:
        self.components = components

    def __call__(self, u: ArrayLike, v: ArrayLike, squared: bool = False) -> float:
        """The distance, or its square."""
        ends = [np.asarray(end, dtype=np.float64) for end in (u, v)]
        width = self.components.shape[1]
        for end in ends:
            require(end.shape == (width,), f"a point of this metric has shape ({width},), got {end.shape}")
            require(bool(np.isfinite(end).all()), "a point holds NaN or infinity: it has no distance from another")
        found = float(squared_form(ends[0] - ends[1], self.components))
        return found if squared else found**0.5


def squared_form(delta: Any, factor: Any) -> Any:
    """δᵀMδ = ‖Lδ‖² for M = LᵀL: (..., d) differences and an (r, d) factor L give (...), arrays or tensors alike.

    Never below 0, whatever L is. Its gradient in L is 2 L δδᵀ. The square root is a metric, this is not: see
    `Mahalanobis`.
    """
    z = delta @ factor.T
    return (z * z).sum(-1)


def factor_matrix(matrix: Any) -> np.ndarray:
    """L (r, d) with LᵀL = M for a symmetric positive semi-definite M, r its rank, the heaviest direction first."""
    m = np.asarray(matrix, dtype=np.float64)
    if m.ndim != 2 or m.shape[0] != m.shape[1] or not m.size:
        raise InputError(f"a Mahalanobis matrix is square, got shape {m.shape}")
    if not np.isfinite(m).all():
        raise InputError("a Mahalanobis matrix is finite, got NaN or infinity: check where it came from")
    size = np.abs(m).max()
    if np.abs(m - m.T).max() > 1e-8 * size:
        raise InputError(
            "a Mahalanobis matrix is symmetric, this one is not: use (M + M.T) / 2, which has the same form"
        )
    values, vectors = np.linalg.eigh((m + m.T) / 2)
    if values[0] < -1e-8 * size:
        raise InputError(
            f"a Mahalanobis matrix has no negative eigenvalue, the smallest here is {values[0]:.3g}: some squared "
            "distances would be negative. Clip the eigenvalues at 0 to come as near as a metric can"
        )
    rank = np.flatnonzero(values > len(m) * np.finfo(np.float64).eps * size)[::-1]
    if not len(rank):
        raise InputError("a Mahalanobis matrix of zeros puts all points at distance 0: give one that tells some apart")
    return fix_signs(np.sqrt(values[rank])[:, None] * vectors[:, rank].T)


def fix_signs(factor: np.ndarray) -> np.ndarray:
    """Rows turned so that their largest entry is positive: a sign that no library version can flip."""
    largest = np.take_along_axis(factor, np.abs(factor).argmax(1)[:, None], 1)
    return factor * np.where(largest < 0, -1.0, 1.0)
