"""Operating points: counts in whole numbers, rates only at the end.

Accept iff s ≥ τ. FMR(τ) = #impostor ≥ τ / N_i, FNMR(τ) = #genuine < τ / N_g. A threshold can only act at a
distinct finite score or at +∞, so a tie group moves as one; the −∞ of a failed template is never accepted.

Curves of operating points, and histograms of scores: for drawing, and as grids for resampling.

EER on the convex hull of the operating points: a second number, never in place of the EER.

A system may choose between two thresholds at random, and so reach every point between their two (FMR, FNMR). The lower
left edge of the hull of all operating points is the best that can be had this way; ``eer_rocch`` is where it meets
FMR = FNMR. It is never above the EER, and flatters where scores are few: hence never one for the other.

The metrics of verification are declared here, each beside its formula: from scores, and from the weighted curves of
resampled subjects, where many of them are computed at once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from scipy.special import ndtri

from mettle.errors import InputError
from mettle.evaluate.inputs import NotMeasurable, check_int
from mettle.evaluate.metrics import DECIMAL_4, PERCENT_2, PairMetric, register
from mettle.evaluate.scoring.scores import ErrorCounts, ScoreStore, round_threshold_up

NO_EER = (
    "EER is not measurable: FNMR exceeds FMR at every threshold because of failed templates (−inf); "
    "report FTA and FRR (system_rates), or TAR at a false-accept rate"
)
PRIOR = 0.01  # share of targets of the detection cost that is reported


def sample_size_status(budget: float) -> str:
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
    def finite_threshold(self) -> float | None:
        """The threshold, where it can be used: None where none was measured, or where none but +∞ accepts so few."""
        return None if self.threshold is None or math.isinf(self.threshold) else self.threshold

    @property
    def verdict(self) -> str:
        """The status, and first of all that there is no threshold: equal scores of strangers leave nothing between."""
        return "no threshold: equal scores" if self.threshold == math.inf else self.status


@dataclass(frozen=True)
class EERBracket:
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
class DetectionCost:
    """A detection cost, the threshold that attains it, and how much less it could be in histogram mode."""

    value: float
    threshold: float
    bound: float


@dataclass(frozen=True, eq=False)
class WeightedCurves:
    """Scores of some resamples of the subjects, weighted and counted in the bins of a grid.

    Attributes:
        impostor: (1 + b, bins) weighted impostor scores in each bin of the grid.
        genuine: (1 + b, bins) weighted genuine scores in each bin.
        is_exact: whether the grid holds every distinct score, so that nothing is interpolated.
    """

    impostor: np.ndarray
    genuine: np.ndarray
    is_exact: bool

    @cached_property
    def error_rates(self) -> tuple[np.ndarray, np.ndarray]:
        """FMR and FNMR at each grid threshold and at +∞, one row per resample."""
        accepts = np.cumsum(self.impostor[:, ::-1], axis=1)  # from the top, where counts are small and exact
        # The expansion can make a sparse tail negative; rates stay within bounds and never rise with τ.
        rising = np.maximum.accumulate(np.maximum(accepts, 0), axis=1)[:, ::-1]
        fmr = np.append(rising[:, 1:], np.zeros((len(rising), 1)), axis=1) / rising[:, :1]
        rejects = np.cumsum(self.genuine, axis=1)
        return fmr, rejects / rejects[:, -1:]


def error_counts(scores: ScoreStore, threshold: float | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """False accepts #impostor ≥ τ and false rejects #genuine < τ, as int64; one threshold exactly, many as drawn."""
    t = round_threshold_up(threshold, scores.dtype)
    if t.ndim == 0:
        accepts, rejects = scores.count_errors(float(t))
        return np.asarray(accepts), np.asarray(rejects)
    return scores.impostors - scores.below(t), np.searchsorted(scores.genuine, t, side="left")


