"""Billions of pairs in bounded memory: genuine scores exactly, impostors counted in bins, looked up where it matters.

    pass 1   every impostor score falls into one of 64k bins           -> where the EER or a threshold must lie
    pass 2   the few scores inside that window, scored exactly, and     -> the exact EER, TAR and threshold
             how many impostors lie above it, counted exactly

Pass 1 may score in float32: such a score is off by at most δ = (d + 4)·2⁻²⁴ (d products, one rounding each, of unit
vectors), so pass 2 looks δ beyond its window on both sides and decides there by the exact score. What rests on pass 2
(EER, operating points) is therefore exact; what rests on pass 1 alone (AUC, curves) carries a bound that is stated:

    AUC bound = ½ Σ_g #{impostors in the bins within δ of g} / (N_g·N_i)

With ``bins`` at the genuine scores themselves, and exact scores in pass 1, the bound is 0: that is the exact mode
above what fits into memory.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from mettle.evaluate.binning import Binning
from mettle.evaluate.checks import both_kinds
from mettle.evaluate.scores import Design, Stream

BINS = 1 << 16
ABSENT = -1.5  # what a masked cell of a tile is set to where bins do not matter: below every cosine


class Window(NamedTuple):
    """The impostors between two scores, both included: sorted, and how many lie above."""

    low: float
    high: float
    values: np.ndarray
    above: int


class Points(NamedTuple):
    """Operating points between two scores, by ascending threshold, in whole numbers."""

    thresholds: np.ndarray
    accepts: np.ndarray
    rejects: np.ndarray


class Bins(Protocol):
    """A never-decreasing map from scores to whole numbers from 0 up."""

    @property
    def edges(self) -> np.ndarray:
        """About where each bin begins, and the end of the last."""
        ...

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """The bin of each score."""
        ...


Walk = Callable[[Sequence[tuple[float, float]]], list[Window]]


@dataclass(frozen=True, eq=False)
class Counted:
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
    """

    genuine: np.ndarray
    counts: np.ndarray
    bins: Bins
    slack: float
    sharp: bool
    walk: Walk
    subjects: int
    stream: Stream
    failed: int = 0
    _seen: list[Window] = field(default_factory=list, repr=False)

    @property
    def impostors(self) -> int:
        """Number of impostor pairs."""
        return int(self.counts.sum())

    @property
    def dtype(self) -> np.dtype:
        """Of the scores."""
        return self.genuine.dtype

    @property
    def before(self) -> np.ndarray:
        """Impostors in earlier bins, one more than there are bins."""
        return np.append(0, np.cumsum(self.counts))

    def below(self, thresholds: np.ndarray) -> np.ndarray:
        """About #impostor < τ: whole bins, and an equal share of the bin that τ falls into."""
        t = np.asarray(thresholds, self.dtype)
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

    def lower(self) -> tuple[np.ndarray, np.ndarray]:
        """False accepts and false rejects where each bin begins."""
        edges = self.bins.edges.astype(self.dtype)
        return self.impostors - self.before, np.searchsorted(self.genuine, edges, side="left")

    def window(self, low: float, high: float) -> Window:
        """Pass 2 for one window, kept for further questions inside it."""
        for seen in self._seen:
            if seen.low <= low and high <= seen.high:
                return seen
        return self.look([(low, high)])[0]

    def look(self, windows: Sequence[tuple[float, float]]) -> list[Window]:
        """Pass 2 for several windows at once."""
        found = self.walk(windows)
        self._seen.extend(found)
        return found

    def around(self, first: int, last: int) -> tuple[float, float]:
        """The scores between the beginnings of two bins."""
        edges = self.bins.edges
        ends = edges[np.clip([first, last], 0, len(edges) - 1)].astype(self.dtype)
        return float(ends[0]), float(ends[1])

    def points(self, low: float, high: float) -> Points:
        """The exact operating points inside a window."""
        w = self.window(low, high)
        ends = np.asarray([w.low, w.high], self.dtype)
        a, b = np.searchsorted(self.genuine, ends[0], side="left"), np.searchsorted(self.genuine, ends[1], side="right")
        thresholds = np.union1d(self.genuine[a:b], w.values)
        accepts = w.above + len(w.values) - np.searchsorted(w.values, thresholds, side="left")
        return Points(thresholds, accepts, np.searchsorted(self.genuine, thresholds, side="left"))

    def exactly(self, threshold: float) -> tuple[int, int]:
        """False accepts and false rejects at one threshold, exactly."""
        t = self.dtype.type(threshold)
        rejects = int(np.searchsorted(self.genuine, t, side="left"))
        if np.isposinf(t):
            return 0, rejects
        w = self.window(float(t), float(t))
        return w.above + len(w.values) - int(np.searchsorted(w.values, t, side="left")), rejects

    def auc(self) -> tuple[float, float]:
        """AUC and how far it can be from the exact one."""
        before, n = self.before, len(self.genuine) * self.impostors
        if self.sharp:
            at = self.bins(self.genuine)
            return (int(before[at].sum()) + int(before[at + 1].sum())) / (2 * n), 0.0
        low = before[self.bins(self.genuine - self.dtype.type(self.slack))]
        high = before[self.bins(self.genuine + self.dtype.type(self.slack)) + 1]
        return (int(low.sum()) + int(high.sum())) / (2 * n), (int(high.sum()) - int(low.sum())) / (2 * n)


