"""The estimator: fit a metric, then map points to where it is plain Euclidean distance."""

import warnings
from copy import deepcopy
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from mettle.errors import InputError
from mettle.losses import MCML, Contrastive
from mettle.metric import validation
from mettle.metric.covariance import Whitening, fit_whitening, similar_pair_scatter, total_scatter, within_class_scatter
from mettle.metric.linear import factor_matrix, squared_form
from mettle.metric.optimize import Examples, learn_factor


class Mahalanobis(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    r"""A Mahalanobis distance, estimated or learned, as a scikit-learn transformer.

    Formula:
        d(x, y) = √( (x − y)ᵀ M (x − y) ) = ‖Lx − Ly‖,  M = LᵀL, positive semi-definite by construction
        covariance  M = inverse covariance of all points, shrunk; labels are ignored
        within_class  M = inverse covariance of points about their class means, shrunk: directions in which a class
                    varies count less
        learned     M minimises  loss(LX, y) + penalty · ‖A − A₀‖²  over L = A W; W: ``within_class``; A₀ = I
    Needs:
        ``fit(X, y)`` with X (n, d) and one label per row; or pairs, X (n, 2, d) and y 1 for alike, 0 (or −1) for not.
    Use when:
        features are given (measurements, frozen embeddings) and Euclid weighs them badly. After a network that is
        trained anyway it is redundant: its last linear layer absorbs L.
    Relations:
        M = I is Euclid. ``transform`` gives Lx, so plain L2 search there is Mahalanobis search here. The square root
        is a metric when M is of full rank, else a pseudo-metric (distinct points at distance 0). d² is no metric:
        the points 0, 1, 2 on a line have 4 > 1 + 1.

    Args:
        method: ``learned``, ``within_class`` or ``covariance``.
        n_components: rows of L; None for as many as features that vary. Fewer keep the most telling directions.
        loss: any pairwise loss of `mettle.losses`, or a callable (embeddings, labels) -> scalar; on pairs also
            (embeddings, embeddings, alike) -> scalar. None: `MCML` for labels, `Contrastive` for pairs.
        shrinkage: ``auto`` (Ledoit and Wolf) or a number from 0, the plain covariance, to 1, independent features.
        penalty: how strongly a learned metric is held to the one of ``within_class``.
        max_iter: steps of L-BFGS, or epochs when learning in batches.
        tol: learning stops when no entry of the gradient is above this, or the loss no longer moves.
        batch: (classes, samples) of a batch; None for everything at once; ``auto`` decides by the number of points.
        random_state: seeds batches and losses that draw.

    Attributes:
        components_: (r, d) L.
        n_iter_: iterations, 1 where nothing is searched.
        loss_: the objective at the end, NaN where nothing is searched.
        shrinkage_: the shrinkage used.
        n_features_in_, feature_names_in_: as for every scikit-learn estimator.
    """

    def __init__(
        self,
        method: Literal["learned", "within_class", "covariance"] = "learned",
        *,
        n_components: int | None = None,
        loss: Any = None,
        shrinkage: float | Literal["auto"] = "auto",
        penalty: float = 0.01,
        max_iter: int = 200,
        tol: float = 1e-4,
        batch: tuple[int, int] | Literal["auto"] | None = "auto",
        random_state: Any = None,
    ) -> None:
        self.method = method
        self.n_components = n_components
        self.loss = loss
        self.shrinkage = shrinkage
        self.penalty = penalty
        self.max_iter = max_iter
        self.tol = tol
        self.batch = batch
        self.random_state = random_state

    @classmethod
    def from_components(cls, components: ArrayLike) -> Self:
        """A fitted metric with this L (r, d): one kept from ``components_``, say."""
        factor = np.array(components, dtype=np.float64)
        if factor.ndim != 2 or not factor.size or not np.isfinite(factor).all():
            raise InputError(f"components must be a finite (r, d) array, got shape {factor.shape}")
        found = cls(method="covariance")
        found.components_ = factor
        found.n_features_in_ = factor.shape[1]  # type: ignore[attr-defined]
        return found

    @classmethod
    def from_matrix(cls, matrix: ArrayLike) -> Self:
        """A fitted metric with this M (d, d), symmetric and positive semi-definite."""
        return cls.from_components(factor_matrix(matrix))

    def fit(self, X: ArrayLike, y: ArrayLike | None = None) -> Self:
        """Find L. X (n, d) with labels, or (n, 2, d) with y 1 where the two are alike and 0 or −1 where not."""
        validation.check_parameters(self.get_params(deep=False))
        points, examples = self._examples(X, y)
        validation.check_range(points)
        found = self._whitening(points, examples)
        r = len(found.factor) if self.n_components is None else min(self.n_components, len(found.factor))
        self.shrinkage_, self.n_iter_, self.loss_ = found.shrinkage, 1, float("nan")
        self.components_ = found.factor[:r]
        if self.method == "learned":
            assert examples is not None
            self._learn(examples, found.factor, r)
        return self

    def transform(self, X: ArrayLike) -> np.ndarray:
        """(n, r) Lx: where plain L2 distance is this metric. Faiss and k-d trees need nothing else."""
        check_is_fitted(self)
        return self._valid(X) @ self.components_.T

    def pair_distance(self, X: ArrayLike, Y: ArrayLike | None = None, *, squared: bool = False) -> np.ndarray:
        """(n,) distances of pairs: X (n, 2, d), or X and Y (n, d) row by row. The squared form is no metric."""
        check_is_fitted(self)
        first, second = self._pairs(X, Y)
        found = squared_form(first - second, self.components_)
        return found if squared else np.sqrt(found)

    def pair_score(self, X: ArrayLike, Y: ArrayLike | None = None) -> np.ndarray:
        """(n,) −d of pairs, higher = more alike: ready for a ROC curve. Arguments as for `pair_distance`."""
        return -self.pair_distance(X, Y)

    def get_mahalanobis_matrix(self) -> np.ndarray:
        """M (d, d) = LᵀL."""
        check_is_fitted(self)
        return self.components_.T @ self.components_

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.required = self.method != "covariance"
        tags.input_tags.three_d_array = True
        return tags

    def _learn(self, examples: Examples, prior: np.ndarray, r: int) -> None:
        loss = deepcopy(self.loss)  # one that keeps a memory of batches must not bring it to the next fit
        if loss is None:
            loss = MCML() if examples.second is None else Contrastive(normalise=False)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        found = learn_factor(
            loss, examples, prior, r,
            penalty=self.penalty, batch=self.batch, max_iter=self.max_iter, tol=self.tol, seed=seed,
        )  # fmt: skip
        self.components_ = found.factor.numpy()
        self.n_iter_, self.loss_ = found.iterations, found.value
        if not found.converged:
            warnings.warn(
                f"Mahalanobis stopped after max_iter={self.max_iter} iterations before it settled: raise max_iter, "
                "or tol",
                ConvergenceWarning,
                stacklevel=3,
            )

    def _whitening(self, points: np.ndarray, examples: Examples | None) -> Whitening:
        shrinkage = None if isinstance(self.shrinkage, str) else float(self.shrinkage)
        if self.method == "covariance" or examples is None:
            spread = total_scatter(points)
        elif examples.second is None:
            spread = within_class_scatter(points, examples.target)
        else:
            alike = examples.target == 1
            spread = similar_pair_scatter(examples.first[alike], examples.second[alike])
        return fit_whitening(points, spread, shrinkage)

    def _examples(self, X: Any, y: Any) -> tuple[np.ndarray, Examples | None]:
        """All points, and what is known of them."""
        second = None
        if _is_pairs(X):
            first, second = self._pairs(X, None, reset=True)
            points = np.concatenate([first, second])
        else:
            points = first = self._valid(X, reset=True, ensure_min_samples=2)
        validation.require(
            self.n_components is None or self.n_components <= points.shape[1],
            f"n_components={self.n_components} is more than the {points.shape[1]} features of X",
        )
        if self.method == "covariance":
            return points, None
        y = validation.check_target(y, len(first), self.method)
        return points, Examples(
            first,
            validation.encode_labels(y, self.method) if second is None else validation.encode_pair_labels(y),
            second,
        )

    def _pairs(self, X: Any, Y: Any, *, reset: bool = False) -> tuple[np.ndarray, np.ndarray]:
        if Y is not None:
            first, second = self._valid(X), self._valid(Y)
            rows = len(first), len(second)
            validation.require(rows[0] == rows[1], f"pairs go row by row: X has {rows[0]} rows, Y has {rows[1]}")
            return first, second
        with validation.as_input_error():
            pairs: Any = check_array(X, allow_nd=True, dtype=np.float64)  # type: ignore[arg-type]
        validation.require(
            pairs.ndim == 3 and pairs.shape[1] == 2,
            f"pairs have shape (n, 2, d), got {pairs.shape}; or pass two arrays (n, d) to compare row by row",
        )
        if reset:
            self._valid(pairs.reshape(-1, pairs.shape[2]), reset=True)
        wanted = self.n_features_in_  # type: ignore[attr-defined]
        # Checked by hand: three axes have no column names, and scikit-learn would warn of their absence.
        validation.require(
            pairs.shape[2] == wanted,
            f"X has {pairs.shape[2]} features, but Mahalanobis is expecting {wanted} features as input",
        )
        return pairs[:, 0], pairs[:, 1]

    def _valid(self, X: Any, *, reset: bool = False, ensure_min_samples: int = 1) -> np.ndarray:
        with validation.as_input_error():
            found: Any = validate_data(self, X, reset=reset, dtype=np.float64, ensure_min_samples=ensure_min_samples)
        return found


def _is_pairs(X: Any) -> bool:
    """Three axes: of an array, a tensor or nested lists. A table or a sparse matrix has two."""
    shape = getattr(X, "shape", None)
    if shape is None and isinstance(X, (list, tuple)):
        try:
            shape = np.shape(X)
        except ValueError:  # ragged: for scikit-learn to refuse
            return False
    return shape is not None and len(shape) == 3