def eer(scores: ScoreStore) -> tuple[Fraction, EERBracket]:
    """The value where the path through the operating points (FMR, FNMR) meets FMR = FNMR, exactly.

    With (x₀, y₀) the last point where x ≥ y and (x₁, y₁) the next: EER = x₀ + t·(x₁ − x₀), where
    t = (x₀ − y₀) / ((x₀ − y₀) − (x₁ − y₁)).

    Raises:
        NotMeasurable: so many failed templates that FNMR > FMR even at the lowest score.
    """
    found = scores.eer_bracket()
    if found is None:
        raise NotMeasurable(NO_EER)
    (x0, y0), (x1, y1) = (_error_rates(scores, point) for point in found)
    below, above = found[0].threshold, found[1].threshold
    if x0 == y0:
        point = (below, float(x0), float(y0))
        return x0, EERBracket(point, point, 0.0)
    t = (x0 - y0) / ((x0 - y0) - (x1 - y1))
    gap = (min(x0, y1) - max(x1, y0)) / 2
    bracket = EERBracket((below, float(x0), float(y0)), (above, float(x1), float(y1)), float(gap))
    return x0 + t * (x1 - x0), bracket


def _error_rates(scores: ScoreStore, point: ErrorCounts) -> tuple[Fraction, Fraction]:
    return Fraction(point.accepts, scores.impostors), Fraction(point.rejects, len(scores.genuine))


def resampled_eer(curves: WeightedCurves, at: None = None) -> np.ndarray:
    """EER of each resample, where the path of grid points meets FMR = FNMR."""
    fmr, fnmr = curves.error_rates
    gap = fmr - fnmr
    low = np.clip((gap >= 0).sum(axis=1) - 1, 0, gap.shape[1] - 2)[:, None]
    x0, g0 = np.take_along_axis(fmr, low, 1)[:, 0], np.take_along_axis(gap, low, 1)[:, 0]
    x1, g1 = np.take_along_axis(fmr, low + 1, 1)[:, 0], np.take_along_axis(gap, low + 1, 1)[:, 0]
    return x0 + np.clip(g0 / np.maximum(g0 - g1, 1e-300), 0, 1) * (x1 - x0)


def resampled_auc(curves: WeightedCurves, at: None = None) -> np.ndarray:
    """AUC of each resample: a bin counts the impostors below it and half of its own."""
    below = np.cumsum(curves.impostor, axis=1) - curves.impostor / 2
    pairs = curves.genuine.sum(axis=1) * curves.impostor.sum(axis=1)
    return (curves.genuine * below).sum(axis=1) / pairs


def operating_point(scores: ScoreStore, far: float) -> OperatingPoint:
    """The smallest threshold with FMR ≤ far: no interpolation, never the nearest rate."""
    n_i, n_g = scores.impostors, len(scores.genuine)
    errors = allowed_errors(far, n_i)
    if errors < 1:
        return OperatingPoint(far, None, None, None, None, n_i, "not measurable")
    threshold = scores.threshold_for(math.floor(errors))
    accepts, rejects = (int(c) for c in error_counts(scores, threshold))
    return OperatingPoint(
        far, accepts / n_i, (n_g - rejects) / n_g, threshold, accepts, n_i, sample_size_status(float(errors))
    )


def _tar(scores: ScoreStore, far: float) -> float:
    """TAR, where the rate can be measured.

    Raises:
        NotMeasurable: fewer than 1/far impostor pairs.
    """
    found = operating_point(scores, far)
    if found.tar is None:
        raise not_measurable("tar", far, found.impostors)
    return found.tar


def not_measurable(what: str, far: float, impostors: int) -> NotMeasurable:
    """Why nothing is told at a rate."""
    return NotMeasurable(
        f"{what} at far={far:g} is not measurable with {impostors} impostor pairs: "
        f"at least {min_impostors(far)} are needed, ten times as many for a headline"
    )


