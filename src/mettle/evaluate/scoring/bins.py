"""Bins of scores: equal ones, one for every gap between given scores, and which of many thresholds a score reaches.

A window of impostor scores: what pass 2 brings back.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

BINS = 1 << 16
_CELLS = 1 << 18
_PENDING = 1 << 22  # scores that wait before equal ones are counted together


class Bins(Protocol):
    """A never-decreasing map from scores to whole numbers from 0 up."""

    @property
    def edges(self) -> np.ndarray:
        """About where each bin begins, and the end of the last."""
        ...

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """The bin of each score."""
        ...


@dataclass(frozen=True, eq=False)
class Binning:
    """How many thresholds are ≤ a score: a table of equal cells, then the few thresholds inside the cell.

    Five times faster than bisection on millions of scores, and equal to it.
    """

    thresholds: np.ndarray  # with +∞ behind them
    scale: float
    table: np.ndarray  # thresholds in earlier cells
    steps: int  # most thresholds in one cell

    @classmethod
    def from_thresholds(cls, thresholds: np.ndarray) -> "Binning":
        """The table of sorted, distinct thresholds."""
        padded = np.append(thresholds, np.asarray(np.inf, thresholds.dtype))
        span = float(thresholds[-1]) - float(thresholds[0])
        if not 1e-25 < span < 1e25:  # one threshold, or numbers at the edge of the type: bisect
            return cls(padded, 1.0, np.empty(0, np.int32), _CELLS)
        scale = (_CELLS - 1) / span
        in_cell = np.bincount(_find_cells(thresholds, thresholds[0], scale), minlength=_CELLS)
        table = (np.cumsum(in_cell) - in_cell).astype(np.int32)
        return cls(padded, scale, table, int(in_cell.max()))

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """How many thresholds each score reaches."""
        if self.steps > 8:
            return np.searchsorted(self.thresholds[:-1], scores, side="right")
        at = self.table[_find_cells(scores, self.thresholds[0], self.scale)]
        for _ in range(self.steps):
            at += self.thresholds[at] <= scores
        return at


def _find_cells(scores: np.ndarray, start: np.floating, scale: float) -> np.ndarray:
    """Cell of each score: never decreasing in the score, which is all that the table relies on."""
    place = (scores - start) * scores.dtype.type(scale)
    return np.clip(place, 0, _CELLS - 1, out=place).astype(np.int32)


@dataclass(frozen=True, eq=False)
class EvenBins:
    """Equal bins; nice numbers such as 0, ½ and 1 lie inside bins, never at an edge where rounding would decide."""

    low: float
    high: float
    count: int = BINS

    @property
    def scale(self) -> float:
        """Bins in a score of one; a few stay empty at both ends."""
        return (self.count - 16.43) / (self.high - self.low)

    @property
    def edges(self) -> np.ndarray:
        """Where each bin begins, and the end of the last."""
        return (np.arange(self.count + 1) - 8.43) / self.scale + self.low

    @property
    def unreached_score(self) -> float:
        """A number in the first bin, which no score reaches."""
        return self.low - 8 / self.scale

    @property
    def shift(self) -> float:
        """Bin = ⌊score·scale + shift⌋."""
        return 8.43 - self.low * self.scale

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """The bin of each score."""
        place = scores * scores.dtype.type(self.scale) + scores.dtype.type(self.shift)
        return np.clip(place, 0, self.count - 1, out=place).astype(np.int32)


@dataclass(frozen=True, eq=False)
class GapBins:
    """One bin for each distinct genuine score and one for each gap between them."""

    inside: Binning
    edges: np.ndarray

    @classmethod
    def from_genuine(cls, genuine: np.ndarray) -> "GapBins":
        """The bins of sorted genuine scores."""
        up = np.asarray(np.inf, genuine.dtype)
        thresholds = np.unique(np.concatenate([genuine, np.nextafter(genuine, up)]))
        edges = np.concatenate([[min(-2.0, thresholds[0] - 1)], thresholds, [max(2.0, thresholds[-1] + 1)]])
        return cls(Binning.from_thresholds(thresholds), edges)

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """The bin of each score."""
        return self.inside(scores)


class ScoreWindow(NamedTuple):
    """The impostors between two scores, both included: distinct scores, how many of each, and how many lie above."""

    low: float
    high: float
    values: np.ndarray
    counts: np.ndarray
    above: int

    def count_at_least(self, thresholds: np.ndarray) -> np.ndarray:
        """#impostor ≥ τ, in all, for thresholds inside the window."""
        reached = self.above + np.append(np.cumsum(self.counts[::-1])[::-1], 0)
        return reached[np.searchsorted(self.values, thresholds, side="left")]


class WindowPoints(NamedTuple):
    """Operating points between two scores, by ascending threshold, in whole numbers."""

    thresholds: np.ndarray
    accepts: np.ndarray
    rejects: np.ndarray


class WindowCollector:
    """Collects one window, piece by piece: a tie of a billion pairs is one score and its count."""

    def __init__(self, low: float, high: float, dtype: np.dtype):
        self.ends = low, high
        self.above, self._pending = 0, 0
        self._typed = dtype.type(low), dtype.type(high)  # thresholds are of the scores' type
        self._parts: list[np.ndarray] = []
        self._merged = np.empty(0, dtype), np.empty(0, np.int64)

    def add(self, scores: np.ndarray) -> None:
        """Exact scores near the window: those inside are kept, those above counted."""
        low, high = self._typed
        self.above += int(np.count_nonzero(scores > high))
        inside = scores[(scores >= low) & (scores <= high)]
        self._parts.append(inside)
        self._pending += len(inside)
        if self._pending > _PENDING:
            self._merge_equal()

    def window(self) -> ScoreWindow:
        """What was collected."""
        self._merge_equal()
        return ScoreWindow(*self.ends, *self._merged, self.above)

    def _merge_equal(self) -> None:
        """Count equal scores together."""
        if self._pending:
            scores = np.sort(np.concatenate(self._parts))
            first = np.flatnonzero(np.append(True, scores[1:] != scores[:-1]))
            values, counts = scores[first], np.diff(np.append(first, len(scores)))
            if len(self._merged[0]):
                values, at = np.unique(np.append(self._merged[0], values), return_inverse=True)
                counts = np.bincount(at, np.append(self._merged[1], counts)).astype(np.int64)
            self._merged = values, counts
        self._parts, self._pending = [], 0
