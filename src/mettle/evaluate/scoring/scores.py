"""Scores of pairs, in blocks by kind, and what every store of them answers.

Where they come from:

    Rows -> Unit (unit vectors on an integer grid) -> Design (which pairs) -> blocks ─┬─► SortedScores     in memory
                                                                                     └─► HistogramScores  in bins

:class:`ScoreStore` is the interface: error rates ask it and never what kind of store it is.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from mettle.errors import InputError
from mettle.evaluate.inputs import NotMeasurable, both_kinds

if TYPE_CHECKING:
    from mettle.evaluate.scoring.pair_tiles import PairTiles


def round_threshold_up(threshold: float | np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A threshold among scores of this type: the least of their numbers that is not below it, nor −∞.

    Rounded to the nearest, 0.5 + 1e-9 would be 0.5 in float32, and accept what scores less than was asked for.
    """
    wanted = np.asarray(threshold, np.float64)
    with np.errstate(over="ignore"):
        t = wanted.astype(dtype)
    t = np.where(t < wanted, np.nextafter(t, np.asarray(np.inf, dtype)), t)
    return np.maximum(t, np.finfo(dtype).min).astype(dtype)


class ScoreBlock(NamedTuple):
    """Some scored pairs; subjects are empty unless asked for.

    With subjects, impostors may come as a tile, whose subjects are then a column and a row.
    """

    genuine: np.ndarray
    genuine_subject: np.ndarray
    impostor: np.ndarray
    impostor_subjects: tuple[np.ndarray, np.ndarray]


Stream = Callable[[bool], Iterator[ScoreBlock]]  # stream(with_subjects) replays all pairs from the start


class ErrorCounts(NamedTuple):
    """The errors at one operating threshold, in whole numbers."""

    threshold: float
    accepts: int
    rejects: int


class Corners(NamedTuple):
    """Operating points among which the least cost, and every corner of the convex hull, is found.

    Attributes:
        thresholds: ascending, all finite.
        accepts: false accepts at each of them.
        rejects: false rejects at each of them.
        blur: by how many places the false accepts may be off; 0 where they are exact and no point is missing.
    """

    thresholds: np.ndarray
    accepts: np.ndarray
    rejects: np.ndarray
    blur: int


