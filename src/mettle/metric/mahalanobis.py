"""The Mahalanobis distance: four ways to find its matrix, and how far to trust the data chosen by held-out classes."""

import warnings
from copy import deepcopy
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state

from mettle.losses import MCML, Contrastive
from mettle.metric import validation
from mettle.metric.covariance import (
    PATH,
    Shrinkage,
    Whitening,
    fit_whitening,
    pair_scatter,
    total_scatter,
    within_class_scatter,
)
from mettle.metric.held_out import Fold, label_folds, pair_folds
from mettle.metric.linear import LinearMetric
from mettle.metric.optimize import Examples, Search, check_batch, check_factor, learn_factor
from mettle.metric.selection import choose_shrinkage, choose_steps, fit_likelihood_ratio

SUPERVISED = ("learned", "likelihood_ratio")


class Mahalanobis(LinearMetric):
    r"""A Mahalanobis distance, estimated or learned, as a scikit-learn transformer.

    Formula:
        d(x, y) = √( (x − y)ᵀ M (x − y) ) = ‖Lx − Ly‖,  M = LᵀL, positive semi-definite by construction
        covariance        M = inverse covariance of all points, shrunk; labels are ignored
        within_class      M = W⁻¹, the inverse covariance of points about their class means, shrunk: directions in
                          which a class varies count less
        likelihood_ratio  M = W⁻¹ − (W + B)⁻¹ with B the covariance between classes: directions in which classes do
                          not differ count less too. W and B are shrunk to multiples of the identity; with both
                          shrunk all the way M is Euclid
        learned           M minimizes  loss(LX, y) + penalty · ‖A − A₀‖²  over L = A W, started at A₀, the likelihood
                          ratio, for as many steps as held-out classes gain from
    Needs:
        ``fit(X, y)`` with X (n, d) and one label per row; or pairs, X (n, 2, d) and y 1 for alike, 0 (or −1) for not.
    Use when:
        features are given (measurements, frozen embeddings) and Euclid weighs them badly. After a network that is
        trained anyway it is redundant: its last linear layer absorbs L.
    Relations:
        M = I is Euclid. ``transform`` gives Lx, so plain L2 search there is Mahalanobis search here. The square root
        is a metric when M is of full rank, else a pseudo-metric (distinct points at distance 0). d² is no metric:
        the points 0, 1, 2 on a line have 4 > 1 + 1. On pairs and without shrinkage the likelihood ratio is KISSME.

    Args:
        method: ``learned``, ``likelihood_ratio``, ``within_class`` or ``covariance``.
        n_components: rows of L; None for as many as features that vary. Fewer keep the most telling directions.
        loss: any pairwise loss of `mettle.losses`, or a callable (embeddings, labels) -> scalar; on pairs also
            (embeddings, embeddings, alike) -> scalar. None: `MCML` for labels, `Contrastive` for pairs.
        shrinkage: ``auto`` or a number from 0, nothing, to 1. For ``covariance`` and ``within_class`` towards
            independent features, ``auto`` as Ledoit and Wolf estimate. For the others towards Euclid, one number or
            two for (W, B); ``auto`` is what is best for held-out classes, by cross-validation over the classes.
        standardize: whether Euclid there is that of features divided by their standard deviations. ``auto`` chooses
            with the shrinkage; where ``shrinkage`` is a number it means no.
        penalty: how strongly a learned metric is held to where it starts.
        early_stopping: whether learning stops where held-out classes stop gaining; else it goes on to the minimum.
        max_iter: steps of L-BFGS, or epochs when learning in batches.
        tol: learning stops when no entry of the gradient is above this, or the loss no longer moves.
        batch: (classes, samples) of a batch; None for everything at once; ``auto`` decides by the number of points.
        random_state: seeds batches and losses that draw.

    Attributes:
        components_: (r, d) L.
        n_iter_: iterations; 1 where nothing is searched, or held-out classes gained nothing.
        loss_: the objective at the end, NaN where nothing is searched.
        shrinkage_: the shrinkage used: a number, or (W, B).
        standardize_: whether features were divided by their standard deviations first.
        n_features_in_, feature_names_in_: as for every scikit-learn estimator.
    """

    def __init__(
        self,
        method: Literal["learned", "likelihood_ratio", "within_class", "covariance"] = "learned",
        *,
        n_components: int | None = None,
        loss: Any = None,
        shrinkage: float | tuple[float, float] | Literal["auto"] = "auto",
        standardize: bool | Literal["auto"] = "auto",
        penalty: float = 0.01,
        early_stopping: bool = True,
        max_iter: int = 200,
        tol: float = 1e-4,
        batch: tuple[int, int] | Literal["auto"] | None = "auto",
        random_state: Any = None,
    ) -> None:
        self.method = method
        self.n_components = n_components
        self.loss = loss
        self.shrinkage = shrinkage
        self.standardize = standardize
        self.penalty = penalty
        self.early_stopping = early_stopping
        self.max_iter = max_iter
        self.tol = tol
        self.batch = batch
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike | None = None) -> Self:
        """Find L. X (n, d) with labels, or (n, 2, d) with y 1 where the two are alike and 0 or −1 where not."""
        validation.check_mahalanobis(self.get_params(deep=False))
        points, examples = self._examples(X, y)
        validation.check_range(points)
        self.n_iter_, self.loss_ = 1, float("nan")
        if self.method in SUPERVISED:
            assert examples is not None
            self._fit_to_classes(examples)
        else:
            found = self._whitening(points, examples)
            self.shrinkage_, self.standardize_ = found.shrinkage, True
            self.components_ = found.factor[: self.n_components]
        return self

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.required = self.method != "covariance"
        tags.input_tags.three_d_array = True
        return tags

    def _fit_to_classes(self, examples: Examples) -> None:
        learn = self.method == "learned"
        choose = isinstance(self.shrinkage, str)
        folds: list[Fold] = []
        if choose or (learn and self.early_stopping):
            folds = label_folds(examples.target) if examples.second is None else pair_folds(examples.target)
        shrinkage = choose_shrinkage(examples, folds, self._path())
        ratio = fit_likelihood_ratio(examples, shrinkage)
        self.shrinkage_, self.standardize_ = (shrinkage.within, shrinkage.between), shrinkage.standardize
        self.components_ = ratio.factor[: self.n_components]
        if not learn:
            return
        search, steps, r = self._search(examples), None, len(self.components_)
        check_batch(search, examples)
        if self.early_stopping:
            steps = choose_steps(search, examples, folds, shrinkage, r)
        found = learn_factor(search, examples, ratio.directions, ratio.weights[:r], max_iter=steps)
        self.components_ = check_factor(found.factor, self.components_)
        self.n_iter_, self.loss_ = max(found.iterations, 1), found.value
        if not found.converged and steps in (None, self.max_iter):
            warnings.warn(
                f"Mahalanobis stopped after max_iter={self.max_iter} iterations before it settled: raise max_iter, "
                "or tol",
                ConvergenceWarning,
                stacklevel=3,
            )

    def _path(self) -> list[Shrinkage]:
        """Where to look for the best shrinkage: one place, if the user names it."""
        if isinstance(self.shrinkage, str):
            auto = isinstance(self.standardize, str)
            return [place for place in PATH if auto or place.standardize == self.standardize]
        pair: Any = self.shrinkage if isinstance(self.shrinkage, tuple | list) else (self.shrinkage, self.shrinkage)
        within, between = pair
        return [Shrinkage(self.standardize is True, float(within), float(between))]

    def _search(self, examples: Examples) -> Search:
        loss = deepcopy(self.loss)  # one that keeps a memory of batches must not bring it to the next fit
        if loss is None:
            loss = MCML() if examples.second is None else Contrastive(normalise=False)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        return Search(loss, self.penalty, self.batch, self.max_iter, self.tol, seed)

    def _whitening(self, points: np.ndarray, examples: Examples | None) -> Whitening:
        shrinkage = None if isinstance(self.shrinkage, str) else float(self.shrinkage)  # type: ignore[arg-type]
        if self.method == "covariance" or examples is None:
            scatter = total_scatter(points)
        elif examples.second is None:
            scatter = within_class_scatter(points, examples.target)
        else:
            similar = examples.target == 1
            scatter = pair_scatter(examples.first[similar], examples.second[similar])
        return fit_whitening(points, scatter, shrinkage)

    def _examples(self, X: Any, y: Any) -> tuple[np.ndarray, Examples | None]:
        """All points, and what is known of them."""
        second = None
        if _is_pairs(X):
            first, second = self._validate_pairs(X, None, reset=True)
            points = np.concatenate([first, second])
        else:
            points = first = self._validate_points(X, reset=True, ensure_min_samples=2)
        validation.check_components(self.n_components, points.shape[1])
        if self.method == "covariance":
            return points, None
        y = validation.check_target(y, len(first), f"Mahalanobis(method={self.method!r})", "use method='covariance'")
        if second is None:
            target = validation.encode_labels(y, least_classes=2 if self.method in SUPERVISED else 1)
        else:
            target = validation.encode_pair_labels(y)
            validation.require(
                self.method not in SUPERVISED or int(target.sum()) >= 2,
                "one alike pair does not show a spread: give at least two",
            )
        return points, Examples(first, target, second)


def _is_pairs(X: Any) -> bool:
    """Three axes: of an array, a tensor or nested lists. A table or a sparse matrix has two."""
    shape = getattr(X, "shape", None)
    if shape is None and isinstance(X, (list, tuple)):
        try:
            shape = np.shape(X)
        except ValueError:  # ragged: for scikit-learn to refuse
            return False
    return shape is not None and len(shape) == 3
