"""Curves of operating points, and histograms of scores: for drawing, and as grids for resampling."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import ndtri

from mettle.evaluate.checks import NotMeasurable, whole
from mettle.evaluate.counted import Counted
from mettle.evaluate.point import Pairs, counts, eer, next_above
from mettle.evaluate.scores import Scores


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