def resampled_tar(curves: WeightedCurves, far: float) -> np.ndarray:
    """TAR of each resample at its own threshold: no line between points when the grid is complete."""
    fmr, fnmr = curves.error_rates
    at = np.argmax(fmr <= far * (1 + 1e-9), axis=1)[:, None]  # +∞ always qualifies
    tar = 1 - np.take_along_axis(fnmr, at, 1)[:, 0]
    if curves.is_exact:
        return tar
    before = np.maximum(at - 1, 0)
    x0, x1 = np.take_along_axis(fmr, before, 1)[:, 0], np.take_along_axis(fmr, at, 1)[:, 0]
    share = np.clip((x0 - far) / np.where(x0 > x1, x0 - x1, 1), 0, 1)
    above = 1 - np.take_along_axis(fnmr, before, 1)[:, 0]
    return np.where(x0 > far, above + share * (tar - above), tar)


def min_dcf(scores: ScoreStore, prior: float = PRIOR, miss: float = 1.0, false_accept: float = 1.0) -> DetectionCost:
    """The least detection cost over all thresholds.

    DCF(τ) = (miss·p·FNMR + false_accept·(1−p)·FMR) / min(miss·p, false_accept·(1−p)). On counts the minimum is taken
    where bins begin; inside a bin the cost cannot be less than with the rejects of its beginning and the fewest false
    accepts that may belong to it.
    """
    a, b = miss * prior, false_accept * (1 - prior)
    return least_cost(scores, lambda fmr, fnmr: (a * fnmr + b * fmr) / min(a, b))