class ScoreStore(ABC):
    """All scores of one evaluation: what can be asked of them, however they are kept.

    Attributes:
        genuine: genuine scores, ascending.
        subjects: how many subjects take part, 0 when unknown.
        stream: replays the pairs with subject codes 0 … subjects-1; what the bootstrap needs is not stored
            (two codes for each of 32 million pairs) but computed again, identically, when asked for.
        design: which pairs there are, where they may be scored again fast and almost exactly; None elsewhere.
        is_in_memory: whether counting errors costs no walk through the pairs.
    """

    genuine: np.ndarray
    subjects: int
    stream: Stream
    design: "PairTiles | None"
    is_in_memory: ClassVar[bool]

    @property
    @abstractmethod
    def impostors(self) -> int:
        """Number of impostor pairs."""

    @property
    @abstractmethod
    def dtype(self) -> np.dtype:
        """Of the scores."""

    @property
    @abstractmethod
    def failed_pairs(self) -> tuple[int, int]:
        """Genuine and impostor pairs with a failed template, whose score is −∞."""

    @abstractmethod
    def below(self, thresholds: np.ndarray) -> np.ndarray:
        """#impostor < τ for each threshold, for drawing: of a histogram about so many."""

    @abstractmethod
    def quantiles(self, ranks: np.ndarray) -> np.ndarray:
        """The impostor scores at these ascending ranks, for drawing."""

    @abstractmethod
    def count_errors(self, threshold: float) -> tuple[int, int]:
        """False accepts #impostor ≥ τ and false rejects #genuine < τ, exactly."""

    @abstractmethod
    def count_many_errors(self, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same for many ascending thresholds, in one walk through the pairs where they are not in memory."""

    @abstractmethod
    def auc(self) -> tuple[float, float]:
        """AUC, and how far it can be from the exact one."""

    @abstractmethod
    def eer_bracket(self) -> tuple[ErrorCounts, ErrorCounts] | None:
        """The last operating point with FMR ≥ FNMR and the next one; None where there is none."""

    @abstractmethod
    def threshold_for(self, accepts: int) -> float:
        """The smallest operating threshold with at most so many false accepts."""

    @abstractmethod
    def threshold_above_impostor(self, accepts: int) -> float:
        """The next number above the (accepts + 1)-th highest impostor score: ties with it are rejected."""

    @abstractmethod
    def corners(self) -> Corners:
        """Where the least cost and the corners of the convex hull can be."""

    @abstractmethod
    def distinct(self) -> np.ndarray:
        """Every distinct finite score, ascending; of a histogram, where each bin that is not empty begins."""

    @abstractmethod
    def lowest(self, count: int) -> tuple[np.ndarray, bool]:
        """About the lowest ``count`` + 1 distinct finite scores, and whether there are no others."""

    @abstractmethod
    def score_range(self) -> tuple[float, float]:
        """The lowest and the highest finite score."""

    @abstractmethod
    def refine(self, accepts: Sequence[int], thresholds: Sequence[float], *, together: bool = False) -> None:
        """Look up, in one walk, what the EER, thresholds with so many false accepts, and these thresholds ask for.

        ``together``: by all ranks that share the pairs, each of which makes this call.
        """


@dataclass(frozen=True, eq=False)
class SortedScores(ScoreStore):
    """All scores, sorted, and the way to walk through the pairs again.

    Attributes:
        genuine: genuine scores, ascending.
        impostor: impostor scores, ascending.
        subjects: how many subjects take part, 0 when unknown.
        stream: replays the pairs with subject codes 0 … subjects-1; what the bootstrap needs is not stored
            (two codes for each of 32 million pairs) but computed again, identically, when asked for.
    """

    genuine: np.ndarray
    impostor: np.ndarray
    subjects: int
    stream: Stream
    design = None
    is_in_memory = True

    @classmethod
    def of(cls, stream: Stream, bound: tuple[int, int], dtype: type, subjects: int) -> "SortedScores":
        """Drain a stream of at most ``bound`` (genuine, impostor) pairs and sort it in place."""
        sides = tuple(np.empty(n, dtype) for n in bound)  # untouched pages of an upper bound cost nothing
        filled = [0, 0]
        for block in stream(False):
            for side, part in enumerate((block.genuine, block.impostor)):
                sides[side][filled[side] : filled[side] + len(part)] = part
                filled[side] += len(part)
        both_kinds(*filled)
        genuine, impostor = (a[:n] for a, n in zip(sides, filled, strict=True))
        genuine.sort()
        impostor.sort()
        return cls(genuine, impostor, subjects, stream)

    @property
    def impostors(self) -> int:
        """Number of impostor pairs."""
        return len(self.impostor)

    @property
    def dtype(self) -> np.dtype:
        """Of the scores."""
        return self.impostor.dtype

    @property
    def failed_pairs(self) -> tuple[int, int]:
        """Genuine and impostor pairs with a failed template, whose score is −∞."""
        genuine, impostor = (np.searchsorted(a, a.dtype.type(-np.inf), "right") for a in (self.genuine, self.impostor))
        return int(genuine), int(impostor)

    def below(self, thresholds: np.ndarray) -> np.ndarray:
        """#impostor < τ for each threshold."""
        return np.searchsorted(self.impostor, round_threshold_up(thresholds, self.dtype), side="left")

    def quantiles(self, ranks: np.ndarray) -> np.ndarray:
        """The impostor scores at these ascending ranks."""
        return self.impostor[np.clip(np.rint(ranks), 0, len(self.impostor) - 1).astype(np.int64)]

    def count_errors(self, threshold: float) -> tuple[int, int]:
        """#impostor ≥ τ and #genuine < τ."""
        t = round_threshold_up(threshold, self.dtype)
        rejects = np.searchsorted(self.genuine, t, side="left")
        return len(self.impostor) - int(np.searchsorted(self.impostor, t, side="left")), int(rejects)

    def count_many_errors(self, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """#impostor ≥ τ and #genuine < τ for each threshold."""
        t = round_threshold_up(thresholds, self.dtype)
        return len(self.impostor) - self.below(t), np.searchsorted(self.genuine, t, side="left")

    def auc(self) -> tuple[float, float]:
        """(Σ over genuine of #impostor below + ½·#equal) / (N_g·N_i), from whole numbers."""
        left = np.searchsorted(self.impostor, self.genuine, side="left")
        right = np.searchsorted(self.impostor, self.genuine, side="right")
        twice = int(left.sum()) + int(right.sum())
        return float(Fraction(twice, 2 * len(self.genuine) * len(self.impostor))), 0.0

    def eer_bracket(self) -> tuple[ErrorCounts, ErrorCounts] | None:
        """The operating points around FMR = FNMR."""
        low = max((t for t in (self._last_not_below(side) for side in (0, 1)) if t is not None), default=None)
        if low is None:
            return None
        high = self.next_above(low)
        return ErrorCounts(low, *self.count_errors(low)), ErrorCounts(high, *self.count_errors(high))

    def _last_not_below(self, which: int) -> float | None:
        """The largest finite score of one kind at which FMR ≥ FNMR: FMR − FNMR only falls, so bisect."""
        side = self.impostor if which else self.genuine
        low = int(np.searchsorted(side, side.dtype.type(-np.inf), side="right"))  # of the same type, or it is copied
        good, bad = low - 1, len(side)  # side[good] holds, side[bad] does not
        while bad - good > 1:
            middle = (good + bad) // 2
            accepts, rejects = self.count_errors(float(side[middle]))
            holds = accepts * len(self.genuine) >= rejects * len(self.impostor)
            good, bad = (middle, bad) if holds else (good, middle)
        return float(side[good]) if good >= low else None

    def threshold_for(self, accepts: int) -> float:
        """The next score above the (accepts + 1)-th highest impostor score."""
        n = len(self.impostor)
        return self.next_above(-np.inf if accepts >= n else float(self.impostor[n - accepts - 1]))

    def threshold_above_impostor(self, accepts: int) -> float:
        """Above the (accepts + 1)-th highest impostor score."""
        level = self.impostor[len(self.impostor) - accepts - 1]
        return float(np.nextafter(level, np.asarray(np.inf, level.dtype)))

    def corners(self) -> Corners:
        """At genuine scores, and at the lowest of all.

        Between two genuine scores a higher threshold rejects no more genuine pairs and accepts fewer impostors. The
        lowest score joins them because failed templates (−∞) may leave no genuine score so low.
        """
        lowest = self.dtype.type(self.next_above(-np.inf))
        thresholds = np.unique(np.append(self.genuine[np.isfinite(self.genuine)], lowest))
        thresholds = thresholds[np.isfinite(thresholds)]
        return Corners(thresholds, *self.count_many_errors(thresholds), 0)

    def distinct(self) -> np.ndarray:
        """Every distinct finite score."""
        values = np.union1d(_drop_repeats(self.genuine), _drop_repeats(self.impostor))
        return values[np.isfinite(values)]

    def lowest(self, count: int) -> tuple[np.ndarray, bool]:
        """Jump from one score to the next by bisection, however many there are."""
        found: list[float] = []
        value = self.next_above(-np.inf)
        while value < np.inf and len(found) <= count:
            found.append(value)
            value = self.next_above(value)
        return np.asarray(found, self.dtype), len(found) <= count

    def score_range(self) -> tuple[float, float]:
        """The lowest and the highest finite score."""
        low = self.next_above(-np.inf)
        if low == np.inf:
            raise NotMeasurable("no finite scores to draw: every template failed")
        return low, max(float(self.genuine[-1]), float(self.impostor[-1]))

    def refine(self, accepts: Sequence[int], thresholds: Sequence[float], *, together: bool = False) -> None:
        """Nothing is left open."""

    def next_above(self, value: float) -> float:
        """The next operating threshold above a value: a distinct finite score, or +∞."""
        found = math.inf
        for side in (self.genuine, self.impostor):
            at = np.searchsorted(side, np.asarray(value, side.dtype), side="right")
            if at < len(side):
                found = min(found, float(side[at]))
        return found


def _drop_repeats(ascending: np.ndarray) -> np.ndarray:
    """Distinct values of a sorted array, without sorting it again."""
    return ascending[np.append(True, ascending[1:] != ascending[:-1])]


@dataclass(frozen=True, eq=False)
class TrialList:
    """Pairs named one by one: (m, 2) row numbers and the truth, with vectors or ready-made scores."""

    score: Callable[[slice], np.ndarray]
    target: np.ndarray
    subject: tuple[np.ndarray, np.ndarray] | None
    chunk: int = 1 << 18

    def stream(self, with_subjects: bool) -> Iterator[ScoreBlock]:
        """Score the list, piece by piece."""
        if with_subjects and self.subject is None:
            raise InputError("intervals resample subjects: pass subjects, the (m, 2) labels of the scored pairs")
        for start in range(0, len(self.target), self.chunk):
            part = slice(start, start + self.chunk)
            s, t = self.score(part), self.target[part]
            if with_subjects and self.subject is not None:
                a, b = self.subject[0][part], self.subject[1][part]
            else:
                a = b = np.empty(len(t), np.int32)
            yield ScoreBlock(s[t], a[t], s[~t], (a[~t], b[~t]))
