"""EER on the convex hull of the operating points: a second number, never in place of the EER.

A system may choose between two thresholds at random, and so reach every point between their two (FMR, FNMR). The lower
left edge of the hull of all operating points is the best that can be had this way; ``eer_rocch`` is where it meets
FMR = FNMR. It is never above the EER, and flatters where scores are few: hence never one for the other.

Genuine scores are thresholds enough: between two of them a higher threshold rejects no more genuine pairs and accepts
fewer impostors. The lowest score joins them, because failed templates (−∞) may leave no genuine score so low.
"""

from fractions import Fraction

import numpy as np

from mettle.evaluate.checks import NotMeasurable
from mettle.evaluate.counted import Counted
from mettle.evaluate.point import NO_EER, Pairs, counts, next_above
from mettle.evaluate.scores import Scores


def eer_rocch(scores: Pairs) -> tuple[float, float]:
    """EER on the convex hull, and how far it can be from the exact one: 0 unless it rests on bins.

    On counts the operating points are those where bins begin. Impostors there were counted by scores that are off by
    up to δ, that is by some bins; a threshold inside a bin does no better than the rejects of its beginning and the
    accepts of its end. The hulls of the worst and of the best that this allows bound the value.

    Raises:
        NotMeasurable: so many failed templates that FNMR > FMR even at the lowest score.
    """
    n_i, n_g = scores.impostors, len(scores.genuine)
    if not isinstance(scores, Counted):
        return float(_meet(*counts(scores, _thresholds(scores)), n_i, n_g)), 0.0
    accepts, rejects = scores.lower
    value = _meet(accepts, rejects, n_i, n_g)
    if scores.sharp:
        return float(value), 0.0
    off = 1 + int(np.ceil(scores.slack / np.diff(scores.bins.edges).min()))
    worst = _meet(np.append(np.full(off, n_i), accepts[:-off]), rejects, n_i, n_g)
    best = _meet(np.append(accepts[1 + off :], np.zeros(1 + off, np.int64)), rejects, n_i, n_g)
    return float(value), float(max(worst - value, value - best))


def _thresholds(scores: Scores) -> np.ndarray:
    """Where a corner of the hull can be, ascending; +∞ is one in any case."""
    lowest = scores.dtype.type(next_above(scores, -np.inf))
    return np.unique(np.append(scores.genuine[np.isfinite(scores.genuine)], lowest))


def _meet(accepts: np.ndarray, rejects: np.ndarray, n_i: int, n_g: int) -> Fraction:
    """Where the hull of these points, by ascending threshold, and of +∞ meets FMR = FNMR, exactly.

    From the chord between both ends to the point farthest below it, which is a corner of the hull, and on with the
    half that crosses FMR = FNMR, until nothing lies below: a step halves the rest, more or less.
    """
    whole = np.dtype(object if n_i * n_g >= 2**63 else np.int64)  # products of counts may be beyond int64
    a, r = np.append(accepts, 0).astype(whole), np.append(rejects, n_g).astype(whole)
    if int(a[0]) * n_g < int(r[0]) * n_i:
        raise NotMeasurable(NO_EER)
    first, last = 0, len(a) - 1
    while True:
        x, y = a[first : last + 1] - a[first], r[first : last + 1] - r[first]
        side = x * y[-1] - y * x[-1]  # below 0: left of the chord, where both errors are fewer
        at = int(side.argmin())
        if side[at] == 0:
            break
        at += first
        first, last = (at, last) if int(a[at]) * n_g >= int(r[at]) * n_i else (first, at)
    (x0, y0), (x1, y1) = ((Fraction(int(a[k]), n_i), Fraction(int(r[k]), n_g)) for k in (first, last))
    return x0 + (x0 - y0) / ((x0 - y0) - (x1 - y1)) * (x1 - x0)
