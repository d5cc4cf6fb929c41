"""What `Mahalanobis` chooses by held-out classes: how much to shrink, and how far to learn."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from mettle.errors import InputError
from mettle.metric.covariance import (
    PATH,
    UNKNOWN,
    LikelihoodRatio,
    Shrinkage,
    TwoCovariances,
    likelihood_ratio,
    likelihood_ratio_coordinates,
    pair_scatter,
    total_scatter,
    two_covariances,
    within_class_scatter,
)
from mettle.metric.held_out import Fold
from mettle.metric.optimize import Examples, Search, learn_factor

LEARNING_FOLDS = 3  # each learns once; shrinking takes all folds
STEPS_WITHOUT_GAIN = 4  # on held-out classes, before learning stops in a fold


def estimate_covariances(examples: Examples, *, standardize: bool) -> TwoCovariances:
    """Covariances within and between classes, from labels or from pairs."""
    if examples.second is None:
        scatter, contrast = within_class_scatter(examples.first, examples.target), total_scatter(examples.first)
    else:
        similar = examples.target == 1
        scatter = pair_scatter(examples.first[similar], examples.second[similar])
        contrast = pair_scatter(examples.first[~similar], examples.second[~similar])
    return two_covariances(examples.points, scatter, contrast, standardize=standardize)


def fit_likelihood_ratio(examples: Examples, shrinkage: Shrinkage) -> LikelihoodRatio:
    """The likelihood ratio with this much shrinkage."""
    return likelihood_ratio(estimate_covariances(examples, standardize=shrinkage.standardize), shrinkage)


def choose_shrinkage(examples: Examples, folds: list[Fold], path: Iterable[Shrinkage] = PATH) -> Shrinkage:
    """The place on the path that is best for what was held out, by the mean over all held-out queries.

    Of equally good ones the first. Without folds: half of everything.
    """
    path = list(path)
    totals, judged = np.zeros(len(path)), 0
    for fold in folds:
        known, points = examples.take(fold.train), examples.take(fold.held_out).points
        models: dict[bool, TwoCovariances] = {}
        try:
            for standardize in {place.standardize for place in path}:
                models[standardize] = estimate_covariances(known, standardize=standardize)
        except InputError:  # what is left varies in no direction: this fold cannot judge
            continue
        judged += 1
        for k, place in enumerate(path):
            try:
                u, v = likelihood_ratio_coordinates(models[place.standardize], place, points)
            except np.linalg.LinAlgError:  # a covariance without inverse
                totals[k] = -np.inf
                continue
            totals[k] += fold.score(u, v).sum()
    if not judged or not np.isfinite(totals).any():
        return replace(UNKNOWN, standardize=path[-1].standardize)
    return path[int(np.argmax(totals >= totals.max() * (1 - 1e-9)))]


def choose_steps(search: Search, examples: Examples, folds: list[Fold], shrinkage: Shrinkage, rank: int) -> int | None:
    """How many steps of learning held-out classes gain from; None where no fold can tell.

    More than 0 only if the mean gain over held-out classes exceeds its standard error: what learning adds must be
    visible outside the classes that it saw.
    """
    curves = []
    for fold in folds[:LEARNING_FOLDS]:
        known, points = examples.take(fold.train), examples.take(fold.held_out).points
        usable = int((np.bincount(known.target) >= 2).sum())
        if usable < 2:
            continue
        curves += _held_out_curves(_limit_classes(search, usable), known, points, fold, shrinkage, rank)
    if len(curves) < 2:
        return None
    longest = max(map(len, curves))
    gains = np.array([np.r_[curve, np.full(longest - len(curve), curve[-1])] - curve[0] for curve in curves])
    best = int(gains.mean(0).argmax())
    error = gains[:, best].std(ddof=1) / np.sqrt(len(gains))
    return best if gains[:, best].mean() > error else 0


def _held_out_curves(
    search: Search, known: Examples, points: np.ndarray, fold: Fold, shrinkage: Shrinkage, rank: int
) -> list[np.ndarray]:
    """For every held-out class its score before learning and after every step."""
    try:
        start = fit_likelihood_ratio(known, shrinkage)
    except InputError:
        return []
    scores = [fold.score(points @ start.factor[:rank].T, None)]

    def see(factor: np.ndarray) -> bool:
        scores.append(fold.score(points @ factor.T, None))
        means = [score.mean() for score in scores]
        return len(means) - 1 - int(np.argmax(means)) >= STEPS_WITHOUT_GAIN

    learn_factor(search, known, start.directions, start.weights[:rank], on_step=see)
    curve = np.array(scores)
    return [curve[:, fold.group == group].mean(1) for group in np.unique(fold.group)]


def _limit_classes(search: Search, usable: int) -> Search:
    """Batches of no more classes than a fold has."""
    if not isinstance(search.batch, (tuple, list)):
        return search
    return replace(search, batch=(min(int(search.batch[0]), usable), int(search.batch[1])))