@dataclass(frozen=True, eq=False)
class Even:
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
    def nowhere(self) -> float:
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
class Gaps:
    """One bin for each distinct genuine score and one for each gap between them."""

    inside: Binning
    edges: np.ndarray

    @classmethod
    def of(cls, genuine: np.ndarray) -> "Gaps":
        """The bins of sorted genuine scores."""
        up = np.asarray(np.inf, genuine.dtype)
        thresholds = np.unique(np.concatenate([genuine, np.nextafter(genuine, up)]))
        edges = np.concatenate([[min(-2.0, thresholds[0] - 1)], thresholds, [max(2.0, thresholds[-1] + 1)]])
        return cls(Binning.of(thresholds), edges)

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """The bin of each score."""
        return self.inside(scores)


def counted(design: Design, subjects: int, *, exact: bool, device: Any = None) -> Counted:
    """Pass 1.

    Args:
        design: which pairs.
        subjects: how many subjects.
        exact: bins at the genuine scores and exact scores, instead of equal bins and fast ones.
        device: where to score fast; None for the CPU.
    """
    if exact or design.norm is not None:
        genuine = np.sort(_genuine(design))
        bins: Bins = Gaps.of(genuine) if exact else Even(*(design.norm.span() if design.norm else (-1.0, 1.0)))
        plain = Plain(design, bins)
        tally, slack, walk = plain.count(), 0.0, plain.walk
    else:
        bins = even = Even(-1.0, 1.0)
        fast = Fast(design) if device is None else _on(device, design)
        genuine = np.sort(fast.genuine())
        tally, slack, walk = fast.count(even), fast.slack, fast.walk
    both_kinds(len(genuine), int(tally.sum()))
    return Counted(genuine, tally, bins, slack, exact, walk, subjects, design.stream)


def _on(device: Any, design: Design) -> Any:
    from mettle.evaluate.device import Passes

    return Passes.of(design, device)


def _genuine(design: Design) -> np.ndarray:
    i, j = design.genuine_pairs()
    parts = [design.paired(i[at], j[at]) for at in _parts(len(i), 1 << 14)]
    return np.concatenate(parts) if parts else np.empty(0, design.dtype)


@dataclass(frozen=True, eq=False)
class Plain:
    """Both passes over exact scores."""

    design: Design
    bins: Bins

    def count(self) -> np.ndarray:
        """Pass 1."""
        tally = np.zeros(len(self.bins.edges) - 1, np.int64)
        for block in self.design.stream(False):
            tally += np.bincount(self.bins(block.impostor), minlength=len(tally))
        return tally

    def walk(self, windows: Sequence[tuple[float, float]]) -> list[Window]:
        """Pass 2."""
        values, above = [[] for _ in windows], [0] * len(windows)
        for block in self.design.stream(False):
            s = block.impostor
            for k, (low, high) in enumerate(_typed(windows, s.dtype)):
                above[k] += int(np.count_nonzero(s > high))
                values[k].append(s[(s >= low) & (s <= high)])
        return windowed(windows, values, above)