def least_cost(scores: ScoreStore, cost: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> DetectionCost:
    """The least of a cost of (FMR, FNMR) over all thresholds; it may fall with neither of the two.

    Genuine scores are thresholds enough. Of a histogram, the bound is what the fewest false accepts of every bin leave
    open.
    """
    n_g, n_i = len(scores.genuine), scores.impostors
    corner = scores.corners()
    accepts, rejects = np.append(corner.accepts, 0) / n_i, np.append(corner.rejects, n_g) / n_g
    found = cost(accepts, rejects)
    at, bound = int(found.argmin()), 0.0
    if corner.blur:
        fewest = np.append(corner.accepts[1 + corner.blur :], np.zeros(1 + corner.blur, np.int64)) / n_i
        bound = float(found[at] - cost(fewest, rejects[:-1]).min())
    return DetectionCost(float(found[at]), float(np.append(corner.thresholds, np.inf)[at]), max(0.0, bound))


def resampled_min_dcf(curves: WeightedCurves, at: None = None) -> np.ndarray:
    """The least detection cost of each resample, at the reported prior and equal costs."""
    fmr, fnmr = curves.error_rates
    return (fnmr + (1 - PRIOR) / PRIOR * fmr).min(axis=1)


def exact_rate(far: float, name: str = "far") -> Fraction:
    """A false-accept rate as the decimal that was typed: 0.1 of 30 pairs is 3, not 3.0000000000000002."""
    if not isinstance(far, int | float | np.floating) or not 0 < far <= 1:
        raise InputError(f"{name} must be a rate above 0 and at most 1: got {far!r}")
    return Fraction(str(float(far)))


def allowed_errors(far: float, n: int, name: str = "far") -> Fraction:
    """Errors among ``n`` that a rate allows, far · n; a rate that came from k / n allows k of them, however rounded."""
    errors = exact_rate(far, name) * n
    whole = math.floor(errors) + 1
    return Fraction(whole) if n and whole / n <= float(far) else errors


def min_impostors(far: float) -> int:
    """How many impostor pairs a rate needs to be measurable."""
    n = math.ceil(1 / exact_rate(far))
    return n - 1 if n > 1 and allowed_errors(far, n - 1) >= 1 else n


@dataclass(frozen=True, eq=False)
class OperatingCurve:
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
class RocPoints:
    """All operating points, computed when first read; :meth:`thinned` is for drawing."""

    scores: ScoreStore

    @cached_property
    def full(self) -> OperatingCurve:
        """Every distinct finite score and +∞."""
        return curve_at(self.scores, self.scores.distinct())

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

    def subsample(self, k: int = 256) -> OperatingCurve:
        """About k of the points, dense where error rates are small; never sorts or copies the scores."""
        return curve_at(self.scores, threshold_grid(self.scores, k)[0])

    def probit(self) -> tuple[np.ndarray, np.ndarray]:
        """The axes of a DET picture; see :meth:`Curve.probit`."""
        return self.full.probit()


@dataclass(frozen=True, eq=False)
class Histogram:
    """Counts of both kinds of scores between common edges."""

    edges: np.ndarray
    genuine: np.ndarray
    impostor: np.ndarray


def curve_at(scores: ScoreStore, thresholds: np.ndarray) -> OperatingCurve:
    """The operating points at these finite thresholds, and +∞."""
    thresholds = np.append(thresholds, np.asarray(np.inf, thresholds.dtype))
    accepts, rejects = error_counts(scores, thresholds)
    return OperatingCurve(thresholds, accepts / scores.impostors, rejects / len(scores.genuine))


def threshold_grid(scores: ScoreStore, k: int) -> tuple[np.ndarray, bool]:
    """About k operating thresholds, dense where decisions are made, and whether they are all there are.

    A quarter each: false-accept counts in equal ratios from 1 to N_i; false-reject counts likewise; ranks
    around the EER, within a factor of three; equal steps of both ranks. The lowest score is always there.
    """
    few, complete = scores.lowest(k)
    if complete:
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


def score_histogram(scores: ScoreStore, bins: int) -> Histogram:
    """Equal bins over the finite scores, the last one closed; failed templates are not drawn."""
    check_int(bins, "bins", 1)
    low, high = scores.score_range()
    edges = np.linspace(low, high if high > low else low + 1, bins + 1)
    drawn = []
    starts = edges[:-1].astype(scores.dtype)
    for at, n in (
        (np.searchsorted(scores.genuine, starts, side="left"), len(scores.genuine)),
        (scores.below(starts), scores.impostors),
    ):
        drawn.append(np.diff(np.append(at, n)))
    return Histogram(edges, drawn[0], drawn[1])


def eer_rocch(scores: ScoreStore) -> tuple[float, float]:
    """EER on the convex hull, and how far it can be from the exact one: 0 unless it rests on bins.

    On counts the operating points are those where bins begin. Impostors there were counted by scores that are off by
    up to δ, that is by some bins; a threshold inside a bin does no better than the rejects of its beginning and the
    accepts of its end. The hulls of the worst and of the best that this allows bound the value.

    Raises:
        NotMeasurable: so many failed templates that FNMR > FMR even at the lowest score.
    """
    n_i, n_g = scores.impostors, len(scores.genuine)
    _, accepts, rejects, off = scores.corners()
    value = _intersect_hull(accepts, rejects, n_i, n_g)
    if not off:
        return float(value), 0.0
    worst = _intersect_hull(np.append(np.full(off, n_i), accepts[:-off]), rejects, n_i, n_g)
    best = _intersect_hull(np.append(accepts[1 + off :], np.zeros(1 + off, np.int64)), rejects, n_i, n_g)
    return float(value), float(max(worst - value, value - best))


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


def resampled_eer_rocch(curves: WeightedCurves, at: None = None) -> np.ndarray:
    """EER on the convex hull of each resample, all of them at once: the steps of the exact one."""
    fmr, fnmr = curves.error_rates
    rows = np.arange(len(fmr))
    first, last = np.zeros(len(fmr), np.int64), np.full(len(fmr), fmr.shape[1] - 1)
    while True:
        dx, dy = (side[rows, last] - side[rows, first] for side in (fmr, fnmr))
        below = (fmr - fmr[rows, first, None]) * dy[:, None] - (fnmr - fnmr[rows, first, None]) * dx[:, None]
        at_ = below.argmin(axis=1)
        moves = (below[rows, at_] < -1e-12) & (at_ > first) & (at_ < last)
        if not moves.any():
            break
        left = fmr[rows, at_] >= fnmr[rows, at_]
        first, last = np.where(moves & left, at_, first), np.where(moves & ~left, at_, last)
    g0, g1 = ((fmr - fnmr)[rows, side] for side in (first, last))
    share = np.clip(g0 / np.maximum(g0 - g1, 1e-300), 0, 1)
    return fmr[rows, first] + share * (fmr[rows, last] - fmr[rows, first])


def _fmr(scores: ScoreStore, threshold: float) -> float:
    return scores.count_errors(threshold)[0] / scores.impostors


def _fnmr(scores: ScoreStore, threshold: float) -> float:
    return scores.count_errors(threshold)[1] / len(scores.genuine)


EVERYWHERE = frozenset({"table", "tile", "comparison", "terminal"})

EER = register(
    PairMetric(
        "eer",
        "EER",
        "where the straight path through consecutive operating points meets FMR = FNMR",
        "verification",
        "error rate where false accepts equal false rejects; lower is better",
        lower_is_better=True,
        format=PERCENT_2,
        shown=EVERYWHERE,
        value=lambda scores, at: float(eer(scores)[0]),
        replicates=resampled_eer,
    )
)
AUC = register(
    PairMetric(
        "auc",
        "AUC",
        "chance that a genuine pair scores above an impostor pair, ties counting one half; integer counts",
        "verification",
        "chance that a genuine pair scores above an impostor pair",
        format=DECIMAL_4,
        shown=EVERYWHERE,
        value=lambda scores, at: scores.auc()[0],
        bound=lambda scores, at: scores.auc()[1],
        replicates=resampled_auc,
    )
)
TAR = register(
    PairMetric(
        "tar@far",
        "TAR at FAR {}",
        "share of genuine pairs accepted at the smallest threshold with FMR at most FAR; never the nearest rate, "
        "never interpolated",
        "verification",
        "genuine pairs accepted when {} of impostor pairs are",
        shown=EVERYWHERE,
        value=_tar,
        replicates=resampled_tar,
        rests_on="genuine",
    )
)
EER_ROCCH = register(
    PairMetric(
        "eer_rocch",
        "EER on the hull",
        "the EER on the convex hull of the operating points, what choosing between two thresholds at random could "
        "reach; never above the EER, and never shown in its place",
        "verification",
        "error rate that choosing between two thresholds at random could reach; never above the EER",
        lower_is_better=True,
        format=PERCENT_2,
        value=lambda scores, at: eer_rocch(scores)[0],
        bound=lambda scores, at: eer_rocch(scores)[1],
        replicates=resampled_eer_rocch,
    )
)
MIN_DCF = register(
    PairMetric(
        "min_dcf",
        "min DCF",
        "least (p·FNMR + (1−p)·FMR) / min(p, 1−p), p = 0.01; other priors and costs: `v.detection_cost`",
        "verification",
        "least detection cost with one target in a hundred; 1 is a useless system",
        lower_is_better=True,
        format=DECIMAL_4,
        shown=frozenset({"table", "comparison"}),
        value=lambda scores, at: min_dcf(scores).value,
        bound=lambda scores, at: min_dcf(scores).bound,
        replicates=resampled_min_dcf,
    )
)
FMR = register(
    PairMetric(
        "fmr@threshold",
        "FMR",
        "impostor pairs accepted at a threshold / all impostor pairs; FAR where none failed to be acquired",
        "verification",
        lower_is_better=True,
        format=PERCENT_2,
        shown=frozenset(),
        value=_fmr,
        rests_on="impostor",
    )
)
FNMR = register(
    PairMetric(
        "fnmr@threshold",
        "FNMR",
        "genuine pairs rejected at a threshold / all genuine pairs; TAR = 1 − FNMR",
        "verification",
        lower_is_better=True,
        format=PERCENT_2,
        shown=frozenset(),
        value=_fnmr,
        rests_on="genuine",
    )
)
