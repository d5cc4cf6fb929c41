"""Operating points: counts in whole numbers, rates only at the end.

Accept iff s ≥ τ. FMR(τ) = #impostor ≥ τ / N_i, FNMR(τ) = #genuine < τ / N_g. A threshold can only act at a
distinct finite score or at +∞, so a tie group moves as one; the −∞ of a failed template is never accepted.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np

from mettle.errors import InputError
from mettle.evaluate.checks import NotMeasurable
from mettle.evaluate.counted import Counted
from mettle.evaluate.scores import Scores, acting
from mettle.evaluate.window import Points

Pairs = Scores | Counted  # sorted scores, or counts with a way to look closer
NO_EER = (
    "EER is not measurable: FNMR exceeds FMR at every threshold because of failed templates (−inf); "
    "report FTA and FRR (system_rates), or TAR at a false-accept rate"
)


@dataclass(frozen=True)
class OperatingPoint:
    """One threshold, chosen for a wanted false-accept rate.

    Attributes:
        far: the rate that was wanted.
        fmr: the rate attained, never above ``far``.
        tar: share of genuine pairs accepted.
        threshold: the smallest that keeps FMR ≤ far; +∞ when only rejecting everybody does.
        false_accepts: impostor pairs accepted.
        impostors: impostor pairs in all.
        status: by the impostor errors that ``far`` allows, N_i·far: "not measurable" below 1 (the numbers are
            then None), "refused as headline" below 10, "flagged" below 30, else "ok".
    """

    far: float
    fmr: float | None
    tar: float | None
    threshold: float | None
    false_accepts: int | None
    impostors: int
    status: str

    @property
    def usable(self) -> float | None:
        """The threshold, where it can be used: None where none was measured, or where none but +∞ accepts so few."""
        return None if self.threshold is None or math.isinf(self.threshold) else self.threshold

    @property
    def verdict(self) -> str:
        """The status, and first of all that there is no threshold: equal scores of strangers leave nothing between."""
        return "no threshold: equal scores" if self.threshold == math.inf else self.status


@dataclass(frozen=True)
class Bracket:
    """The two operating points around FMR = FNMR, each (threshold, FMR, FNMR).

    Attributes:
        below: the last point with FMR ≥ FNMR.
        above: the next one; the same point when the two rates are equal there.
        half_gap: half the range that the two points leave open for the EER.
    """

    below: tuple[float, float, float]
    above: tuple[float, float, float]
    half_gap: float


@dataclass(frozen=True)
class Cost:
    """A detection cost, the threshold that attains it, and how much less it could be in histogram mode."""

    value: float
    threshold: float
    bound: float


def counts(scores: Pairs, threshold: float | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """False accepts #impostor ≥ τ and false rejects #genuine < τ, as int64; one threshold exactly, many as drawn."""
    t = acting(threshold, scores.dtype)
    if isinstance(scores, Counted) and t.ndim == 0:
        accepts, rejects = scores.exactly(float(t))
        return np.asarray(accepts), np.asarray(rejects)
    return scores.impostors - scores.below(t), np.searchsorted(scores.genuine, t, side="left")


def auc(scores: Scores) -> Fraction:
    """AUC = (Σ over genuine of #impostor below + ½·#equal) / (N_g·N_i), exactly."""
    left = np.searchsorted(scores.impostor, scores.genuine, side="left")
    right = np.searchsorted(scores.impostor, scores.genuine, side="right")
    twice = int(left.sum()) + int(right.sum())
    return Fraction(twice, 2 * len(scores.genuine) * len(scores.impostor))


def eer(scores: Pairs) -> tuple[Fraction, Bracket]:
    """The value where the path through the operating points (FMR, FNMR) meets FMR = FNMR, exactly.

    With (x₀, y₀) the last point where x ≥ y and (x₁, y₁) the next: EER = x₀ + t·(x₁ − x₀), where
    t = (x₀ − y₀) / ((x₀ − y₀) − (x₁ − y₁)).

    Raises:
        NotMeasurable: so many failed templates that FNMR > FMR even at the lowest score.
    """
    if isinstance(scores, Counted):
        low, high, (x0, y0), (x1, y1) = _crossing(scores)
        return _meet(low, high, (x0, y0), (x1, y1))
    low = max((t for t in (_last_not_below(scores, side) for side in (0, 1)) if t is not None), default=None)
    if low is None:
        raise NotMeasurable(NO_EER)
    high = next_above(scores, low)
    return _meet(low, high, _rates(scores, low), _rates(scores, high))


