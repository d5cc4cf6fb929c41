"""Billions of pairs in bounded memory: genuine scores exactly, impostors counted in bins, looked up where it matters.

    pass 1   every impostor score falls into one of 64k bins           -> where the EER or a threshold must lie
    pass 2   the few scores inside that window, scored exactly, and     -> the exact EER, TAR and threshold
             how many impostors lie above it, counted exactly

Pass 1 may score fast: such a score is off by at most δ (:mod:`mettle.evaluate.scoring.cpu_passes` says by how
much), so pass 2 looks δ beyond its window on both sides and decides there by the exact score. What rests on pass 2
(EER, operating points) is therefore exact; what rests on pass 1 alone (AUC, curves) carries a bound that is stated:

    AUC bound = ½ Σ_g #{impostors in the bins within δ of g} / (N_g·N_i)

With ``bins`` at the genuine scores themselves, and exact scores in pass 1, the bound is 0: that is the exact mode
above what fits into memory.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from mettle.evaluate.inputs import both_kinds
from mettle.evaluate.scoring.bins import Bins, EvenBins, GapBins, ScoreWindow, WindowPoints
from mettle.evaluate.scoring.cpu_passes import ExactPasses, FastPasses
from mettle.evaluate.scoring.pair_tiles import PairTiles
from mettle.evaluate.scoring.rank_parts import gather_sorted, merge_windows, pack_windows, sum_counts
from mettle.evaluate.scoring.scores import Corners, ErrorCounts, ScoreStore, Stream, round_threshold_up
from mettle.pairs.distributed import ALONE, RankGroup

Walk = Callable[[Sequence[tuple[float, float]]], list[ScoreWindow]]


@dataclass(frozen=True, eq=False)
class HistogramScores(ScoreStore):
    """Genuine scores, sorted; impostor scores in bins, with a way to look into a window.

    Attributes:
        genuine: genuine scores, ascending, exact.
        counts: int64 impostors in each bin.
        bins: score to bin.
        slack: how far a score may have been off when it was put into a bin.
        sharp: whether a bin that holds a genuine score holds nothing but scores equal to it.
        walk: pass 2.
        subjects: how many subjects take part.
        stream: replays the pairs, exactly, with subject codes.
        design: which pairs, where pass 1 scored them fast; None where it scored exactly.
        joint: pass 2 by all ranks together; ``walk`` is that of this rank alone.
    """

    genuine: np.ndarray
    counts: np.ndarray
    bins: Bins
    slack: float
    sharp: bool
    walk: Walk
    subjects: int
    stream: Stream
    design: PairTiles | None = None
    joint: Walk | None = None  # pass 2 by all ranks together, each of which must ask for it
    _seen: list[ScoreWindow] = field(default_factory=list, repr=False)
    is_in_memory = False

    @property
    def impostors(self) -> int:
        """Number of impostor pairs."""
        return int(self.before[-1])

    @property
    def failed_pairs(self) -> tuple[int, int]:
        """None: embeddings always have templates."""
        return 0, 0

    @property
    def dtype(self) -> np.dtype:
        """Of the scores."""
        return self.genuine.dtype

    @cached_property
    def before(self) -> np.ndarray:
        """Impostors in earlier bins, one more than there are bins."""
        return np.append(0, np.cumsum(self.counts))

    @cached_property
    def lower(self) -> tuple[np.ndarray, np.ndarray]:
        """False accepts and false rejects where each bin begins."""
        edges = self.bins.edges.astype(self.dtype)
        return self.impostors - self.before, np.searchsorted(self.genuine, edges, side="left")

    def below(self, thresholds: np.ndarray) -> np.ndarray:
        """About #impostor < τ: whole bins, and an equal share of the bin that τ falls into."""
        t = round_threshold_up(thresholds, self.dtype)
        finite = np.clip(t, self.bins.edges[0], self.bins.edges[-1]).astype(self.dtype)
        at = self.bins(finite)
        low, high = self.bins.edges[at], self.bins.edges[at + 1]
        share = np.clip((finite - low) / np.where(high > low, high - low, 1), 0, 1)
        found = self.before[at] + np.rint(share * self.counts[at]).astype(np.int64)
        return np.where(np.isposinf(t), self.impostors, found)

    def quantiles(self, ranks: np.ndarray) -> np.ndarray:
        """About the impostor scores at these ascending ranks: where their bins begin."""
        at = np.searchsorted(self.before, np.clip(np.rint(ranks), 0, self.impostors - 1), side="right") - 1
        return self.bins.edges[at].astype(self.dtype)

    @property
    def is_refined(self) -> bool:
        """Whether any window was looked into."""
        return bool(self._seen)

    def has_seen(self, low: float, high: float) -> bool:
        """Whether a window was looked into, or one around it."""
        return any(seen.low <= low and high <= seen.high for seen in self._seen)

    def window(self, low: float, high: float) -> ScoreWindow:
        """Pass 2 for one window, kept for further questions inside it."""
        for seen in self._seen:
            if seen.low <= low and high <= seen.high:
                return seen
        return self.look_into([(low, high)])[0]

    def look_into(self, windows: Sequence[tuple[float, float]], *, together: bool = False) -> list[ScoreWindow]:
        """Pass 2 for several windows at once; ``together``: by all ranks, where pass 1 was."""
        found = (self.joint if together and self.joint else self.walk)(windows)
        self._seen.extend(found)
        return found

    def around(self, first: int, last: int) -> tuple[float, float]:
        """The scores between the beginnings of two bins."""
        edges = self.bins.edges
        ends = edges[np.clip([first, last], 0, len(edges) - 1)].astype(self.dtype)
        return float(ends[0]), float(ends[1])

    def points(self, low: float, high: float) -> WindowPoints:
        """The exact operating points inside a window."""
        w = self.window(low, high)
        ends = np.asarray([w.low, w.high], self.dtype)
        a, b = np.searchsorted(self.genuine, ends[0], side="left"), np.searchsorted(self.genuine, ends[1], side="right")
        thresholds = np.union1d(self.genuine[a:b], w.values)
        return WindowPoints(
            thresholds, w.count_at_least(thresholds), np.searchsorted(self.genuine, thresholds, side="left")
        )

    def count_errors(self, threshold: float) -> tuple[int, int]:
        """False accepts and false rejects at one threshold, exactly."""
        t = self.dtype.type(round_threshold_up(threshold, self.dtype))
        rejects = int(np.searchsorted(self.genuine, t, side="left"))
        if np.isposinf(t):
            return 0, rejects
        return int(self.window(float(t), float(t)).count_at_least(t)), rejects

    def auc(self) -> tuple[float, float]:
        """AUC and how far it can be from the exact one."""
        before, n = self.before, len(self.genuine) * self.impostors
        if self.sharp:
            at = self.bins(self.genuine)
            return (int(before[at].sum()) + int(before[at + 1].sum())) / (2 * n), 0.0
        low = before[self.bins(self.genuine - self.dtype.type(self.slack))]
        high = before[self.bins(self.genuine + self.dtype.type(self.slack)) + 1]
        return (int(low.sum()) + int(high.sum())) / (2 * n), (int(high.sum()) - int(low.sum())) / (2 * n)

    def count_many_errors(self, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One more walk through all pairs; a score counts at every threshold that it reaches."""
        t = round_threshold_up(thresholds, self.dtype)
        reached = np.zeros(len(t) + 1, np.int64)
        for block in self.stream(False):
            reached += np.bincount(np.searchsorted(t, block.impostor, side="right"), minlength=len(t) + 1)
        return reached[::-1].cumsum()[::-1][1:], np.searchsorted(self.genuine, t, side="left")

    def eer_bracket(self) -> tuple[ErrorCounts, ErrorCounts] | None:
        """The two operating points around FMR = FNMR: bins say where to look, wider where that was not enough."""
        n_g, n_i = len(self.genuine), self.impostors
        first, last = self._crossing_bins()
        while True:
            p = self.points(*self.around(first, last))
            # FMR − FNMR only falls, so bisect; the products of counts may be beyond int64.
            low = bisect_left(range(len(p.thresholds)), True, key=partial(_is_behind, p, n_g, n_i)) - 1
            if 0 <= low < len(p.thresholds) - 1:
                break
            if low >= 0 and last >= len(self.counts):  # nothing above: +∞ accepts nobody
                return _error_counts(p, low), ErrorCounts(math.inf, 0, n_g)
            first, last = self._widen(first, last)
        return _error_counts(p, low), _error_counts(p, low + 1)

    def threshold_for(self, accepts: int) -> float:
        """Bins say where to look, wider where that was not enough."""
        first, last = self._budget_bins(accepts)
        while True:
            p = self.points(*self.around(first, last))
            good = np.flatnonzero(p.accepts <= accepts)
            at = int(good[0]) if len(good) else len(p.thresholds)
            if len(good) and (at > 0 or first == 0):
                return float(p.thresholds[at])
            if not len(good) and last >= len(self.counts):
                return math.inf
            first, last = self._widen(first, last)

    def threshold_above_impostor(self, accepts: int) -> float:
        """Above the impostor score next to the threshold for so many false accepts, or that threshold itself."""
        tau = self.threshold_for(accepts)  # the next score of either kind: the impostor below is near it
        window = self.window(tau, tau) if math.isfinite(tau) else None
        below = np.empty(0) if window is None else window.values[window.values < self.dtype.type(tau)]
        return float(np.nextafter(below[-1], np.asarray(np.inf, below.dtype))) if len(below) else tau

    def corners(self) -> Corners:
        """Where bins begin."""
        width = float(np.diff(self.bins.edges).min())
        return Corners(self.bins.edges, *self.lower, 0 if self.sharp else 1 + math.ceil(self.slack / width))

    def distinct(self) -> np.ndarray:
        """Where each bin that is not empty begins."""
        return np.unique(self.bins.edges[:-1][self._filled_bins()].astype(self.dtype))

    def lowest(self, count: int) -> tuple[np.ndarray, bool]:
        """The lowest score, or where its bin begins."""
        return min(self.genuine[:1], self.quantiles(np.zeros(1))), False

    def score_range(self) -> tuple[float, float]:
        """The lowest and the highest score, or the ends of their bins."""
        filled, edges = np.flatnonzero(self.counts), self.bins.edges
        low, high = float(edges[filled[0]]), float(edges[filled[-1] + 1])
        return min(low, float(self.genuine[0])), max(high, float(self.genuine[-1]))

    def refine(self, accepts: Sequence[int], thresholds: Sequence[float], *, together: bool = False) -> None:
        """One second pass for all that is asked and was not looked into before."""
        bins = [self._crossing_bins(), *(self._budget_bins(count) for count in accepts)]
        typed = [float(round_threshold_up(t, self.dtype)) for t in thresholds if math.isfinite(t)]
        windows = [self.around(*ends) for ends in bins] + [(t, t) for t in typed]
        if new := [window for window in windows if not self.has_seen(*window)]:
            self.look_into(new, together=together)

    def _crossing_bins(self) -> tuple[int, int]:
        """Bins around the EER: the last beginning where FMR ≥ FNMR, and its neighbours."""
        accepts, rejects = self.lower
        return self._surrounding(int(np.count_nonzero(accepts / self.impostors >= rejects / len(self.genuine))) - 1)

    def _budget_bins(self, accepts: int) -> tuple[int, int]:
        """Bins around the smallest threshold with at most so many false accepts."""
        return self._surrounding(int(np.count_nonzero(self.lower[0] > accepts)) - 1)

    def _surrounding(self, at: int) -> tuple[int, int]:
        """From the last bin before that holds any score to the next one behind, and one more on either side."""
        filled = np.flatnonzero(self._filled_bins())
        before, behind = filled[filled < at], filled[filled > at]
        first = int(before[-1]) if len(before) else 0
        last = int(behind[0]) + 1 if len(behind) else len(self.counts)
        return max(0, first - 1), min(len(self.counts), last + 1)

    def _widen(self, first: int, last: int) -> tuple[int, int]:
        """Three times as many bins."""
        return max(0, 2 * first - last), min(len(self.counts), 2 * last - first)

    def _filled_bins(self) -> np.ndarray:
        """Which bins hold a score of either kind."""
        accepts, rejects = self.lower
        return (np.diff(accepts) != 0) | (np.diff(rejects) != 0)


def _is_behind(p: WindowPoints, n_g: int, n_i: int, k: int) -> bool:
    """Whether FMR < FNMR at the k-th point, in whole numbers."""
    return int(p.accepts[k]) * n_g < int(p.rejects[k]) * n_i


def _error_counts(p: WindowPoints, k: int) -> ErrorCounts:
    return ErrorCounts(float(p.thresholds[k]), int(p.accepts[k]), int(p.rejects[k]))


def count_scores(
    design: PairTiles, subjects: int, *, exact: bool, device: Any = None, ranks: RankGroup = ALONE
) -> HistogramScores:
    """Pass 1.

    Args:
        design: which pairs.
        subjects: how many subjects.
        exact: bins at the genuine scores and exact scores, instead of equal bins and fast ones.
        device: where to score fast; None for the CPU.
        ranks: who shares the tiles; every rank gets the counts of all.
    """
    fast = FastPasses(design, ranks) if device is None else _passes_on(device, design, ranks)
    by_fast = not exact and design.norm is None
    genuine = gather_sorted((fast if by_fast else FastPasses(design, ranks)).genuine_scores, ranks)
    if by_fast:
        bins: Bins = EvenBins(-1.0, 1.0)
        passes, slack = fast, fast.score_error_bound
        parts = ranks.compute(lambda: {"counts": fast.count_bins(bins)})
    else:
        bins = (
            GapBins.from_genuine(genuine)
            if exact
            else EvenBins(*(design.norm.score_range() if design.norm else (-1.0, 1.0)))
        )
        passes, slack = ExactPasses(design, bins, ranks), 0.0
        parts = ranks.compute(lambda: {"counts": passes.count_bins()})
    tally = sum_counts(parts)
    both_kinds(len(genuine), int(tally.sum()))
    alone = passes if ranks.size == 1 else replace(passes, ranks=ALONE)
    again = design if by_fast else None

    def walk_together(windows: Sequence[tuple[float, float]]) -> list[ScoreWindow]:
        return merge_windows(windows, ranks.compute(lambda: pack_windows(passes.refine_windows(windows))))

    joint = walk_together if ranks.size > 1 else None
    return HistogramScores(
        genuine, tally, bins, slack, exact, alone.refine_windows, subjects, design.stream, again, joint=joint
    )


def _passes_on(device: Any, design: PairTiles, ranks: RankGroup) -> Any:
    from mettle.evaluate.scoring.cuda_passes import CudaPasses

    return CudaPasses(design, device, ranks)
