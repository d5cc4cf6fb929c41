"""A window of impostor scores: what pass 2 brings back."""

from typing import NamedTuple

import numpy as np

_PENDING = 1 << 22  # scores that wait before equal ones are counted together


class Window(NamedTuple):
    """The impostors between two scores, both included: distinct scores, how many of each, and how many lie above."""

    low: float
    high: float
    values: np.ndarray
    counts: np.ndarray
    above: int

    def reach(self, thresholds: np.ndarray) -> np.ndarray:
        """#impostor ≥ τ, in all, for thresholds inside the window."""
        reached = self.above + np.append(np.cumsum(self.counts[::-1])[::-1], 0)
        return reached[np.searchsorted(self.values, thresholds, side="left")]


class Points(NamedTuple):
    """Operating points between two scores, by ascending threshold, in whole numbers."""

    thresholds: np.ndarray
    accepts: np.ndarray
    rejects: np.ndarray


class Sieve:
    """Collects one window, piece by piece: a tie of a billion pairs is one score and its count."""

    def __init__(self, low: float, high: float, dtype: np.dtype):
        self.ends = low, high
        self.above, self._pending = 0, 0
        self._typed = dtype.type(low), dtype.type(high)  # thresholds are of the scores' type
        self._parts: list[np.ndarray] = []
        self._merged = np.empty(0, dtype), np.empty(0, np.int64)

    def pour(self, scores: np.ndarray) -> None:
        """Exact scores near the window: those inside are kept, those above counted."""
        low, high = self._typed
        self.above += int(np.count_nonzero(scores > high))
        inside = scores[(scores >= low) & (scores <= high)]
        self._parts.append(inside)
        self._pending += len(inside)
        if self._pending > _PENDING:
            self._merge()

    def window(self) -> Window:
        """What was collected."""
        self._merge()
        return Window(*self.ends, *self._merged, self.above)

    def _merge(self) -> None:
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
