"""Intervals by resampling subjects, never pairs.

Pairs of one subject stand and fall together, so an interval that resamples pairs is far too short. Here S
subjects are drawn with replacement; w_s is how often subject s came. A genuine pair of s weighs w_s, an
impostor pair of s ≠ t weighs w_s·w_t (copies of one subject never form impostors), and thresholds are found
anew in every replicate:

    FMR_b(τ) = Σ_{s≠t} w_s w_t C_st(τ) / Σ_{s≠t} w_s w_t C_st(−∞)    C_st(τ): impostor scores ≥ τ of s and t
    FNMR_b(τ) = Σ_s w_s g_s(τ) / Σ_s w_s g_s(∞)                      g_s(τ): genuine scores < τ of s

Both are evaluated on a grid of some hundred thresholds: all distinct scores if those are few (then replicates
are exact), otherwise a grid dense around the EER and in the tails, with straight lines between. What the
lines leave out is removed by shifting the replicates so that the one with all w = 1 equals the exact value.

Up to 512 subjects C is kept as counts by subject pair and bin and the sums are matrix products. Above, the
products are replaced by their expansion around w = 1, w_s w_t ≈ w_s + w_t − 1, which needs one histogram per
subject. It drops (w_s − 1)(w_t − 1): a share of about 1 / (errors per subject) of the variance, so it matters
only for operating points with fewer errors than subjects. Above 2²⁷ impostor pairs these histograms come from the
scores of everybody against 8192 rows drawn at random: their noise widens an interval by a share of about
1 / (errors per subject among those rows), never narrows it.

Fewer than six subjects carry no interval. S independent values hold their median between the smallest and the largest
with probability 1 − 2^{1−S}, so that below six even the whole range of what was seen falls short of 95 %, and a
resample has nothing else to draw from. Simulated intervals of EER and AUC hold the truth 66 to 72 times in 100 with
three subjects, 83 to 90 with four, 87 to 95 with five, 87 to 97 with six, 92 to 97 with eight.

How often each subject is drawn, replicate by replicate: small integers, and products of them some at a time.

A product in floats needs eight bytes a cell, so it is made of parts of the table. Parts are cut at multiples of
``_STEP``: the kernels of a matrix product take rows and columns in groups of a power of two, and what they round for a
row then does not depend on the part it is in (on one thread; several threads cut by themselves, and move a last bit).

Error curves of resampled subjects, and the EER, AUC and TAR of each: what :mod:`mettle.evaluate.bootstrap` draws.

Scores counted by subject and bin, and weighed for every resample of the subjects.

Up to 512 subjects counts are kept by pair of subjects. Above, by subject, a pair at both of its ends; and above 2²⁷
impostor pairs from the scores of everybody against 8192 rows drawn at random.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from threading import Lock
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.special import logit, ndtr, ndtri, stdtrit

from mettle.errors import InputError
from mettle.evaluate.inputs import NotMeasurable, check_int
from mettle.evaluate.metrics import PairMetric, parse_metric
from mettle.evaluate.roc import WeightedCurves, threshold_grid
from mettle.evaluate.scoring.bins import Binning
from mettle.evaluate.scoring.cpu_passes import FastPasses
from mettle.evaluate.scoring.pair_tiles import PairTiles
from mettle.evaluate.scoring.scores import ScoreStore, round_threshold_up
from mettle.evaluate.scoring.tile_threads import keep_to_one_core

REPLICATES = 1000
LEAST = 6  # subjects of each kind that an interval needs, see above
TOO_FEW = "no interval: too few subjects"
METHOD = "subject bootstrap, BCa percentiles with Student tails"
_CELLS = 1 << 21  # of a part, in floats 16 MB
_STEP = 64
DENSE_SUBJECTS = 512
MANY = 1 << 27  # impostor pairs from which everybody is compared with PARTNERS rows only
PARTNERS = 8192


@dataclass(frozen=True)
class Interval:
    """An interval over resampled subjects; see :func:`bca_interval`.

    Attributes:
        low: lower end.
        high: upper end.
        level: nominal coverage.
        replicates: how many resamples were usable.
        seed: of the resampling; the same seed and subjects give the same weights.
        method: in words.
    """

    low: float
    high: float
    level: float
    replicates: int
    seed: int
    method: str


def mean_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """The mean of independent repetitions, such as seeds, and half the width of its interval (Student's t).

    Two values leave one degree of freedom and an interval 12.7 standard errors wide either way; one value leaves NaN.
    """
    x = np.asarray(values, np.float64)
    if len(x) < 2:
        return float(x.mean()), float("nan")
    return float(x.mean()), float(-stdtrit(len(x) - 1, (1 - level) / 2) * x.std(ddof=1) / np.sqrt(len(x)))


def bca_interval(
    values: np.ndarray,
    point: float,
    weights: np.ndarray,
    level: float,
    seed: int,
    method: str,
    *,
    rate: int | None = None,
    among: np.ndarray | None = None,
) -> Interval:
    """Percentiles of the replicates, corrected for bias, skewness and few or unequal subjects (BCa, Student tails).

    Plain percentiles are too short, above all where few subjects make most of the errors. With U_s the covariance of
    the replicates and w_s (how much subject s moves the value), S subjects, and Φ the normal distribution:

        z₀ = Φ⁻¹(share of replicates below the value)                                bias
        a = Σ U³ / (6 (Σ U²)^{3/2})                                                  skewness
        ν = 2S / (κ − 1), κ = S Σ U⁴ / (Σ U²)², between 2 and S − 1                  subjects that count
        z = √(S/(S−1))·t_ν(α/2), and the lower end is the quantile Φ(z₀ + (z₀ + z) / (1 − a(z₀ + z)))

    Where the value rests on some subjects only (a miss needs a genuine pair), the others have a U of nothing but noise,
    and three hundred bystanders would make eight people look like many. Then a and ν are those of the subjects that it
    rests on, ν no larger than over everybody; S in z stays who was drawn, as a resample that holds now more, now fewer
    of the eight already is wider by as much.

    Args:
        values: (b,) replicates.
        point: the value itself.
        weights: (b, S) of the subjects in each replicate.
        level: nominal coverage.
        seed: of the resampling, for the record.
        method: in words.
        rate: how many items a rate in [0, 1] rests on; U is then taken on the logit scale. None for differences.
        among: (S,) mask of the subjects that the value rests on; by default all.

    Raises:
        InputError: a level outside (0, 1), or not one replicate for each tail.
    """
    _check_level(level, len(values))
    drawn, scaled, centre = weights.shape[1], values, point
    subjects = drawn if among is None else int(np.count_nonzero(among))
    if rate is not None:
        ends = 0.5 / rate, 1 - 0.5 / rate
        scaled, centre = logit(np.clip(values, *ends)), float(logit(np.clip(point, *ends)))
    moved = influence(weights, scaled - scaled.mean()) / len(values)
    second = float(np.square(moved).sum())
    if second == 0:  # nothing moves
        low, high = min(float(values.min()), point), max(float(values.max()), point)
        found = Interval(low, high, level, len(values), seed, method)
        return found if rate is None or low < high else all_alike(found, subjects, point)
    skew, count = _skew_and_dof(moved)
    if among is not None and not among.all() and moved[among].any():
        everybody, (skew, count) = count, _skew_and_dof(moved[among])
        count = min(count, everybody)
    z = np.sqrt(drawn / (drawn - 1)) * stdtrit(count, (1 - level) / 2)
    share = ((scaled < centre).mean() + (scaled <= centre).mean()) / 2
    bias = float(np.clip(ndtri(np.clip(share, 0.01, 0.99)), -1, 1))
    tails = [ndtr(bias + (bias + t) / max(1 - skew * (bias + t), 0.1)) for t in (z, -z)]
    low, high = np.quantile(values, np.clip(tails, 0, 1))
    found = Interval(min(float(low), point), max(float(high), point), level, len(values), seed, method)
    return found if rate is None or found.low < found.high else all_alike(found, subjects, point)


def _skew_and_dof(moved: np.ndarray) -> tuple[float, float]:
    """Skewness a and the number ν of subjects that count, from how much each of them moves the value."""
    subjects, second = len(moved), float(np.square(moved).sum())
    skew = float((moved**3).sum()) / (6 * second**1.5)
    peaked = subjects * float((moved**4).sum()) / second**2
    return skew, float(np.clip(2 * subjects / max(peaked - 1, 1e-9), min(2, subjects - 1), subjects - 1))


def _check_level(level: float, replicates: int) -> None:
    """Refuse a level that is none, and one whose tails no replicate falls into."""
    if not isinstance(level, Real) or not 0 < level < 1:
        raise InputError(f"level must lie between 0 and 1: got {level!r}; 0.95 is usual")
    if replicates * (1 - level) < 2 - 1e-9:
        need = math.ceil(2 / (1 - level) - 1e-9)
        raise InputError(
            f"replicates must be at least {need} for level={level:g}, one for each tail: got {replicates}; "
            f"{REPLICATES} are usual"
        )


def of_rate(
    values: np.ndarray,
    value: float,
    weights: np.ndarray,
    level: float,
    seed: int,
    method: str,
    *,
    rate: int,
    among: np.ndarray | None = None,
) -> Interval:
    """The interval of a rate: :func:`bca_interval`, and where it is perfect what no error still allows."""
    found = bca_interval(values, value, weights, level, seed, method, rate=rate, among=among)
    subjects = weights.shape[1] if among is None else int(among.sum())
    return zero_errors(found, subjects, value) if value in (0, 1) else found


def zero_errors(interval: Interval, subjects: int, perfect: float) -> Interval:
    """Widen an interval around a perfect value (0 or 1): no errors seen still allows 3 / subjects of them."""
    return _bound_unseen_errors(interval, subjects, perfect, f"no errors among {subjects} subjects: rule of three")


def all_alike(interval: Interval, subjects: int, value: float) -> Interval:
    """An interval where no resample moves a rate: 3 / subjects of the people may still do anything at all."""
    return _bound_unseen_errors(interval, subjects, value, f"{subjects} subjects do exactly as well: rule of three")


def _bound_unseen_errors(interval: Interval, subjects: int, value: float, method: str) -> Interval:
    share = min(1.0, max(3.0, -float(np.log(1 - interval.level))) / subjects)
    low, high = value * (1 - share), value + share * (1 - value)
    return Interval(low, high, interval.level, interval.replicates, interval.seed, method)


def check_subjects(count: int, what: str = "subjects") -> None:
    """Refuse fewer subjects than an interval can rest on.

    Raises:
        NotMeasurable: fewer than ``LEAST``.
    """
    if count < LEAST:
        raise NotMeasurable(f"{TOO_FEW}, {count} {what} where at least {LEAST} are needed")


def interval_or_none(make: Callable[[], Interval]) -> dict[str, Any] | None:
    """An interval as plain numbers, ready for JSON; None where subjects are too few."""
    try:
        return dict(vars(make()))
    except NotMeasurable:
        return None


def bootstrap_weights(subjects: int, replicates: int, seed: int) -> np.ndarray:
    """(replicates, subjects) whole numbers: how often each subject is drawn; every row sums to ``subjects``.

    Raises:
        InputError: replicates or a seed that are no whole numbers from 1 and from 0 up.
        NotMeasurable: fewer than ``LEAST`` subjects.
    """
    check_int(replicates, "replicates", 1)
    check_int(seed, "seed", 0)
    check_subjects(subjects)
    return draw_weights(subjects, replicates, seed)


@dataclass(frozen=True, eq=False)
class BootstrapCurves(WeightedCurves):
    """Error curves of every resample: the first row has all weights one, the rest are the replicates.

    Attributes:
        method: in words.
        rows: (b,) which of the draws were usable, ascending.
        weights: (b, S) how often each subject was drawn.
        has_pairs: (S,) masks of the subjects with genuine pairs, and of those with impostor pairs.
    """

    method: str
    rows: np.ndarray
    weights: np.ndarray
    has_pairs: tuple[np.ndarray, np.ndarray]

    def subjects_of(self, metric: PairMetric) -> np.ndarray:
        """Mask of the subjects that a metric rests on."""
        genuine, impostor = self.has_pairs
        if metric.rests_on == "fewer":
            return genuine if genuine.sum() <= impostor.sum() else impostor
        return genuine if metric.rests_on == "genuine" else impostor

    def values(self, metric: PairMetric, at: float | None, point: float) -> np.ndarray:
        """(b,) the metric of every resample, shifted so that no weights give the exact value."""
        assert metric.replicates is not None
        found = metric.replicates(self, at)
        return np.clip(found[1:] + (point - found[0]), *metric.limits)


class ResultPerItem(ABC):
    """A result that has one number per item: a query, a test sample. Its values are their means.

    Attributes:
        result: which metrics it has.
    """

    result: ClassVar[str]

    @abstractmethod
    def items(self, name: str | tuple[str, float]) -> tuple[np.ndarray, np.ndarray]:
        """The numbers by the name of a metric, and the code of the subject that each rests on."""

    @property
    @abstractmethod
    def method(self) -> str:
        """What an interval draws anew and what stays, in words."""

    def value(self, name: str | tuple[str, float]) -> float:
        """The mean over the items, by the name that :meth:`interval` knows."""
        return float(self.items(name)[0].mean())

    def interval(
        self, name: str | tuple[str, float], level: float = 0.95, *, replicates: int = REPLICATES, seed: int = 0
    ) -> Interval:
        """Interval of a mean over the items: their subjects are resampled.

        Raises:
            NotMeasurable: fewer than six subjects.
        """
        parse_metric(name, self.result)
        return interval_of_mean(*self.items(name), self.method, level, replicates=replicates, seed=seed)


def interval_of_mean(
    values: np.ndarray,
    subjects: np.ndarray,
    method: str,
    level: float = 0.95,
    *,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> Interval:
    """Interval of the mean of a rate over items: their subjects are resampled.

    mean_b = Σ_s w_s·(sum over the items of s) / Σ_s w_s·(items of s).

    Args:
        values: (n,) one number per item, in [0, 1].
        subjects: (n,) code of the subject of each item.
        method: in words.
        level: nominal coverage.
        replicates: how many resamples.
        seed: of the resampling.

    Raises:
        NotMeasurable: fewer than ``LEAST`` subjects.
    """
    code = np.unique(subjects, return_inverse=True)[1].reshape(-1)
    totals, counts = np.bincount(code, weights=values), np.bincount(code)
    weights = bootstrap_weights(len(counts), replicates, seed)
    drawn = weighted_sums(weights, totals) / weighted_sums(weights, counts)
    return of_rate(drawn, float(np.mean(values)), weights, level, seed, method, rate=len(values))


def bootstrap_curves(
    scores: ScoreStore, *, replicates: int = REPLICATES, seed: int = 0, dense: bool | None = None
) -> BootstrapCurves:
    """Walk through the pairs once and weigh them for every resample of the subjects.

    Args:
        scores: what :func:`mettle.evaluate.verification` scored.
        replicates: how many resamples.
        seed: of the resampling.
        dense: products of weights (True) or their first-order expansion (False); by default as many
            subjects allow.

    Raises:
        NotMeasurable: fewer than ``LEAST`` subjects have genuine pairs, or impostor pairs.
    """
    count = scores.subjects
    if count == 0:
        next(scores.stream(True))  # says what is missing
    weights = bootstrap_weights(count, replicates, seed)
    dense = is_dense(scores) if dense is None else dense
    size = int(np.clip((1 << 24) // count**2, 256, 1024)) if dense else 256
    thresholds, complete = threshold_grid(scores, size)
    every = np.vstack([np.ones((1, count), weights.dtype), weights])
    positive, negative, paired = _weighted_counts(scores, thresholds, every, dense)
    usable = (positive.sum(axis=1) > 0) & (negative.sum(axis=1) > 0)
    method = METHOD + ("" if dense else ", first-order impostor weights")
    method += f", impostors among {PARTNERS} rows" if not dense and sample_pairs(scores) is not None else ""
    rows = np.flatnonzero(usable[1:])
    drawn = select_replicates(weights, usable[1:])
    return BootstrapCurves(negative[usable], positive[usable], complete, method, rows, drawn, paired)


def at_thresholds(
    scores: ScoreStore, thresholds: Sequence[float], *, replicates: int = REPLICATES, seed: int = 0
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]]:
    """FMR and FNMR of every usable resample at each fixed threshold, the weights in it, and who has pairs of a kind."""
    count = scores.subjects
    if count == 0:
        next(scores.stream(True))  # says what is missing
    weights = bootstrap_weights(count, replicates, seed)
    edges, place = np.unique(round_threshold_up(np.asarray(thresholds), scores.dtype), return_inverse=True)
    positive, negative, paired = _weighted_counts(scores, edges, weights, is_dense(scores))
    negative = np.maximum(negative, 0)
    usable = (positive.sum(axis=1) > 0) & (negative.sum(axis=1) > 0)
    positive, negative = positive[usable], negative[usable]
    fmr = negative[:, ::-1].cumsum(axis=1)[:, ::-1] / negative.sum(axis=1, keepdims=True)
    fnmr = positive.cumsum(axis=1) / positive.sum(axis=1, keepdims=True)
    weights = select_replicates(weights, usable)
    return [(fmr[:, k + 1], fnmr[:, k], weights, paired) for k in place.reshape(-1)]


def _weighted_counts(
    scores: ScoreStore, thresholds: np.ndarray, weights: np.ndarray, dense: bool
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Genuine and impostor scores in each bin for every row of weights, and who has pairs of either kind: enough do."""
    genuine, impostor = count_by_subject(scores, thresholds, dense)
    seen = np.any(impostor, axis=-1)
    if seen.ndim == 2:  # a pair stands at its two subjects, in either order
        seen = np.any(seen, axis=0) | np.any(seen, axis=1)
    paired = np.any(genuine, axis=1), seen
    for people, kind in zip(paired, ("genuine", "impostor"), strict=True):
        check_subjects(int(np.count_nonzero(people)), f"subjects with {kind} pairs")
    return *weigh_counts(genuine, impostor, weights), paired


def draw_weights(subjects: int, replicates: int, seed: int) -> np.ndarray:
    """(replicates, subjects), int8 unless a count is larger: ``subjects`` draws with replacement in every row."""
    rng, found = np.random.default_rng(seed), np.empty((replicates, subjects), np.int8)
    for part in slice_rows(replicates, subjects):
        who = rng.integers(subjects, size=(part.stop - part.start, subjects))
        who += subjects * np.arange(len(who))[:, None]
        counts = np.bincount(who.ravel(), minlength=who.size).reshape(who.shape)
        found = found.astype(np.promote_types(found.dtype, np.min_scalar_type(-1 - int(counts.max()))), copy=False)
        found[part] = counts
    return found


def weighted_sums(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Σ_s w_s·v_s, or v_s a row of them, for every replicate, in float64."""
    found = np.empty((len(weights), *values.shape[1:]))
    for part in slice_rows(*weights.shape):
        found[part] = weights[part].astype(np.float64) @ values
    return found


def influence(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Σ_b (w_bs − 1)·v_b for every subject."""
    found = np.empty(weights.shape[1])
    for part in slice_rows(weights.shape[1], len(weights)):
        found[part] = (weights[:, part] - 1.0).T @ values
    return found


def slice_rows(count: int, width: int) -> Iterator[slice]:
    """Slices of ``count`` rows of this width; a rest of a few rows goes with the part before it."""
    step = max(_STEP, _CELLS // max(width, 1) // _STEP * _STEP)
    starts = [*range(0, max(count - _STEP, 1), step)]
    yield from (slice(a, b) for a, b in zip(starts, [*starts[1:], count], strict=True))


def select_replicates(weights: np.ndarray, able: np.ndarray) -> np.ndarray:
    """The replicates that are usable: all of them without a copy, where they are."""
    return weights if able.all() else weights[able]


def is_dense(scores: ScoreStore) -> bool:
    """Whether subjects are few enough to count by pairs of them."""
    return scores.subjects <= DENSE_SUBJECTS


def weigh_counts(genuine: np.ndarray, impostor: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What `count_by_subject` counted in each bin, weighed by every row of weights."""
    positive = weighted_sums(weights, genuine)  # whole numbers below 2⁵³, and a product of floats is a fast one
    return positive, _weighted_pair_counts(weights, impostor) if impostor.ndim == 3 else _expanded_pair_counts(
        weights, impostor
    )


def count_by_subject(scores: ScoreStore, thresholds: np.ndarray, dense: bool) -> tuple[np.ndarray, np.ndarray]:
    """Count scores by subject and bin; bin k holds the scores that thresholds 0 … k-1 accept.

    Returns:
        (S, bins) genuine counts, and impostor counts: (S, S, bins) float32 if dense, else (S, bins) int64 in
        which a pair is counted at both of its subjects.
    """
    subjects, bins = scores.subjects, len(thresholds) + 1
    place = Binning.from_thresholds(thresholds)
    if scores.design is not None and not dense:
        # A score that is off by 1e-5 leaves an interval what it is; elsewhere there may be ties to respect.
        genuine = _tally_genuine(FastPasses(scores.design), place, subjects)
        some = sample_pairs(scores)
        impostor = (
            _tally_impostors(FastPasses(scores.design), place, subjects, 2)
            if some is None
            else _tally_of_some(some, place, subjects)
        )
        return genuine.reshape(subjects, bins), impostor.reshape(subjects, bins)
    genuine = np.zeros(subjects * bins, np.int64)
    impostor = np.zeros(subjects**2 * bins, np.float32) if dense else np.zeros(subjects * bins, np.int64)
    with keep_to_one_core(scores.impostors):
        for block in (scores.stream if scores.design is None else FastPasses(scores.design).stream)(True):
            at = block.genuine_subject.astype(np.int64) * bins + place(block.genuine)
            genuine += np.bincount(at, minlength=len(genuine))
            column = place(block.impostor)
            first, second = block.impostor_subjects
            if dense:
                pair = (first.astype(np.int64) * subjects + second) * bins
                np.add.at(impostor, (pair + column).reshape(-1), np.float32(1))
            else:
                for side in (first, second):
                    start, counts = _count_cells(side, column, bins)
                    impostor[start : start + len(counts)] += counts
    shape = (subjects, subjects, bins) if dense else (subjects, bins)
    return genuine.reshape(subjects, bins), impostor.reshape(shape)


def sample_pairs(scores: ScoreStore) -> PairTiles | None:
    """Which pairs there are, where they are so many that a sample of them is resampled."""
    return scores.design if scores.impostors > MANY else None


def _tally_genuine(fast: FastPasses, place: Binning, subjects: int) -> np.ndarray:
    """Genuine scores by subject and bin."""
    bins = len(place.thresholds)
    genuine = np.zeros(subjects * bins, np.int64)
    for block in fast.genuine_blocks():
        start, counts = _count_cells(block.genuine_subject, place(block.genuine), bins)
        genuine[start : start + len(counts)] += counts
    return genuine


def _tally_impostors(fast: FastPasses, place: Binning, subjects: int, ends: int) -> np.ndarray:
    """Impostor scores by subject and bin, a pair at the subject of its row alone (one end) or at both."""
    bins, lock = len(place.thresholds), Lock()
    found = np.zeros(subjects * bins, np.int64)

    def tally_part(part: FastPasses) -> None:
        for block in part.impostor_blocks(True):
            column = place(block.impostor)
            for side in block.impostor_subjects[:ends]:
                start, counts = _count_cells(side, column, bins)
                with lock:
                    found[start : start + len(counts)] += counts

    fast.map_parts(tally_part)
    return found


def _tally_of_some(design: PairTiles, place: Binning, subjects: int) -> np.ndarray:
    """Impostor scores of every row against some rows of the other side, by subject and bin, scaled up."""
    impostor = np.zeros(subjects * len(place.thresholds))
    for side in (0,) if design.is_symmetric else (0, 1):
        some = design.sample_side(side, PARTNERS)
        found = _tally_impostors(FastPasses(some), place, subjects, 1)
        impostor += found * (len(design.rows[1 - side]) / len(some.rows[1]))
    return impostor


def _count_cells(subject: np.ndarray, column: np.ndarray, bins: int) -> tuple[int, np.ndarray]:
    """How many scores each subject has in each bin, flat, and where in a table of all subjects that begins."""
    if not column.size:
        return 0, np.empty(0, np.int64)
    first, last = int(subject.min()), int(subject.max())
    narrow = np.int32 if (1 + last - first) * bins < 1 << 31 else np.int64
    key = (subject - first).astype(narrow) * narrow(bins) + column
    return first * bins, torch.bincount(torch.from_numpy(key).reshape(-1)).numpy()


def _weighted_pair_counts(weights: np.ndarray, impostor: np.ndarray) -> np.ndarray:
    """Σ_st w_s w_t C_st by bin, for every row of weights: matrix products, some t and some replicates at a time.

    A set that is compared with itself has its pairs at (s, t) with s before t: nearly half of C is empty and left out.
    """
    out = np.zeros((len(weights), impostor.shape[2]))
    w = weights.astype(np.float32)
    for some in _slice_evenly(impostor.shape[1], 32):
        last = int(np.flatnonzero(impostor[:, some].any(axis=(1, 2)))[-1:].sum()) + 1
        part_of = impostor[:last, some]
        flat = part_of.reshape(last, -1)
        for part in _slice_evenly(len(w), 256):
            half = (w[part, :last] @ flat).reshape(-1, *part_of.shape[1:])
            out[part] += np.matmul(w[part, None, some], half)[:, 0]
    return out


def _expanded_pair_counts(weights: np.ndarray, impostor: np.ndarray) -> np.ndarray:
    """Σ_st (w_s + w_t − 1) C_st by bin: the histogram of s holds both roles, so Σ_s w_s H_s − Σ_s H_s / 2."""
    return weighted_sums(weights, impostor) - impostor.sum(axis=0) / 2


def _slice_evenly(n: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, n, size))