def _meet(
    low: float, high: float, first: tuple[Fraction, Fraction], second: tuple[Fraction, Fraction]
) -> tuple[Fraction, Bracket]:
    (x0, y0), (x1, y1) = first, second
    if x0 == y0:
        point = (low, float(x0), float(y0))
        return x0, Bracket(point, point, 0.0)
    t = (x0 - y0) / ((x0 - y0) - (x1 - y1))
    gap = (min(x0, y1) - max(x1, y0)) / 2
    bracket = Bracket((low, float(x0), float(y0)), (high, float(x1), float(y1)), float(gap))
    return x0 + t * (x1 - x0), bracket


def _crossing(scores: Counted) -> tuple[float, float, tuple[Fraction, Fraction], tuple[Fraction, Fraction]]:
    """The two operating points around FMR = FNMR: bins say where to look, wider where that was not enough."""
    n_g, n_i = len(scores.genuine), scores.impostors
    first, last = crossing_bins(scores)
    while True:
        p = scores.points(*scores.around(first, last))
        # FMR − FNMR only falls, so bisect; the products of counts may be beyond int64.
        low = bisect_left(range(len(p.thresholds)), True, key=partial(_behind, p, n_g, n_i)) - 1
        if 0 <= low < len(p.thresholds) - 1:
            break
        if low >= 0 and last >= len(scores.counts):  # nothing above: +∞ accepts nobody
            a, r = int(p.accepts[low]), int(p.rejects[low])
            return float(p.thresholds[low]), math.inf, (Fraction(a, n_i), Fraction(r, n_g)), (Fraction(0), Fraction(1))
        first, last = max(0, 2 * first - last), min(len(scores.counts), 2 * last - first)
    pairs = [(Fraction(int(p.accepts[k]), n_i), Fraction(int(p.rejects[k]), n_g)) for k in (low, low + 1)]
    return float(p.thresholds[low]), float(p.thresholds[low + 1]), pairs[0], pairs[1]


def _behind(p: Points, n_g: int, n_i: int, k: int) -> bool:
    """Whether FMR < FNMR at the k-th point, in whole numbers."""
    return int(p.accepts[k]) * n_g < int(p.rejects[k]) * n_i


def crossing_bins(scores: Counted) -> tuple[int, int]:
    """Bins around the EER: the last beginning where FMR ≥ FNMR, and its neighbours."""
    accepts, rejects = scores.lower
    return _surrounding(scores, int(np.count_nonzero(accepts / scores.impostors >= rejects / len(scores.genuine))) - 1)


def budget_bins(scores: Counted, accepts: int) -> tuple[int, int]:
    """Bins around the smallest threshold with at most so many false accepts."""
    return _surrounding(scores, int(np.count_nonzero(scores.lower[0] > accepts)) - 1)


def _surrounding(scores: Counted, at: int) -> tuple[int, int]:
    """From the last bin before that holds any score to the next one behind, and one more on either side."""
    accepts, rejects = scores.lower
    filled = np.flatnonzero((np.diff(accepts) != 0) | (np.diff(rejects) != 0))
    before, behind = filled[filled < at], filled[filled > at]
    first = int(before[-1]) if len(before) else 0
    last = int(behind[0]) + 1 if len(behind) else len(scores.counts)
    return max(0, first - 1), min(len(scores.counts), last + 1)


def operating_point(scores: Pairs, far: float) -> OperatingPoint:
    """The smallest threshold with FMR ≤ far: no interpolation, never the nearest rate."""
    n_i, n_g = scores.impostors, len(scores.genuine)
    errors = budget(far, n_i)
    if errors < 1:
        return OperatingPoint(far, None, None, None, None, n_i, "not measurable")
    threshold = threshold_for(scores, math.floor(errors))
    accepts, rejects = (int(c) for c in counts(scores, threshold))
    return OperatingPoint(far, accepts / n_i, (n_g - rejects) / n_g, threshold, accepts, n_i, status(float(errors)))


def status(budget: float) -> str:
    """What a rate deserves that rests on so many allowed impostor errors."""
    steps = ((1, "not measurable"), (10, "refused as headline"), (30, "flagged"))
    return next((word for limit, word in steps if budget < limit), "ok")


