"""The one search for pairs by their score: the hardest pairs, and those next to a threshold.

Pairs have one order: harder ones first, equally hard ones by their two positions. A search takes them from the top, at
most so many of the same two labels. It is exact, and however many pairs are equally hard, memory does not grow: the
list that it keeps holds the first of all that were looked at, whatever order they came in.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mettle.errors import InputError
from mettle.evaluate.inputs import EmbeddingSet, check_embeddings, check_int
from mettle.evaluate.scoring.cpu_passes import FastPasses
from mettle.evaluate.scoring.pair_tiles import PairTiles
from mettle.unknown_names import explain_arguments

_OFFERED = 1 << 18  # pairs of a tile that are looked at in one go
_SCORED_AT_ONCE = 1 << 14  # pairs scored at a time
_ROWS = 512  # of a tile
_SORTED_AT_ONCE = 1 << 16  # pairs that are sorted at a time

PairKind = Literal["genuine", "impostor"]


@dataclass(frozen=True)
class HardPair:
    """Two samples by position, and their cosine."""

    first: int
    second: int
    score: float


@dataclass(frozen=True)
class PairQuery:
    """Which pairs: of one kind, with a score in [low, high), the lowest or the highest of them first."""

    kind: PairKind
    lowest: bool
    low: float = -np.inf
    high: float = np.inf

    @classmethod
    def hardest(cls, kind: PairKind) -> "PairQuery":
        """Genuine pairs that look different, or impostors that look alike."""
        return cls(kind, lowest=kind == "genuine")

    @property
    def sign(self) -> int:
        """What a score is multiplied by so that the first pairs have the largest product: their hardness."""
        return -1 if self.lowest else 1


@explain_arguments
def hardest_pairs(embeddings: Any, labels: Any, kind: PairKind, *, count: int = 20, each: int = 2) -> list[HardPair]:
    """The hardest pairs, hardest first: genuine ones with the lowest score, impostors with the highest.

    Args:
        embeddings: (n, d) array or tensor.
        labels: (n,) integers or text.
        kind: which.
        count: how many.
        each: how many of them may show the same two labels.
    """
    if kind not in ("genuine", "impostor"):
        raise InputError(f"kind must be 'genuine' or 'impostor': got {kind!r}")
    check_int(count, "count", 1)
    check_int(each, "each", 1)
    rows = check_embeddings(embeddings, labels)
    return search_pairs(rows, [(np.arange(len(rows)), None)], PairQuery.hardest(kind), count=count, each=each)


Block = tuple[np.ndarray, np.ndarray | None]  # positions: each row with each column, or the rows with each other


def search_pairs(
    rows: EmbeddingSet,
    blocks: Iterable[Block],
    query: PairQuery,
    *,
    trials: str = "all",
    count: int,
    each: int | None = None,
) -> list[HardPair]:
    """The first ``count`` pairs that a query is about, in the order above.

    Args:
        rows: all samples; pairs of one id are left out.
        blocks: which of them are compared. No pair may be in two blocks. Of rows that are compared with columns the
            row is the first of a pair, of rows that are compared with each other the one of the smaller position.
        query: which pairs come first.
        trials: "all", "within" (both of one domain) or "across" (two domains).
        count: how many.
        each: how many of them may show the same two labels; None: any number.
    """
    best = TopPairs(count, None if each is None else (each, rows.labels))
    for one, two in blocks:
        if len(one) and (two is None or len(two)):
            design = PairTiles.from_sets(rows.take(one), None if two is None else rows.take(two), trials, _ROWS)
            sides = one[design.order[0]], (one if two is None else two)[design.order[1]]
            offer = _offer_genuine if query.kind == "genuine" else _offer_impostors
            offer(best, design, sides, query)
    score = query.sign * best.hardness
    return [HardPair(*pair) for pair in zip(best.first.tolist(), best.second.tolist(), score.tolist(), strict=True)]


class TopPairs:
    """The first ``room`` pairs in that order, at most so many of the same two labels.

    Attributes:
        first: the first position of each pair.
        second: the second one.
        hardness: of each pair, falling.
    """

    def __init__(self, room: int, cap: tuple[int, np.ndarray] | None = None) -> None:
        """``cap``: how many pairs the same two labels may have, and the label of every position."""
        self.room = room
        self.first, self.second = np.empty((2, 0), np.int64)
        self.hardness = np.empty(0)
        self._each, self._labels = (None, None) if cap is None else (cap[0], np.unique(cap[1], return_inverse=True)[1])
        self._last = _Entries.none()  # of every two labels that have all the pairs they may have, the last one

    @property
    def min_hardness(self) -> float:
        """How hard a pair must be, at least, to be of interest."""
        return float(self.hardness[-1]) if len(self.hardness) == self.room else -np.inf

    def may_enter(self, first: np.ndarray, second: np.ndarray, hardness: np.ndarray) -> np.ndarray:
        """Mask of the pairs that would stand in the list if each were offered alone."""
        new = hardness >= self.min_hardness
        if len(self.hardness) == self.room:  # among those as hard as the last one only earlier ones
            new &= _is_before(first, second, hardness, self.first[-1], self.second[-1], self.hardness[-1])
        if len(self._last.group):
            at = np.flatnonzero(new)
            group = self._group(first[at], second[at])
            place = np.minimum(np.searchsorted(self._last.group, group), len(self._last.group) - 1)
            last = self._last.take(place)
            new[at] = (last.group != group) | _is_before(
                first[at], second[at], hardness[at], last.first, last.second, last.hardness
            )
        return new

    def add(self, first: np.ndarray, second: np.ndarray, hardness: np.ndarray) -> None:
        """Put these pairs where they belong, as far as they do; no pair may come twice."""
        for start in range(0, len(first), _SORTED_AT_ONCE):
            part = slice(start, start + _SORTED_AT_ONCE)
            self._add_part(first[part], second[part], hardness[part])

    def _add_part(self, first: np.ndarray, second: np.ndarray, hardness: np.ndarray) -> None:
        new = self.may_enter(first, second, hardness)
        if not new.any():
            return
        first, second = np.append(self.first, first[new]), np.append(self.second, second[new])
        hardness = np.append(self.hardness, hardness[new].astype(np.float64))
        best = np.lexsort((second, first, -hardness))
        if self._each is not None:
            group = self._group(first[best], second[best])
            best = best[_rank_in_group(group) < self._each][: self.room]
            group = self._group(first[best], second[best])
            at = np.flatnonzero(_rank_in_group(group) == self._each - 1)
            at = at[np.argsort(group[at])]
            self._last = _Entries(group[at], first[best[at]], second[best[at]], hardness[best[at]])
        best = best[: self.room]
        self.first, self.second, self.hardness = first[best], second[best], hardness[best]

    def _group(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """One number for the two labels of each pair."""
        assert self._labels is not None
        one, two = self._labels[first], self._labels[second]
        return np.minimum(one, two) * len(self._labels) + np.maximum(one, two)


@dataclass(frozen=True)
class _Entries:
    """Pairs of a list with the number of their two labels, ascending by it."""

    group: np.ndarray
    first: np.ndarray
    second: np.ndarray
    hardness: np.ndarray

    @classmethod
    def none(cls) -> "_Entries":
        nothing = np.empty(0, np.int64)
        return cls(nothing, nothing, nothing, np.empty(0))

    def take(self, at: np.ndarray) -> "_Entries":
        return _Entries(self.group[at], self.first[at], self.second[at], self.hardness[at])


def _is_before(first: np.ndarray, second: np.ndarray, hardness: np.ndarray, i: Any, j: Any, bar: Any) -> np.ndarray:
    """Whether pairs stand before other ones: (i, j) of hardness ``bar``."""
    return (hardness > bar) | ((hardness == bar) & ((first < i) | ((first == i) & (second < j))))


def _rank_in_group(group: np.ndarray) -> np.ndarray:
    """How many entries of the same group stand before each one."""
    order = np.argsort(group, kind="stable")
    ordered = group[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])) if len(group) else np.empty(0, np.int64)
    lengths = np.diff(np.append(starts, len(group)))
    place = np.empty(len(group), np.int64)
    place[order] = np.arange(len(group)) - np.repeat(starts, lengths)
    return place


Sides = tuple[np.ndarray, np.ndarray]  # the position of every row and of every column of a design


def _positions(design: PairTiles, sides: Sides, i: np.ndarray, j: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two positions of pairs of a design, the smaller one first where a set is compared with itself."""
    one, two = sides[0][i], sides[1][j]
    return (np.minimum(one, two), np.maximum(one, two)) if design.is_symmetric else (one, two)


