"""Operating points: counts in whole numbers, rates only at the end.

Accept iff s ≥ τ. FMR(τ) = #impostor ≥ τ / N_i, FNMR(τ) = #genuine < τ / N_g. A threshold can only act at a
distinct finite score or at +∞, so a tie group moves as one; the −∞ of a failed template is never accepted.

Curves of operating points, and histograms of scores: for drawing, and as grids for resampling.

EER on the convex hull of the operating points: a second number, never in place of the EER.

A system may choose between two thresholds at random, and so reach every point between their two (FMR, FNMR). The lower
left edge of the hull of all operating points is the best that can be had this way; ``eer_rocch`` is where it meets
FMR = FNMR. It is never above the EER, and flatters where scores are few: hence never one for the other.

Genuine scores are thresholds enough: between two of them a higher threshold rejects no more genuine pairs and accepts
fewer impostors. The lowest score joins them, because failed templates (−∞) may leave no genuine score so low.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial

import numpy as np
from scipy.special import ndtri

from mettle.errors import InputError
from mettle.evaluate.inputs import NotMeasurable, whole
from mettle.evaluate.scoring.bins import Points
from mettle.evaluate.scoring.histogram import Counted
from mettle.evaluate.scoring.scores import Scores, acting

NO_EER = (
    "EER is not measurable: FNMR exceeds FMR at every threshold because of failed templates (−inf); "
    "report FTA and FRR (system_rates), or TAR at a false-accept rate"
)


Pairs = Scores | Counted  # sorted scores, or counts with a way to look closer


def status(budget: float) -> str:
    """What a rate deserves that rests on so many allowed impostor errors."""
    steps = ((1, "not measurable"), (10, "refused as headline"), (30, "flagged"))
    return next((word for limit, word in steps if budget < limit), "ok")


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
        return _interpolate_eer(low, high, (x0, y0), (x1, y1))
    low = max((t for t in (_last_not_below(scores, side) for side in (0, 1)) if t is not None), default=None)
    if low is None:
        raise NotMeasurable(NO_EER)
    high = next_above(scores, low)
    return _interpolate_eer(low, high, _rates(scores, low), _rates(scores, high))


def _interpolate_eer(
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


@dataclass(frozen=True, eq=False)
class Curve:
    """Operating points by ascending threshold, the last at +∞."""

    thresholds: np.ndarray
    fmr: np.ndarray
    fnmr: np.ndarray

    @property
    def tar(self) -> np.ndarray:
        """TAR = 1 − FNMR."""
        return 1 - self.fnmr

    def probit(self) -> tuple[np.ndarray, np.ndarray]:
        """The points of a DET picture, Φ⁻¹(FMR) and Φ⁻¹(FNMR), where both rates are strictly between 0 and 1."""
        inside = (self.fmr > 0) & (self.fmr < 1) & (self.fnmr > 0) & (self.fnmr < 1)
        return ndtri(self.fmr[inside]), ndtri(self.fnmr[inside])


@dataclass(frozen=True, eq=False)
class Roc:
    """All operating points, computed when first read; :meth:`thinned` is for drawing."""

    scores: Pairs

    @cached_property
    def full(self) -> Curve:
        """Every distinct finite score and +∞."""
        return curve_at(self.scores, distinct(self.scores))

    @property
    def thresholds(self) -> np.ndarray:
        """Ascending thresholds, the last +∞."""
        return self.full.thresholds

    @property
    def fmr(self) -> np.ndarray:
        """FMR at each threshold."""
        return self.full.fmr

    @property
    def fnmr(self) -> np.ndarray:
        """FNMR at each threshold."""
        return self.full.fnmr

    @property
    def tar(self) -> np.ndarray:
        """TAR at each threshold."""
        return self.full.tar

    def thinned(self, k: int = 256) -> Curve:
        """About k of the points, dense where error rates are small; never sorts or copies the scores."""
        return curve_at(self.scores, grid(self.scores, k)[0])

    def probit(self) -> tuple[np.ndarray, np.ndarray]:
        """The axes of a DET picture; see :meth:`Curve.probit`."""
        return self.full.probit()


@dataclass(frozen=True, eq=False)
class Histogram:
    """Counts of both kinds of scores between common edges."""

    edges: np.ndarray
    genuine: np.ndarray
    impostor: np.ndarray


def curve_at(scores: Pairs, thresholds: np.ndarray) -> Curve:
    """The operating points at these finite thresholds, and +∞."""
    thresholds = np.append(thresholds, np.asarray(np.inf, thresholds.dtype))
    accepts, rejects = counts(scores, thresholds)
    return Curve(thresholds, accepts / scores.impostors, rejects / len(scores.genuine))


def distinct(scores: Pairs) -> np.ndarray:
    """Every distinct finite score, ascending; of counts, where each bin that is not empty begins."""
    if isinstance(scores, Counted):
        accepts, rejects = scores.lower
        moved = (np.diff(accepts) != 0) | (np.diff(rejects) != 0)
        return np.unique(scores.bins.edges[:-1][moved].astype(scores.dtype))
    values = np.union1d(_unique(scores.genuine), _unique(scores.impostor))
    return values[np.isfinite(values)]


def grid(scores: Pairs, k: int) -> tuple[np.ndarray, bool]:
    """About k operating thresholds, dense where decisions are made, and whether they are all there are.

    A quarter each: false-accept counts in equal ratios from 1 to N_i; false-reject counts likewise; ranks
    around the EER, within a factor of three; equal steps of both ranks. The lowest score is always there.
    """
    if isinstance(scores, Counted):
        few = min(scores.genuine[:1], scores.quantiles(np.zeros(1)))
    else:
        few = _unique_up_to(scores, k)
        if len(few) <= k:
            return few, True
    n_g, n_i, quarter = len(scores.genuine), scores.impostors, max(4, k // 4)
    try:
        centre = float(eer(scores)[0])
    except NotMeasurable:
        centre = 0.5
    around = np.geomspace(max(centre / 3, 1 / n_i), min(1.0, max(3 * centre, 3 / n_i)), quarter // 2)
    even = np.linspace(0, 1, quarter // 2)
    rank_i = n_i - np.concatenate([np.geomspace(1, n_i, quarter), around * n_i, even * n_i])
    rank_g = np.concatenate([np.geomspace(1, n_g, quarter) - 1, around * n_g, even * n_g])
    genuine = scores.genuine[np.clip(np.rint(rank_g), 0, n_g - 1).astype(np.int64)]
    values = np.unique(np.concatenate([scores.quantiles(rank_i), genuine, few[:1]]))
    return values[np.isfinite(values)], False


def histogram(scores: Pairs, bins: int) -> Histogram:
    """Equal bins over the finite scores, the last one closed; failed templates are not drawn."""
    whole(bins, "bins", 1)
    low, high = _range(scores)
    edges = np.linspace(low, high if high > low else low + 1, bins + 1)
    drawn = []
    starts = edges[:-1].astype(scores.dtype)
    for at, n in (
        (np.searchsorted(scores.genuine, starts, side="left"), len(scores.genuine)),
        (scores.below(starts), scores.impostors),
    ):
        drawn.append(np.diff(np.append(at, n)))
    return Histogram(edges, drawn[0], drawn[1])


def _range(scores: Pairs) -> tuple[float, float]:
    """The lowest and the highest finite score."""
    if isinstance(scores, Counted):
        filled = np.flatnonzero(scores.counts)
        edges = scores.bins.edges
        low, high = float(edges[filled[0]]), float(edges[filled[-1] + 1])
        return min(low, float(scores.genuine[0])), max(high, float(scores.genuine[-1]))
    low = next_above(scores, -np.inf)
    if low == np.inf:
        raise NotMeasurable("no finite scores to draw: every template failed")
    return low, max(float(scores.genuine[-1]), float(scores.impostor[-1]))


def _unique(ascending: np.ndarray) -> np.ndarray:
    """Distinct values of a sorted array, without sorting it again."""
    return ascending[np.append(True, ascending[1:] != ascending[:-1])]


def _unique_up_to(scores: Scores, k: int) -> np.ndarray:
    """The lowest k + 1 distinct finite scores: jump from one to the next by bisection, whatever N is."""
    found: list[float] = []
    value = next_above(scores, -np.inf)
    while value < np.inf and len(found) <= k:
        found.append(value)
        value = next_above(scores, value)
    return np.asarray(found, scores.impostor.dtype)


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
        return float(_intersect_hull(*counts(scores, _thresholds(scores)), n_i, n_g)), 0.0
    accepts, rejects = scores.lower
    value = _intersect_hull(accepts, rejects, n_i, n_g)
    if scores.sharp:
        return float(value), 0.0
    off = 1 + int(np.ceil(scores.slack / np.diff(scores.bins.edges).min()))
    worst = _intersect_hull(np.append(np.full(off, n_i), accepts[:-off]), rejects, n_i, n_g)
    best = _intersect_hull(np.append(accepts[1 + off :], np.zeros(1 + off, np.int64)), rejects, n_i, n_g)
    return float(value), float(max(worst - value, value - best))


def _thresholds(scores: Scores) -> np.ndarray:
    """Where a corner of the hull can be, ascending; +∞ is one in any case."""
    lowest = scores.dtype.type(next_above(scores, -np.inf))
    return np.unique(np.append(scores.genuine[np.isfinite(scores.genuine)], lowest))


def _intersect_hull(accepts: np.ndarray, rejects: np.ndarray, n_i: int, n_g: int) -> Fraction:
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