def threshold_for(scores: Pairs, accepts: int) -> float:
    """The smallest operating threshold with at most ``accepts`` false accepts."""
    n = scores.impostors
    if isinstance(scores, Counted):
        return _counted_threshold(scores, accepts)
    if accepts >= n:
        return next_above(scores, -np.inf)
    return next_above(scores, float(scores.impostor[n - accepts - 1]))


def _counted_threshold(scores: Counted, accepts: int) -> float:
    first, last = budget_bins(scores, accepts)
    while True:
        p = scores.points(*scores.around(first, last))
        good = np.flatnonzero(p.accepts <= accepts)
        at = int(good[0]) if len(good) else len(p.thresholds)
        if len(good) and (at > 0 or first == 0):
            return float(p.thresholds[at])
        if not len(good) and last >= len(scores.counts):
            return math.inf
        first, last = max(0, 2 * first - last), min(len(scores.counts), 2 * last - first)


def min_dcf(scores: Pairs, prior: float, miss: float, false_accept: float) -> Cost:
    """The least detection cost over all thresholds.

    DCF(τ) = (miss·p·FNMR + false_accept·(1−p)·FMR) / min(miss·p, false_accept·(1−p)). On counts the minimum is taken
    where bins begin; inside a bin the cost cannot be less than with the rejects of its beginning and the accepts of
    its end. On sorted scores nothing is left open, and genuine scores are thresholds enough: between two of them a
    higher threshold rejects no more genuine pairs and accepts fewer impostors.
    """
    n_g, n_i = len(scores.genuine), scores.impostors
    a, b = miss * prior, false_accept * (1 - prior)
    counted = isinstance(scores, Counted)
    thresholds = scores.bins.edges if counted else np.unique(scores.genuine[np.isfinite(scores.genuine)])
    accepts, rejects = scores.lower if counted else counts(scores, thresholds)
    accepts, rejects = np.append(accepts, 0) / n_i, np.append(rejects, n_g) / n_g
    cost = (a * rejects + b * accepts) / min(a, b)
    at = int(cost.argmin())
    open_ = float(cost[at] - ((a * rejects[:-1] + b * accepts[1:]) / min(a, b)).min()) if counted else 0.0
    return Cost(float(cost[at]), float(np.append(thresholds, np.inf)[at]), max(0.0, open_))


def next_above(scores: Scores, value: float) -> float:
    """The next operating threshold above a value: a distinct finite score, or +∞."""
    found = np.inf
    for side in (scores.genuine, scores.impostor):
        at = np.searchsorted(side, np.asarray(value, side.dtype), side="right")
        if at < len(side):
            found = min(found, float(side[at]))
    return found


def rate(far: float, name: str = "far") -> Fraction:
    """A false-accept rate as the decimal that was typed: 0.1 of 30 pairs is 3, not 3.0000000000000002."""
    if not isinstance(far, int | float | np.floating) or not 0 < far <= 1:
        raise InputError(f"{name} must be a rate above 0 and at most 1: got {far!r}")
    return Fraction(str(float(far)))


def budget(far: float, n: int, name: str = "far") -> Fraction:
    """Errors among ``n`` that a rate allows, far · n; a rate that came from k / n allows k of them, however rounded."""
    errors = rate(far, name) * n
    whole = math.floor(errors) + 1
    return Fraction(whole) if n and whole / n <= float(far) else errors


def least(far: float) -> int:
    """How many impostor pairs a rate needs to be measurable."""
    n = math.ceil(1 / rate(far))
    return n - 1 if n > 1 and budget(far, n - 1) >= 1 else n


def _rates(scores: Scores, threshold: float) -> tuple[Fraction, Fraction]:
    accepts, rejects = counts(scores, threshold)
    return Fraction(int(accepts), len(scores.impostor)), Fraction(int(rejects), len(scores.genuine))


def _last_not_below(scores: Scores, which: int) -> float | None:
    """The largest finite score of one kind at which FMR ≥ FNMR: FMR − FNMR only falls, so bisect."""
    side = scores.impostor if which else scores.genuine
    low = int(np.searchsorted(side, side.dtype.type(-np.inf), side="right"))  # of the same type, or it is copied
    good, bad = low - 1, len(side)  # side[good] holds, side[bad] does not
    while bad - good > 1:
        middle = (good + bad) // 2
        fmr, fnmr = _rates(scores, float(side[middle]))
        good, bad = (middle, bad) if fmr >= fnmr else (good, middle)
    return float(side[good]) if good >= low else None