def _offer_scored(
    best: TopPairs, query: PairQuery, positions: tuple[np.ndarray, np.ndarray], score: np.ndarray
) -> None:
    """Offer pairs whose exact scores are known, as far as the query is about them."""
    asked = (score >= query.low) & (score < query.high)
    best.add(positions[0][asked], positions[1][asked], query.sign * score[asked].astype(np.float64))


def _offer_genuine(best: TopPairs, design: PairTiles, sides: Sides, query: PairQuery) -> None:
    """Offer every genuine pair."""
    i, j = design.genuine_pairs()
    for at in range(0, len(i), _SCORED_AT_ONCE):
        one, two = i[at : at + _SCORED_AT_ONCE], j[at : at + _SCORED_AT_ONCE]
        _offer_scored(best, query, _positions(design, sides, one, two), design.score_pairs(one, two))


def _offer_impostors(best: TopPairs, design: PairTiles, sides: Sides, query: PairQuery) -> None:
    """Offer every impostor pair that could enter: fast scores say which to score exactly."""
    fast = FastPasses(design)
    for rows, cols, tile in fast.tiles(-query.sign * np.inf):
        for start in range(0, len(tile), step := max(1, _OFFERED // (cols.stop - cols.start))):
            part = slice(rows.start + start, min(rows.start + start + step, rows.stop))
            _offer_part(best, fast, sides, query, part, cols, tile[start : start + step].reshape(-1))


def _offer_part(
    best: TopPairs, fast: FastPasses, sides: Sides, query: PairQuery, rows: slice, cols: slice, rough: np.ndarray
) -> None:
    """Offer part of a tile, the pairs of the greatest fast scores first: soon the others need not be scored."""
    slack, size = 2 * fast.score_error_bound, 64 * best.room  # twice: comparisons are in the precision of fast scores
    hardness = query.sign * rough
    asked = (rough >= max(query.low - slack, -2)) & (rough <= min(query.high + slack, 2))  # ±∞: left out
    at = np.flatnonzero(asked)
    while len(at := at[hardness[at] >= best.min_hardness - slack]):
        some = np.ones(len(at), bool)
        if len(at) > size and best.min_hardness == -np.inf:  # nothing to measure them by but themselves
            some = hardness[at] >= np.partition(hardness[at], len(at) - size)[-size]
        chosen, at, size = at[some], at[~some], 8 * size
        i, j = np.divmod(chosen, cols.stop - cols.start)
        first, second = _positions(fast.design, sides, rows.start + i, cols.start + j)
        may = best.may_enter(first, second, hardness[chosen].astype(np.float64) + slack)
        _offer_scored(best, query, (first[may], second[may]), fast.exact_scores(rows, cols, chosen[may]))