@dataclass(frozen=True, eq=False)
class Fast:
    """Both passes over products in the precision of the input, decided by exact scores in pass 2."""

    design: Design

    @property
    def type(self) -> np.dtype:
        """Of the fast scores."""
        return np.dtype(self.design.probe.dtype)

    @property
    def slack(self) -> float:
        """δ: how far a fast score can be from the exact one."""
        d = self.design.probe.high.shape[1]
        rounding = 2.0**-24 if self.type == np.float32 else 2.0**-53
        return (d + 4) * rounding + (0 if self.type == np.float32 else 1e-12)  # float64 scores have 12 decimals

    def genuine(self) -> np.ndarray:
        """Every genuine score, exactly."""
        return _genuine(self.design)

    def tiles(self, absent: float = ABSENT) -> Iterator[tuple[slice, slice, np.ndarray]]:
        """Fast scores, tile by tile, in one buffer that is used again; ``absent`` marks what is no impostor pair."""
        design = self.design
        first = _plain(design.probe, self.type)
        second = first if design.own else _plain(design.gallery, self.type)
        room = np.empty(design.room(), self.type)
        for rows, cols, mixed in design.tiles():
            shape = (rows.stop - rows.start, cols.stop - cols.start)
            tile = np.matmul(first[rows], second[cols].T, out=room[: shape[0] * shape[1]].reshape(shape))
            out = design.absent(rows, cols, shape, mixed)
            if out is not None:
                tile[out] = absent
            yield rows, cols, tile

    def count(self, bins: Even) -> np.ndarray:
        """Pass 1."""
        tally = torch.zeros(bins.count, dtype=torch.int64)
        scale, shift = self.type.type(bins.scale), self.type.type(bins.shift)
        index = np.empty(self.design.room(), np.int32)
        for _, _, tile in self.tiles(bins.nowhere):
            flat = tile.reshape(-1)
            flat *= scale
            flat += shift
            np.copyto(index[: len(flat)], flat, casting="unsafe")
            tally += torch.bincount(torch.from_numpy(index[: len(flat)]), minlength=bins.count)
        found = tally.numpy()
        found[0] = 0  # what was absent
        return found

    def walk(self, windows: Sequence[tuple[float, float]]) -> list[Window]:
        """Pass 2."""
        values: list[list[np.ndarray]] = [[] for _ in windows]
        above, slack = [0] * len(windows), self.slack
        room, flag = np.empty(self.design.room(), self.type), np.empty(self.design.room(), bool)
        for rows, cols, tile in self.tiles():
            flat = tile.reshape(-1)
            away, inside = room[: len(flat)], flag[: len(flat)]
            for k, (low, high) in enumerate(windows):
                low, high = max(low, -1.00005), max(high, -1.00005)
                top = self.type.type(np.nextafter(self.type.type(high + slack), self.type.type(4)))
                above[k] += int(np.count_nonzero(np.greater(flat, top, out=inside)))
                np.subtract(flat, self.type.type((low + high) / 2), out=away)
                np.abs(away, out=away)
                half = (high - low) / 2 + slack * 1.01 + 4 * float(np.finfo(self.type).eps)
                at = np.flatnonzero(np.less_equal(away, self.type.type(half), out=inside))
                at = at[flat[at] <= top]
                i, j = np.divmod(at, cols.stop - cols.start)
                s = self.design.paired(rows.start + i, cols.start + j)
                typed = np.asarray([low, high], s.dtype)
                above[k] += int(np.count_nonzero(s > typed[1]))
                values[k].append(s[(s >= typed[0]) & (s <= typed[1])])
        return windowed(windows, values, above)


def _plain(unit: Any, dtype: np.dtype) -> np.ndarray:
    return unit.vectors().astype(dtype)


def _typed(windows: Sequence[tuple[float, float]], dtype: np.dtype) -> list[tuple[Any, Any]]:
    return [(dtype.type(low), dtype.type(high)) for low, high in windows]


def windowed(windows: Sequence[tuple[float, float]], values: list, above: list[int]) -> list[Window]:
    """Windows from the parts that tiles gave."""
    return [Window(*w, np.sort(np.concatenate(v)), n) for w, v, n in zip(windows, values, above, strict=True)]


def _parts(n: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, n)) for start in range(0, n, size))
