"""How good a distance is for classes it was not fitted to: folds over classes, and a score for every held-out query.

Everything that `Mahalanobis` chooses by itself (how much to shrink, how long to learn) is chosen by this score, from
the training data alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mettle.rng import permutation

FOLDS = 5
CLASSES_NEEDED = 4  # with two samples or more: two to fit, two to tell apart
POINTS = 512  # of a fold that are compared with each other
LEAST_PER_CLASS = 8  # samples of a class among those, where it has as many

Scorer = Callable[[np.ndarray, np.ndarray | None], np.ndarray]


@dataclass(frozen=True)
class Fold:
    """Rows to fit, rows to judge, and what judges them.

    ``score(u, v)`` takes the held-out rows in the coordinates of a metric, d² = ‖δu‖² − ‖δv‖² (v None: ‖δu‖²), and
    gives one value per query; ``group`` says which queries belong together (one class, say).
    """

    train: np.ndarray
    held_out: np.ndarray
    score: Scorer
    group: np.ndarray


def label_folds(labels: np.ndarray) -> list[Fold]:
    """Folds over classes, or over samples where there are fewer than four classes with two samples.

    Empty where the data allow neither. Labels are 0 .. C − 1; the folds depend on nothing but the labels.
    """
    counts = np.bincount(labels)
    usable = np.flatnonzero(counts >= 2)
    if len(usable) < CLASSES_NEEDED:
        return _sample_folds(labels)
    k = min(FOLDS, len(usable) // 2)
    folds = []
    for turn in range(-(-FOLDS // k)):  # few classes allow few folds: deal them again in another order
        order = usable[permutation(len(usable), 0, turn)]
        for i in range(k):
            held_out = np.isin(labels, order[i::k])
            folds.append(_labeled_fold(labels, np.flatnonzero(~held_out), np.flatnonzero(held_out)))
    return folds


def pair_folds(similar: np.ndarray) -> list[Fold]:
    """Folds over pairs, 1 where they are similar and 0 where not; empty where there are too few of a kind."""
    kinds = [np.flatnonzero(similar == kind) for kind in (0, 1)]
    k = min(FOLDS, *(len(kind) // 2 for kind in kinds))
    if k < 2:
        return []
    dealt = np.empty(len(similar), np.int64)
    for kind in kinds:
        dealt[kind[permutation(len(kind), 0, 0)]] = np.arange(len(kind)) % k
    folds = []
    for i in range(k):
        held_out = np.flatnonzero(dealt == i)
        target = similar[held_out]
        queries = np.arange(int(target.sum()))
        folds.append(Fold(np.flatnonzero(dealt != i), held_out, lambda u, v, t=target: pair_auc(u, v, t), queries))
    return folds


def map_at_r(u: np.ndarray, v: np.ndarray | None, labels: np.ndarray) -> np.ndarray:
    """Mean average precision at R of every row that has a positive, against all other rows.

    R is the number of other rows with its label. Of equally near rows negatives come first: what a metric puts on
    one point it does not tell apart.
    """
    squared = _squared_distances(u) - (0 if v is None else _squared_distances(v))
    same = labels[:, None] == labels
    margin = 1e-9 * np.abs(squared).max()
    squared = squared + margin * same
    np.fill_diagonal(squared, np.inf)
    relevant = same.sum(1) - 1
    deepest = int(relevant.max())
    if deepest < len(squared) - 1:
        nearest = np.argpartition(squared, deepest - 1, axis=1)[:, :deepest]
    else:
        nearest = np.broadcast_to(np.arange(len(squared)), squared.shape)
    order = np.argsort(np.take_along_axis(squared, nearest, 1), axis=1)
    rank = np.arange(1, order.shape[1] + 1)
    hits = np.take_along_axis(same, np.take_along_axis(nearest, order, 1), 1) & (rank <= relevant[:, None])
    precision = hits.cumsum(1) / rank
    has_positive = relevant > 0
    return ((precision * hits).sum(1) / np.maximum(relevant, 1))[has_positive]


def pair_auc(u: np.ndarray, v: np.ndarray | None, similar: np.ndarray) -> np.ndarray:
    """For every similar pair the share of dissimilar ones that are farther apart, ties half; rows are both ends."""
    n = len(similar)
    squared = ((u[:n] - u[n:]) ** 2).sum(1) - (0 if v is None else ((v[:n] - v[n:]) ** 2).sum(1))
    far = np.sort(squared[similar == 0])
    near = squared[similar == 1]
    below = np.searchsorted(far, near, "left") + np.searchsorted(far, near, "right")
    return 1 - below / (2 * len(far))


def _sample_folds(labels: np.ndarray) -> list[Fold]:
    dealt = np.empty(len(labels), np.int64)
    for c in np.unique(labels):
        rows = np.flatnonzero(labels == c)
        dealt[rows[permutation(len(rows), 0, int(c))]] = np.arange(len(rows)) % 3
    folds = []
    for i in range(3):
        train, held_out = np.flatnonzero(dealt != i), np.flatnonzero(dealt == i)
        fits = np.bincount(labels[train], minlength=labels.max() + 1).max() >= 2 and len(set(labels[train])) >= 2
        if fits and len(held_out) and np.bincount(labels[held_out]).max() >= 2 and len(set(labels[held_out])) >= 2:
            folds.append(_labeled_fold(labels, train, held_out))
    return folds


def _labeled_fold(labels: np.ndarray, train: np.ndarray, held_out: np.ndarray) -> Fold:
    """A fold whose held-out rows are few enough to be compared over and over."""
    classes = np.unique(labels[held_out])
    if len(held_out) > POINTS:
        classes = classes[permutation(len(classes), 0, 0)[: POINTS // LEAST_PER_CLASS]]
        each = max(LEAST_PER_CLASS, POINTS // len(classes))
        parts = [held_out[labels[held_out] == c] for c in np.sort(classes)]
        held_out = np.concatenate([part[permutation(len(part), 0, 0)[:each]] for part in parts])
    found = labels[held_out]
    has_positive = np.bincount(found)[found] >= 2
    return Fold(train, held_out, lambda u, v: map_at_r(u, v, found), found[has_positive])


def _squared_distances(z: np.ndarray) -> np.ndarray:
    gram = z @ z.T
    size = np.diagonal(gram)
    return size[:, None] + size - 2 * gram
